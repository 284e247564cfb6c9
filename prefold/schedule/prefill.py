"""The prefill scheduler: one window of prompts, cut into steps.

`plan` reads and returns the next step; `commit` advances to the rows behind it. Nothing a step
computes is needed to plan the next one, so a caller may commit a step before it has run and plan
ahead. This module decides rows only: no tensors, no attention, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..prefix import PrefixMap, Trie, common_prefix_lengths
from ..stream import Window
from ..types import Readout, Sharing

__all__ = ["PrefillScheduler", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over the stream rows [start, stop).

    Keys are numbered over the carried path and then the new rows: key j < path is the j-th row of
    the path above `start`, key path + i is row start + i. Key j is visible to the query at key i
    exactly when j <= i < end[j].

    tokens, positions  int32 [n]: the rows the model computes. n = stop - start, or the unique
                       tokens among them when `fold` is given.
    path               rows carried from before, `start`'s ancestors
    end                int64 [path + stop - start]
    key_positions      int32 [path + stop - start]
    keep               int64 [k]: keys whose K/V the next step needs (the path above `stop`), ascending
    fold               rows [n] <-> stream rows [stop - start] (sharing "mlp" only)
    read_rows          int64 [r], ascending: rows in [0, n) the model's result is wanted at; None: all
    done               int64 [d]: sequences of the window whose last row is in this step
    done_reads         int64 [d]: where in read_rows the last row of each is; with read_rows None, its key
    pair_reads         int64 [p], ascending: where in read_rows the row of a (row, target) pair is
    pair_targets       int64 [p]: the pair's index into the window's targets
    """

    start: int
    stop: int
    tokens: np.ndarray
    positions: np.ndarray
    path: int
    end: np.ndarray
    key_positions: np.ndarray
    keep: np.ndarray
    fold: PrefixMap | None
    read_rows: np.ndarray | None
    done: np.ndarray
    done_reads: np.ndarray
    pair_reads: np.ndarray
    pair_targets: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows that go through the model's position-wise layers."""
        return len(self.tokens)


class PrefillScheduler:
    """Cuts the stream of one window into steps of at most `max_batch_rows` rows.

    sharing "full": any contiguous range of the depth-first rows; "mlp" and "off": whole prompts in
    order of arrival, an over-long prompt in chunks of its own, and "mlp" folds a step's prompts. Of
    twins that arrive one after the other (the one-token labels of a prompt) these too run one.
    """

    def __init__(self, window: Window, readout: Readout, *, sharing: Sharing, max_batch_rows: int):
        self.window = window
        self.readout = readout
        self.sharing = sharing
        self.max_batch_rows = max_batch_rows
        if sharing == "full":
            self.trie = Trie.build(window.tokens, window.offsets, is_sorted=window.is_sorted)
            self._offsets = window.offsets
            self._last_row, self._order = self.trie.last_row, self.trie.order
            self._position = window.carried
        else:
            tokens, self._offsets, twin_of = merge_twins(window.tokens, window.offsets)
            self.trie = Trie.build(tokens, self._offsets, share=False)
            self._last_row, self._order = self.trie.last_row[twin_of], np.arange(window.num_requests)
            self._position = 0
        self._path = np.arange(self._position, dtype=np.int64)
        # Last rows ascend along this order, so the sequences a step ends are a slice of it.
        self._last_rows = self._last_row[self._order]
        self._pair_rows, self._pair_targets = self._pairs()

    def plan(self) -> Step | None:
        """The next step, or None when every row has been committed."""
        trie, start = self.trie, self._position
        if start >= trie.num_rows:
            return None
        stop = self._cut(start)
        path = self._path
        keys = np.concatenate((path, np.arange(start, stop, dtype=np.int64)))
        tokens, positions = trie.tokens[start:stop], trie.positions[start:stop]
        fold = self._fold(start, stop) if self.sharing == "mlp" else None
        if fold is not None:
            tokens, positions = tokens[fold.gather], positions[fold.gather]

        first, last = np.searchsorted(self._last_rows, (start, stop))
        done = self._order[first:last]
        pair_first, pair_last = np.searchsorted(self._pair_rows, (start, stop))
        pair_rows = self._pair_rows[pair_first:pair_last] - start
        pair_targets = self._pair_targets[pair_first:pair_last]
        done_rows = self._last_rows[first:last] - start

        read_rows: np.ndarray | None
        if self.readout.kind == "mean":
            read_rows, done_reads, pair_reads = None, done_rows + len(path), pair_rows
        elif self.readout.kind == "logprobs":
            read_rows, pair_reads = np.unique(_to_rows(pair_rows, fold), return_inverse=True)
            if fold is not None:  # rows of the stream ascend; those that stand for them need not
                order = np.argsort(pair_reads, kind="stable")
                pair_reads, pair_targets = pair_reads[order], pair_targets[order]
            done_reads = np.zeros(len(done), np.int64)
        else:
            read_rows, done_reads = np.unique(_to_rows(done_rows, fold), return_inverse=True)
            pair_reads = pair_rows

        return Step(
            start=start,
            stop=stop,
            tokens=tokens,
            positions=positions,
            path=len(path),
            end=np.clip(trie.end[keys] - start + len(path), 0, len(keys)),
            key_positions=trie.positions[keys],
            keep=np.flatnonzero(self._needed_after(keys, stop)),
            fold=fold,
            read_rows=read_rows,
            done=done,
            done_reads=done_reads,
            pair_reads=pair_reads,
            pair_targets=pair_targets,
        )

    def commit(self, step: Step) -> None:
        """Advance behind `step`, which must be the one `plan` returned last."""
        if step.start != self._position:
            raise ValueError(f"step starts at row {step.start}, the stream is at row {self._position}")
        keys = np.concatenate((self._path, np.arange(step.start, step.stop, dtype=np.int64)))
        self._path = keys[step.keep]
        self._position = step.stop

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

    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
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


def merge_twins(tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drop every sequence equal to the one before it: (tokens, offsets, number of the one that stands for each)."""
    lengths = np.diff(offsets)
    shared = common_prefix_lengths(tokens, offsets, np.arange(len(lengths)))
    twin = np.zeros(len(lengths), bool)
    twin[1:] = (shared[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
    kept = lengths[~twin]
    return tokens[np.repeat(~twin, lengths)], np.concatenate(([0], np.cumsum(kept))), np.cumsum(~twin) - 1


def _to_rows(stream_rows: np.ndarray, fold: PrefixMap | None) -> np.ndarray:
    return stream_rows if fold is None else fold.scatter[stream_rows]
