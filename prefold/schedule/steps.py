"""The messages between the host, which decides, and a worker, which computes. NumPy arrays and plain numbers only.

Who takes what a step gives stays on the host, beside the message: a message says what is computed, and its size does
not depend on what else waits, runs or is kept. So it goes to a thread, to another process or to a simulator alike.

There are these:

    StreamStep   some rows of a row stream; the worker keeps the K/V of one path a stream between two of its steps
    MakeStore    room for the K/V of so many slots; before the first SlotStep, and once
    SlotStep     rows whose keys lie in the slots of that store: prompts to be continued, and what is generated

Rooms have more, which their parts of the worker take (`worker.protocol.WorkerPart`). All are started alike:
`ticket = worker.start(message)`, `ticket.result()`. What a slot is used for, which rows are shared, who waits and who
runs, only the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..prefix import PrefixMap
from ..types import Readout, TokenLogprobs

# In place of a token: the logits are no finite numbers, so that no token follows from them.
NOT_FINITE = -2
LAST = Readout("last")
NOTHING = np.zeros(0, np.int64)
NOTHING.flags.writeable = False


class Message:
    """A Message is what a host asks a worker for."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class StreamStep(Message):
    """A StreamStep asks for one forward pass over neighbouring rows of a row stream.

    Keys are numbered over the carried path and then the new rows: key j < path is the j-th row of the path above the
    first new row, key path + i is the i-th of the m new rows. Key j is visible to the query at key i exactly when
    j <= i < end[j]; where there are spans, when first[j] <= i < end[j].

    tokens, positions  int32 [n]: the rows the model computes; n = m, or the unique tokens among them with a `fold`. Ids
                       from MEDIA_BASE on are rows of images
    path               how many rows of the path that the stream's last step left are still above this step: the first
    end                int64 [path + m]: one past the last key whose query sees key j
    key_positions      int32 [path + m]: the position of each key in its prompt
    keep               int64 [k], ascending: keys whose K/V the next step needs
    fold               rows [n] <-> new rows of the stream [m] (sharing "mlp" only)
    read_rows          int64 [r], ascending: the rows in [0, n) that the model's result is wanted of; None: of all
    readout            what is read
    reads              int64 [p]: "logprobs": where in read_rows each target is read, ascending; "mean": the keys whose
                       paths are averaged; else nothing
    targets            int32 [p]: "logprobs": the token whose log-probability is wanted at each of `reads`
    stream             number of the stream
    adapter            number of the LoRA adapter of all rows, in the order of `Facts.adapters`; None: none
    first              int64 [path + m]: of a row in a span the first key of that span, of any other the key itself;
                       None: there is no span

    Its result has a row for each of `reads`, or of `read_rows` where the readout has no `reads`.
    """

    tokens: np.ndarray
    positions: np.ndarray
    path: int
    end: np.ndarray
    key_positions: np.ndarray
    keep: np.ndarray = field(default_factory=lambda: NOTHING)
    fold: PrefixMap | None = None
    read_rows: np.ndarray | None = None
    readout: Readout = LAST
    reads: np.ndarray = field(default_factory=lambda: NOTHING)
    targets: np.ndarray = field(default_factory=lambda: NOTHING)
    stream: int = 0
    adapter: int | None = None
    first: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the model's position-wise layers."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class EndStream(Message):
    """An EndStream says that no step of this stream follows, so that its path may go. `Worker.forget` sends it."""

    stream: int


@dataclass(frozen=True, slots=True)
class MakeStore(Message):
    """A MakeStore asks for room for the K/V of so many slots."""

    slots: int


@dataclass(frozen=True, eq=False, slots=True)
class Ragged:
    """A Ragged holds token ids for each of some reads, and a number beside each id.

    offsets  int64 [reads + 1]: the ids of the i-th read are ids[offsets[i] : offsets[i + 1]]
    ids      int64
    values   float32, one for each id
    """

    offsets: np.ndarray
    ids: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Ragged | None:
        """Returns the (ids, values) of each read as one Ragged; None where there are no ids at all."""
        sizes = [len(ids) for ids, _ in rows]
        if not any(sizes):
            return None
        ids, values = (np.concatenate([row[i] for row in rows]) for i in range(2))
        return cls(np.concatenate(([0], np.cumsum(sizes))), ids.astype(np.int64), values.astype(np.float32))

    def pick(self, reads: np.ndarray) -> Ragged:
        """Returns what belongs to these reads, int64 [n], in their order."""
        counts = np.diff(self.offsets)[reads]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[reads] - offsets[:-1], counts)
        return Ragged(offsets, self.ids[places], self.values[places])


@dataclass(frozen=True, eq=False, slots=True)
class Drawing:
    """A Drawing says how tokens are chosen at n of a step's reads. At reads it does not name, the likeliest is taken.

    reads         int64 [n]: which reads
    filters       float64 [n, FILTERS]: a column for each of these options (`prefold.options`), the temperature first;
                  where that is 0, the most likely token is taken
    keys          uint64 [n]: the keys of the noise that tokens are drawn with, made of seed, sample and position
    logprobs      int64 [n]: how many of the most likely tokens' log-probabilities are wanted beside the chosen one's;
                  -1: none at all
    bias          what is added to logits of tokens
    banned        tokens that may not be chosen
    penalties     float64 [n, PENALTIES]: a column for each of these options
    counted       the tokens that these concern, and how often each is in the output
    masked        int64 [m]: those of the n reads whose token has to be one of `allowed`
    allowed       uint8 [m, ceil(vocabulary / 8)]: whether token i is allowed says bit i % 8 of byte i // 8
    """

    reads: np.ndarray
    filters: np.ndarray
    keys: np.ndarray
    logprobs: np.ndarray
    bias: Ragged | None = None
    banned: Ragged | None = None
    penalties: np.ndarray | None = None
    counted: Ragged | None = None
    masked: np.ndarray = field(default_factory=lambda: NOTHING)
    allowed: np.ndarray | None = None

    def part(self, first: int, stop: int) -> Drawing:
        """Returns the Drawing of those of the n reads from the `first` up to, not including, `stop`."""
        return self if (first, stop) == (0, len(self.reads)) else self.pick(np.arange(first, stop))

    def pick(self, some: np.ndarray) -> Drawing:
        """Returns the Drawing of some of the n reads, int64 ascending, for them alone."""
        bias, banned, counted = (x and x.pick(some) for x in (self.bias, self.banned, self.counted))
        inside = np.isin(self.masked, some)
        return Drawing(
            reads=self.reads[some],
            filters=self.filters[some],
            keys=self.keys[some],
            logprobs=self.logprobs[some],
            bias=bias,
            banned=banned,
            penalties=None if self.penalties is None else self.penalties[some],
            counted=counted,
            masked=np.searchsorted(some, self.masked[inside]),
            allowed=self.allowed[inside] if self.allowed is not None and inside.any() else None,
        )


@dataclass(frozen=True, eq=False, slots=True)
class Numbers:
    """A Numbers says that n of a step's reads give numbers and no token.

    readout  what is read
    reads    int64 [n]: which reads
    targets  int32 with "logprobs": the token whose log-probability is wanted at each row that is read
    counts   int64 [n]: how many rows each of these reads is of: the last ones that its row sees, whose hidden states
             are in their slots (`SlotStep.kept`); None: each is of its own row
    """

    readout: Readout
    reads: np.ndarray
    targets: np.ndarray = field(default_factory=lambda: NOTHING)
    counts: np.ndarray | None = None

    @property
    def sizes(self) -> np.ndarray:
        """Returns how many rows of the result belong to each read, int64 [n]."""
        return np.ones(len(self.reads), np.int64) if self.counts is None or self.readout.kind == "mean" else self.counts


@dataclass(frozen=True, eq=False, slots=True)
class SlotStep(Message):
    """A SlotStep asks for one forward pass over n rows whose keys lie in the slots of the store.

    Its rows are its queries, numbered from 0 to n - 1.

    tokens, positions  int32 [n]; token -1 - i is what the i-th read of the SlotStep before gives, where that is still
                       on its way
    slots              int64 [n]: where each row's K/V goes
    run_*              int64 [r]: keys as runs of neighbouring slots. The `run_count` slots from `run_start` on hold
                       the rows of positions from `run_position` on, and are visible to the queries from `run_first`
                       up to, not including, `run_last`. A new row is seen from its own query on
    read_rows          int64, ascending: rows whose hidden states are wanted
    reads              int64 [p], ascending: where in read_rows each read is; several may be at one
    kept               int64 [k], ascending: where in read_rows each row is whose hidden state is kept in its slot
    drawing            how tokens are chosen; None: at every read that is no number, the most likely one
    numbers            the reads that give numbers, by readout
    adapters           int64 [n]: number of the LoRA adapter of each row, in the order of `Facts.adapters`, -1: none;
                       None: none in the whole step
    exits              float64 [p + k, 3]: of a looped model, for each of `reads` and then of `kept` the threshold at
                       which its row leaves (nan for that of the checkpoint), and the fewest and the most visits that
                       it makes; None: as the checkpoint says
    route              the blocks of a looped model that all rows visit; None: as the model's order says
    follows            whether its rows are those of the SlotStep before, each one position and one slot further, and
                       each sees what that row saw, and the row itself

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
    numbers: tuple[Numbers, ...] = ()
    adapters: np.ndarray | None = None
    exits: np.ndarray | None = None
    route: tuple[int, ...] | None = None
    kept: np.ndarray = field(default_factory=lambda: NOTHING)
    follows: bool = False

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the model."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False, slots=True)
class StepResult:
    """A StepResult holds the numbers that a step read.

    values  float32 [reads, ...]
    greedy  bool [reads] with "logprobs": whether each target is the most likely token of its row; else None
    """

    values: np.ndarray
    greedy: np.ndarray | None = None


@dataclass(frozen=True, eq=False, slots=True)
class SlotResult:
    """A SlotResult holds what a SlotStep gave.

    ids       int64 [p]: the token of each read; -1 where none is allowed, or numbers were read; or NOT_FINITE
    logprobs  the log-probabilities at each read where they were asked for, by its number
    numbers   a StepResult for each of the step's `numbers`
    taken     bool [p]: whether each read was made; the ids of others are -1. None: all were
    """

    ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    numbers: tuple[StepResult, ...] = ()
    taken: np.ndarray | None = None
