"""What the host tells the Triton kernels to read: exactly what is visible, and little else."""

from __future__ import annotations

import numpy as np
import pytest
from cases import SlotCase, groups
from counts import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from nests import chains, random_nest, with_spans

from prefold.worker.attention import plan_rows, visibility
from prefold.worker.attention.row_plan import key_tiles, row_tiles
from prefold.worker.attention.slot_plan import pick_rows, slot_tiles, stretches


def listed(bounds: np.ndarray, items: np.ndarray, part: int, owner: int) -> np.ndarray:
    return items[bounds[part, owner] : bounds[part, owner + 1]]


@settings(max_examples=150)
@given(data=st.data())
def test_row_tiles_visit_what_is_visible(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    rows = data.draw(st.integers(1, 300))
    nest = random_nest(rng, rows, data.draw(st.sampled_from([0.01, 0.1, 0.5, 0.95])))
    path = data.draw(st.integers(0, rows))
    queries = np.sort(rng.integers(path, rows, data.draw(st.integers(0, 2 * rows)))) if path < rows else np.empty(0)
    queries = queries.astype(np.int64)
    window = data.draw(st.sampled_from([None, 1, 5, 64]))
    block_q, block_k = data.draw(st.sampled_from([1, 5, 16])), data.draw(st.sampled_from([4, 16]))
    nest = data.draw(st.sampled_from([nest, with_spans(rng, nest, 0.1), with_spans(rng, nest, 1.0)]))
    plan = plan_rows(nest.end, queries, nest.positions, window, first=nest.first)
    visible = visibility(nest.end, queries, nest.positions, window, nest.first)
    tiles = row_tiles(plan, path, block_q, block_k)
    assert sorted(tiles.order) == list(range(-(-len(queries) // block_q)))
    seen = np.zeros_like(visible)
    for tile in range(tiles.num_tiles):
        lanes = slice(tile * block_q, (tile + 1) * block_q)
        for part in range(4):
            base, stop = (0, path) if part < 2 else (path, rows)
            for first in listed(tiles.bounds, tiles.blocks, part, tile) + base:
                keys = slice(first, min(first + block_k, stop))
                assert not seen[lanes, keys].any(), "visited twice"
                seen[lanes, keys] = True
                if part % 2 == 0:
                    assert visible[lanes, keys].all() and first + block_k <= stop
                elif window is None:
                    # Of use to the tile's queries, or to some query that follows.
                    assert visible[tile * block_q :, keys].any()
    assert not (visible & ~seen).any()
    if path == 0:
        turned = key_tiles(plan, block_q, block_k)
        for block in range(-(-rows // block_k)):
            for part in range(2):
                for tile in listed(turned.bounds, turned.tiles, part, block):
                    assert block * block_k in listed(tiles.bounds, tiles.blocks, 2 + part, tile)
        assert len(turned.tiles) == len(tiles.blocks)


def test_rows_work_is_that_of_the_visible_pairs():
    """32 prompts of 256 tokens below a prefix of 2048, as the published grid has them: 64 x 64 blocks."""
    rows = 2048 + 32 * 256
    end = np.concatenate((np.full(2048, rows), 2048 + 256 * (np.arange(32 * 256) // 256 + 1)))
    plan = plan_rows(end, np.arange(rows), compiled=False)
    tiles = row_tiles(plan, 0, 64, 64)
    assert lines_run(lambda: row_tiles(plan, 0, 64, 64)) < rows / 10
    pairs = int((end - np.arange(rows)).sum())
    assert len(tiles.blocks) * 64 * 64 < 1.04 * pairs


@settings(max_examples=150)
@given(data=st.data())
def test_slot_tiles_list_what_is_visible(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    rows = data.draw(st.integers(1, 250))
    nest = random_nest(rng, rows, data.draw(st.sampled_from([0.01, 0.1, 0.5, 0.95])))
    case = SlotCase(
        data.draw(st.sampled_from([nest, with_spans(rng, nest, 0.1)])),
        seed=data.draw(st.integers(0, 999)),
        heads=(2, 1),
        dim=2,
        every=data.draw(st.sampled_from([1, 3, 20])),
        jumps=data.draw(st.sampled_from([0.01, 0.2, 1.0])),
        window=data.draw(st.sampled_from([None, 1, 5, 64])),
    )
    plan, queries = case.plan(), len(case.query_rows)
    block_q, block_k = data.draw(st.sampled_from([1, 8, 64])), 16
    tiles = slot_tiles(plan, stretches(plan.runs), block_q, block_k)
    seen = np.zeros((queries, rows), int)
    key_of = {slot: key for key, slot in enumerate(case.slots.tolist())}
    entries = np.full((4, tiles.num_keys), -1)
    for place, slot, count, position, first, step, last in tiles.stretches.T:
        at = np.arange(count)
        entries[:, place : place + count] = (slot + at, first + at * step, last + 0 * at, position + at)
    assert (entries >= 0).all(), "a hole in the lists"
    for tile, (item, past) in enumerate(zip(tiles.tile_items[:-1], tiles.tile_items[1:], strict=True)):
        lanes = np.arange(tile * block_q, min((tile + 1) * block_q, queries))
        assert past > item
        for of, start, whole, stop, alone in tiles.items[:, item:past].T:
            assert of == tile and bool(alone) == (past - item == 1) and start <= whole <= stop
            assert (whole - start) % block_k == 0
            for at in range(start, stop):
                slot, first, last, position = entries[:, at]
                key = key_of[slot]
                assert position == case.nest.positions[key]
                sees = (first <= lanes) & (lanes < last)
                if case.window is not None:
                    sees &= case.nest.positions[case.query_rows[lanes]] - position < case.window
                assert at >= whole or sees.all()
                seen[lanes, key] += sees
    np.testing.assert_array_equal(seen, case.visible)


def test_stretches_join_what_goes_on():
    """A prefix in three runs of neighbouring slots, five new rows below it, and a sequence's own tail with its row."""
    case = SlotCase(chains([40]), query_rows=np.arange(35, 40), jumps=1e-9)
    joined = stretches(case.plan().runs)
    assert joined.shape[1] == 2
    assert joined[1].tolist() == [36, 4] and joined[4].tolist() == [0, 1]


def test_sequences_that_share_are_read_together():
    """256 sequences below 2048 rows, with 256 of their own: planned as a whole, and the prefix read few times."""
    nest, rows = groups([256], 2048, 256)
    plan = SlotCase(nest, query_rows=rows, heads=(2, 1), dim=2, jumps=1e-9).plan()

    def tiled():
        joined = stretches(plan.runs)
        block_q = pick_rows(joined, 2, 2) // 2
        return block_q, slot_tiles(plan, joined, block_q, 64)

    assert lines_run(tiled) < 1000
    block_q, tiles = tiled()
    assert tiles.num_keys <= 256 * 257 + 2048 * -(-256 // block_q)
    assert tiles.num_keys < 1.3 * (256 * 257 + 2048)
    assert 64 <= tiles.items.shape[1] <= 256


@pytest.mark.parametrize("group", [1, 3, 8, 128])
def test_a_tile_has_room_for_a_query(group):
    runs = SlotCase(chains([9])).plan().runs
    assert pick_rows(stretches(runs), group, 2) >= group
    assert group <= pick_rows(stretches(runs), group, 4) <= max(32, 2 * group)
