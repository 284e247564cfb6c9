"""Mean pooling over the paths of a stream step, and over rows whose hidden states are stored in slots.

A sum adds only rows of its own path. NaN, infinite or huge hidden states of one request cannot affect another request.

The keys of a step are split into runs. A path contains a run whole or not at all, and each run is summed once. The sum
of a path is the sum of its runs, computed by pointer doubling: after n rounds, a run holds the sum of itself and of the
2^n - 1 runs above it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

import numpy as np

from .arrays import Array, Arrays

# Keys summed in float32. The sums of runs are added in float64, so long paths lose no precision.
RUN_KEYS = 64


@dataclass(frozen=True, slots=True)
class PoolPlan(Generic[Array]):
    """Which keys are summed, and how the sums add up to paths.

    There are r runs, and one empty run (number r) that marks the top of every path.
    """

    keys: Array  # int64 [keys], ascending from 0
    starts: Array  # int64 [r + 1]: the first key of each run; for the empty run, the number of keys
    above: Array  # int64 [rounds, r + 1]: the run 1, 2, 4, ... runs above each run; r if there is none
    last: Array  # int64 [reads]: the last run of each path
    lengths: Array  # float64 [reads, 1]: the number of keys of each path


def plan_pool(end: np.ndarray, positions: np.ndarray, reads: np.ndarray) -> PoolPlan[np.ndarray]:
    """Return the plan for the paths down to the keys `reads`, ascending; end, positions [keys] as in a StreamStep."""
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
    """Return the plan with its arrays on the device of the hidden states."""
    numbers = (plan.keys, plan.starts, plan.above, plan.last, plan.lengths)
    return PoolPlan(*(arrays.send(array) for array in numbers))


def mean_of_rows(arrays: Arrays[Array], hidden: Array, rows: np.ndarray, counts: np.ndarray) -> Array:
    """Return the means of consecutive groups of rows, float32 [reads, hidden].

    Group i is the next `counts[i]` entries of `rows`.

    Args:
        hidden: float32 [keys, hidden]
        counts: int64 [reads]
    """
    parts = -(-counts // RUN_KEYS)
    of = np.repeat(np.arange(len(counts)), parts)
    within = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = (np.cumsum(counts) - counts)[of] + within * RUN_KEYS
    sums = arrays.bag_sums(hidden, arrays.send(rows), arrays.send(starts))
    means = arrays.sum_into(len(counts), arrays.send(of), sums)
    return arrays.float32(means / arrays.send(counts.astype(np.float64)[:, None]))


def means_in_order(arrays: Arrays[Array], hidden: Array, paths: Iterable[np.ndarray]) -> Array:
    """Return the mean of each path, float32 [paths, hidden], adding its rows one by one in path order.

    So the result does not depend on where other paths branch off (for `--invariant`).

    Args:
        hidden: float32 [keys, hidden].
        paths: int64 [n] each, the keys of a path.
    """
    (keys,) = arrays.fetch(hidden)()
    keys = keys.astype(np.float64)
    means = [keys[path].sum(0) / len(path) for path in paths]
    return arrays.send(np.array(means, np.float64).reshape(-1, keys.shape[1]).astype(np.float32))


def run_starts(end: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """Return the first key of each run, int64 [r].

    In a run, each key is the child of the key before, all keys are on the paths of the same reads, and only the last
    key may be read. Runs longer than RUN_KEYS are split.
    """
    key = np.arange(len(end))
    num_reads = np.searchsorted(reads, end)  # number of reads before the end of each key's subtree
    begins = np.ones(len(end), bool)
    begins[1:] = (end[:-1] <= key[1:]) | (num_reads[:-1] != num_reads[1:])
    begins[reads[reads + 1 < len(end)] + 1] = True
    starts = np.flatnonzero(begins)
    sizes = np.diff(np.append(starts, len(end)))
    parts = -(-sizes // RUN_KEYS)
    within = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.repeat(starts, parts) + within * RUN_KEYS


def _above(end: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the parent run of each run on its path, int64 [r + 1]; r if there is none."""
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
    """Return the mean of each path that is read, float32 [reads, hidden]; hidden float32 [keys, hidden]."""
    # The last run is empty, so its sum is 0.
    sums = arrays.bag_sums(hidden, plan.keys, plan.starts)
    for above in plan.above:
        sums = sums + arrays.take(sums, above)
    return arrays.float32(arrays.take(sums, plan.last) / plan.lengths)
