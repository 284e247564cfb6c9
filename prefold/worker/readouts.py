"""Read-outs of a step: tokens, and values (embeddings, scores, log-probabilities) of rows, for streams and slots alike.

`values_of` computes the values of a `Reads`; a ticket fetches them from the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..engine.schedule.steps import NOTHING, Reads, SlotResult, SlotStep, StepResult
from ..model import CausalLM
from ..model.device import send
from ..model.ops import log_sum_exp
from ..spec.requests import Readout, TokenLogprobs
from .pool import mean_of_paths, mean_of_rows, means_in_order
from .rows import Batch, Path, PathKV, join
from .sampler import choose, likeliest

# Rows of the LM head computed at once: bounds the logits to 256 x vocabulary float32 numbers.
HEAD_ROWS = 256
# Rows of logits that are copied at once to count ranks.
RANKED_ROWS = 32


def head_blocks(rows: int) -> Iterator[slice]:
    """Yield slices of at most HEAD_ROWS rows."""
    for first in range(0, rows, HEAD_ROWS):
        yield slice(first, min(rows, first + HEAD_ROWS))


class ValuesTicket:
    """The ticket of values that are on their way from the device. values, greedy: as of StepResult"""

    def __init__(self, values: Tensor, greedy: Tensor | None = None):
        self.values, self._greedy = _fetch(values), None if greedy is None else _fetch(greedy)
        self._event = torch.cuda.Event() if values.is_cuda else None
        if self._event is not None:
            self._event.record()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        return StepResult(self.values.numpy(), None if self._greedy is None else self._greedy.numpy())


def _fetch(tensor: Tensor) -> Tensor:
    """Return the tensor on the host, or a tensor that soon holds it."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def read_stream(model: CausalLM, batch: Batch, path: Path, hidden: Tensor, kv: PathKV) -> tuple[ValuesTicket, Path]:
    """Return the ticket of a stream's step, and the path above the next step.

    hidden, kv: as of `forward_stream`. On a rank other than 0 values of the whole vocabulary are undefined.
    """
    reads = batch.step.read_out
    if reads.readout.kind != "mean":
        return ValuesTicket(*values_of(model, reads.readout, hidden, reads.rows, reads.targets)), Path(kv)
    new = hidden.float() if batch.scatter is None else hidden.float().index_select(0, batch.scatter)
    keys = new if path.hidden is None else torch.cat((path.hidden, new))
    if batch.pool is None:
        means = keys.new_empty(0, keys.shape[1])
    elif model.config.invariant:
        means = means_in_order(keys, (_path_to(batch.step.end, row) for row in reads.rows.tolist()))
    else:
        means = mean_of_paths(keys, batch.pool)
    return ValuesTicket(means), Path(kv, join(path.hidden, new, batch))


def _path_to(end: np.ndarray, row: int) -> np.ndarray:
    """Return the keys on the path down to a key, ascending. end: as in a StreamStep"""
    return np.flatnonzero(end[: row + 1] > row)


class SlotTicket:
    """The ticket of a step over slots: its tokens and values, on their way from the device.

    ids   int64 [reads], on the device, as of SlotResult

    Logits take all ranks, and rank 0 alone uses them.
    """

    def __init__(self, model: CausalLM, hidden: Tensor, step: SlotStep, states: Tensor | None = None):
        """hidden: [rows that are read, hidden]; states: [slots, hidden], the kept states; None: none are kept"""
        self.ids = torch.full((len(step.reads),), -1, dtype=torch.int64, device=hidden.device)
        self._logprobs: dict[int, TokenLogprobs] = {}
        is_token = np.ones(len(step.reads), bool)
        for reads in step.read_outs:
            is_token[reads.consumers] = False
        tokens = np.flatnonzero(is_token)
        if len(tokens):
            self._choose(model, hidden, step, tokens)
        self._values = [ValuesTicket(*_slot_values(model, reads, hidden, step, states)) for reads in step.read_outs]
        self._id_reads = ValuesTicket(self.ids)

    def result(self) -> SlotResult:
        """Wait for the device, and return what the step gave."""
        values = tuple(ticket.result() for ticket in self._values)
        return SlotResult(self._id_reads.result().values, self._logprobs, values)

    def _choose(self, model: CausalLM, hidden: Tensor, step: SlotStep, tokens: np.ndarray) -> None:
        """Draw the tokens of the reads with these numbers."""
        reads, drawing = step.reads[tokens], step.drawing
        is_all = len(tokens) == len(step.reads) and not len(step.state_reads)
        if not is_all:  # other rows need no logits
            rows, reads = np.unique(reads, return_inverse=True)
            hidden = hidden.index_select(0, send(rows, hidden.device))
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
            ids, logprobs = choose(logits, reads[first:stop] - block.start, part)
            self.ids[slice(first, stop) if is_all else send(tokens[first:stop], hidden.device)] = ids
            self._logprobs |= {int(tokens[first + read]): value for read, value in logprobs.items()}


def _slot_values(
    model: CausalLM, reads: Reads, hidden: Tensor, step: SlotStep, states: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return what `values_of` gives for the reads of a step over slots. Reads with `counts` read kept states."""
    if reads.counts is None:
        return values_of(model, reads.readout, hidden, reads.rows, reads.targets)
    assert states is not None
    above = zip(reads.rows.tolist(), reads.counts.tolist(), strict=True)
    slots = np.concatenate([NOTHING, *(_slots_above(step, row, count) for row, count in above)])
    if reads.readout.kind == "mean":
        once, places = np.unique(slots, return_inverse=True)
        kept = states.index_select(0, send(once, states.device)).float()
        if model.config.invariant:
            return means_in_order(kept, np.split(places, np.cumsum(reads.counts)[:-1])), None
        return mean_of_rows(kept, places, reads.counts), None
    return values_of(model, reads.readout, states, slots, reads.targets)


def _slots_above(step: SlotStep, place: int, count: int) -> np.ndarray:
    """Return the slots of the last `count` rows that a row sees, in the order of their positions. place: in
    read_rows"""
    row = step.read_rows[place]
    visible = np.flatnonzero((step.run_first <= row) & (row < step.run_last))
    sizes = step.run_count[visible]
    slots = np.repeat(step.run_start[visible] - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    return slots[len(slots) - count :]


def greedy(model: CausalLM, hidden: Tensor) -> np.ndarray:
    """Return the most likely token of each row of hidden [rows, hidden], int64, as `choose` does; on a CPU, of a model
    that is not split."""
    blocks = [hidden] if len(hidden) <= HEAD_ROWS else hidden.split(HEAD_ROWS)
    return np.concatenate([likeliest(model.logits(block).numpy()) for block in blocks])


def values_of(
    model: CausalLM, readout: Readout, hidden: Tensor, rows: np.ndarray, targets: Sequence[int] | np.ndarray = NOTHING
) -> tuple[Tensor, Tensor | None]:
    """Return the values of a read-out, float32, one for each of `rows`; and for "logprobs" whether each target is the
    most likely token of its row, else None. Reads at one row compute it once.

    hidden   [n, hidden]
    rows     int64 [reads]: the row of `hidden` that is read
    targets  int32 [reads], for "logprobs": the tokens whose log-probabilities are wanted
    """
    once, places = np.unique(rows, return_inverse=True)
    if len(once) < len(hidden):
        hidden = hidden.index_select(0, send(once, hidden.device))
    is_ascending = len(once) == len(rows) and (places[1:] > places[:-1]).all()
    if readout.kind == "logprobs":
        order = np.argsort(places, kind="stable")
        values, is_greedy = logprobs_of(model, hidden, places[order], np.asarray(targets)[order], readout.top)
        if (order[1:] > order[:-1]).all():
            return values, is_greedy
        back = send(np.argsort(order), hidden.device)
        return values[back], is_greedy[back]
    if readout.kind == "logits":
        values = logits_and_sums(model, hidden, readout.ids) if readout.sums else model.logits(hidden, readout.ids)
    else:
        values = model.head(hidden) if readout.kind == "head" else hidden.float()
    return values if is_ascending else values[send(places, hidden.device)], None


def logits_and_sums(model: CausalLM, hidden: Tensor, ids: Sequence[int]) -> Tensor:
    """Return of each row of hidden [rows, hidden] the logits of `ids`, the log-sum-exp of all logits, and the id of the
    largest, float32 [rows, len(ids) + 2]. On a rank other than 0 the values are undefined."""
    values = torch.empty((len(hidden), len(ids) + 2), dtype=torch.float32, device=hidden.device)
    wanted = send(np.asarray(ids), hidden.device)
    for block in head_blocks(len(hidden)):
        logits = model.logits(hidden[block])
        if not model.ranks.rank:
            sums, largest = log_sum_exp(logits)
            # A float32 holds every id below 2**24 exactly.
            values[block] = torch.cat((logits[:, wanted], sums[:, None], largest[:, None].float()), -1)
    return values


def logprobs_of(
    model: CausalLM, hidden: Tensor, rows: np.ndarray, ids: np.ndarray, top: int | None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each of `ids`, and whether it is the most likely id of its row. A row's log-sum-exp
    is computed once for all its targets. On a rank other than 0 the values are undefined.

    rows    int64 [n], ascending: the row of `hidden` of each
    top     as of Readout
    """
    device, columns = hidden.device, () if top is None else (2 + 2 * top,)
    values = torch.empty((len(ids), *columns), dtype=torch.float32, device=device)
    is_greedy = torch.empty(len(ids), dtype=torch.bool, device=device)
    at, wanted = send(rows, device), send(ids, device)
    for block in head_blocks(len(hidden)):
        logits = model.logits(hidden[block])
        if model.ranks.rank:
            continue
        inside = slice(*np.searchsorted(rows, (block.start, block.stop)).tolist())
        values[inside], is_greedy[inside] = log_probs(logits, at[inside] - block.start, wanted[inside], top)
    return values, is_greedy


def log_probs(logits: Tensor, rows: Tensor, ids: Tensor, top: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each of `ids` in its row of logits float32 [r, vocab], and whether it is the most
    likely id of that row. rows, ids: int64 [n]; top: as of Readout."""
    sums, largest = log_sum_exp(logits)
    chosen = logits[rows, ids]
    values = chosen - sums[rows]
    if top is not None:
        few = zip(rows.split(RANKED_ROWS), chosen.split(RANKED_ROWS), strict=True)
        ranks = 1 + torch.cat([(logits[block] > own[:, None]).sum(-1) for block, own in few])
        best, places = logits.topk(top, -1)
        # A float32 holds every id below 2**24 exactly.
        columns = (values[:, None], ranks[:, None], (best - sums[:, None])[rows], places[rows])
        values = torch.cat([column.float() for column in columns], -1)
    return values, largest[rows] == ids
