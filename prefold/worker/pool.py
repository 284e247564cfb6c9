"""Mean pooling: over the paths of a step of the row stream, and over rows whose hidden states are kept in slots.

Nothing is added that is not on the path: where one request's hidden states are NaN, infinite or huge, those of the
others do not show it. The keys of a step fall into runs that every path contains whole or not at all; each is summed
once, and a path's sum is that of its runs, which are found by doubling: after n rounds a run has the sum of itself and
the 2^n - 1 runs above it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

import numpy as np

from .arrays import Array, Arrays

# Keys that are summed in float32; sums of these are made in float64, so that long paths lose nothing.
RUN_KEYS = 64


@dataclass(frozen=True, slots=True)
class PoolPlan(Generic[Array]):
    """A plan says which keys are summed, and what the sums are added to. There are r runs, and a last one of no keys
    that ends each path.

    keys      int64 [keys], 0 and up
    starts    int64 [r + 1]: the first key of each run; of the last one, the number of keys
    above     int64 [rounds, r + 1]: the run that is 1, 2, 4, ... above each
    last      int64 [reads]: the run with which each path ends
    lengths   float64 [reads, 1]: keys of each path
    """

    keys: Array
    starts: Array
    above: Array
    last: Array
    lengths: Array


def plan_pool(end: np.ndarray, positions: np.ndarray, reads: np.ndarray) -> PoolPlan[np.ndarray]:
    """Returns the plan for the paths down to the keys `reads`, ascending; end, positions [keys] as in a StreamStep."""
    starts = run_starts(end, reads)
    above = _above(end, starts)
    rounds = [above]
    while (above := above[above]).min(initial=len(starts)) < len(starts):
        rounds.append(above)
    return PoolPlan(
        keys=np.arange(len(end)),
        starts=np.append(starts, len(end)),
        above=np.stack(rounds),
        last=np.searchsorted(starts, reads, side="right") - 1,
        lengths=(positions[reads] + 1.0)[:, None],
    )


def sent(plan: PoolPlan[np.ndarray], arrays: Arrays[Array]) -> PoolPlan[Array]:
    """Returns a plan where the hidden states are."""
    numbers = (plan.keys, plan.starts, plan.above, plan.last, plan.lengths)
    return PoolPlan(*(arrays.send(array) for array in numbers))


def mean_of_rows(arrays: Arrays[Array], hidden: Array, rows: np.ndarray, counts: np.ndarray) -> Array:
    """Returns the mean over `counts` rows after `counts` rows, int64 [reads], of those numbered by `rows`: float32
    [reads, hidden]; hidden float32 [keys, hidden]."""
    parts = -(-counts // RUN_KEYS)
    of = np.repeat(np.arange(len(counts)), parts)
    within = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = (np.cumsum(counts) - counts)[of] + within * RUN_KEYS
    sums = arrays.bag_sums(hidden, arrays.send(rows), arrays.send(starts))
    means = arrays.sum_into(len(counts), arrays.send(of), sums)
    return arrays.float32(means / arrays.send(counts.astype(np.float64)[:, None]))


def means_in_order(arrays: Arrays[Array], hidden: Array, paths: Iterable[np.ndarray]) -> Array:
    """Return the mean over each path, float32 [paths, hidden], its rows added one by one in the order that they have:
    so it does not depend on where other paths part from it. hidden float32 [keys, hidden]; a path: int64 [n]"""
    (keys,) = arrays.fetch(hidden)()
    keys = keys.astype(np.float64)
    means = [keys[path].sum(0) / len(path) for path in paths]
    return arrays.send(np.array(means, np.float64).reshape(-1, keys.shape[1]).astype(np.float32))


def run_starts(end: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """Returns the first key of each run, int64 [r]: of neighbours of which each is the child of the one before, and
    none is read but the last, and that are seen by the same reads."""
    key = np.arange(len(end))
    num_reads = np.searchsorted(reads, end)  # reads before the end of each key's subtree
    begins = np.ones(len(end), bool)
    begins[1:] = (end[:-1] <= key[1:]) | (num_reads[:-1] != num_reads[1:])
    begins[reads[reads + 1 < len(end)] + 1] = True
    starts = np.flatnonzero(begins)
    sizes = np.diff(np.append(starts, len(end)))
    parts = -(-sizes // RUN_KEYS)
    within = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.repeat(starts, parts) + within * RUN_KEYS


def _above(end: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns the run that each run's first key follows on its path, [r + 1]: r where there is none."""
    none = len(starts)
    above, path = np.full(none + 1, none), list[int]()
    stops = end[np.append(starts[1:], len(end)) - 1].tolist() if none else []
    for run, start in enumerate(starts.tolist()):
        while path and stops[path[-1]] <= start:
            path.pop()
        if path:
            above[run] = path[-1]
        path.append(run)
    return above


def mean_of_paths(arrays: Arrays[Array], hidden: Array, plan: PoolPlan[Array]) -> Array:
    """Returns the mean over each path that is read, float32 [reads, hidden]; hidden float32 [keys, hidden]."""
    # Bags of neighbouring rows. The last one is empty: its sum is 0.
    sums = arrays.bag_sums(hidden, plan.keys, plan.starts)
    for above in plan.above:
        sums = sums + arrays.take(sums, above)
    return arrays.float32(arrays.take(sums, plan.last) / plan.lengths)
