"""The prefix trie of a set of token sequences, laid flat as the row stream.

Rows are the trie's tokens in depth-first order. A *run* is the rows that one sequence adds to the rows of earlier
sequences. The rows of a run are consecutive, and each is the child of the row before it. So the trie is a list of runs,
and each run hangs on a row of an earlier run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError
from .ragged import check_ragged, common_prefix_lengths, lexsort_sequences, ragged_ranges


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of the sequences in the stream. `Trie` and `PrefixMap` are built from it.

    Arrays of length B have one number per sequence, in depth-first order.
    """

    tokens: np.ndarray  # int32 [N]: the tokens of all sequences, in input order
    order: np.ndarray  # int64 [B]: number of the sequence in the input
    starts: np.ndarray  # int64 [B]: place of its first token in `tokens`
    lengths: np.ndarray  # int64 [B]: its tokens
    shared: np.ndarray  # int64 [B]: how many of its leading tokens already have rows
    first_row: np.ndarray  # int64 [B]: the first row that it adds
    num_rows: int  # rows of the stream

    @classmethod
    def build(
        cls,
        tokens: Any,
        offsets: Any,
        *,
        share: bool,
        is_sorted: bool,
        vocab_size: int | None,
        shared: np.ndarray | None = None,
    ) -> Layout:
        tokens, offsets = check_ragged(tokens, offsets, vocab_size=vocab_size)
        in_order = is_sorted or not share
        order = np.arange(len(offsets) - 1) if in_order else lexsort_sequences(tokens, offsets)
        starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
        if not in_order:
            starts, lengths = starts[order], lengths[order]
        if not share:
            shared = np.zeros(len(order), np.int64)
        elif shared is None or not is_sorted:
            shared = common_prefix_lengths(tokens, offsets, order)
        if is_sorted and share:
            _check_sorted(tokens, starts, lengths, shared)
        stops = np.cumsum(lengths - shared)
        num_rows = int(stops[-1]) if len(stops) else 0
        return cls(tokens, order, starts, lengths, shared, stops - (lengths - shared), num_rows)


def _check_sorted(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, shared: np.ndarray) -> None:
    common = shared[1:]
    left, right = starts[:-1], starts[1:]
    left_ends, right_ends = common == lengths[:-1], common == lengths[1:]
    before = tokens[np.where(left_ends, 0, left + common)]
    after = tokens[np.where(right_ends, 0, right + common)]
    # Images may come in any order: a replica gives their rows other ids than the ids by which they were sorted.
    falls = (before > after) & (after < MEDIA_BASE)
    wrong = ~left_ends & (right_ends | falls)
    if wrong.any():
        s = int(np.argmax(wrong)) + 1
        message = f"sequence {s} is not in lexicographic order after sequence {s - 1}"
        raise InputError(message, field="tokens", remedy="sort the sequences, or leave is_sorted=False")


@dataclass(frozen=True, eq=False)
class Trie:
    """The prefix trie of a set of sequences: one row per trie token, depth-first. Arrays are read-only."""

    tokens: np.ndarray  # int32 [rows]: token id of each row
    positions: np.ndarray  # int32 [rows]: depth of each row; 0 for a root
    end: np.ndarray  # int64 [rows]: first row past the row's subtree; row i sees row j exactly if j <= i < end[j]
    last_row: np.ndarray  # int64 [num_sequences]: row of each sequence's last token, in input order
    order: np.ndarray  # int64 [num_sequences]: the sequences' numbers, depth-first
    num_tokens: int  # tokens of all sequences
    run_start: np.ndarray  # int64 [runs]: first row of each run
    run_depth: np.ndarray  # int64 [runs]: position of the first row of each run

    @classmethod
    def build(
        cls,
        tokens: Any,
        offsets: Any,
        *,
        share: bool = True,
        is_sorted: bool = False,
        vocab_size: int | None = None,
        shared: np.ndarray | None = None,
    ) -> Trie:
        """Return the trie of ragged sequences.

        Depth-first order is the lexicographic order of token ids: a prefix comes before its extensions. Equal sequences
        stay in input order and add no rows.

        Args:
            tokens: Token ids [N], of any integer type.
            offsets: Bounds of the sequences [B + 1].
            share: If False, every sequence gets its own branch, and the branches are in input order.
            is_sorted: The sequences are in lexicographic order already, so they are not sorted again. The order is
                checked, except among images: there it is enough that equal images are neighbours.
            vocab_size: Ids must be below this; None accepts every id.
            shared: How many leading tokens each sequence shares with the previous one, if known: int64 [B]. Only used
                for sorted sequences.

        Raises:
            InputError: `check_ragged` rejects the arrays, or the sequences are not sorted in spite of is_sorted=True.
        """
        at = Layout.build(tokens, offsets, share=share, is_sorted=is_sorted, shared=shared, vocab_size=vocab_size)
        added = at.lengths - at.shared
        rows = np.arange(at.num_rows)
        positions = (rows - np.repeat(at.first_row - at.shared, added)).astype(np.int32)
        row_tokens = at.tokens[rows + np.repeat(at.starts + at.shared - at.first_row, added)]
        last_row = np.empty(len(at.order), np.int64)
        # A duplicate adds no row and follows the sequence that it equals, so first_row - 1 is its last row too.
        last_row[at.order] = at.first_row + added - 1
        runs = np.flatnonzero(added)
        run_start, run_depth = at.first_row[runs], at.shared[runs]
        end = _row_ends(run_start, run_depth, added[runs], at.num_rows)
        arrays = row_tokens, positions, end, last_row, at.order
        for array in (*arrays, run_start, run_depth):
            array.flags.writeable = False
        return cls(*arrays, len(at.tokens), run_start, run_depth)

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.order)

    @cached_property
    def parent(self) -> np.ndarray:
        """The row above each row, int64 [rows]; -1 for a root."""
        parent = np.arange(-1, self.num_rows - 1)
        parent[self.run_start] = self._run_parent
        parent.flags.writeable = False
        return parent

    @cached_property
    def _run_parent(self) -> np.ndarray:
        """The row on which each run hangs, int64 [runs]; -1 for a run that starts at a root."""
        depth = self.run_depth
        above = len(depth) - 1 - _next_smaller(np.append(depth[::-1], -1))[-2::-1]
        row = self.run_start[above] + depth - 1 - depth[above]
        return np.where(depth == 0, -1, row)

    def path(self, row: int) -> np.ndarray:
        """Return the rows above `row`, int64 [depth], root first, without `row` itself.

        The path of num_rows, the place behind the last row, is empty. Raise IndexError beyond it.
        """
        if not 0 <= row <= self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        pieces = []
        stop = row if row < self.num_rows else -1
        while stop >= 0:
            run = int(np.searchsorted(self.run_start, stop, side="right")) - 1
            pieces.append(np.arange(self.run_start[run], stop + (stop != row)))
            stop = int(self._run_parent[run])
        return np.concatenate(pieces[::-1]) if pieces else np.zeros(0, np.int64)

    def rows_of(self, sequence: int) -> np.ndarray:
        """Return the rows of one sequence, int64 [length], first token first."""
        last = int(self.last_row[sequence])
        return np.append(self.path(last), last)


def _row_ends(start: np.ndarray, depth: np.ndarray, length: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the end of each row's subtree, int64 [rows], from the runs' first rows, positions and lengths.

    The subtree of a row at position d ends at the first later run that starts at a position <= d. For most rows that is
    the next run. Rows on which later runs hang are handled piece by piece, the deepest piece of every run at once.
    """
    start, depth = np.append(start, num_rows), np.append(depth, -1)  # the stream's end closes everything
    end = np.repeat(start[1:], length)
    run = np.flatnonzero(depth[1:] > depth[:-1])
    if not len(run):
        return end
    smaller = _next_smaller(depth)
    later, top = run + 1, depth[run]
    while len(run):
        bottom = depth[later]
        later = smaller[later]
        piece = np.maximum(depth[later], top)
        size = bottom - piece
        end[ragged_ranges(start[run] + piece - top, size)] = np.repeat(start[later], size)
        more = piece > top
        run, later, top = run[more], later[more], top[more]
    return end


def _next_smaller(values: np.ndarray) -> np.ndarray:
    """Return the index of the first later value that is smaller than each value, int64 [n].

    The last value must be smaller than all others; its own index is n - 1. Each pointer starts at the next value. It
    follows the pointer that it finds there until it points at a smaller value. All values between a value and its
    pointer are at least as large as the value, so no step passes over a smaller one.
    """
    n = len(values)
    pointer = np.minimum(np.arange(1, n + 1), n - 1)
    open_ = np.flatnonzero(values[:-1] <= values[1:])
    while len(open_):
        jump = pointer[pointer[open_]]
        pointer[open_] = jump
        open_ = open_[values[jump] >= values[open_]]
    return pointer


# Image rows have ids above every vocabulary. The rows of one image have consecutive ids, and equal images have equal
# ids. So windows, tries, caches and schedulers treat image rows as tokens. If the rows of an image attend to each other
# in both directions, the image is a *span*. The ids of spans start at SPAN_BASE, and at least one id between two spans
# is unused. So a span is a run of consecutive ids, and the ids show which cuts of a prompt are not allowed.
MEDIA_BASE = 1 << 30
SPAN_BASE = MEDIA_BASE + (1 << 29)


def span_starts(tokens: np.ndarray) -> np.ndarray | None:
    """Return the first row of its span for each row in a span, and the row itself for other rows.

    The result is int64 [rows], ascending; None if no span has more than one row. `tokens` are int32 [rows], from one
    prompt or depth-first.
    """
    inside = _goes_on(tokens)
    if inside is None:
        return None
    return np.maximum.accumulate(np.where(inside, 0, np.arange(len(tokens))))


def longest_span(tokens: np.ndarray) -> int:
    """Return the number of rows of a prompt's longest span; 0 if it has no span."""
    if not len(tokens) or tokens.max() < SPAN_BASE:
        return 0
    starts = span_starts(tokens)
    return 1 if starts is None else int(np.bincount(starts).max())


def clear_of_span(tokens: np.ndarray, cut: int) -> int:
    """Return the first row of the span that `cut` falls into, or `cut` itself if it falls into no span.

    `tokens` are int32 [rows] of a prompt, and do not start in the middle of a span.
    """
    if not 0 < cut < len(tokens) or tokens[cut] < SPAN_BASE or tokens[cut] != tokens[cut - 1] + 1:
        return cut
    starts = span_starts(tokens[: cut + 1])
    assert starts is not None
    return int(starts[-1])


def _goes_on(tokens: np.ndarray) -> np.ndarray | None:
    """Return a bool [rows] that marks the rows that continue the span of the previous row; None if no row does."""
    if not len(tokens) or tokens.max() < SPAN_BASE:
        return None
    inside = np.zeros(len(tokens), bool)
    np.equal(tokens[1:], tokens[:-1] + 1, out=inside[1:])
    inside[1:] &= tokens[:-1] >= SPAN_BASE
    return inside if inside.any() else None
