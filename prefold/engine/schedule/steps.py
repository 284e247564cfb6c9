"""The messages between the host, which decides, and a worker, which computes. NumPy arrays and plain numbers only.

A message says what is computed, and nothing about the requests: which sequence takes a token stays on the host. Its
size depends only on the step, not on how many requests wait or run. So it goes to a thread, to another process or to a
simulator alike.

    StreamStep   computes rows of a row stream; the worker keeps the K/V of one path a stream between two of its steps
    EndStream    ends a stream: the worker drops its path
    MakeStore    makes room for the K/V of so many slots, once, before the first SlotStep
    SlotStep     computes rows whose keys lie in the slots of that store: prompts to be continued, and their outputs

Features have further messages, which their parts of the worker take (`worker.parts.WorkerPart`). All messages are
started alike: `ticket = worker.start(message)`, then `ticket.result()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...spec.requests import Readout, TokenLogprobs
from ...trie import PrefixMap

# Stands in place of a token whose logits were no finite numbers.
NOT_FINITE = -2
LAST = Readout("last")
NOTHING = np.zeros(0, np.int64)
NOTHING.flags.writeable = False


class Message:
    """A Message tells a worker what to compute."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class Reads:
    """The values that a step reads of its rows, all of one kind.

    readout    the kind
    rows       int64 [n]: the place in the step's `read_rows` of each row that is read. For "mean" in a StreamStep: the
               keys whose paths are averaged, ascending
    targets    int32, for "logprobs": the token whose log-probability is wanted at each row that is read
    counts     int64 [n], in a SlotStep: how many rows each read takes in, the last ones that its row sees, whose hidden
               states are in their slots (`SlotStep.state_reads`); None: each read takes in its own row alone
    consumers  int64 [n], in a SlotStep: the numbers of the step's `reads` that take these values, and no token
    """

    readout: Readout
    rows: np.ndarray = field(default_factory=lambda: NOTHING)
    targets: np.ndarray = field(default_factory=lambda: NOTHING)
    counts: np.ndarray | None = None
    consumers: np.ndarray = field(default_factory=lambda: NOTHING)

    @property
    def sizes(self) -> np.ndarray:
        """Return how many rows of the result belong to each read, int64 [n]."""
        return np.ones(len(self.rows), np.int64) if self.counts is None or self.readout.kind == "mean" else self.counts


@dataclass(frozen=True, eq=False, slots=True)
class StreamStep(Message):
    """A StreamStep asks for one forward pass over neighbouring rows of a row stream.

    Keys are numbered over the carried path and then the new rows: key j < path is the j-th row of the path above the
    first new row, key path + i is the i-th of the m new rows. Key j is visible to the query at key i exactly when
    j <= i < end[j]; where there are spans, when first[j] <= i < end[j].

    tokens, positions  int32 [n]: the rows the model computes; n = m, or the unique tokens among them with a `fold`. Ids
                       from MEDIA_BASE on are rows of images
    path               how many rows of the carried path are above this step: the first ones
    end                int64 [path + m]: one past the last key whose query sees key j
    key_positions      int32 [path + m]: the position of each key in its prompt
    keep               int64 [k], ascending: keys whose K/V the next step needs
    fold               rows [n] <-> new rows of the stream [m] (sharing "mlp" only)
    read_rows          int64 [r], ascending: the rows in [0, n) whose hidden states the model returns; None: all
    read_out           the values that are read
    stream             number of the stream
    adapter            number of the LoRA adapter of all rows, in the order of `Facts.adapters`; None: none
    first              int64 [path + m]: for a row in a span the first key of the span, for any other the key itself;
                       None: there is no span

    Its result is a StepResult, with a row for each of the rows that are read.
    """

    tokens: np.ndarray
    positions: np.ndarray
    path: int
    end: np.ndarray
    key_positions: np.ndarray
    keep: np.ndarray = field(default_factory=lambda: NOTHING)
    fold: PrefixMap | None = None
    read_rows: np.ndarray | None = None
    read_out: Reads = Reads(LAST)
    stream: int = 0
    adapter: int | None = None
    first: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the model's position-wise layers."""
        return len(self.tokens)


def folded(step: StreamStep, fold: PrefixMap) -> StreamStep:
    """Return a step of whole prompts whose position-wise layers compute each distinct token once (sharing "mlp").
    Attention unfolds them again."""
    read_rows, reads = step.read_rows, step.read_out
    if read_rows is not None:
        read_rows, again = np.unique(fold.scatter[read_rows], return_inverse=True)
        reads = replace(reads, rows=again[reads.rows])
    tokens, positions = step.tokens[fold.gather], step.positions[fold.gather]
    return replace(step, tokens=tokens, positions=positions, fold=fold, read_rows=read_rows, read_out=reads)


@dataclass(frozen=True, slots=True)
class EndStream(Message):
    """An EndStream says that no step of this stream follows, so that its path may go. `Worker.forget` sends it."""

    stream: int


@dataclass(frozen=True, slots=True)
class MakeStore(Message):
    """A MakeStore asks for room for the K/V of so many slots."""

    slots: int


@dataclass(frozen=True, eq=False, slots=True)
class RaggedLists:
    """A RaggedLists holds, for each of several reads, a list of token ids with a number beside each id.

    offsets  int64 [reads + 1]: the ids of the i-th read are ids[offsets[i] : offsets[i + 1]]
    ids      int64
    values   float32, one for each id
    """

    offsets: np.ndarray
    ids: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> RaggedLists | None:
        """Returns a RaggedLists of the (ids, values) of each read; None if there are no ids at all."""
        sizes = [len(ids) for ids, _ in rows]
        if not any(sizes):
            return None
        ids, values = (np.concatenate([row[i] for row in rows]) for i in range(2))
        return cls(np.concatenate(([0], np.cumsum(sizes))), ids.astype(np.int64), values.astype(np.float32))

    def pick(self, reads: np.ndarray) -> RaggedLists:
        """Returns the RaggedLists of these reads, int64 [n], in their order."""
        counts = np.diff(self.offsets)[reads]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[reads] - offsets[:-1], counts)
        return RaggedLists(offsets, self.ids[places], self.values[places])


@dataclass(frozen=True, eq=False, slots=True)
class Drawing:
    """A Drawing says how tokens are chosen at n of a step's reads. At all other reads the most likely token is taken.

    reads          int64 [n]: the numbers of these reads
    filters        float64 [n, FILTERS]: the options FILTERS of `prefold.spec.task`, of which the temperature is the
                   first; with temperature 0 the most likely token is taken
    keys           uint64 [n]: the keys of the noise with which tokens are drawn, made of seed, sample and position
    logprobs       int64 [n]: how many of the most likely tokens' log-probabilities are wanted beside the chosen
                   token's; -1: none at all
    bias           token ids and the number that is added to each one's logit
    banned_ids     tokens that may not be chosen; the numbers are unused
    penalties      float64 [n, PENALTIES]: the options PENALTIES of `prefold.spec.task`
    output_counts  the tokens that the penalties concern, and how often each is in the output
    grammar_reads  int64 [m]: which of the n reads have a grammar; their tokens must be among `grammar_masks`
    grammar_masks  uint8 [m, ceil(vocabulary / 8)]: token i is allowed if bit i % 8 of byte i // 8 is set
    """

    reads: np.ndarray
    filters: np.ndarray
    keys: np.ndarray
    logprobs: np.ndarray
    bias: RaggedLists | None = None
    banned_ids: RaggedLists | None = None
    penalties: np.ndarray | None = None
    output_counts: RaggedLists | None = None
    grammar_reads: np.ndarray = field(default_factory=lambda: NOTHING)
    grammar_masks: np.ndarray | None = None

    def part(self, first: int, stop: int) -> Drawing:
        """Returns the Drawing of the reads `first` to `stop` - 1 among the n reads."""
        return self if (first, stop) == (0, len(self.reads)) else self.pick(np.arange(first, stop))

    def pick(self, places: np.ndarray) -> Drawing:
        """Returns the Drawing of those of the n reads that stand at these places, int64 ascending."""
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
    """A SlotStep asks for one forward pass over n rows whose keys lie in the slots of the store.

    Its rows are its queries, numbered from 0 to n - 1.

    tokens, positions  int32 [n]; token -1 - i stands for the token in flight of the i-th read of the SlotStep before.
                       The tokens of a step that follows may be the very `ids` of the result before, int64
    slots              int64 [n]: the slot that each row's K/V is written to
    run_*              int64 [r]: keys as runs of neighbouring slots. The `run_count` slots from `run_start` on hold
                       the rows of positions from `run_position` on, and are visible to the queries from `run_first`
                       up to, not including, `run_last`. A new row is seen from its own query on
    read_rows          int64, ascending: rows whose hidden states are wanted
    reads              int64 [p], ascending: the place in read_rows of each read; several reads may share a row
    state_reads        int64 [k], ascending: the places in read_rows of the rows whose hidden states are kept in their
                       slots
    drawing            how tokens are chosen; None: every read that gives a token takes the most likely one
    read_outs          the values of the reads that give no token, a Reads for each readout
    adapters           int64 [n]: number of the LoRA adapter of each row, in the order of `Facts.adapters`, -1: none;
                       None: no row has an adapter
    feature            what a feature's part of the engine tells the feature's part of the worker about these rows
    follows            whether it is the same step again as the SlotStep before (the scheduler's RepeatedStep): its
                       rows are those of that step, each one position and one slot further, so that each sees the
                       keys of the row before, and itself. All but `tokens` and the drawing stays as it was

    Its result is a SlotResult.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    run_start: np.ndarray
    run_count: np.ndarray
    run_position: np.ndarray
    run_first: np.ndarray
    run_last: np.ndarray
    read_rows: np.ndarray
    reads: np.ndarray = field(default_factory=lambda: NOTHING)
    drawing: Drawing | None = None
    read_outs: tuple[Reads, ...] = ()
    adapters: np.ndarray | None = None
    feature: object = None
    state_reads: np.ndarray = field(default_factory=lambda: NOTHING)
    follows: bool = False

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the model."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False, slots=True)
class StepResult:
    """The values that a step read.

    values  float32 [reads, ...]
    greedy  bool [reads] with "logprobs": whether each target is the most likely token of its row; else None
    """

    values: np.ndarray
    greedy: np.ndarray | None = None


@dataclass(eq=False, slots=True)
class SlotResult:
    """The tokens and values that a SlotStep read.

    ids       int64 [p]: the token of each read; -1 if no token is allowed, or values were read; or NOT_FINITE. The
              array may be that of the next step's result too
    logprobs  the wanted log-probabilities, by the number of the read
    values    a StepResult for each of the step's `read_outs`
    """

    ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    values: tuple[StepResult, ...] = ()
