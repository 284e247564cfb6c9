"""Compute the read-outs of a step: tokens, and values (embeddings, scores, log-probabilities), for streams and slots.

`values_of` computes the values of a `Reads`; a ticket fetches them from the device. Each function is given an `Arrays`,
which implements the array operations of the executor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol

import numpy as np

from ..engine.schedule.steps import NOTHING, Reads, SlotResult, SlotStep, StepResult, StreamStep
from ..spec.requests import Readout, TokenLogprobs
from .arrays import Array, Arrays, ReadModel
from .pool import PoolPlan, mean_of_paths, mean_of_rows, means_in_order
from .sampler import choose

# Rows of the LM head computed at once: bounds the logits to 256 x vocabulary float32 numbers.
HEAD_ROWS = 256


class PooledBatch(Protocol[Array]):
    """The part of a prepared stream step that mean pooling needs.

    Attributes:
        scatter: For a folded step, int64: the row of each new row of the stream. Otherwise None.
        keep_path: int64, the rows of the carried path that stay.
        keep_new: int64, the new rows of the stream that join the path.
        pool: The plan of the paths that are read. None: no path is read.
    """

    @property
    def step(self) -> StreamStep: ...
    @property
    def scatter(self) -> Array | None: ...
    @property
    def keep_path(self) -> Array: ...
    @property
    def keep_new(self) -> Array: ...
    @property
    def pool(self) -> PoolPlan[Array] | None: ...


def head_blocks(rows: int) -> Iterator[slice]:
    """Yield slices of at most HEAD_ROWS rows."""
    for first in range(0, rows, HEAD_ROWS):
        yield slice(first, min(rows, first + HEAD_ROWS))


class ValuesTicket(Generic[Array]):
    """The ticket of values that are being copied from the device.

    Args:
        values, greedy: the fields of the StepResult
    """

    def __init__(self, arrays: Arrays[Array], values: Array, greedy: Array | None = None):
        self._wait = arrays.fetch(values) if greedy is None else arrays.fetch(values, greedy)

    def result(self) -> StepResult:
        return StepResult(*self._wait())


def read_stream(
    arrays: Arrays[Array], model: ReadModel[Array], batch: PooledBatch[Array], above: Array | None, hidden: Array
) -> tuple[ValuesTicket[Array], Array | None]:
    """Return the ticket of a stream step and, for mean pooling, the hidden states of the path above the next step.

    On a rank other than 0, values that need the whole vocabulary are undefined.

    Args:
        above: float32 [path, hidden], the hidden states of the path above this step. None: there is no path, or no
            mean pooling.
        hidden: [read rows, hidden].
    """
    reads = batch.step.read_out
    if reads.readout.kind != "mean":
        return ValuesTicket(arrays, *values_of(arrays, model, reads.readout, hidden, reads.rows, reads.targets)), None
    new = arrays.float32(hidden)
    if batch.scatter is not None:
        new = arrays.take(new, batch.scatter)
    keys = new if above is None else arrays.join((above, new))
    if batch.pool is None:
        means = arrays.empty((0, keys.shape[1]))
    elif model.config.invariant:
        means = means_in_order(arrays, keys, (_path_to(batch.step.end, row) for row in reads.rows.tolist()))
    else:
        means = mean_of_paths(arrays, keys, batch.pool)
    kept = arrays.take(new, batch.keep_new)
    if above is not None and len(batch.keep_path):
        kept = arrays.join((arrays.take(above, batch.keep_path), kept))
    return ValuesTicket(arrays, means), kept


def _path_to(end: np.ndarray, row: int) -> np.ndarray:
    """Return the keys on the path down to `row`, ascending.

    Args:
        end: as in a StreamStep
    """
    return np.flatnonzero(end[: row + 1] > row)


class SlotTicket(Generic[Array]):
    """The ticket of a step over slots: tokens and values that are being copied from the device.

    All ranks take part in computing logits; only rank 0 uses them.

    Args:
        hidden: [read rows, hidden]
        states: [slots, hidden], the stored hidden states, or None

    Attributes:
        ids: int64 [reads], on the device, as in SlotResult.
    """

    def __init__(
        self,
        arrays: Arrays[Array],
        model: ReadModel[Array],
        hidden: Array,
        step: SlotStep,
        states: Array | None = None,
    ):
        self.ids: Array = arrays.empty((len(step.reads),), "int64")
        self.ids[:] = -1
        self._arrays: Arrays[Array] = arrays
        self._logprobs: dict[int, TokenLogprobs] = {}
        is_token = np.ones(len(step.reads), bool)
        for reads in step.read_outs:
            is_token[reads.consumers] = False
        tokens = np.flatnonzero(is_token)
        if len(tokens):
            self._choose(model, hidden, step, tokens)
        self._values = [
            ValuesTicket(arrays, *_slot_values(arrays, model, reads, hidden, step, states)) for reads in step.read_outs
        ]
        self._id_reads = ValuesTicket(arrays, self.ids)

    def result(self) -> SlotResult:
        """Wait for the device and return the result of the step."""
        values = tuple(ticket.result() for ticket in self._values)
        return SlotResult(self._id_reads.result().values, self._logprobs, values)

    def _choose(self, model: ReadModel[Array], hidden: Array, step: SlotStep, tokens: np.ndarray) -> None:
        """Draw the tokens of some reads.

        Args:
            tokens: indices into `step.reads`
        """
        arrays, reads, drawing = self._arrays, step.reads[tokens], step.drawing
        is_all = len(tokens) == len(step.reads) and not len(step.state_reads)
        if not is_all:  # compute logits only for the rows that draw a token
            rows, reads = np.unique(reads, return_inverse=True)
            hidden = arrays.take(hidden, arrays.send(rows))
            if drawing is not None:
                drawing = replace(drawing, reads=np.searchsorted(tokens, drawing.reads))
        for block in head_blocks(len(hidden)):
            logits = model.logits(hidden[block])
            if model.ranks.rank:
                continue
            first, stop = np.searchsorted(reads, (block.start, block.stop)).tolist()
            part = drawing
            if part is not None:
                part = part.part(*np.searchsorted(part.reads, (first, stop)).tolist())
                part = replace(part, reads=part.reads - first)
            ids, logprobs = choose(arrays, logits, reads[first:stop] - block.start, part)
            self.ids[slice(first, stop) if is_all else arrays.send(tokens[first:stop])] = ids
            self._logprobs |= {int(tokens[first + read]): value for read, value in logprobs.items()}


def _slot_values(
    arrays: Arrays[Array],
    model: ReadModel[Array],
    reads: Reads,
    hidden: Array,
    step: SlotStep,
    states: Array | None,
) -> tuple[Array, Array | None]:
    """Return the result of `values_of` for a slot step. Reads with `counts` read stored hidden states."""
    if reads.counts is None:
        return values_of(arrays, model, reads.readout, hidden, reads.rows, reads.targets)
    assert states is not None
    slots = _kept_slots(step, reads.rows, reads.counts)
    if reads.readout.kind == "mean":
        once, places = np.unique(slots, return_inverse=True)
        rows = arrays.float32(arrays.take(states, arrays.send(once)))
        if model.config.invariant:
            return means_in_order(arrays, rows, np.split(places, np.cumsum(reads.counts)[:-1])), None
        return mean_of_rows(arrays, rows, places, reads.counts), None
    return values_of(arrays, model, reads.readout, states, slots, reads.targets)


def _kept_slots(step: SlotStep, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the slots of the last `counts` rows that each of `rows` sees, concatenated."""
    above = zip(rows.tolist(), counts.tolist(), strict=True)
    return np.concatenate([NOTHING, *(_slots_above(step, row, count) for row, count in above)])


def _slots_above(step: SlotStep, place: int, count: int) -> np.ndarray:
    """Return the slots of the last `count` rows that a row sees, in order of position.

    Args:
        place: index into `read_rows`
    """
    row = step.read_rows[place]
    visible = np.flatnonzero((step.run_first <= row) & (row < step.run_last))
    sizes = step.run_count[visible]
    slots = np.repeat(step.run_start[visible] - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    return slots[len(slots) - count :]


def greedy(arrays: Arrays[Array], model: ReadModel[Array], hidden: Array) -> np.ndarray:
    """Return the most likely token of each row, int64, as `choose` does. For an unsplit model on a CPU.

    Args:
        hidden: [rows, hidden]
    """
    blocks = list(head_blocks(len(hidden))) or [slice(0)]
    return np.concatenate([arrays.fetch(arrays.most_likely(model.logits(hidden[block])))()[0] for block in blocks])


def values_of(
    arrays: Arrays[Array],
    model: ReadModel[Array],
    readout: Readout,
    hidden: Array,
    rows: np.ndarray,
    targets: Sequence[int] | np.ndarray = NOTHING,
) -> tuple[Array, Array | None]:
    """Return the values of a read-out, float32, one for each of `rows`.

    The second result is None, except for "logprobs": there it is True for each target that is the most likely token of
    its row. Reads of one row compute it once.

    Args:
        hidden: [n, hidden].
        rows: int64 [reads], the row of `hidden` of each read.
        targets: int32 [reads], for "logprobs": the tokens to look up.
    """
    once, places = np.unique(rows, return_inverse=True)
    if len(once) < len(hidden):
        hidden = arrays.take(hidden, arrays.send(once))
    is_ascending = len(once) == len(rows) and (places[1:] > places[:-1]).all()
    if readout.kind == "logprobs":
        order = np.argsort(places, kind="stable")
        values, is_greedy = logprobs_of(arrays, model, hidden, places[order], np.asarray(targets)[order], readout.top)
        if (order[1:] > order[:-1]).all():
            return values, is_greedy
        back = arrays.send(np.argsort(order))
        return arrays.take(values, back), arrays.take(is_greedy, back)
    if readout.kind == "logits" and readout.sums:
        values = logits_and_sums(arrays, model, hidden, readout.ids)
    elif readout.kind == "logits":
        values = model.logits(hidden, readout.ids)
    else:
        values = model.head(hidden) if readout.kind == "head" else arrays.float32(hidden)
    return values if is_ascending else arrays.take(values, arrays.send(places)), None


def logits_and_sums(arrays: Arrays[Array], model: ReadModel[Array], hidden: Array, ids: Sequence[int]) -> Array:
    """Return the logits of `ids`, the log-sum-exp of all logits, and the id of the largest logit.

    `hidden` is [rows, hidden]; the result is float32 [rows, len(ids) + 2]. On a rank other than 0 the values are
    undefined.
    """
    values = arrays.empty((len(hidden), len(ids) + 2))
    wanted = arrays.send(np.asarray(ids, np.int64))
    for block in head_blocks(len(hidden)):
        logits = model.logits(hidden[block])
        if not model.ranks.rank:
            sums, largest = arrays.log_sum_exp(logits)
            # float32 represents every id below 2**24 exactly.
            values[block, :-2], values[block, -2], values[block, -1] = logits[:, wanted], sums, largest
    return values


def logprobs_of(
    arrays: Arrays[Array],
    model: ReadModel[Array],
    hidden: Array,
    rows: np.ndarray,
    ids: np.ndarray,
    top: int | None,
) -> tuple[Array, Array]:
    """Return the log-probability of each of `ids`, and whether the id is the most likely one of its row.

    The log-sum-exp of a row is computed once for all its targets. On a rank other than 0 the values are undefined.

    Args:
        hidden: [n, hidden].
        rows: int64 [n], ascending: the row of `hidden` of each id.
        ids: int64 [n].
        top: As in Readout.
    """
    shape = (len(ids),) if top is None else (len(ids), 2 + 2 * top)
    values, is_greedy = arrays.empty(shape), arrays.empty((len(ids),), "bool")
    at, wanted = arrays.send(rows), arrays.send(ids)
    for block in head_blocks(len(hidden)):
        logits = model.logits(hidden[block])
        if model.ranks.rank:
            continue
        inside = slice(*np.searchsorted(rows, (block.start, block.stop)).tolist())
        found = log_probs(arrays, logits, at[inside] - block.start, wanted[inside], top)
        values[inside], is_greedy[inside] = found
    return values, is_greedy


def log_probs(
    arrays: Arrays[Array], logits: Array, rows: Array, ids: Array, top: int | None = None
) -> tuple[Array, Array]:
    """Return the log-probability of each of `ids` in its row, and whether the id is the most likely one of the row.

    Args:
        logits: float32 [r, vocab]
        rows, ids: int64 [n]
        top: as in Readout
    """
    sums, largest = arrays.log_sum_exp(logits)
    chosen = logits[rows, ids]
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        values = chosen - sums[rows]
        if top is not None:
            best, places = arrays.largest(logits, top)
            # float32 represents every id below 2**24 exactly.
            columns = arrays.empty((len(ids), 2 + 2 * top))
            columns[:, 0], columns[:, 1] = values, 1 + arrays.count_larger(logits, rows, chosen)
            columns[:, 2 : 2 + top], columns[:, 2 + top :] = (best - sums[:, None])[rows], places[rows]
            values = columns
    return values, largest[rows] == ids
