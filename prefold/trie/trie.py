"""Lays the prefix trie of a set of token sequences flat, as the row stream.

Rows are the trie's tokens in depth-first order. The rows that a sequence adds to those of earlier sequences are a
*run*. The rows of a run lie side by side, each the child of the row before it, so the trie is a list of runs, each of
which hangs on a row of an earlier run.
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
    """A Layout holds where the sequences lie in the stream. `Trie` and `PrefixMap` are both built from it.

    tokens     int32 [N]  the tokens of all sequences, in input order
    num_rows              rows of the stream

    The other fields are int64 [B], a number for each sequence in depth-first order:

    order      the sequence's number in the input
    starts     where its first token lies in `tokens`
    lengths    its tokens
    shared     how many of its leading tokens lie in rows of earlier sequences
    first_row  the row of the first token behind those: the first row that the sequence adds
    """

    tokens: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    first_row: np.ndarray
    num_rows: int

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
    # Images may come in any order: their rows have other ids than when they were sorted, where a replica runs them.
    falls = (before > after) & (after < MEDIA_BASE)
    wrong = ~left_ends & (right_ends | falls)
    if wrong.any():
        s = int(np.argmax(wrong)) + 1
        message = f"sequence {s} is not in lexicographic order after sequence {s - 1}"
        raise InputError(message, field="tokens", remedy="sort the sequences, or leave is_sorted=False")


@dataclass(frozen=True, eq=False)
class Trie:
    """A trie holds the prefixes of a set of sequences, one row for each of its tokens, depth-first.

    Arrays are read-only.

    tokens     int32 [rows]            token id of each row
    positions  int32 [rows]            depth of each row, 0 at a root
    end        int64 [rows]            row just past the row's subtree: row j is on the path of row i, or i itself,
                                       exactly when j <= i < end[j]
    last_row   int64 [num_sequences]   row of each sequence's last token, in input order
    order      int64 [num_sequences]   the sequences' numbers, depth-first
    num_tokens                         tokens of all sequences
    """

    tokens: np.ndarray
    positions: np.ndarray
    end: np.ndarray
    last_row: np.ndarray
    order: np.ndarray
    num_tokens: int
    run_start: np.ndarray  # int64 [runs]: first row of each run
    run_depth: np.ndarray  # int64 [runs]: its position

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
        """Returns the trie of ragged sequences: tokens [N], of any integer type; offsets [B + 1].

        Depth-first order is the lexicographic order of token ids: a prefix comes before its extensions, and equal
        sequences keep their input order and add no rows.

        share       False: every sequence has a branch of its own, and they come in input order
        is_sorted   the sequences are given in lexicographic order, which saves the sort; this is checked, but for the
                    order of images among each other, where it is enough that equal ones come together
        vocab_size  ids must be below it; None: any id will do
        shared      int64 [B], of sorted sequences: how many leading tokens each has in common with the one before,
                    where that is known already

        Raises InputError where `check_ragged` does, and when is_sorted=True is not true.
        """
        at = Layout.build(tokens, offsets, share=share, is_sorted=is_sorted, shared=shared, vocab_size=vocab_size)
        added = at.lengths - at.shared
        rows = np.arange(at.num_rows)
        positions = (rows - np.repeat(at.first_row - at.shared, added)).astype(np.int32)
        row_tokens = at.tokens[rows + np.repeat(at.starts + at.shared - at.first_row, added)]
        last_row = np.empty(len(at.order), np.int64)
        # A duplicate adds no row and follows the sequence it equals, so first_row - 1 is its last row too.
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
        """Returns the row above each row, int64 [rows]; -1 for a root."""
        parent = np.arange(-1, self.num_rows - 1)
        parent[self.run_start] = self._run_parent
        parent.flags.writeable = False
        return parent

    @cached_property
    def _run_parent(self) -> np.ndarray:
        """Returns the row on which each run hangs, int64 [runs]; -1 for a run that starts at a root."""
        depth = self.run_depth
        above = len(depth) - 1 - _next_smaller(np.append(depth[::-1], -1))[-2::-1]
        row = self.run_start[above] + depth - 1 - depth[above]
        return np.where(depth == 0, -1, row)

    def path(self, row: int) -> np.ndarray:
        """Returns the rows above `row`, int64 [depth], root first, without `row` itself.

        The path of num_rows, the place behind the last row, is empty. Raises IndexError for a row beyond it.
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
        """Returns the rows of one sequence, int64 [length], first token first."""
        last = int(self.last_row[sequence])
        return np.append(self.path(last), last)


def _row_ends(start: np.ndarray, depth: np.ndarray, length: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns where each row's subtree ends, int64 [rows], from the runs' first rows, positions and lengths.

    The subtree of a row at position d ends where the first later run begins whose position is at most d. For most
    rows that is the next run. The others, on which later runs hang, are found piece by piece, the deepest piece of
    every run at once.
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
    """Returns the index of the first later value that is smaller than each value, int64 [n].

    The last value must be smaller than all others; its own index is n - 1. Each pointer starts at the next value and
    follows the pointer it finds there until it points at a smaller value. Everything between a value and its pointer
    is at least that value, so no step passes over a smaller one.
    """
    n = len(values)
    pointer = np.minimum(np.arange(1, n + 1), n - 1)
    open_ = np.flatnonzero(values[:-1] <= values[1:])
    while len(open_):
        jump = pointer[pointer[open_]]
        pointer[open_] = jump
        open_ = open_[values[jump] >= values[open_]]
    return pointer


# A row of an image has an id above every vocabulary. The rows of one image have ids of their own, which go up by one
# from row to row, so that equal images are equal ids: windows, tries, caches and schedulers treat them as tokens.
# Images whose rows see each other both ways have ids from SPAN_BASE on, and between two such *spans* an id stays
# unused. So a span is a run of ids that go up by one, and whatever cuts sees in the ids where it may not.
MEDIA_BASE = 1 << 30
SPAN_BASE = MEDIA_BASE + (1 << 29)


def span_starts(tokens: np.ndarray) -> np.ndarray | None:
    """Returns for each row in a span the span's first row, and for any other row the row itself: int64 [rows],
    ascending. Returns None where no span has more than one row. tokens: int32 [rows], of one prompt, or depth-first."""
    inside = _goes_on(tokens)
    if inside is None:
        return None
    return np.maximum.accumulate(np.where(inside, 0, np.arange(len(tokens))))


def longest_span(tokens: np.ndarray) -> int:
    """Returns the number of rows of a prompt's longest span, 0 where there is none."""
    if not len(tokens) or tokens.max() < SPAN_BASE:
        return 0
    starts = span_starts(tokens)
    return 1 if starts is None else int(np.bincount(starts).max())


def clear_of_span(tokens: np.ndarray, cut: int) -> int:
    """Returns the first row of the span that `cut` falls into, or `cut` itself where that is no span's. tokens: int32
    [rows] of a prompt, which begin outside of a span or with a span's first row."""
    if not 0 < cut < len(tokens) or tokens[cut] < SPAN_BASE or tokens[cut] != tokens[cut - 1] + 1:
        return cut
    starts = span_starts(tokens[: cut + 1])
    assert starts is not None
    return int(starts[-1])


def _goes_on(tokens: np.ndarray) -> np.ndarray | None:
    """Returns which rows continue the span of the row before, bool [rows]; None where no row does."""
    if not len(tokens) or tokens.max() < SPAN_BASE:
        return None
    inside = np.zeros(len(tokens), bool)
    np.equal(tokens[1:], tokens[:-1] + 1, out=inside[1:])
    inside[1:] &= tokens[:-1] >= SPAN_BASE
    return inside if inside.any() else None
