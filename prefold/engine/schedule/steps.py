"""Messages between the host, which plans, and a worker, which computes. NumPy arrays and plain numbers only.

A message says what to compute, and nothing about requests: only the host knows which sequence gets a token. Its size
depends on the step, not on the number of waiting or running requests. So a message can go to a thread, to another
process or to a simulator.

    StreamStep   computes rows of a row stream; between its steps the worker keeps the K/V of one path per stream
    EndStream    ends a stream: the worker drops its path
    MakeStore    allocates the KV store with a number of slots, once, before the first SlotStep
    SlotStep     computes rows with keys in the slots of the store: prompts to be continued, and their outputs

Features have further messages, which their parts of the worker handle (`worker.parts.WorkerPart`). All messages start
in the same way: `ticket = worker.start(message)`, then `ticket.result()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...spec.requests import Readout, TokenLogprobs
from ...trie import PrefixMap

# Replaces a token if its logits were not finite.
NOT_FINITE = -2
LAST = Readout("last")
NOTHING = np.zeros(0, np.int64)
NOTHING.flags.writeable = False


class Message:
    """An instruction to a worker."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class Reads:
    """The values that a step reads from its rows, all of one kind."""

    readout: Readout
    # int64 [n]: for each row that is read, its place in the step's `read_rows`. For "mean" in a StreamStep: the keys
    # whose paths are averaged, ascending.
    rows: np.ndarray = field(default_factory=lambda: NOTHING)
    targets: np.ndarray = field(default_factory=lambda: NOTHING)  # int32, for "logprobs": the token scored at each row
    # int64 [n], in a SlotStep: each read covers this many rows, the last ones that its row sees. Their hidden states
    # are in their slots (`SlotStep.state_reads`). None: each read covers only its own row.
    counts: np.ndarray | None = None
    # int64 [n], in a SlotStep: numbers of the step's `reads` that get these values, and no token.
    consumers: np.ndarray = field(default_factory=lambda: NOTHING)

    @property
    def sizes(self) -> np.ndarray:
        """How many rows of the result belong to each read, int64 [n]."""
        return np.ones(len(self.rows), np.int64) if self.counts is None or self.readout.kind == "mean" else self.counts


@dataclass(frozen=True, eq=False, slots=True)
class StreamStep(Message):
    """One forward pass over consecutive rows of a row stream. The result is a StepResult with one row per row read.

    Keys are numbered over the carried path and then the new rows. Key j < path is row j of the path above the first new
    row; key path + i is new row i of m. Key j is visible to the query at key i exactly if j <= i < end[j], or, if there
    are spans, if first[j] <= i < end[j].
    """

    # int32 [n]: the rows that the model computes; n = m, or the number of unique tokens with a `fold`. Ids from
    # MEDIA_BASE on are image rows.
    tokens: np.ndarray
    positions: np.ndarray  # int32 [n]
    path: int  # number of rows of the carried path, from the root, that are above this step
    end: np.ndarray  # int64 [path + m]: one past the last query (as a key number) that sees key j
    key_positions: np.ndarray  # int32 [path + m]: the position of each key in its prompt
    keep: np.ndarray = field(default_factory=lambda: NOTHING)  # int64 [k], ascending: keys that the next step needs
    fold: PrefixMap | None = None  # rows [n] <-> new rows of the stream [m] (sharing "mlp" only)
    # int64 [r], ascending: the rows in [0, n) for which the model returns hidden states; None: all.
    read_rows: np.ndarray | None = None
    read_out: Reads = Reads(LAST)  # the values to read
    stream: int = 0  # number of the stream
    adapter: int | None = None  # LoRA adapter of all rows, as a place in `Facts.adapters`
    # int64 [path + m]: for a row in a span the first key of the span, for other rows the key itself; None: no spans.
    first: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows in the model's position-wise layers."""
        return len(self.tokens)


def folded(step: StreamStep, fold: PrefixMap) -> StreamStep:
    """Return a step of whole prompts that computes each distinct token once in position-wise layers (sharing "mlp").

    Attention unfolds the rows again.
    """
    read_rows, reads = step.read_rows, step.read_out
    if read_rows is not None:
        read_rows, again = np.unique(fold.scatter[read_rows], return_inverse=True)
        reads = replace(reads, rows=again[reads.rows])
    tokens, positions = step.tokens[fold.gather], step.positions[fold.gather]
    return replace(step, tokens=tokens, positions=positions, fold=fold, read_rows=read_rows, read_out=reads)


@dataclass(frozen=True, slots=True)
class EndStream(Message):
    """The last message of a stream: its path may be dropped. `Worker.forget` sends it."""

    stream: int


@dataclass(frozen=True, slots=True)
class MakeStore(Message):
    """Allocate the KV store with this number of slots."""

    slots: int


@dataclass(frozen=True, eq=False, slots=True)
class RaggedLists:
    """A list of token ids for each of several reads, with a number beside each id."""

    offsets: np.ndarray  # int64 [reads + 1]: the ids of read i are ids[offsets[i] : offsets[i + 1]]
    ids: np.ndarray  # int64
    values: np.ndarray  # float32, one for each id

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> RaggedLists | None:
        """Return a RaggedLists of the (ids, values) of each read; None if there are no ids at all."""
        sizes = [len(ids) for ids, _ in rows]
        if not any(sizes):
            return None
        ids, values = (np.concatenate([row[i] for row in rows]) for i in range(2))
        return cls(np.concatenate(([0], np.cumsum(sizes))), ids.astype(np.int64), values.astype(np.float32))

    def pick(self, reads: np.ndarray) -> RaggedLists:
        """Return the RaggedLists of these reads, int64 [n], in their order."""
        counts = np.diff(self.offsets)[reads]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[reads] - offsets[:-1], counts)
        return RaggedLists(offsets, self.ids[places], self.values[places])


@dataclass(frozen=True, eq=False, slots=True)
class Drawing:
    """How tokens are drawn at n of a step's reads. All other reads draw the most likely token."""

    reads: np.ndarray  # int64 [n]: the numbers of these reads
    # float64 [n, FILTERS]: the options FILTERS of `prefold.spec.task`. The first is the temperature; 0 means greedy.
    filters: np.ndarray
    keys: np.ndarray  # uint64 [n]: keys of the sampling noise, derived from seed, sample and position
    # int64 [n]: return log-probabilities of the drawn token and of this many most likely tokens; -1: none.
    logprobs: np.ndarray
    bias: RaggedLists | None = None  # token ids with the number to add to each id's logit
    banned_ids: RaggedLists | None = None  # tokens that must not be drawn; the numbers are unused
    penalties: np.ndarray | None = None  # float64 [n, PENALTIES]: the options PENALTIES of `prefold.spec.task`
    output_counts: RaggedLists | None = None  # tokens with penalties, and how often each is in the output
    # int64 [m]: which of the n reads have a grammar; their tokens must be allowed by `grammar_masks`.
    grammar_reads: np.ndarray = field(default_factory=lambda: NOTHING)
    # uint8 [m, ceil(vocabulary / 8)]: token i is allowed if bit i % 8 of byte i // 8 is set.
    grammar_masks: np.ndarray | None = None

    def part(self, first: int, stop: int) -> Drawing:
        """Return the Drawing of the reads `first` to `stop` - 1 among the n reads."""
        return self if (first, stop) == (0, len(self.reads)) else self.pick(np.arange(first, stop))

    def pick(self, places: np.ndarray) -> Drawing:
        """Return the Drawing of the reads at these places among the n reads, int64 ascending."""
        raggeds = (self.bias, self.banned_ids, self.output_counts)
        bias, banned_ids, output_counts = (ragged and ragged.pick(places) for ragged in raggeds)
        inside = np.isin(self.grammar_reads, places)
        return Drawing(
            reads=self.reads[places],
            filters=self.filters[places],
            keys=self.keys[places],
            logprobs=self.logprobs[places],
            bias=bias,
            banned_ids=banned_ids,
            penalties=None if self.penalties is None else self.penalties[places],
            output_counts=output_counts,
            grammar_reads=np.searchsorted(places, self.grammar_reads[inside]),
            grammar_masks=self.grammar_masks[inside] if self.grammar_masks is not None and inside.any() else None,
        )


@dataclass(eq=False, slots=True)
class SlotStep(Message):
    """One forward pass over n rows with their keys in the slots of the store. The result is a SlotResult.

    The rows are the queries, numbered from 0 to n - 1.
    """

    # int32 [n]. Token -1 - i stands for the token in flight of read i of the previous SlotStep. The tokens of a step
    # that follows may be the same `ids` array (int64) as in the previous result.
    tokens: np.ndarray
    positions: np.ndarray  # int32 [n]
    slots: np.ndarray  # int64 [n]: the slot for each row's K/V
    # int64 [r] each: keys as runs of neighbouring slots. The `run_count` slots from `run_start` on have the rows of
    # positions from `run_position` on. They are visible to the queries from `run_first` up to, not including,
    # `run_last`. A new row is visible from its own query on.
    run_start: np.ndarray
    run_count: np.ndarray
    run_position: np.ndarray
    run_first: np.ndarray
    run_last: np.ndarray
    read_rows: np.ndarray  # int64, ascending: rows for which hidden states are needed
    # int64 [p], ascending: the place in read_rows of each read; several reads may share a row.
    reads: np.ndarray = field(default_factory=lambda: NOTHING)
    drawing: Drawing | None = None  # how tokens are drawn; None: every read that draws a token is greedy
    read_outs: tuple[Reads, ...] = ()  # for reads without a token: one Reads per readout
    # int64 [n]: the LoRA adapter of each row as a place in `Facts.adapters`, -1 for none; None: no row has an adapter.
    adapters: np.ndarray | None = None
    feature: object = None  # data from a feature's part of the engine for its part of the worker
    # int64 [k], ascending: places in read_rows of the rows that keep their hidden states in their slots.
    state_reads: np.ndarray = field(default_factory=lambda: NOTHING)
    # True: this step repeats the previous SlotStep (see the scheduler's RepeatedStep). Each row is one position and one
    # slot further, so it sees the keys of the row before, and itself. Only `tokens` and `drawing` differ otherwise.
    follows: bool = False

    @property
    def num_rows(self) -> int:
        """The number of rows computed."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False, slots=True)
class StepResult:
    """The values that a step read."""

    values: np.ndarray  # float32 [reads, ...]
    greedy: np.ndarray | None = None  # bool [reads], for "logprobs": the target is the most likely token of its row


@dataclass(eq=False, slots=True)
class SlotResult:
    """The tokens and values that a SlotStep read."""

    # int64 [p]: the token of each read; NOT_FINITE, or -1 if no token is allowed or values were read. The next step's
    # result may use the same array.
    ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # number of a read -> its log-probabilities
    values: tuple[StepResult, ...] = ()  # one StepResult for each of the step's `read_outs`
