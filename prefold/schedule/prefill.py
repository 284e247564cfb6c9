"""The stream's scheduler: one window of prompts, cut into steps.

A step is a function of the rows it computes: `step(start, stop)` reads the window's trie and what is to be read, and
changes nothing, so a step that does not fit into memory is two calls of it. `plan` returns the next step and `commit`
advances to the rows behind it. Nothing a step computes is needed to plan the next one, so a caller may commit a step
before it has run and plan ahead. This module decides rows only: no tensors, no attention, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..prefix import PrefixMap, Trie
from ..stream import Window
from ..types import Readout, Sharing
from .steps import NOTHING, StreamStep

__all__ = ["PlannedStep", "PrefillScheduler", "reusable_rows"]


@dataclass(frozen=True, eq=False, slots=True)
class PlannedStep:
    """The rows start .. stop of a window's stream as a message, and who takes what it reads.

    done        int64 [d]: requests of the window whose last row is in this step
    done_reads  int64 [d]: which row of the step's result is each one's; "logprobs": nothing
    targets     int64 [p]: "logprobs": which of the window's targets each row of the result is; else nothing
    """

    start: int
    stop: int
    message: StreamStep
    done: np.ndarray
    done_reads: np.ndarray
    targets: np.ndarray


class PrefillScheduler:
    """Cuts the stream of one window into steps of at most `max_batch_rows` rows.

    sharing "full": any contiguous range of the depth-first rows; "mlp" and "off": whole prompts in
    order of arrival, an over-long prompt in chunks of its own, and "mlp" folds a step's prompts. Of
    twins that arrive one after the other (the one-token labels of a prompt) these too run one.

    follows  whether the worker holds the path that the window before left behind: then the stream goes on from
             there, and else it begins at the window's first row
    stream   its number, for the messages
    adapter  the number of the window's LoRA adapter, for the messages
    """

    def __init__(
        self,
        window: Window,
        readout: Readout,
        *,
        sharing: Sharing,
        max_batch_rows: int,
        follows: bool = False,
        stream: int = 0,
        adapter: int | None = None,
    ):
        self.window = window
        self.readout = readout
        self.sharing = sharing
        self.max_batch_rows = max_batch_rows
        self.stream = stream
        self.adapter = adapter
        self._position = 0
        if sharing == "full":
            shared = window.shared if window.is_sorted else None
            self.trie = Trie.build(window.tokens, window.offsets, is_sorted=window.is_sorted, shared=shared)
            self._offsets = window.offsets
            self._last_row, self._order = self.trie.last_row, self.trie.order
            if follows:
                self._position = reusable_rows(window, readout)
        else:
            tokens, self._offsets, twin_of = merge_twins(window)
            self.trie = Trie.build(tokens, self._offsets, share=False)
            self._last_row, self._order = self.trie.last_row[twin_of], np.arange(window.num_requests)
        # Last rows ascend along this order, so the sequences a step ends are a slice of it.
        self._last_rows = self._last_row[self._order]
        self._target_rows, self._targets = self._rows_of_targets()

    def plan(self) -> PlannedStep | None:
        """The next step, or None when every row has been committed."""
        start = self._position
        return None if start >= self.trie.num_rows else self.step(start, self._cut(start))

    def commit(self, step: PlannedStep) -> None:
        """Advance behind `step`, which must be the one `plan` returned last."""
        if step.start != self._position:
            raise ValueError(f"step starts at row {step.start}, the stream is at row {self._position}")
        self._position = step.stop

    def halves(self, step: PlannedStep) -> tuple[PlannedStep, PlannedStep]:
        """The rows of a step as two, to be run one after the other; of at least two rows. Where prompts were folded
        (sharing "mlp"), a half that ends within one is not."""
        middle = (step.start + step.stop) // 2
        return self.step(step.start, middle), self.step(middle, step.stop)

    def step(self, start: int, stop: int) -> PlannedStep:
        """The step that computes the rows start <= row < stop, after the ones before them."""
        trie = self.trie
        path = trie.path(start)
        keys = np.concatenate((path, np.arange(start, stop, dtype=np.int64)))
        tokens, positions = trie.tokens[start:stop], trie.positions[start:stop]
        fold = self._fold(start, stop) if self.sharing == "mlp" else None
        if fold is not None:
            tokens, positions = tokens[fold.gather], positions[fold.gather]

        first, last = np.searchsorted(self._last_rows, (start, stop))
        done_rows = self._last_rows[first:last] - start
        read_rows: np.ndarray | None = None
        reads = done_reads = targets = NOTHING
        if self.readout.kind == "mean":
            reads, done_reads = np.unique(done_rows + len(path), return_inverse=True)
        elif self.readout.kind == "logprobs":
            some = slice(*np.searchsorted(self._target_rows, (start, stop)).tolist())
            read_rows, reads = np.unique(_to_rows(self._target_rows[some] - start, fold), return_inverse=True)
            targets = self._targets[some]
            if fold is not None:  # rows of the stream ascend; those that stand for them need not
                order = np.argsort(reads, kind="stable")
                reads, targets = reads[order], targets[order]
        else:
            read_rows, done_reads = np.unique(_to_rows(done_rows, fold), return_inverse=True)

        message = StreamStep(
            tokens=tokens,
            positions=positions,
            path=len(path),
            end=np.clip(trie.end[keys] - start + len(path), 0, len(keys)),
            key_positions=trie.positions[keys],
            keep=np.flatnonzero(self._needed_after(keys, stop)),
            fold=fold,
            read_rows=read_rows,
            readout=self.readout,
            reads=reads,
            targets=self.window.targets[targets] if len(targets) else NOTHING,
            stream=self.stream,
            adapter=self.adapter,
        )
        return PlannedStep(start, stop, message, self._order[first:last], done_reads, targets)

    def _cut(self, start: int) -> int:
        remaining = self.trie.num_rows - start
        if remaining <= self.max_batch_rows:
            if self.sharing == "full":
                return self.trie.num_rows
        elif self.sharing == "full":
            # Steps of equal size: a last step of a few rows would run far below the machine's speed.
            steps = -(-remaining // self.max_batch_rows)
            return start + -(-remaining // steps)
        offsets = self._offsets
        sequence = int(np.searchsorted(offsets, start, side="right")) - 1
        if start > offsets[sequence]:  # within an over-long prompt: its chunks run alone
            return min(start + self.max_batch_rows, int(offsets[sequence + 1]))
        whole = int(offsets[np.searchsorted(offsets, start + self.max_batch_rows, side="right") - 1])
        return whole if whole > start else start + self.max_batch_rows

    def _needed_after(self, keys: np.ndarray, stop: int) -> np.ndarray:
        """Which keys the stream behind `stop` sees; behind the window's last row, what the next window may see."""
        if stop < self.trie.num_rows:
            return self.trie.end[keys] > stop
        if self.sharing != "full":
            return np.zeros(len(keys), bool)
        # The next window goes on from the path of this window's last sequence.
        return np.isin(keys, self.trie.rows_of(int(self.trie.order[-1])))

    def _fold(self, start: int, stop: int) -> PrefixMap | None:
        offsets = self._offsets
        first, last = np.searchsorted(offsets, (start, stop))
        if offsets[first] != start or offsets[last] != stop:
            return None  # a chunk of an over-long prompt: one sequence, nothing to fold
        return PrefixMap.build(self.trie.tokens[start:stop], offsets[first : last + 1] - start)

    def _rows_of_targets(self) -> tuple[np.ndarray, np.ndarray]:
        """(row, index into window.targets) of every target, by ascending row.

        Target t of m is read at the row m - 1 - t steps above the sequence's last row.
        """
        starts, stops = self.window.target_offsets[:-1], self.window.target_offsets[1:]
        counts = stops - starts
        rows = np.empty(int(self.window.target_offsets[-1]), np.int64)
        active = np.flatnonzero(counts > 0)
        at, above = self._last_row[active], 0
        while len(active):
            rows[stops[active] - 1 - above] = at
            above += 1
            more = counts[active] > above
            active, at = active[more], self.trie.parent[at[more]]
        order = np.argsort(rows, kind="stable")
        return rows[order], order


def reusable_rows(window: Window, readout: Readout) -> int:
    """How many rows of the path that the window before left behind this window need not compute again.

    They are rows of the `common` tokens, but of none whose result this window reads: what rows gave is not held. A
    mean is read at the last row, for the hidden states of the path above it are held beside its K/V. A request
    without targets ends with its last row too.
    """
    if not window.common or readout.kind == "first":
        return 0
    lengths = np.diff(window.offsets)
    if readout.kind != "logprobs":
        # Only a twin of the last request before ends in a common row, and a twin would come first.
        return min(window.common, int(lengths[0]) - 1)
    # A request reads a common row when its first read position lies within what it shares with the last request
    # before; in sorted order that is the smallest of the prefixes shared by neighbours up to it.
    shared = window.shared.copy()
    shared[0] = window.common
    shared = np.minimum.accumulate(shared)
    first_read = lengths - np.maximum(np.diff(window.target_offsets), 1)
    inside = first_read < shared
    return min(window.common, int(first_read[inside].min())) if inside.any() else window.common


def merge_twins(window: Window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drop every request equal to the one before it: (tokens, offsets, number of the one that stands for each)."""
    lengths, shared = np.diff(window.offsets), window.shared
    twin = np.zeros(len(lengths), bool)
    twin[1:] = (shared[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
    kept = lengths[~twin]
    return window.tokens[np.repeat(~twin, lengths)], np.concatenate(([0], np.cumsum(kept))), np.cumsum(~twin) - 1


def _to_rows(stream_rows: np.ndarray, fold: PrefixMap | None) -> np.ndarray:
    return stream_rows if fold is None else fold.scatter[stream_rows]
