"""The planner of row streams: it cuts one window of prompts into steps.

A step is a function of the rows that it computes: `step(start, stop)` reads the window's trie and changes nothing, so
that a step which does not fit into memory becomes two calls of it. `plan` returns the next step, and `commit` advances
to the rows behind it. Planning needs no results, so a caller may commit a step before it has run, and plan ahead. A
span is computed in one step, so that no step begins or ends within one. This module decides rows only: no tensors, no
attention, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...errors import OutOfMemoryError
from ...spec.requests import Readout, Sharing
from ...trie import PrefixMap, Trie, Window, clear_of_span, span_starts
from .steps import NOTHING, Reads, StreamStep, folded


@dataclass(frozen=True, eq=False, slots=True)
class PlannedStep:
    """A PlannedStep is the message for the rows start <= row < stop of a window's stream, with the requests of its
    reads.

    requests       int64 [d]: requests of the window whose last row is in this step
    request_reads  int64 [d]: the row of the step's result that each of these requests takes; empty with "logprobs"
    targets        int64 [p]: with "logprobs" the place in the window's targets of each row of the result; otherwise
                   empty
    """

    start: int
    stop: int
    message: StreamStep
    requests: np.ndarray
    request_reads: np.ndarray
    targets: np.ndarray


class StreamPlanner(Protocol):
    """A StreamPlanner cuts one window of a row stream into steps, as a WindowPlanner does."""

    def plan(self, max_rows: int | None = None) -> PlannedStep | None: ...

    def commit(self, step: PlannedStep) -> None: ...

    def halves(self, step: PlannedStep) -> tuple[PlannedStep, PlannedStep]: ...


class WindowPlanner:
    """A WindowPlanner cuts the stream of one window into steps of at most `max_batch_rows` rows.

    With sharing "full" a step is any contiguous range of the depth-first rows. With "mlp" and "off" it is whole
    prompts in order of arrival, and a prompt that is too long for a step runs in chunks of its own; "mlp" folds the
    prompts of a step. Of neighbouring twins (the one-token labels of a prompt) only one runs, with "mlp" and "off" too.

    follows  whether the worker holds the path that the window before left behind; the stream then goes on from that
             path, and otherwise begins at the window's first row
    stream   the number of the stream in the messages
    adapter  the number of the window's LoRA adapter in the messages
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
        self._span = span_starts(self.trie.tokens)
        # Last rows ascend along this order, so the sequences a step ends are a slice of it.
        self._last_rows = self._last_row[self._order]
        self._target_rows, self._targets = self._rows_of_targets()

    def plan(self, max_rows: int | None = None) -> PlannedStep | None:
        """Returns the next step, or None when every row has been committed. Changes nothing.

        max_rows  the most rows of the step; None: `max_batch_rows`
        """
        start, max_rows = self._position, self.max_batch_rows if max_rows is None else max_rows
        return None if start >= self.trie.num_rows else self.step(start, self._clear(start, self._cut(start, max_rows)))

    def commit(self, step: PlannedStep) -> None:
        """Advances to the rows behind `step`. Raises ValueError if `plan` did not return it last."""
        if step.start != self._position:
            raise ValueError(f"step starts at row {step.start}, the stream is at row {self._position}")
        self._position = step.stop

    def halves(self, step: PlannedStep) -> tuple[PlannedStep, PlannedStep]:
        """Returns the rows of a step, at least two, as two steps that are run one after the other.

        With sharing "mlp" a half that begins or ends within a prompt is not folded. Raises OutOfMemoryError if all rows
        are one span.
        """
        middle = self._clear(step.start, (step.start + step.stop) // 2)
        if middle == step.stop:
            rows = step.stop - step.start
            raise OutOfMemoryError(f"memory is too small for the {rows} rows of an image, which are computed together")
        return self.step(step.start, middle), self.step(middle, step.stop)

    def step(self, start: int, stop: int) -> PlannedStep:
        """Returns the step that computes the rows start <= row < stop, after the rows before them."""
        trie = self.trie
        path = trie.path(start)
        keys = np.concatenate((path, np.arange(start, stop, dtype=np.int64)))
        first, last = np.searchsorted(self._last_rows, (start, stop))
        done_rows = self._last_rows[first:last] - start
        read_rows: np.ndarray | None = None
        reads = done_reads = targets = NOTHING
        if self.readout.kind == "mean":
            reads, done_reads = np.unique(done_rows + len(path), return_inverse=True)
        elif self.readout.kind == "logprobs":
            within = slice(*np.searchsorted(self._target_rows, (start, stop)).tolist())
            read_rows, reads = np.unique(self._target_rows[within] - start, return_inverse=True)
            targets = self._targets[within]
        else:
            read_rows, done_reads = np.unique(done_rows, return_inverse=True)
            reads = np.arange(len(read_rows))

        message = StreamStep(
            tokens=trie.tokens[start:stop],
            positions=trie.positions[start:stop],
            path=len(path),
            end=np.clip(trie.end[keys] - start + len(path), 0, len(keys)),
            key_positions=trie.positions[keys],
            keep=np.flatnonzero(self._needed_after(keys, stop)),
            read_rows=read_rows,
            read_out=Reads(self.readout, reads, self.window.targets[targets] if len(targets) else NOTHING),
            stream=self.stream,
            adapter=self.adapter,
            first=self._first_keys(start, stop, len(path)),
        )
        if self.sharing == "mlp" and (fold := self._fold(start, stop)) is not None:
            message = folded(message, fold)
        return PlannedStep(start, stop, message, self._order[first:last], done_reads, targets)

    def _clear(self, start: int, cut: int) -> int:
        """Returns `cut`, moved out of a span: to the span's first row, or behind the span if that row is `start`."""
        if self._span is None or cut >= self.trie.num_rows or self._span[cut] == cut:
            return cut
        first = int(self._span[cut])
        return first if first > start else int(np.searchsorted(self._span, first, side="right"))

    def _first_keys(self, start: int, stop: int, path: int) -> np.ndarray | None:
        """Returns `StreamStep.first` of a step."""
        if self._span is None:
            return None
        first = np.concatenate((np.arange(path), self._span[start:stop] - start + path))
        return None if np.array_equal(first, np.arange(len(first))) else first

    def _cut(self, start: int, max_rows: int) -> int:
        """Returns the row behind the step that begins at `start`."""
        remaining = self.trie.num_rows - start
        if remaining <= max_rows:
            if self.sharing == "full":
                return self.trie.num_rows
        elif self.sharing == "full":
            # Steps of equal size: a last step of a few rows would run far below the machine's speed.
            steps = -(-remaining // max_rows)
            return start + -(-remaining // steps)
        offsets = self._offsets
        sequence = int(np.searchsorted(offsets, start, side="right")) - 1
        if start > offsets[sequence]:  # within an over-long prompt: its chunks run alone
            return min(start + max_rows, int(offsets[sequence + 1]))
        whole = int(offsets[np.searchsorted(offsets, start + max_rows, side="right") - 1])
        return whole if whole > start else start + max_rows

    def _needed_after(self, keys: np.ndarray, stop: int) -> np.ndarray:
        """Returns which keys the rows from `stop` on see; at the window's end, which keys the next window may see."""
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
        """Returns the row of every target, ascending, and its place in window.targets.

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
    """Returns how many rows of the path that the window before left behind this window need not compute again.

    They are the rows of the window's `common` tokens up to the first row that is read, or up to the span of that row: a
    path holds K/V, and no results. A mean, and a request without targets, are read at the last row of the prompt; the
    path holds the hidden states that a mean needs of the rows above.
    """
    if not window.common:
        return 0
    lengths = np.diff(window.offsets)
    if readout.kind != "logprobs":
        # Only a twin of the last request before ends in a common row, and a twin would come first.
        return clear_of_span(window.tokens, min(window.common, int(lengths[0]) - 1))
    # A request reads a common row when its first read position lies within what it shares with the last request
    # before; in sorted order that is the smallest of the prefixes shared by neighbours up to it.
    shared = window.shared.copy()
    shared[0] = window.common
    shared = np.minimum.accumulate(shared)
    first_read = lengths - np.maximum(np.diff(window.target_offsets), 1)
    inside = first_read < shared
    rows = min(window.common, int(first_read[inside].min())) if inside.any() else window.common
    return clear_of_span(window.tokens, rows)


def merge_twins(window: Window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drops every request that equals the request before it. Returns the tokens and offsets of the requests that
    stay, and for each request of the window the number of the request that stands for it, int64 [B]."""
    lengths, shared = np.diff(window.offsets), window.shared
    twin = np.zeros(len(lengths), bool)
    twin[1:] = (shared[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
    offsets = np.concatenate(([0], np.cumsum(lengths[~twin])))
    return window.tokens[np.repeat(~twin, lengths)], offsets, np.cumsum(~twin) - 1
