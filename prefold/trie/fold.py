"""Maps between tokens and rows (gather and scatter), for layers that work on each position by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from .ragged import windows
from .trie import Layout

# The cost of a pass over many sequences, and of each token in it; the unit is the cost of one sequence that is
# treated by itself.
_PASS_COST = 24
_TOKEN_COST = 1 / 128
_BLOCK = 1 << 17  # rows in a pass, so that it stays in cache


@dataclass(frozen=True, eq=False)
class PrefixMap:
    """A PrefixMap holds which tokens share a row, for position-wise layers (RadixMLP: Feil and Lazarevich 2026).

    Arrays are read-only. The rows are those that `Trie.build` makes of the same sequences.

    gather    int64 [rows]  the token that stands for each row: the first of those that share it. Rows of padding,
                            at the end, hold 0
    scatter   int64 [N]     the row of each token
    num_rows                rows without padding
    """

    gather: np.ndarray
    scatter: np.ndarray
    num_rows: int

    @classmethod
    def build(
        cls, tokens: Any, offsets: Any, *, pad_to_multiple: int | None = None, vocab_size: int | None = None
    ) -> PrefixMap:
        """Returns the maps of ragged sequences: tokens [N], of any integer type; offsets [B + 1].

        pad_to_multiple  rounds the number of rows up; no token is scattered from the rows that are added
        vocab_size       ids must be below it; None: any id will do

        Raises InputError where `check_ragged` does, and when pad_to_multiple is below 1.
        """
        if pad_to_multiple is not None and pad_to_multiple < 1:
            raise InputError(
                f"pad_to_multiple is {pad_to_multiple}", field="pad_to_multiple", remedy="give 1 or more, or None"
            )
        at = Layout.build(tokens, offsets, share=True, is_sorted=False, vocab_size=vocab_size)
        scatter = _scatter(at)
        padding = -at.num_rows % (pad_to_multiple or 1)
        gather = np.full(at.num_rows + padding, len(scatter))
        np.minimum.at(gather, scatter, np.arange(len(scatter)))
        gather[at.num_rows :] = 0
        for array in (gather, scatter):
            array.flags.writeable = False
        return cls(gather, scatter, at.num_rows)

    def fold(self, x: Any) -> Any:
        """Returns [rows, ...] of x [N, ...]: each row has the value of the token that stands for it."""
        return _take(x, self.gather, len(self.scatter), "x")

    def unfold(self, y: Any) -> Any:
        """Returns [N, ...] of y [rows, ...]: each token has the value of its row."""
        return _take(y, self.scatter, len(self.gather), "y")


def _take(x: Any, index: np.ndarray, expected: int, name: str) -> Any:
    if len(x) != expected:
        raise InputError(f"{name} has {len(x)} rows, not {expected}", field=name, remedy="give one row a token or row")
    if hasattr(x, "index_select"):  # a tensor, without importing torch: the index is made one of its kind and device
        return x.index_select(0, x.new_empty(0).long().new_tensor(index))
    return np.asarray(x)[index]


def _scatter(at: Layout) -> np.ndarray:
    """Returns the row of each token, int64 [N].

    The positions that most sequences have are treated for all sequences at once; what is left of the longer ones is
    treated sequence by sequence.
    """
    scatter = np.empty(len(at.tokens), np.int64)
    base = at.first_row - at.shared  # what a new row's number is more than its position
    depth = _depth_together(at.lengths)
    sequences, start = np.arange(len(at.lengths)), 0
    while start < depth:
        sequences = sequences[at.lengths[sequences] > start]
        width = min(int(at.lengths[sequences].min()) - start, max(1, _BLOCK // len(sequences)))
        position = np.arange(start, start + width)[:, None]
        row = base[sequences] + position
        row[at.shared[sequences] > position] = 0
        # Row numbers grow along the stream: the row that a sequence shares is the last one opened before it.
        np.maximum.accumulate(row, axis=1, out=row)
        windows(scatter, width, writeable=True)[at.starts[sequences] + start] = row.T
        start += width
    _scatter_singly(at, scatter, base, depth)
    return scatter


def _scatter_singly(at: Layout, scatter: np.ndarray, base: np.ndarray, depth: int) -> None:
    """Fills in `scatter` at positions >= depth, one sequence after the other."""
    long = np.flatnonzero(at.lengths > depth)
    if not len(long):
        return
    rows = np.arange(at.num_rows)
    path = np.empty(int(at.lengths.max()), np.int64)  # of the sequence before
    fields = at.starts[long], at.lengths[long], np.maximum(at.shared[long], depth), base[long]
    for start, length, first, zero in zip(*(f.tolist() for f in fields), strict=True):
        path[first:length] = rows[zero + first : zero + length]
        scatter[start + depth : start + length] = path[depth:length]


def _depth_together(lengths: np.ndarray) -> int:
    """Returns up to which position it is cheaper to treat all sequences at once, with one pass for each length."""
    if len(lengths) <= _PASS_COST or int(lengths.sum()) * _TOKEN_COST >= len(lengths):
        return 0
    sizes, count = np.unique(lengths, return_counts=True)
    longer = len(lengths) - np.cumsum(count)
    tokens = np.cumsum(np.diff(sizes, prepend=0) * (longer + count))
    cost = np.arange(1, len(sizes) + 1) * _PASS_COST + tokens * _TOKEN_COST + longer
    best = int(np.argmin(cost))
    return int(sizes[best]) if cost[best] < len(lengths) else 0
