"""Attention over slots, compiled and in PyTorch, against attention by its definition."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nests import Nest, chains, nest_of, random_nest

from prefold import kernels
from prefold.attention import Heads, KeyRuns, KVStore, SlotPlan, dense_attention, plan_slots, visibility
from prefold.errors import InputError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
PLANES = 2


@pytest.fixture(params=["compiled", "pytorch"])
def backend(request, monkeypatch) -> str:
    """Both forms behind the same call."""
    if request.param == "compiled":
        if kernels.load() is None:
            pytest.skip(kernels.status())

        def refuse(*args, **kwargs):
            raise AssertionError("fell back to PyTorch")

        monkeypatch.setattr("prefold.attention.slot_torch.attend_block", refuse)
    else:
        monkeypatch.setattr(kernels, "load", lambda: None)
    return request.param


def random_slots(rng: np.random.Generator, count: int, jumps: float) -> tuple[np.ndarray, int]:
    """Distinct slots from 1 on, one a key, in runs that break off with probability `jumps`; and how many slots."""
    runs, left = [], count
    while left:
        size = min(left, int(rng.geometric(jumps)))
        runs.append(size)
        left -= size
    order = rng.permutation(len(runs))
    starts, total = np.zeros(len(runs), np.int64), 1
    for run in order:
        total += int(rng.integers(0, 3))
        starts[run] = total
        total += runs[run]
    return np.concatenate([s + np.arange(n) for s, n in zip(starts, runs, strict=True)]), total


def runs_of(nest: Nest, query_rows: np.ndarray, slots: np.ndarray, breaks: np.ndarray) -> KeyRuns:
    """The keys that some query sees, as runs; `breaks`: keys before which a run ends in any case."""
    first = np.searchsorted(query_rows, np.arange(nest.rows))
    last = np.searchsorted(query_rows, nest.end)
    runs: list[list[int]] = []
    before = None
    for key in np.flatnonzero(first < last).tolist():
        follows = before is not None and not breaks[key] and key == before + 1 and slots[key] == slots[before] + 1
        if follows and (first[key], last[key]) == (first[before], last[before]):
            follows = nest.positions[key] == nest.positions[before] + 1
        else:
            follows = False
        if follows:
            runs[-1][1] += 1
        else:
            runs.append([slots[key], 1, nest.positions[key], first[key], last[key]])
        before = key
    return KeyRuns(*np.array(runs, np.int64).reshape(-1, 5).T)


class Case:
    """A step over a store: its plan, random tensors, and what attention must give."""

    def __init__(
        self,
        nest: Nest,
        *,
        seed=0,
        heads=(6, 2),
        dim=32,
        dtype=torch.float32,
        every=1,
        jumps=0.1,
        window=None,
        query_rows=None,
    ):
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        if query_rows is None:
            query_rows = np.sort(rng.choice(nest.rows, -(-nest.rows // every), replace=False))
        self.query_rows = np.asarray(query_rows)
        self.nest, self.window, self.scale, self.heads = nest, window, dim**-0.5, heads
        self.slots, self.num_slots = random_slots(rng, nest.rows, jumps)
        self.breaks = rng.random(nest.rows) < jumps / 2
        self.q = torch.randn(len(self.query_rows), heads[0], dim, generator=generator).to(dtype)
        self.k = torch.randn(nest.rows, heads[1], dim, generator=generator).to(dtype)
        self.v = torch.randn(nest.rows, heads[1], dim, generator=generator).to(dtype)

    @property
    def runs(self) -> KeyRuns:
        return runs_of(self.nest, self.query_rows, self.slots, self.breaks)

    def plan(self) -> SlotPlan:
        positions = self.nest.positions[self.query_rows]
        return plan_slots(self.runs, len(self.query_rows), positions, self.window, group=self.heads[0] // self.heads[1])

    def store(self) -> KVStore:
        """All keys written into plane 1, in two writes; plane 0 holds something else."""
        store = KVStore(PLANES, Heads(*self.heads, self.q.shape[2], self.q.dtype), self.num_slots)
        garbage = self.k.new_full((self.num_slots, *self.k.shape[1:]), torch.nan)
        store.write(0, torch.arange(self.num_slots), garbage, garbage)
        slots = torch.from_numpy(self.slots)
        some = torch.from_numpy(np.random.default_rng(1).random(len(slots)) < 0.5)
        for part in (some, ~some):
            store.write(1, slots[part], self.k[part], self.v[part])
        return store

    @property
    def visible(self) -> np.ndarray:
        return visibility(self.nest.end, self.query_rows, self.nest.positions, self.window)

    def run(self) -> torch.Tensor:
        return self.store().attend(1, self.q, self.plan(), self.scale)

    def expected(self) -> torch.Tensor:
        return dense_attention(self.q.double(), self.k.double(), self.v.double(), self.visible, scale=self.scale)

    def check(self) -> None:
        out = self.run()
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        torch.testing.assert_close(out.double(), self.expected(), rtol=0, atol=TOLERANCE[self.q.dtype])


def groups(sizes: list[int], shared: int, own: int) -> tuple[Nest, np.ndarray]:
    """Decoding: for each size, a prefix of `shared` rows and so many sequences of `own` more rows; their last rows."""
    parents: list[int] = []
    queries = []
    for size in sizes:
        parents += [-1, *range(len(parents), len(parents) + shared - 1)]
        stem = len(parents) - 1
        for _ in range(size):
            parents += [stem, *range(len(parents), len(parents) + own - 1)]
            queries.append(len(parents) - 1)
    return nest_of(parents), np.array(queries)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("compiled", [True, False])
def test_random_tries(compiled, data):
    rows, branching = data.draw(st.integers(1, 200)), data.draw(st.sampled_from([0.02, 0.1, 0.3, 0.8]))
    nest = random_nest(np.random.default_rng(data.draw(st.integers(0, 999))), rows, branching)
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    case = Case(
        nest,
        seed=data.draw(st.integers(0, 999)),
        heads=(kv_heads * group, kv_heads),
        dim=data.draw(st.sampled_from([6, 16, 33, 40, 64, 80])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        every=data.draw(st.sampled_from([1, 3, 10, 40])),
        jumps=data.draw(st.sampled_from([0.01, 0.1, 0.5, 1.0])),
        window=data.draw(st.sampled_from([None, None, 1, 7, 50])),
    )
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(kernels, "load", lambda: None)
        case.check()


@pytest.mark.parametrize("dim", [1, 16, 40, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (16, 1), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(backend, dim, heads, dtype):
    """Decoding and prefill in one step: two groups of sequences, and a branching prompt."""
    nest, queries = groups([9, 3], 40, 21)
    prompt = random_nest(np.random.default_rng(1), 70, 0.1)
    end = np.concatenate((nest.end, prompt.end + nest.rows))
    both = Nest(end, np.concatenate((nest.positions, prompt.positions)))
    rows = np.concatenate((queries, nest.rows + np.arange(9, 70)))
    Case(both, heads=heads, dim=dim, dtype=dtype, query_rows=rows).check()


@pytest.mark.parametrize("sizes", [[1] * 20, [16], [8, 8, 8], [5, 11, 2, 30], [33]])
@pytest.mark.parametrize(("shared", "own"), [(300, 7), (3, 130), (1, 1), (200, 200)])
@pytest.mark.parametrize("window", [None, 90])
def test_decoding(backend, sizes, shared, own, window):
    nest, queries = groups(sizes, shared, own)
    Case(nest, heads=(9, 3), dim=16, dtype=torch.bfloat16, query_rows=queries, jumps=0.02, window=window).check()


def test_prefill_of_long_prompts(backend):
    nest = chains([700, 3, 130])
    for jumps in (0.001, 0.2):
        Case(nest, dim=16, jumps=jumps, query_rows=np.arange(200, nest.rows)).check()
        Case(nest, dim=16, jumps=jumps, query_rows=np.arange(200, nest.rows), window=100).check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_take_the_pytorch_form(dtype):
    Case(random_nest(np.random.default_rng(2), 90, 0.2), dtype=dtype).check()


def test_head_dim_beyond_the_kernel():
    Case(random_nest(np.random.default_rng(2), 30, 0.2), dim=272).check()


def test_no_queries(backend):
    store = KVStore(1, Heads(4, 2, 32, torch.float32), 10)
    plan = plan_slots(KeyRuns(*[np.empty(0, np.int64)] * 5), 0)
    assert store.attend(0, torch.empty(0, 4, 32), plan, 1.0).shape == (0, 4, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_of_runs_does_not_matter(backend, dtype):
    case = Case(random_nest(np.random.default_rng(3), 120, 0.1), dtype=dtype, every=2)
    runs = case.runs
    order = np.random.default_rng(0).permutation(len(runs))
    shuffled = KeyRuns(*(getattr(runs, name)[order] for name in ("start", "count", "position", "first", "last")))
    out = case.store().attend(1, case.q, plan_slots(shuffled, len(case.q)), case.scale)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=TOLERANCE[dtype])


def test_runs_need_not_be_nested(backend):
    """Two runs whose queries overlap and neither holds the other's."""
    case = Case(chains([30]), query_rows=np.arange(10, 30))
    case.slots = np.arange(1, 31)
    runs = KeyRuns(*np.array([[1, 7, 0, 0, 12], [8, 11, 7, 5, 20]]).T)
    visible = np.zeros((20, 30), bool)
    visible[:12, :7] = visible[5:, 7:18] = True
    out = case.store().attend(1, case.q, plan_slots(runs, 20), case.scale)
    expected = dense_attention(case.q.double(), case.k.double(), case.v.double(), visible, scale=case.scale)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_one_fused_buffer(backend, dtype):
    case = Case(random_nest(np.random.default_rng(4), 60, 0.2), dim=20, dtype=dtype)
    plain = case.run()
    fused = torch.cat((case.q, case.k, case.v), 1).flatten(1)
    case.q, case.k, case.v = fused.unflatten(1, (-1, 20)).split((6, 2, 2), 1)
    assert not case.q.is_contiguous()
    torch.testing.assert_close(case.run(), plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_thread_count_gives_the_same(backend, dtype):
    nest, queries = groups([40, 2, 1, 1], 300, 90)
    case = Case(nest, query_rows=np.sort(np.append(queries, np.arange(50, 100))), dtype=dtype, jumps=0.02)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(case.run())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_stays_in_its_sequence(backend, where, bad, dtype):
    rng = np.random.default_rng(7)
    nest = random_nest(rng, 120, 0.3)
    for row in rng.choice(nest.rows, 12, replace=False).tolist():
        case = Case(nest, heads=(4, 2), dtype=dtype, jumps=0.3, every=2, seed=row)
        getattr(case, where)[row, 1, row % 32] = bad
        out = case.run()
        sees = torch.from_numpy(case.visible[:, row])
        torch.testing.assert_close(
            out[~sees].double(), case.expected()[~sees], rtol=0, atol=TOLERANCE[dtype], equal_nan=False
        )
        assert out[:, :2].isfinite().all(), "the other KV head"
        if where == "v":
            assert not out[sees][:, 2:, row % 32].isfinite().any()
        elif bad is torch.nan:
            assert out[sees][:, 2:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_written_again_forgets_what_was_not_finite(backend, dtype):
    case = Case(chains([9, 9]), dtype=dtype)
    store = case.store()
    slots, wrong = torch.from_numpy(case.slots), torch.full_like(case.k, torch.inf)
    store.write(1, slots, wrong, wrong)
    store.write(1, slots, case.k, case.v)
    out = store.attend(1, case.q, case.plan(), case.scale)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=TOLERANCE[dtype])


def test_scores_far_apart_and_far_from_zero(backend):
    nest, queries = groups([9, 1], 80, 80)
    case = Case(nest, query_rows=queries)
    case.k *= 40
    case.scale = 3.0
    # A score of 2000 is rounded by 1e-4, so its probability by as much of itself.
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scale_may_be_anything(scale):
    case = Case(chains([9, 9]))
    case.scale = scale
    case.check()


@pytest.mark.parametrize("dim", [1, 16, 40, 64, 80, 256, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_written_can_be_read(dim, dtype, threads):
    torch.manual_seed(0)
    count = 2001
    store = KVStore(PLANES, Heads(3, 3, dim, dtype), count)
    keys, values = torch.randn(2, count, 3, dim).to(dtype)
    keys[5], values[7, 1, 0] = torch.nan, torch.inf
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for slots in torch.randperm(count).split(700):
            store.write(1, slots, keys[slots], values[slots])
    finally:
        torch.set_num_threads(before)
    slots = torch.randint(0, count, (500,))
    for found, wanted in zip(store.read(1, slots), (keys[slots], values[slots]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    for found in store.read(0, slots):
        assert not found.any()


def test_many_rows_to_the_scratch_slot(backend):
    store = KVStore(1, Heads(1, 1, 16, torch.bfloat16), 8)
    rows = torch.randn(6, 1, 16).bfloat16()
    store.write(0, torch.tensor([0, 1, 0, 0, 2, 0]), rows, rows)
    for found in store.read(0, torch.tensor([1, 2])):
        assert torch.equal(found, rows[[1, 4]])


def test_bytes_per_slot_are_those_of_the_store(backend):
    for dtype in (torch.float32, torch.bfloat16):
        store = KVStore(3, Heads(2, 2, 40, dtype), 1000)
        assert abs(store.num_bytes - 1000 * KVStore.bytes_per_slot(3, store.heads)) <= 3 * 4096


needs_kernels = pytest.mark.skipif(kernels.load() is None, reason="no kernels")


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
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_lists_are_the_visible_pairs(data):
    rows, branching = data.draw(st.integers(1, 400)), data.draw(st.sampled_from([0.01, 0.1, 0.5, 0.95]))
    case = Case(
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
        return Case(nest, heads=(9, 3), query_rows=queries, jumps=0.001).plan().lists

    unrelated = tiles_of([1] * 20, 200, 8)
    assert len(unrelated.runs) == len(unrelated.masked) == 0
    assert len(unrelated.tile_starts) == 21
    np.testing.assert_array_equal(tiles_of([8] * 8, 256, 96).tile_starts, np.arange(0, 65, 8))
    np.testing.assert_array_equal(tiles_of([64], 256, 96).tile_starts, np.arange(0, 65, 16))
    together = tiles_of([10, 3, 12], 256, 96)
    assert {0, 10, 13, 25} <= set(together.tile_starts.tolist())
    # Prefill has no use for lists of a query's own.
    prefill = Case(chains([500]), heads=(9, 3), jumps=0.0001).plan().lists
    np.testing.assert_array_equal(prefill.tile_starts[:-1], np.arange(0, 500, 16))
    assert len(prefill.own) == 0
    assert len(prefill.masked) <= 9 * 32


@needs_kernels
def test_planning_is_cheap():
    nest, queries = groups([8] * 8, 256, 96)
    decode = Case(nest, heads=(9, 3), query_rows=queries, jumps=0.01)
    prompt = Case(chains([4096]), heads=(9, 3), jumps=0.01)
    for case, limit in ((decode, 0.01), (prompt, 0.1)):
        runs, positions = case.runs, np.zeros(0)
        started = time.process_time()
        plan = plan_slots(runs, len(case.q), positions, group=3)
        assert time.process_time() - started < limit
        assert len(plan.lists.runs) + len(plan.lists.masked) + len(plan.lists.own) <= 20 * len(case.q)


def test_bad_input_says_which(backend):
    def plan(start=1, count=1, position=0, first=0, last=1, queries=1, **more):
        return plan_slots(KeyRuns(*(np.array([x]) for x in (start, count, position, first, last))), queries, **more)

    plan()
    for wrong in ({"count": 0}, {"start": -1}, {"first": 1}, {"last": 2}, {"first": -1}):
        with pytest.raises(InputError, match="run"):
            plan(**wrong)
    with pytest.raises(InputError, match="sees no key"):
        plan(queries=2)
    with pytest.raises(InputError, match="window"):
        plan(window=4)
    with pytest.raises(InputError, match="window"):
        plan(window=0, query_positions=np.zeros(1))
    with pytest.raises(InputError, match="length"):
        plan_slots(KeyRuns(*[np.zeros(2)] * 4, np.ones(1)), 1)

    store = KVStore(1, Heads(2, 2, 16, torch.float32), 8)
    rows = torch.zeros(1, 2, 16)
    for slot in (-1, 8):
        with pytest.raises(InputError, match="slot"):
            store.write(0, torch.tensor([slot]), rows, rows)
    for slots, values in (([1], rows[:, :1]), ([1], rows.double()), ([1.0], rows), ([1, 2], rows)):
        with pytest.raises(InputError, match="do not fit"):
            store.write(0, torch.tensor(slots), rows, values)
    with pytest.raises(InputError, match="queries"):
        store.attend(0, torch.zeros(2, 2, 16), plan(), 1.0)
    for q in (torch.zeros(1, 3, 16), torch.zeros(1, 2, 8), torch.zeros(1, 2, 16).double()):
        with pytest.raises(InputError, match="heads"):
            store.attend(0, q, plan(), 1.0)
    with pytest.raises(InputError, match="slot"):
        store.attend(0, torch.zeros(1, 2, 16), plan(start=8), 1.0)
