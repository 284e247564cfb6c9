"""Random tries as attention sees them: ends and positions of depth-first rows, without the trie itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Nest(NamedTuple):
    """end, positions int64 [rows]; first int64 [rows], of a row in a span the first of the span, or None: no spans."""

    end: np.ndarray
    positions: np.ndarray
    first: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.end)


def random_nest(rng: np.random.Generator, rows: int, branching: float) -> Nest:
    """Each row continues the row above it, or (with probability `branching`) one of the rows above that, or none."""
    parents: list[int] = []
    stack: list[int] = []
    for row in range(rows):
        if stack and rng.random() < branching:
            del stack[rng.integers(0, len(stack)) :]
        parents.append(stack[-1] if stack else -1)
        stack.append(row)
    return nest_of(parents)


def nest_of(parents: list[int]) -> Nest:
    """parents[i]: the row above row i, -1 for none; rows in depth-first order."""
    rows = len(parents)
    end, positions = np.arange(1, rows + 1), np.zeros(rows, np.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            positions[row] = positions[parent] + 1
    for row in range(rows - 1, -1, -1):
        if parents[row] >= 0:
            end[parents[row]] = max(end[parents[row]], end[row])
    return Nest(end, positions)


def chains(lengths: list[int]) -> Nest:
    """Sequences that share nothing, one after the other."""
    stops = np.cumsum(lengths)
    return Nest(np.repeat(stops, lengths), np.concatenate([np.arange(n) for n in lengths]))


def with_spans(rng: np.random.Generator, nest: Nest, begins: float, most: int = 40) -> Nest:
    """The nest with spans: at each row one begins with probability `begins`, of up to `most` rows that end together."""
    first = np.arange(nest.rows)
    row = 0
    while row < nest.rows:
        size = int(rng.integers(2, most + 1)) if rng.random() < begins else 1
        size = min(size, int(nest.end[row]) - row)
        same = nest.end[row : row + size] == nest.end[row]
        size = size if same.all() else int(np.argmin(same))
        first[row : row + size] = row
        row += size
    return nest._replace(first=first)
