"""Segments against every possible cut, and against the trie they are cut from."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_trie import ragged, random_sequences, sequence_lists

from prefold.errors import InputError
from prefold.trie import RowCost, StreamCost, Trie, common_prefix_lengths
from prefold.trie.segments import keys_seen

COSTS = st.builds(RowCost, st.floats(0.5, 3), st.floats(0, 1), st.sampled_from([(), (None,), (None, 2), (3, 3, None)]))


def stream_of(sequences) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    """Prompts in order, their lengths, and what each shares with the one before."""
    sequences = sorted(tuple(s) for s in sequences)
    tokens, offsets = ragged(sequences)
    offsets = np.asarray(offsets, np.int64)
    shared = common_prefix_lengths(np.asarray(tokens, np.int32), offsets, np.arange(len(sequences)))
    return sequences, np.diff(offsets).astype(np.int32), shared.astype(np.int32)


def row_by_row(sequences, start: int, stop: int, cost: RowCost) -> float:
    """The cost of the prompts alone: of every unique prefix among them."""
    rows = {s[:n] for s in sequences[start:stop] for n in range(1, len(s) + 1)}
    keys = [min(len(row), window or len(row)) for row in rows for window in cost.planes]
    return cost.linear * len(rows) + cost.per_key * sum(keys)


def slowest(costs: StreamCost, found, speeds, busy) -> float:
    """When the last replica that works ends."""
    ends = [(costs.of(*s) + w) / v for s, v, w in zip(found, speeds, busy, strict=True) if s.start < s.stop]
    return max(ends, default=0.0)


def assert_covers(found, start: int, stop: int, num: int) -> None:
    assert len(found) == num and found[0].start == start and found[-1].stop == stop
    assert all(a.stop == b.start and a.start <= a.stop for a, b in pairwise(found))


@given(sequence_lists, COSTS, st.data())
def test_a_range_costs_what_its_rows_cost(sequences, cost, data):
    sequences, lengths, shared = stream_of(sequences)
    costs = StreamCost(lengths, shared, cost)
    start = data.draw(st.integers(0, len(sequences)))
    stop = data.draw(st.integers(start, len(sequences)))
    assert costs.of(start, stop) == pytest.approx(row_by_row(sequences, start, stop, cost))


@given(
    sequence_lists,
    COSTS,
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.0, 0.5, 3.0]), st.floats(0, 20)), min_size=1, max_size=4),
    st.data(),
)
def test_no_cut_ends_earlier(sequences, cost, replicas, data):
    sequences, lengths, shared = stream_of(sequences)
    costs, num = StreamCost(lengths, shared, cost), len(sequences)
    start = data.draw(st.integers(0, num))
    stop = data.draw(st.integers(start, num))
    speeds, busy = map(list, zip(*replicas, strict=True))
    if not any(speeds):
        with pytest.raises(InputError, match="speeds"):
            costs.cut(start, stop, speeds, busy=busy)
        return

    @cache
    def best(at: int, replica: int) -> float:
        if replica == len(speeds):
            return 0.0 if at == stop else np.inf
        tries = [best(at, replica + 1)]
        if speeds[replica]:
            for c in range(at + 1, stop + 1):
                tries.append(max((costs.of(at, c) + busy[replica]) / speeds[replica], best(c, replica + 1)))
        return min(tries)

    found = costs.cut(start, stop, speeds, busy=busy)
    assert_covers(found, start, stop, len(speeds))
    assert slowest(costs, found, speeds, busy) <= best(start, 0) * (1 + 1e-5) + 1e-9


def test_independent_prompts_are_cut_evenly_or_by_speed():
    costs = StreamCost(np.full(100, 10), np.zeros(100, int))
    assert costs.cut(0, 100, [1] * 4) == [(0, 25), (25, 50), (50, 75), (75, 100)]
    assert costs.cut(0, 100, [1, 3]) == [(0, 25), (25, 100)]
    assert costs.cut(20, 100, [1, 0, 1], busy=[200, 0, 0]) == [(20, 50), (50, 50), (50, 100)]


@pytest.mark.parametrize("num", [8, 1024])
def test_even_and_cheap_on_a_large_stream(num):
    rng = np.random.default_rng(num)
    sequences = [(0, *s) for s in random_sequences(rng, 20_000, 50, 1000)]
    sequences, lengths, shared = stream_of(sequences)
    costs = StreamCost(lengths, shared, RowCost(1.0, 0.01, (None,)))
    found = costs.cut(0, len(sequences), [1.0] * num)
    assert_covers(found, 0, len(sequences), num)
    cost = np.array([costs.of(*s) for s in found])
    longest = float(RowCost(1.0, 0.01, (None,)).first_rows(lengths).max())
    assert cost.max() <= 1.02 * cost.mean() + longest
    rows = [int((lengths - shared)[a:b].sum() + shared[a]) for a, b in found if a < b]
    unique = Trie.build(*ragged(sequences)).num_rows
    assert unique <= sum(rows) <= unique + (num - 1) * int(shared.max())


def test_outputs_count():
    lengths, shared = np.full(6, 4), np.zeros(6, int)
    outputs = np.array([0, 0, 0, 0, 0, 20])
    costs = StreamCost(lengths, shared, outputs=outputs, decode=2.0)
    assert costs.total == 24 + 2 * 20
    assert costs.cut(0, 6, [1, 1]) == [(0, 5), (5, 6)]
    quadratic = StreamCost(lengths, shared, RowCost(0.0, 1.0, (None,)), outputs=outputs)
    assert quadratic.of(5, 6) == sum(range(1, 25))


@given(sequence_lists, st.floats(0.5, 40), st.data())
def test_a_reach_is_about_its_limit_and_cuts_where_little_is_shared(sequences, limit, data):
    sequences, lengths, shared = stream_of(sequences)
    costs = StreamCost(lengths, shared)
    start = data.draw(st.integers(0, len(sequences) - 1)) if sequences else 0
    if not sequences:
        return
    stop = costs.reach(start, len(sequences), limit)
    new = np.concatenate(([0], np.cumsum(lengths - shared)))
    assert start < stop <= len(sequences)
    assert stop == start + 1 or new[stop] - new[start] <= limit
    if stop < len(sequences) and stop > start + 1:
        others = [c for c in range(start + 1, len(sequences)) if 0.75 * limit <= new[c] - new[start] <= limit]
        assert not others or shared[stop] == min(shared[c] for c in others)


def test_keys_are_counted_one_by_one():
    for window in (None, 1, 3, 50):
        expected = [sum(min(p, window or p) for p in range(1, n + 1)) for n in range(9)]
        assert keys_seen(np.arange(9), window).tolist() == expected


def test_an_empty_stream():
    costs = StreamCost(np.zeros(0, int), np.zeros(0, int))
    assert costs.total == 0 and costs.cut(0, 0, [1, 1]) == [(0, 0), (0, 0)]
