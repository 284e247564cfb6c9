"""Gather and scatter maps between tokens and rows: a view of the trie for what works on single rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from .ragged import windows
from .trie import Layout

__all__ = ["PrefixMap"]

# What a pass over many sequences costs, and each token in it: in sequences treated by themselves.
_PASS_COST = 24
_TOKEN_COST = 1 / 128
_BLOCK = 1 << 17  # rows in a pass, so that it stays in cache


@dataclass(frozen=True, eq=False)
class PrefixMap:
    """Which tokens share a row, for position-wise layers (RadixMLP: Feil and Lazarevich 2026). Arrays are read-only.

    gather    int64 [rows]  the token that stands for each row: the first of those that share it; rows are those of
                            Trie.build on the same sequences. Rows of padding, at the end, hold 0.
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
        """The maps of ragged sequences: tokens, any integer type [N]; offsets [B + 1].

        `pad_to_multiple` rounds the number of rows up; nothing is scattered from the rows added.
        Raises InputError as `check_ragged` does.
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
        """x [N, ...] of tokens -> [rows, ...]: each row's value, taken from the token that stands for it."""
        return _take(x, self.gather, len(self.scatter), "x")

    def unfold(self, y: Any) -> Any:
        """y [rows, ...] -> [N, ...] of tokens: each token gets the value of its row."""
        return _take(y, self.scatter, len(self.gather), "y")


def _take(x: Any, index: np.ndarray, expected: int, name: str) -> Any:
    if len(x) != expected:
        raise InputError(f"{name} has {len(x)} rows, not {expected}", field=name, remedy="give one row a token or row")
    if hasattr(x, "index_select"):  # a tensor, without importing torch: the index is made one of its kind and device
        return x.index_select(0, x.new_empty(0).long().new_tensor(index))
    return np.asarray(x)[index]


def _scatter(at: Layout) -> np.ndarray:
    """int64 [N]: the row of each token.

    All sequences together, for the positions that most of them have; then each of the longer ones by itself.
    """
    scatter = np.empty(len(at.tokens), np.int64)
    base = at.first_row - at.shared  # what a new row's number is more than its position
    depth = _depth_together(at.lengths)
    which, start = np.arange(len(at.lengths)), 0
    while start < depth:
        which = which[at.lengths[which] > start]
        width = min(int(at.lengths[which].min()) - start, max(1, _BLOCK // len(which)))
        position = np.arange(start, start + width)[:, None]
        row = base[which] + position
        row[at.shared[which] > position] = 0
        # Row numbers grow along the stream: the row that a sequence shares is the last one opened before it.
        np.maximum.accumulate(row, axis=1, out=row)
        windows(scatter, width, writeable=True)[at.starts[which] + start] = row.T
        start += width
    _scatter_singly(at, scatter, base, depth)
    return scatter


def _scatter_singly(at: Layout, scatter: np.ndarray, base: np.ndarray, depth: int) -> None:
    """Fill in the rows at positions >= depth, one sequence after the other."""
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
    """Positions worth treating for all sequences at once, in a pass for every length that occurs among them."""
    if len(lengths) <= _PASS_COST or int(lengths.sum()) * _TOKEN_COST >= len(lengths):
        return 0
    found, count = np.unique(lengths, return_counts=True)
    longer = len(lengths) - np.cumsum(count)
    tokens = np.cumsum(np.diff(found, prepend=0) * (longer + count))
    cost = np.arange(1, len(found) + 1) * _PASS_COST + tokens * _TOKEN_COST + longer
    best = int(np.argmin(cost))
    return int(found[best]) if cost[best] < len(lengths) else 0
