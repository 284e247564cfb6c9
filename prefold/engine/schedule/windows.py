"""The planner of row streams: cuts one window of prompts into steps.

A step is a function of its rows: `step(start, stop)` reads the window's trie and changes nothing. So a step that does
not fit in memory becomes two calls. `plan` returns the next step, and `commit` advances past its rows. Planning needs
no results, so a caller may commit a step before it has run, and plan ahead. A span (the rows of one image) is computed
in one step, so no step starts or ends inside a span. This module only decides rows: no tensors, no attention, no clock.
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
    """The message for the rows start <= row < stop of a window's stream, and the requests that its reads answer."""

    start: int
    stop: int
    message: StreamStep
    requests: np.ndarray  # int64 [d]: numbers of the requests with their last row in this step
    request_reads: np.ndarray  # int64 [d]: row of the step's result for each entry of `requests`; empty for "logprobs"
    targets: np.ndarray  # int64 [p]: for "logprobs", index into the window's targets of each result row; else empty


class StreamPlanner(Protocol):
    """The interface of a WindowPlanner: cuts one window of a row stream into steps."""

    def plan(self, max_rows: int | None = None) -> PlannedStep | None: ...

    def commit(self, step: PlannedStep) -> None: ...

    def halves(self, step: PlannedStep) -> tuple[PlannedStep, PlannedStep]: ...


class WindowPlanner:
    """Cuts the stream of one window into steps of at most `max_batch_rows` rows.

    With sharing "full", a step is any contiguous range of the depth-first rows. With "mlp" and "off", a step is whole
    prompts in order of arrival, and a prompt that is too long for a step runs alone in chunks; "mlp" folds the prompts
    of a step. Of neighbouring equal prompts (twins), one runs, in every mode. For example, the requests for a
    prompt's one-token labels are twins.

    Args:
        follows: The worker holds the path of the previous window, and the stream continues from that path. If False,
            the stream starts at the window's first row.
        stream: The number of the stream in the messages.
        adapter: The number of the window's LoRA adapter in the messages.
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
        # Last rows ascend in this order, so the sequences that end in a step are a slice.
        self._last_rows = self._last_row[self._order]
        self._target_rows, self._targets = self._rows_of_targets()

    def plan(self, max_rows: int | None = None) -> PlannedStep | None:
        """Return the next step, or None when every row has been committed. Change nothing.

        `max_rows` limits the rows of the step; None: `max_batch_rows`.
        """
        start, max_rows = self._position, self.max_batch_rows if max_rows is None else max_rows
        return None if start >= self.trie.num_rows else self.step(start, self._clear(start, self._cut(start, max_rows)))

    def commit(self, step: PlannedStep) -> None:
        """Advance past the rows of `step`. Raise ValueError if `step` does not start at the current row."""
        if step.start != self._position:
            raise ValueError(f"step starts at row {step.start}, the stream is at row {self._position}")
        self._position = step.stop

    def halves(self, step: PlannedStep) -> tuple[PlannedStep, PlannedStep]:
        """Return the rows of a step (at least two) as two steps, to run one after the other.

        With sharing "mlp", a half that starts or ends inside a prompt is not folded. Raise OutOfMemoryError if all rows
        are one span.
        """
        middle = self._clear(step.start, (step.start + step.stop) // 2)
        if middle == step.stop:
            rows = step.stop - step.start
            raise OutOfMemoryError(f"memory is too small for the {rows} rows of an image, which must run in one step")
        return self.step(step.start, middle), self.step(middle, step.stop)

    def step(self, start: int, stop: int) -> PlannedStep:
        """Return the step that computes the rows start <= row < stop, after the rows before them."""
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
        """Return `cut`, moved out of a span: to the span's first row, or past the span if that row is `start`."""
        if self._span is None or cut >= self.trie.num_rows or self._span[cut] == cut:
            return cut
        first = int(self._span[cut])
        return first if first > start else int(np.searchsorted(self._span, first, side="right"))

    def _first_keys(self, start: int, stop: int, path: int) -> np.ndarray | None:
        """Return `StreamStep.first`: for a row in a span the span's first key, for all other keys the key itself.

        Return None if every entry is the key itself.
        """
        if self._span is None:
            return None
        first = np.concatenate((np.arange(path), self._span[start:stop] - start + path))
        return None if np.array_equal(first, np.arange(len(first))) else first

    def _cut(self, start: int, max_rows: int) -> int:
        """Return the end of the step that starts at row `start`."""
        remaining = self.trie.num_rows - start
        if remaining <= max_rows:
            if self.sharing == "full":
                return self.trie.num_rows
        elif self.sharing == "full":
            # Use steps of equal size, because a last step of a few rows would be inefficient.
            steps = -(-remaining // max_rows)
            return start + -(-remaining // steps)
        offsets = self._offsets
        sequence = int(np.searchsorted(offsets, start, side="right")) - 1
        if start > offsets[sequence]:  # inside an over-long prompt: its chunks run alone
            return min(start + max_rows, int(offsets[sequence + 1]))
        whole = int(offsets[np.searchsorted(offsets, start + max_rows, side="right") - 1])
        return whole if whole > start else start + max_rows

    def _needed_after(self, keys: np.ndarray, stop: int) -> np.ndarray:
        """Return a mask of the keys that later rows need: rows from `stop`, or the next window after the last row."""
        if stop < self.trie.num_rows:
            return self.trie.end[keys] > stop
        if self.sharing != "full":
            return np.zeros(len(keys), bool)
        # The next window continues from the path of this window's last sequence.
        return np.isin(keys, self.trie.rows_of(int(self.trie.order[-1])))

    def _fold(self, start: int, stop: int) -> PrefixMap | None:
        offsets = self._offsets
        first, last = np.searchsorted(offsets, (start, stop))
        if offsets[first] != start or offsets[last] != stop:
            return None  # a chunk of an over-long prompt is one sequence: nothing to fold
        return PrefixMap.build(self.trie.tokens[start:stop], offsets[first : last + 1] - start)

    def _rows_of_targets(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the row that each target is read from, ascending, and the target's index in `window.targets`.

        Target t of a request's m targets is read m - 1 - t rows above the request's last row.
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
    """Return the number of rows of the previous window's path that this window can reuse.

    These are the rows of the window's `common` tokens before the first row that is read, because a path has K/V but no
    results. A limit inside a span moves to the span's start. A mean, or a request without targets, is read at the
    prompt's last row. For a mean, the path also has the hidden states of the rows above.
    """
    if not window.common:
        return 0
    lengths = np.diff(window.offsets)
    if readout.kind != "logprobs":
        # Only a twin of the previous window's last request ends in a common row, and it is this window's first request.
        return clear_of_span(window.tokens, min(window.common, int(lengths[0]) - 1))
    # A request reads a common row if its first read position is inside the prefix that it shares with the previous
    # window's last request. In sorted order, the length of this prefix is the minimum over all pairs of neighbours from
    # the previous window's last request to this request.
    shared = window.shared.copy()
    shared[0] = window.common
    shared = np.minimum.accumulate(shared)
    first_read = lengths - np.maximum(np.diff(window.target_offsets), 1)
    inside = first_read < shared
    rows = min(window.common, int(first_read[inside].min())) if inside.any() else window.common
    return clear_of_span(window.tokens, rows)


def merge_twins(window: Window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drop every request that equals the request before it.

    Return the tokens and offsets of the remaining requests. The third array, int64 [B], has for each request of the
    window the number of the remaining request that equals it.
    """
    lengths, shared = np.diff(window.offsets), window.shared
    twin = np.zeros(len(lengths), bool)
    twin[1:] = (shared[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
    offsets = np.concatenate(([0], np.cumsum(lengths[~twin])))
    return window.tokens[np.repeat(~twin, lengths)], offsets, np.cumsum(~twin) - 1
