"""Cuts the stream into segments of about equal cost, each of which can be computed on its own."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from .trie import Trie

__all__ = ["Segment", "segments"]

_HALVINGS = 40


class Segment(NamedTuple):
    """A segment is the rows start <= row < stop of the stream. Computing them needs the rows `trie.path(start)` too."""

    start: int
    stop: int


def segments(trie: Trie, num: int, *, cost: np.ndarray | None = None) -> list[Segment]:
    """Returns at most `num` contiguous segments that cover the stream, the costliest of them as cheap as can be.

    A segment costs its rows, and the path above its first row, which is computed again. `cost` [rows] is the cost
    of each row, greater than 0 (1 each by default; 1 + c * (position + 1) counts attention too). Cuts lie where a run
    begins: a cut further down in the run would lengthen the path by as much as it shortens the segment. There are
    fewer than `num` segments where more would not make the costliest cheaper; no segment is empty, and an empty trie
    has none. Raises InputError when num < 1, or `cost` is not one positive number a row.
    """
    if num < 1:
        raise InputError(f"num is {num}", field="num", remedy="give 1 or more")
    cost = np.ones(trie.num_rows) if cost is None else np.asarray(cost, np.float64)
    if cost.shape != (trie.num_rows,) or not bool((cost > 0).all()):
        remedy = f"give an array of {trie.num_rows} numbers greater than 0"
        raise InputError("cost is not one positive number a row", field="cost", remedy=remedy)
    if not trie.num_rows:
        return []
    starts = trie.run_start
    before = np.concatenate(([0.0], np.cumsum(cost)))
    total = before[-1]
    # gain: cost of the rows before a cut, less the cost of the path that is computed again for it. A segment that
    # starts at cut c and may cost `limit` ends where the rows before it cost limit + gain[c]; so of the cuts within
    # reach the one of largest gain is the best.
    gain = before[starts] - _path_cost(trie, cost)[starts]
    low, high = total / num, total
    cuts = [0]
    for _ in range(_HALVINGS):
        limit = (low + high) / 2
        found = _cut(before[starts], gain, limit, total, num)
        if found is None:
            low = limit
        else:
            high, cuts = limit, found
        if high - low <= 1e-6 * total:
            break
    rows = [int(starts[c]) for c in cuts] + [trie.num_rows]
    return [Segment(a, b) for a, b in pairwise(rows)]


def _path_cost(trie: Trie, cost: np.ndarray) -> np.ndarray:
    """Returns the cost of the path above each row, float64 [rows]: a row is above the others of its subtree."""
    closed = np.bincount(trie.end, weights=cost, minlength=trie.num_rows + 1)[:-1]
    return np.concatenate(([0.0], np.cumsum(cost)[:-1])) - np.cumsum(closed)


def _cut(before: np.ndarray, gain: np.ndarray, limit: float, total: float, num: int) -> list[int] | None:
    """Returns the runs at which segments of cost `limit` start, 0 first; None when `num` segments do not suffice."""
    cuts = [0]
    while limit + gain[cuts[-1]] < total:
        first = cuts[-1] + 1
        stop = int(np.searchsorted(before, limit + gain[cuts[-1]], side="right"))
        if stop <= first or len(cuts) == num:
            return None
        cuts.append(first + int(np.argmax(gain[first:stop])))
    return cuts
