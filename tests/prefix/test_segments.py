from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_trie import ragged, random_sequences, sequence_lists

from prefold.errors import InputError
from prefold.prefix import Trie, segments


def segment_cost(trie: Trie, cost: np.ndarray, start: int, stop: int) -> float:
    return float(cost[start:stop].sum() + cost[trie.path(start)].sum())


def best_possible(trie: Trie, num: int, cost: np.ndarray) -> float:
    """The costliest segment of the best partition, tried over all cuts."""

    @cache
    def best(start: int, left: int) -> float:
        whole = segment_cost(trie, cost, start, trie.num_rows)
        if left == 1:
            return whole
        tries = (max(segment_cost(trie, cost, start, c), best(c, left - 1)) for c in range(start + 1, trie.num_rows))
        return min(whole, *tries, whole)

    return best(0, num)


def assert_covers(trie: Trie, found: list, num: int) -> None:
    assert len(found) <= num
    assert all(a < b for a, b in found)
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])][: len(found)]
    assert not trie.num_rows or found[-1].stop == trie.num_rows


@given(sequence_lists, st.integers(1, 5), st.booleans())
def test_no_partition_is_better(sequences, num, with_cost):
    trie = Trie.build(*ragged(sequences))
    cost = 1.0 + 0.5 * trie.positions if with_cost else np.ones(trie.num_rows)
    found = segments(trie, num, cost=cost if with_cost else None)
    assert_covers(trie, found, num)
    if found:
        costliest = max(segment_cost(trie, cost, a, b) for a, b in found)
        assert costliest <= best_possible(trie, num, cost) + 1e-5 * cost.sum()


def test_independent_prompts_are_cut_evenly_and_between():
    trie = Trie.build(np.arange(1000), np.arange(0, 1001, 10))
    found = segments(trie, 4)
    assert found == [(0, 250), (250, 500), (500, 750), (750, 1000)]


@pytest.mark.parametrize("num", [2, 8, 64])
def test_even_and_cheap_on_a_large_trie(num):
    rng = np.random.default_rng(num)
    sequences = [(0, *s) for s in random_sequences(rng, 5000, 50, 1000)]
    trie = Trie.build(*ragged(sequences))
    found = segments(trie, num)
    assert len(found) == num
    cost = [segment_cost(trie, np.ones(trie.num_rows), a, b) for a, b in found]
    assert max(cost) < 1.02 * trie.num_rows / num + 60
    longest = max(map(len, sequences))
    assert sum(cost) - trie.num_rows <= (num - 1) * longest


def test_a_single_prompt_cannot_be_cut():
    assert segments(Trie.build(np.arange(100), [0, 100]), 8) == [(0, 100)]


def test_more_segments_than_rows():
    trie = Trie.build(np.arange(3), [0, 1, 2, 3])
    assert segments(trie, 10) == [(0, 1), (1, 2), (2, 3)]


def test_no_rows():
    assert segments(Trie.build([], [0]), 3) == []


def test_bad_arguments():
    trie = Trie.build([1, 2], [0, 2])
    with pytest.raises(InputError, match="num is 0"):
        segments(trie, 0)
    for cost in (np.ones(3), np.array([1.0, 0.0]), np.array([1.0, np.nan])):
        with pytest.raises(InputError, match="cost"):
            segments(trie, 2, cost=cost)
