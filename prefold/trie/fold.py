"""Maps between tokens and rows (gather and scatter) for position-wise layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from .ragged import windows
from .trie import Layout

# Cost of one pass over many sequences, and of each token in the pass. The unit is the cost of one sequence alone.
_PASS_COST = 24
_TOKEN_COST = 1 / 128
_BLOCK = 1 << 17  # rows in a pass; small enough to stay in the CPU cache


@dataclass(frozen=True, eq=False)
class PrefixMap:
    """The tokens that share a row, for position-wise layers (RadixMLP: Feil and Lazarevich 2026).

    The rows equal the rows of `Trie.build` for the same sequences. All arrays are read-only.
    """

    gather: np.ndarray  # int64 [rows]: the first token that shares each row; padding rows, at the end, hold 0
    scatter: np.ndarray  # int64 [N]: the row of each token
    num_rows: int  # rows without padding

    @classmethod
    def build(
        cls, tokens: Any, offsets: Any, *, pad_to_multiple: int | None = None, vocab_size: int | None = None
    ) -> PrefixMap:
        """Return the maps of ragged sequences.

        Args:
            tokens: Token ids [N], of any integer type.
            offsets: Bounds of the sequences [B + 1].
            pad_to_multiple: Round the number of rows up to a multiple of this. No token maps to a padding row.
            vocab_size: Ids must be below this; None accepts every id.

        Raises:
            InputError: `check_ragged` rejects the arrays, or pad_to_multiple is below 1.
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
        """Return x [N, ...] as [rows, ...]: each row gets the value of the first token that shares it."""
        return _take(x, self.gather, len(self.scatter), "x")

    def unfold(self, y: Any) -> Any:
        """Return y [rows, ...] as [N, ...]: each token gets the value of its row."""
        return _take(y, self.scatter, len(self.gather), "y")


def _take(x: Any, index: np.ndarray, expected: int, name: str) -> Any:
    if len(x) != expected:
        raise InputError(f"{name} has {len(x)} rows, not {expected}", field=name, remedy="give one row a token or row")
    if hasattr(x, "index_select"):  # a torch tensor; its methods build the index, so that torch is not imported
        return x.index_select(0, x.new_empty(0).long().new_tensor(index))
    return np.asarray(x)[index]


def _scatter(at: Layout) -> np.ndarray:
    """Return the row of each token, int64 [N].

    Up to the depth that most sequences reach, all sequences are mapped at once. The rest of the longer sequences is
    mapped one sequence at a time.
    """
    scatter = np.empty(len(at.tokens), np.int64)
    base = at.first_row - at.shared  # row number minus position, for the rows that a sequence adds
    depth = _depth_together(at.lengths)
    sequences, start = np.arange(len(at.lengths)), 0
    while start < depth:
        sequences = sequences[at.lengths[sequences] > start]
        width = min(int(at.lengths[sequences].min()) - start, max(1, _BLOCK // len(sequences)))
        position = np.arange(start, start + width)[:, None]
        row = base[sequences] + position
        row[at.shared[sequences] > position] = 0
        # Row numbers grow along the stream, so a sequence shares the most recent row opened at this position.
        np.maximum.accumulate(row, axis=1, out=row)
        windows(scatter, width, writeable=True)[at.starts[sequences] + start] = row.T
        start += width
    _scatter_singly(at, scatter, base, depth)
    return scatter


def _scatter_singly(at: Layout, scatter: np.ndarray, base: np.ndarray, depth: int) -> None:
    """Fill in `scatter` at positions >= depth, one sequence after the other."""
    long = np.flatnonzero(at.lengths > depth)
    if not len(long):
        return
    rows = np.arange(at.num_rows)
    path = np.empty(int(at.lengths.max()), np.int64)  # rows of the previous sequence
    fields = at.starts[long], at.lengths[long], np.maximum(at.shared[long], depth), base[long]
    for start, length, first, zero in zip(*(f.tolist() for f in fields), strict=True):
        path[first:length] = rows[zero + first : zero + length]
        scatter[start + depth : start + length] = path[depth:length]


def _depth_together(lengths: np.ndarray) -> int:
    """Return the depth up to which one pass per length over all sequences is cheaper than one sequence at a time."""
    if len(lengths) <= _PASS_COST or int(lengths.sum()) * _TOKEN_COST >= len(lengths):
        return 0
    sizes, count = np.unique(lengths, return_counts=True)
    longer = len(lengths) - np.cumsum(count)
    tokens = np.cumsum(np.diff(sizes, prepend=0) * (longer + count))
    cost = np.arange(1, len(sizes) + 1) * _PASS_COST + tokens * _TOKEN_COST + longer
    best = int(np.argmin(cost))
    return int(sizes[best]) if cost[best] < len(lengths) else 0
