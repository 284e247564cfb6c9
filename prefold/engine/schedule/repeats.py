"""Rows of a node that are computed once more in a step of generation, and write no K/V."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cache import SCRATCH
from ..cache.tree import Node


def repeat_rows(
    node: Node, rows: range, run: int, row_lists: Sequence[list[int]], key_lists: Sequence[list[int]]
) -> None:
    """Adds these rows of a node to a step, and splits the node's keys, so that each of the rows sees the keys up to its
    own, and the rows that follow in the step see all of them.

    run        the number of the first run of the node's keys
    row_lists  tokens, positions and slots of the step's rows
    key_lists  start, count, position, first and last of the runs of its keys; those from `run` on are replaced
    """
    computed, query = node.num_computed, len(row_lists[0])
    row_lists[0].extend(np.asarray(node.tokens[rows.start : rows.stop]).tolist())
    row_lists[1].extend(range(node.start + rows.start, node.start + rows.stop))
    row_lists[2].extend([SCRATCH] * len(rows))
    first = query + np.clip(np.arange(computed) - rows.start, 0, len(rows))
    positions = range(node.start, node.start + computed)
    keys = (node.slots[:computed].tolist(), [1] * computed, positions, first.tolist(), [0] * computed)
    for numbers, more in zip(key_lists, keys, strict=True):
        numbers[run:] = more


def visible_runs(
    start: np.ndarray, count: np.ndarray, position: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Returns the runs of keys that a row of the step sees: where only some rows of a node are repeated, none may see
    the keys behind them."""
    is_seen = first < last
    return start[is_seen], count[is_seen], position[is_seen], first[is_seen], last[is_seen]
