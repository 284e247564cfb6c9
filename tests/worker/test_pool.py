"""Mean pooling over paths: against the mean of each path's keys, and nothing of one path in another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefold.worker.pool import RUN_KEYS, mean_of_paths, plan_pool, run_starts, sent
from prefold.worker.torch.arrays import TorchArrays

ARRAYS = TorchArrays(torch.device("cpu"))


def random_tree(rng: np.random.Generator, count: int, branching: float) -> tuple[np.ndarray, np.ndarray]:
    """(end, positions) of `count` keys, depth first; a low `branching` gives long chains."""
    path: list[int] = []
    end, positions = np.full(count, count), np.empty(count, np.int64)
    for key in range(count):
        while path and rng.random() < branching:
            end[path.pop()] = key
        positions[key] = len(path)
        path.append(key)
    return end, positions


def paths_of(end: np.ndarray, reads: np.ndarray) -> list[np.ndarray]:
    key = np.arange(len(end))
    return [np.flatnonzero((key <= read) & (end > read)) for read in reads]


@pytest.mark.parametrize("branching", [0.0, 0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("count", [1, 2, 65, 400])
def test_means_of_random_trees(count, branching):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        end, positions = random_tree(rng, count, branching)
        reads = np.flatnonzero(rng.random(count) < rng.choice([0.05, 0.5, 1.0]))
        reads = reads if reads.size else np.array([count - 1])
        hidden = torch.from_numpy(rng.normal(size=(count, 7)).astype(np.float32))
        found = mean_of_paths(ARRAYS, hidden, sent(plan_pool(end, positions, reads), ARRAYS)).numpy()
        wanted = [hidden.numpy()[keys].astype(np.float64).mean(0) for keys in paths_of(end, reads)]
        np.testing.assert_allclose(found, np.stack(wanted), atol=2e-6)


def test_few_runs_are_made():
    """As many as places where paths part or end, and one a so many keys."""
    chain = np.full(1000, 1000)
    assert run_starts(chain, np.array([999])).tolist() == list(range(0, 1000, RUN_KEYS))
    fan = np.append(100, np.arange(2, 101))  # one key and 99 below it
    assert len(run_starts(fan, np.arange(1, 100))) == 100
    assert run_starts(np.array([4, 4, 4, 4]), np.array([1, 3])).tolist() == [0, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_on_a_path_does_not_show(bad):
    """Bit for bit, wherever it lies: before, between and after."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        end, positions = random_tree(rng, 200, rng.choice([0.1, 0.5]))
        reads = np.flatnonzero(rng.random(200) < 0.4)
        hidden = torch.from_numpy(rng.normal(size=(200, 5)).astype(np.float32))
        plan = sent(plan_pool(end, positions, reads), ARRAYS)
        clean = mean_of_paths(ARRAYS, hidden, plan)
        broken = int(rng.integers(200))
        hidden[broken] = bad
        found = mean_of_paths(ARRAYS, hidden, plan)
        for before, after, keys in zip(clean, found, paths_of(end, reads), strict=True):
            assert (broken in keys) or torch.equal(before, after)
            assert (broken not in keys) or (after.abs() > 1e30).all() or after.isnan().all()
