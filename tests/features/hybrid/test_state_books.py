"""The scheduler of hybrids over symbolic states: a state is the tokens that it is behind, so that a wrong one shows."""

from __future__ import annotations

import numpy as np
import pytest
from books import check_books

from prefold.engine.cache import CacheOptions, SlotPool
from prefold.engine.schedule.admission import StepLimits
from prefold.features.hybrid.scheduler import StateScheduler
from prefold.features.hybrid.steps import ZERO


class Symbols:
    """A worker whose state is the tuple of the tokens above, and whose K/V is the token with its position."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[int, ...]] = {ZERO: ()}
        self.slots: dict[int, tuple[int, int]] = {}

    def run(self, step) -> None:
        """Checks that every row sees its whole path, and goes on from the state of just that path."""
        message, runs = step.message, step.message.runs
        stop = [*runs.first[1:].tolist(), message.num_rows]
        for slot, token, position in zip(message.slots, message.tokens, message.positions, strict=True):
            if slot:
                self.slots[int(slot)] = int(token), int(position)
        ends: list[tuple[int, ...]] = []
        for first, last, source in zip(runs.first.tolist(), stop, runs.source.tolist(), strict=True):
            path = self.states[source] if source >= 0 else ends[-1 - source]
            for row in range(first, last):
                assert len(path) == message.positions[row]
                path = (*path, int(message.tokens[row]))
                assert self.seen(message, row) == [*enumerate(path)]
            ends.append(path)
        for run, slot in zip(runs.ends.tolist(), runs.slots.tolist(), strict=True):
            assert slot != ZERO
            self.states[slot] = ends[run]

    def seen(self, message, row: int) -> list[tuple[int, int]]:
        """The (position, token) of each key that a row sees."""
        keys = []
        for i in np.flatnonzero((message.run_first <= row) & (row < message.run_last)).tolist():
            for k in range(int(message.run_count[i])):
                token, position = self.slots[int(message.run_start[i]) + k]
                assert position == message.run_position[i] + k
                keys.append((position, token))
        return sorted(keys)


@pytest.mark.parametrize("cache", [None, CacheOptions(min_overlap=1), CacheOptions(min_overlap=4, max_tokens=30)])
@pytest.mark.parametrize("seed", range(6))
def test_rows_go_on_from_the_states_of_their_paths(cache, seed):
    rng = np.random.default_rng(seed)
    running = int(rng.integers(1, 6))
    scheduler = StateScheduler(
        SlotPool(int(rng.integers(40, 120))),
        state_slots=running + int(rng.integers(0, 8)),
        max_batch_rows=int(rng.integers(running, 24)),
        max_running=running,
        cache=cache,
    )
    worker, texts, keys = Symbols(), [[1]], iter(range(10**6))
    open_keys: set[int] = set()
    for turn in range(250):
        if rng.random() < 0.5 and turn < 200:
            above = texts[rng.integers(len(texts))]
            text = [*above[: rng.integers(len(above) + 1)], *rng.integers(0, 4, int(rng.integers(1, 7))).tolist()][-25:]
            texts.append(text)
            open_keys.add(key := next(keys))
            scheduler.submit(
                key, np.array(text, np.int32), limit=int(rng.integers(1, 9)), samples=int(rng.integers(1, 4)),
                reserve=bool(rng.random() < 0.5), namespace=(None, str(rng.integers(2))),
            )  # fmt: skip
        if open_keys and rng.random() < 0.05:
            scheduler.cancel(open_keys.pop())
        failed = scheduler.admit(StepLimits(rows=int(rng.integers(1, 24))))
        assert not failed
        step = scheduler.plan(StepLimits(rows=int(rng.integers(1, 24))))
        if step is None:
            continue
        worker.run(step)
        scheduler.begin(step)
        tokens = rng.integers(0, 4, len(step.consumers)).tolist()
        scheduler.commit(step, tokens, (rng.random(len(tokens)) < 0.1).tolist())
        check_books(scheduler)
    while (scheduler.admit(), step := scheduler.plan())[1] is not None:
        worker.run(step)
        scheduler.begin(step)
        scheduler.commit(step, [0] * len(step.consumers), [False] * len(step.consumers))
        check_books(scheduler)
    assert not scheduler.has_work
    if cache is None:
        assert not scheduler.states


@pytest.mark.parametrize("rows", [1000, 33])
def test_a_tree_is_computed_once(rows):
    """Three levels, more sequences than run at once: states wait at branch points until the last child begins."""
    scheduler = StateScheduler(SlotPool(5000), state_slots=8, max_batch_rows=rows, max_running=4)
    worker, unique = Symbols(), 0
    for a in range(3):
        for b in range(3):
            for c in range(4):
                text = [*[a] * 30, *[b] * 12, c, 5, 6]
                scheduler.submit((a, b, c), np.array(text, np.int32), limit=2)
    unique = 3 * (30 + 3 * (12 + 4 * (3 + 1)))
    computed = most = 0
    while (scheduler.admit(), step := scheduler.plan())[1] is not None:
        worker.run(step)
        scheduler.begin(step)
        most = max(most, len(scheduler.states))
        computed += step.num_rows
        scheduler.commit(step, [0] * len(step.consumers), [False] * len(step.consumers))
        check_books(scheduler)
    assert computed == unique and scheduler.stats.recomputed_rows == 0
    assert most <= 2 + 4 + 1


def test_a_step_of_the_same_sequences_follows_the_one_before():
    """The second decode step reads each state where it is stored, and so do those that follow it."""
    scheduler, worker, follows = (
        StateScheduler(SlotPool(200), state_slots=8, max_batch_rows=64, max_running=4),
        Symbols(),
        [],
    )
    for key, prompt in enumerate(([1, 2, 3], [1, 2, 4, 5], [6])):
        scheduler.submit(key, np.array(prompt, np.int32), limit=9, reserve=True)
    runs = []
    while (scheduler.admit(), step := scheduler.plan())[1] is not None:
        worker.run(step)
        follows.append(step.message.follows)
        runs.append(step.message.runs)
        scheduler.begin(step)
        scheduler.commit(step, [7] * len(step.consumers), [False] * len(step.consumers))
        check_books(scheduler)
    assert follows == [False] * 3 + [True] * 6 and all(one is runs[2] for one in runs[3:])
