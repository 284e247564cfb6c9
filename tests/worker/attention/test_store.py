"""Attention over slots, compiled and in PyTorch, against attention by its definition."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import PLANES, TOLERANCE, SlotCase, groups
from dense import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import kernels_in_use, threads_in_use
from nests import Nest, chains, random_nest, with_spans

from prefold import kernels
from prefold.worker.attention import KeyRuns, SlotPlan, plan_slots
from prefold.worker.native.memory import zero_pages
from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.store import KVStore


@settings(max_examples=120)
@given(data=st.data())
@pytest.mark.parametrize("compiled", [True, False])
def test_random_tries(compiled, data):
    rows, branching = data.draw(st.integers(1, 200)), data.draw(st.sampled_from([0.02, 0.1, 0.3, 0.8]))
    nest = random_nest(np.random.default_rng(data.draw(st.integers(0, 999))), rows, branching)
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    if data.draw(st.booleans()):
        nest = with_spans(np.random.default_rng(rows), nest, data.draw(st.sampled_from([0.05, 1.0])))
    case = SlotCase(
        nest,
        seed=data.draw(st.integers(0, 999)),
        heads=(kv_heads * group, kv_heads),
        dim=data.draw(st.sampled_from([6, 16, 33, 40, 64, 80])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        every=data.draw(st.sampled_from([1, 3, 10, 40])),
        jumps=data.draw(st.sampled_from([0.01, 0.1, 0.5, 1.0])),
        window=data.draw(st.sampled_from([None, None, 1, 7, 50])),
    )
    if data.draw(st.booleans()):
        case.keep(torch.bfloat16)
    with kernels_in_use(kernels.load() if compiled else None):
        case.check()


@pytest.mark.parametrize("dim", [1, 16, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (16, 1), (5, 1)])
@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]
)
def test_shapes(backend, dim, heads, dtype, kept):
    """Decoding and prefill in one step: two groups of sequences, and a branching prompt. What is kept in another dtype
    is rounded, and nothing else."""
    nest, queries = groups([9, 3], 40, 21)
    prompt = random_nest(np.random.default_rng(1), 70, 0.1)
    end = np.concatenate((nest.end, prompt.end + nest.rows))
    both = Nest(end, np.concatenate((nest.positions, prompt.positions)))
    rows = np.concatenate((queries, nest.rows + np.arange(9, 70)))
    case = SlotCase(both, heads=heads, dim=dim, dtype=dtype, query_rows=rows)
    if kept is not None:
        case.keep(kept)
    case.check()


@pytest.mark.parametrize("sizes", [[1] * 20, [16], [8, 8, 8], [5, 11, 2, 30], [33]])
@pytest.mark.parametrize(("shared", "own"), [(300, 7), (3, 130), (1, 1), (200, 200)])
@pytest.mark.parametrize("window", [None, 90])
def test_decoding(backend, sizes, shared, own, window):
    nest, queries = groups(sizes, shared, own)
    SlotCase(nest, heads=(9, 3), dim=16, dtype=torch.bfloat16, query_rows=queries, jumps=0.02, window=window).check()


def test_prefill_of_long_prompts(backend):
    nest = chains([700, 3, 130])
    for jumps in (0.001, 0.2):
        SlotCase(nest, dim=16, jumps=jumps, query_rows=np.arange(200, nest.rows)).check()
        SlotCase(nest, dim=16, jumps=jumps, query_rows=np.arange(200, nest.rows), window=100).check()


def test_no_queries(backend):
    store = KVStore([Heads(4, 2, 32, torch.float32)] * 1, 10)
    plan = plan_slots(KeyRuns(*[np.empty(0, np.int64)] * 5), 0)
    assert store.attend(0, torch.empty(0, 4, 32), plan, 1.0).shape == (0, 4, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_of_runs_does_not_matter(backend, dtype):
    case = SlotCase(random_nest(np.random.default_rng(3), 120, 0.1), dtype=dtype, every=2)
    runs = case.runs
    order = np.random.default_rng(0).permutation(len(runs))
    shuffled = KeyRuns(*(getattr(runs, name)[order] for name in ("start", "count", "position", "first", "last")))
    out = case.store().attend(1, case.q, plan_slots(shuffled, len(case.q)), case.scale)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=TOLERANCE[dtype])


def test_runs_need_not_be_nested(backend):
    """Two runs whose queries overlap and neither holds the other's."""
    case = SlotCase(chains([30]), query_rows=np.arange(10, 30))
    case.slots = np.arange(1, 31)
    runs = KeyRuns(*np.array([[1, 7, 0, 0, 12], [8, 11, 7, 5, 20]]).T)
    visible = np.zeros((20, 30), bool)
    visible[:12, :7] = visible[5:, 7:18] = True
    out = case.store().attend(1, case.q, plan_slots(runs, 20), case.scale)
    expected = dense_attention(case.q.double(), case.k.double(), case.v.double(), visible, scale=case.scale)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_written_again_forgets_what_was_not_finite(backend, dtype):
    case = SlotCase(chains([9, 9]), dtype=dtype)
    store = case.store()
    slots, wrong = torch.from_numpy(case.slots), torch.full_like(case.k, torch.inf)
    store.write(1, slots, wrong, wrong)
    store.write(1, slots, case.k, case.v)
    out = store.attend(1, case.q, case.plan(), case.scale)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scale_may_be_anything(scale):
    case = SlotCase(chains([9, 9]))
    case.scale = scale
    case.check()


@pytest.mark.parametrize("dim", [1, 16, 40, 64, 80, 256, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_written_can_be_read(dim, dtype, threads):
    torch.manual_seed(0)
    count = 2001
    store = KVStore([Heads(3, 3, dim, dtype)] * PLANES, count)
    keys, values = torch.randn(2, count, 3, dim).to(dtype)
    keys[5], values[7, 1, 0] = torch.nan, torch.inf
    with threads_in_use(threads):
        for slots in torch.randperm(count).split(700):
            store.write(1, slots, keys[slots], values[slots])
    slots = torch.randint(0, count, (500,))
    for found, wanted in zip(store.read(1, slots), (keys[slots], values[slots]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    for found in store.read(0, slots):
        assert not found.any()


def test_many_rows_to_the_scratch_slot(backend):
    store = KVStore([Heads(1, 1, 16, torch.bfloat16)] * 1, 8)
    rows = torch.randn(6, 1, 16).bfloat16()
    store.write(0, torch.tensor([0, 1, 0, 0, 2, 0]), rows, rows)
    for found in store.read(0, torch.tensor([1, 2])):
        assert torch.equal(found, rows[[1, 4]])


def test_bytes_per_slot_are_those_of_the_store(backend):
    for dtype in (torch.float32, torch.bfloat16):
        store = KVStore([Heads(2, 2, 40, dtype)] * 3, 1000)
        assert abs(store.num_bytes - 1000 * KVStore.bytes_per_slot(store.heads)) <= 3 * 4096


@pytest.mark.parametrize(("where", "bad"), [("k", torch.inf), ("v", torch.nan), ("v", 3.4e38)])
def test_what_bfloat16_cannot_hold_stays_with_those_that_see_it(backend, where, bad):
    case = SlotCase(random_nest(np.random.default_rng(0), 120, 0.1), heads=(4, 2))
    case.keep(torch.bfloat16)
    case.check_not_finite(where, 40, bad)


def test_float32_rows_are_rounded_once_when_they_are_kept(backend):
    store, plain = (KVStore([Heads(2, 2, 40, torch.float32, None, kept)] * 2, 1000) for kept in (torch.bfloat16, None))
    rows = torch.randn(2, 60, 2, 40)
    store.write(1, torch.arange(60), *rows)
    for read, row in zip(store.read(1, torch.arange(60)), rows, strict=True):
        assert torch.equal(read, row.bfloat16().float())
    sizes = [KVStore.bytes_per_slot(s.heads) for s in (store, plain)]
    assert sizes[0] - 4 <= sizes[1] // 2 and store.num_bytes < 0.6 * plain.num_bytes


needs_kernels = pytest.mark.skipif(kernels.load() is None, reason="no kernels")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_vector_of_a_plane_lies_in_two_cache_lines(dtype):
    planes = KVStore([Heads(2, 2, 40, dtype)] * 3, 1001).packed.planes
    assert len(planes) == 3
    for plane in planes:
        assert plane.struct.keys % 64 == plane.struct.values % 64 == 0


def seen_in_lists(plan: SlotPlan, num_slots: int) -> np.ndarray:
    """Tile lists and own lists written out: bool [queries, slots]; a slot listed twice for a query fails."""
    tiles = plan.lists
    seen = np.zeros((plan.num_queries, num_slots + 1), int)
    assert tiles.tile_starts[0] == 0
    assert tiles.tile_starts[-1] == plan.num_queries
    for tile, (start, stop) in enumerate(itertools.pairwise(tiles.tile_starts)):
        assert 0 < stop - start <= 16
        for first, count in tiles.runs[tiles.run_offsets[tile] : tiles.run_offsets[tile + 1]]:
            seen[start:stop, 2 * first : 2 * (first + count)] += 1
        for pair, mask in tiles.masked[tiles.mask_offsets[tile] : tiles.mask_offsets[tile + 1]].tolist():
            for lane in range(stop - start):
                seen[start + lane, 2 * pair] += mask >> lane & 1
                seen[start + lane, 2 * pair + 1] += mask >> (16 + lane) & 1
    for query, (start, stop) in enumerate(itertools.pairwise(tiles.own_offsets)):
        for first, count in tiles.own[start:stop]:
            seen[query, first : first + count] += 1
    assert seen.max(initial=0) <= 1
    return seen[:, :num_slots].astype(bool)


@needs_kernels
@settings(max_examples=150)
@given(data=st.data())
def test_lists_are_the_visible_pairs(data):
    rows, branching = data.draw(st.integers(1, 400)), data.draw(st.sampled_from([0.01, 0.1, 0.5, 0.95]))
    case = SlotCase(
        random_nest(np.random.default_rng(data.draw(st.integers(0, 999))), rows, branching),
        seed=data.draw(st.integers(0, 999)),
        heads=(data.draw(st.integers(1, 9)), 1),
        every=data.draw(st.sampled_from([1, 3, 40])),
        jumps=data.draw(st.sampled_from([0.01, 0.3, 1.0])),
        window=data.draw(st.sampled_from([None, 1, 5, 64])),
    )
    wanted = np.zeros((len(case.q), case.num_slots), bool)
    wanted[:, case.slots] = case.visible
    np.testing.assert_array_equal(seen_in_lists(case.plan(), case.num_slots), wanted)


@needs_kernels
def test_queries_are_grouped_where_they_share():
    def tiles_of(sizes, shared, own):
        nest, queries = groups(sizes, shared, own)
        return SlotCase(nest, heads=(9, 3), query_rows=queries, jumps=0.001).plan().lists

    unrelated = tiles_of([1] * 20, 200, 8)
    assert len(unrelated.runs) == len(unrelated.masked) == 0
    assert len(unrelated.tile_starts) == 21
    np.testing.assert_array_equal(tiles_of([8] * 8, 256, 96).tile_starts, np.arange(0, 65, 8))
    np.testing.assert_array_equal(tiles_of([64], 256, 96).tile_starts, np.arange(0, 65, 16))
    together = tiles_of([10, 3, 12], 256, 96)
    assert {0, 10, 13, 25} <= set(together.tile_starts.tolist())
    # Prefill has no use for lists of a query's own.
    prefill = SlotCase(chains([500]), heads=(9, 3), jumps=0.0001).plan().lists
    np.testing.assert_array_equal(prefill.tile_starts[:-1], np.arange(0, 500, 16))
    assert len(prefill.own) == 0
    assert len(prefill.masked) <= 9 * 32


@needs_kernels
def test_plans_are_small():
    nest, queries = groups([8] * 8, 256, 96)
    decode = SlotCase(nest, heads=(9, 3), query_rows=queries, jumps=0.01)
    prompt = SlotCase(chains([4096]), heads=(9, 3), jumps=0.01)
    for case in (decode, prompt):
        plan = plan_slots(case.runs, len(case.q), np.zeros(0), group=3)
        assert len(plan.lists.runs) + len(plan.lists.masked) + len(plan.lists.own) <= 20 * len(case.q)


def test_bad_input_says_which(backend):
    def plan(start=1, count=1, position=0, first=0, last=1, queries=1, **more):
        return plan_slots(KeyRuns(*(np.array([x]) for x in (start, count, position, first, last))), queries, **more)

    plan()
    for wrong in ({"count": 0}, {"start": -1}, {"first": 1}, {"last": 2}, {"first": -1}):
        with pytest.raises(ValueError, match="run"):
            plan(**wrong)
    with pytest.raises(ValueError, match="sees no key"):
        plan(queries=2)
    with pytest.raises(ValueError, match="window"):
        plan(window=4)
    with pytest.raises(ValueError, match="window"):
        plan(window=0, query_positions=np.zeros(1))
    with pytest.raises(ValueError, match="length"):
        plan_slots(KeyRuns(*[np.zeros(2)] * 4, np.ones(1)), 1)

    store = KVStore([Heads(2, 2, 16, torch.float32)] * 1, 8)
    rows = torch.zeros(1, 2, 16)
    for slot in (-1, 8):
        with pytest.raises(ValueError, match="slot"):
            store.write(0, torch.tensor([slot]), rows, rows)
    for slots, values in (([1], rows[:, :1]), ([1], rows.double()), ([1.0], rows), ([1, 2], rows)):
        with pytest.raises(ValueError, match="do not fit"):
            store.write(0, torch.tensor(slots), rows, values)
    with pytest.raises(ValueError, match="queries"):
        store.attend(0, torch.zeros(2, 2, 16), plan(), 1.0)
    for q in (torch.zeros(1, 3, 16), torch.zeros(1, 2, 8), torch.zeros(1, 2, 16).double()):
        with pytest.raises(ValueError, match="heads"):
            store.attend(0, q, plan(), 1.0)
    with pytest.raises(ValueError, match="slot"):
        store.attend(0, torch.zeros(1, 2, 16), plan(start=8), 1.0)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="counts resident memory as Linux does")
@pytest.mark.parametrize("compiled", [True, False], indirect=True)
def test_a_first_row_takes_pages_and_not_huge_pages(compiled):
    """28 layers of 8 KV heads have 448 regions of keys or values. Huge pages would take 2 MB for each."""
    heads, planes = Heads(16, 8, 128, torch.bfloat16), 28
    before = resident_bytes()
    store = KVStore([heads] * planes, 20_000)
    row = torch.ones(1, 8, 128, dtype=torch.bfloat16)
    for plane in range(planes):
        store.write(plane, torch.tensor([1]), row, row)
    assert store.num_bytes > 2 << 30
    assert resident_bytes() - before < 100 << 20  # 3 MB, and what other threads of the process took meanwhile


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads the flags of memory as Linux writes them")
def test_memory_has_no_huge_pages_even_if_the_system_gives_them_unasked():
    """The flag nh stands for MADV_NOHUGEPAGE."""
    memory = zero_pages(8 << 20)
    place = memory.ctypes.data
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= place < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    assert flags
    assert "nh" in flags


def resident_bytes() -> int:
    line = next(x for x in Path("/proc/self/smaps_rollup").read_text().splitlines() if x.startswith("Rss:"))
    return 1024 * int(line.split()[1])
