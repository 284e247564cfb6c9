"""Plans: the kernel's tiles and the blocks of the PyTorch form say exactly who sees what, in little memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from counts import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from nests import chains, nest_of, random_nest, with_spans

from prefold import kernels
from prefold.worker.attention import RowPlan, plan_rows, visibility

needs_kernels = pytest.mark.skipif(kernels.load() is None, reason="no kernels")


def seen_in_tiles(plan: RowPlan) -> np.ndarray:
    """Tile lists written out: bool [queries, keys]; a pair listed twice fails."""
    tiles = plan.lists
    seen = np.zeros((plan.num_queries, plan.num_keys + 1), bool)
    for tile in range(len(tiles.run_offsets) - 1):
        lanes = slice(16 * tile, min(16 * tile + 16, plan.num_queries))
        part = np.zeros((16, plan.num_keys + 1), int)
        for first, count in tiles.runs[tiles.run_offsets[tile] : tiles.run_offsets[tile + 1]]:
            part[:, 2 * first : 2 * (first + count)] += 1
        for pair, mask in tiles.masked[tiles.mask_offsets[tile] : tiles.mask_offsets[tile + 1]].tolist():
            for lane in range(16):
                part[lane, 2 * pair] += mask >> lane & 1
                if mask >> (16 + lane) & 1:
                    part[lane, 2 * pair + 1] += 1
        assert part.max(initial=0) <= 1
        seen[lanes] = part[: lanes.stop - lanes.start]
    return seen[:, :-1]


def seen_in_blocks(plan: RowPlan) -> np.ndarray:
    """Key lists of the PyTorch form, for all queries of the block: bool [queries, keys]."""
    seen = np.zeros((plan.num_queries, plan.num_keys), bool)
    for block in plan.blocks:
        seen[block.start : block.stop, block.keys()] = True
    return seen


@needs_kernels
@settings(max_examples=200)
@given(data=st.data())
def test_tiles_are_the_visible_pairs(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    rows = data.draw(st.integers(1, 260))
    nest = random_nest(rng, rows, data.draw(st.sampled_from([0.01, 0.1, 0.5, 0.95])))
    queries = np.sort(rng.integers(0, rows, data.draw(st.integers(0, 2 * rows))))
    if data.draw(st.booleans()):
        queries = np.unique(queries)
    window = data.draw(st.sampled_from([None, 1, 5, 64]))
    nest = data.draw(st.sampled_from([nest, with_spans(rng, nest, 0.1), with_spans(rng, nest, 1.0)]))
    plan = plan_rows(nest.end, queries, nest.positions, window, first=nest.first)
    # Lanes past the last query of a tile may see anything: they are never stored.
    wanted = visibility(nest.end, queries, nest.positions, window, nest.first)
    np.testing.assert_array_equal(seen_in_tiles(plan), wanted)


@settings(max_examples=100)
@given(data=st.data())
def test_blocks_hold_the_visible_pairs_and_no_useless_key(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    rows = data.draw(st.integers(1, 900))
    nest = random_nest(rng, rows, data.draw(st.sampled_from([0.01, 0.1, 0.5])))
    queries = np.unique(rng.integers(0, rows, data.draw(st.integers(1, rows))))
    window = data.draw(st.sampled_from([None, 5]))
    nest = data.draw(st.sampled_from([nest, with_spans(rng, nest, 0.1, 200)]))
    plan = plan_rows(nest.end, queries, nest.positions, window, first=nest.first)
    visible, seen = visibility(nest.end, queries, nest.positions, window, nest.first), seen_in_blocks(plan)
    assert not (visible & ~seen).any()
    if window is None:
        for block in plan.blocks:
            rows_of_block = slice(block.start, block.stop)
            np.testing.assert_array_equal(seen[block.start], visible[rows_of_block].any(0))


@needs_kernels
def test_long_prompts_need_little_memory():
    nest = chains([100_000])
    plan = plan_rows(nest.end, np.arange(100_000))
    assert len(plan.lists.runs) <= 100_000 / 16
    assert len(plan.lists.masked) <= 100_000
    assert lines_run(lambda: plan_rows(nest.end, np.arange(100_000))) < 1000
    step = plan_rows(nest.end[:32_000], np.arange(31_488, 32_000))
    assert len(step.lists.runs) + len(step.lists.masked) <= 32 * 10


@needs_kernels
def test_siblings_of_a_long_prompt_need_little_memory():
    """A trunk of 20,000 rows with 4,000 short branches at its end: the trunk is one run a tile."""
    parents = list(range(-1, 19_999))
    for _ in range(4000):
        parents += [19_999, len(parents), len(parents) + 1]
    nest = nest_of(parents)
    plan = plan_rows(nest.end, np.arange(nest.rows))
    assert plan.lists.runs.nbytes + plan.lists.masked.nbytes < 8 * 2 * nest.rows


@needs_kernels
def test_planning_in_several_threads():
    nests = [random_nest(np.random.default_rng(seed), 2000, 0.05) for seed in range(4)]

    def plan(nest):
        return plan_rows(nest.end, np.arange(nest.rows)).lists

    alone = [plan(nest) for nest in nests]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(plan, nests * 3))
    for i, tiles in enumerate(together):
        np.testing.assert_array_equal(tiles.runs, alone[i % 4].runs)
        np.testing.assert_array_equal(tiles.masked, alone[i % 4].masked)


def test_bad_input_says_which():
    end = np.array([3, 2, 3])
    with pytest.raises(ValueError, match="interval of a row is empty"):
        plan_rows(np.array([3, 1, 3]), [0])
    for rows in ([2, 1], [-1], [3]):
        with pytest.raises(ValueError, match="query rows"):
            plan_rows(end, rows)
    with pytest.raises(ValueError, match="window"):
        plan_rows(end, [0], None, 4)
    with pytest.raises(ValueError, match="window"):
        plan_rows(end, [0], np.arange(3), 0)


def test_a_bad_span_says_what_is_wrong():
    end = np.full(4, 4)
    assert plan_rows(end, [0], first=np.arange(4)).first is None, "no row is in a span: nothing to look at"
    for first in ([0, 2, 2, 3], [0, 0, 0], [-1, 1, 2, 3]):
        with pytest.raises(ValueError, match="begins behind it"):
            plan_rows(end, [0], first=np.array(first))
    for first in ([0, 1, 0, 3], [0, 0, 1, 3]):
        with pytest.raises(ValueError, match="are not consecutive"):
            plan_rows(end, [0], first=np.array(first))
    with pytest.raises(ValueError, match="different ends"):
        plan_rows(np.array([4, 4, 3, 4]), [0], first=np.array([0, 1, 1, 3]))


@needs_kernels
def test_what_is_no_trie_is_an_error():
    with pytest.raises(ValueError, match="overlap"):
        plan_rows(np.array([2, 3, 3]), [2])
    with pytest.raises(ValueError, match="positions fall"):
        plan_rows(np.array([3, 3, 3]), [2], np.array([0, 5, 4]), 2)
