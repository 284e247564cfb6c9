"""The slot pool against a set of numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from counts import lines_run, most_bytes
from hypothesis import given
from hypothesis import strategies as st

from prefold.engine.cache import SCRATCH, SlotPool


@given(st.integers(0, 60), st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_against_a_set(size, actions):
    pool, held, free = SlotPool(size), [], set(range(1, size + 1))
    for take, number in actions:
        if take:
            slots = pool.allocate(number)
            if number > len(free):
                assert slots is None
                continue
            assert len(slots) == number and set(slots.tolist()) <= free and SCRATCH not in slots
            assert (np.diff(slots) > 0).all()
            free -= set(slots.tolist())
            held.append(slots)
        elif held:
            slots = held.pop(number % len(held))
            half = len(slots) // 2
            pool.free(slots[half:])
            pool.free(slots[:half])
            free |= set(slots.tolist())
        assert pool.free_slots == len(free)
        runs = sorted(pool.sizes.items())
        assert {slot for start, count in runs for slot in range(start, start + count)} == free
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs)), "neighbours are one run"


def test_prefers_one_even_run():
    pool = SlotPool(100)
    pool.allocate(3)
    assert pool.allocate(10).tolist() == list(range(6, 16))


def test_one_run_or_none():
    pool = SlotPool(20)
    held = pool.allocate(20)
    pool.free(held[2:9])
    pool.free(held[12:])
    assert pool.allocate_run(9) is None and pool.allocate_run(30) is None and pool.free_slots == 15
    assert pool.allocate_run(7).tolist() == list(range(14, 21))
    assert pool.allocate_run(0).tolist() == []
    assert len(pool.allocate(7)) == 7


def test_refuses_what_is_not_in_use():
    pool = SlotPool(10)
    slots = pool.allocate(4)
    pool.free(slots)
    with pytest.raises(ValueError, match="not all are in use"):
        pool.free(slots)
    with pytest.raises(ValueError, match="not all are in use"):
        pool.free(np.array([11]))
    for wrong in (slots[:1], np.array([0])):
        with pytest.raises(ValueError, match="not all are in use"):
            pool.free(wrong)
    again = pool.allocate(4)
    with pytest.raises(ValueError, match="not all are in use"):
        pool.free(np.concatenate((again, again[1:2])))


def test_a_long_free_run_costs_what_a_short_one_does():
    def allocate(slots: int) -> tuple[int, int]:
        pool = SlotPool(slots)
        call = lambda: [pool.free(pool.allocate(16)) for _ in range(50)]  # noqa: E731
        return lines_run(call), most_bytes(call)

    (many, bytes_of_many), (few, _) = allocate(10_000_000), allocate(1000)
    assert many < 2 * few and bytes_of_many < 1 << 16


def test_many_free_runs_cost_what_few_do():
    def allocate(slots: int) -> tuple[int, int]:
        pool = SlotPool(slots)
        pool.free(pool.allocate(slots)[::4])
        pool.allocate(5)  # of five runs, as no run has two slots
        call = lambda: [pool.free(np.concatenate((pool.allocate(3), pool.allocate(2)))) for _ in range(50)]  # noqa: E731
        return lines_run(call), most_bytes(call)

    (many, bytes_of_many), (few, _) = allocate(200_000), allocate(20_000)
    assert many < 1.5 * few and bytes_of_many < 1 << 17


@pytest.mark.parametrize(("free", "count", "runs"), [(1, 1, 1), (1, 2, 2), (3, 3, 1), (3, 5, 2), (7, 7, 1)])
def test_few_free_runs_are_looked_at_where_none_has_room(free, count, runs):
    """Runs of `free` slots that begin at odd ones have no room for as many from an even one on, and none is larger."""

    class Counted(dict):
        looks = 0

        def __contains__(self, start):
            Counted.looks += 1
            return super().__contains__(start)

    pool, each = SlotPool(40_000), free + 1
    slots = pool.allocate(40_000)
    pool.free(slots[(slots - 1) % each < free])
    pool.sizes = Counted(pool.sizes)
    for _ in range(100):
        found = pool.allocate(count)
        assert len(found) == count and (np.diff(found) != 1).sum() + 1 == runs
        Counted.looks = 0
        pool.free(pool.allocate(count))
        assert Counted.looks < 200


def test_a_single_slot_is_an_even_one_while_there_are_such():
    pool = SlotPool(100)
    assert [int(pool.allocate(1)[0]) for _ in range(50)] == list(range(2, 101, 2))
    assert [int(pool.allocate(1)[0]) for _ in range(50)] == list(range(1, 100, 2))
