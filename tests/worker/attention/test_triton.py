"""The Triton kernels, in Triton's interpreter where there is no GPU, against attention by its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import RowCase, SlotCase, groups
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nests import chains, random_nest, with_spans
from tritons import on_triton  # noqa: F401 (a fixture)

from prefold.worker.attention import KeyRuns, plan_slots
from prefold.worker.torch.attention import gpu
from prefold.worker.torch.attention.heads import Heads
from prefold.worker.torch.attention.store import KVStore

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEW = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def only_triton(on_triton, no_blocked_attention):  # noqa: F811
    """No other form may stand in."""


# In the interpreter a step takes as long as the square of its rows: a quick run has three blocks of keys a tile.
@pytest.mark.parametrize("most", [80, pytest.param(200, marks=pytest.mark.slow)])
@FEW
@given(data=st.data())
def test_rows_of_random_tries(most, data):
    rows, branching = data.draw(st.integers(1, most)), data.draw(st.sampled_from([0.02, 0.3, 0.8]))
    nest = random_nest(np.random.default_rng(data.draw(st.integers(0, 999))), rows, branching)
    if data.draw(st.booleans()):
        nest = with_spans(np.random.default_rng(rows), nest, data.draw(st.sampled_from([0.05, 1.0])))
    group = data.draw(st.integers(1, 7))
    RowCase(
        nest,
        seed=data.draw(st.integers(0, 999)),
        heads=(2 * group, 2),
        dim=data.draw(st.sampled_from([6, 33, 64, 80])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        path=data.draw(st.integers(0, rows - 1)),
        every=data.draw(st.sampled_from([1, 3, 40])),
        window=data.draw(st.sampled_from([None, 1, 7, 50])),
    ).check()


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_common_shapes(dim, dtype):
    case = RowCase(random_nest(np.random.default_rng(1), 80, 0.05), heads=(4, 1), dim=dim, dtype=dtype, path=40)
    case.check()


def test_rows_seen_whole_and_in_part():
    """Long enough for blocks without a mask, of the path and of the new rows."""
    case = RowCase(chains([330, 3, 130]), dim=16, heads=(2, 1), path=150)
    tables = gpu.place_rows(case.plan(), 150, Heads(2, 1, 16, torch.float32), torch.device("cpu"))
    assert (tables.bounds[:, -1] > tables.bounds[:, 0]).all(), "a part without blocks"
    case.check()


def test_many_heads_of_a_group():
    RowCase(chains([9]), heads=(130, 1), dim=8).check()


def test_rows_of_one_fused_buffer():
    case = RowCase(random_nest(np.random.default_rng(4), 60, 0.2), dim=20)
    plain = case.run()
    fused = torch.cat((case.q, case.k, case.v), 1).flatten(1)
    case.q, case.k, case.v = fused.unflatten(1, (-1, 20)).split((6, 2, 2), 1)
    assert torch.equal(case.run(), plain)
    case.k = case.k.transpose(0, 1).contiguous().transpose(0, 1)
    case.v = case.v.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(case.run(), plain)


def test_no_queries():
    case = RowCase(chains([5]))
    case.query_rows, case.q = np.empty(0, np.int64), case.q[:0]
    assert case.run().shape == (0, 6, 32)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("make", [RowCase, SlotCase], ids=["rows", "slots"])
def test_what_is_not_finite_stays_in_its_sequence(make, where, bad):
    nest = random_nest(np.random.default_rng(7), 36, 0.3)
    for row in (0, 11, 34):
        make(nest, heads=(4, 2)).check_not_finite(where, row, bad)


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [RowCase, SlotCase], ids=["rows", "slots"])
def test_sinks(make, dtype, every):
    case = make(random_nest(np.random.default_rng(5), 70, 0.1), heads=(6, 2), dtype=dtype, every=every, window=40)
    case.sinks = torch.tensor([-200.0, 0.3, 1.5, -0.7, 4.0, 200.0])
    case.check()


def test_sinks_where_a_list_is_read_in_several_places():
    nest, rows = groups([2, 3], 300, 20)
    case = SlotCase(nest, heads=(4, 2), query_rows=rows)
    case.sinks = torch.tensor([0.3, 1.5, 6.0, -0.7])
    case.check()


def test_gradients_with_sinks():
    case = RowCase(random_nest(np.random.default_rng(8), 60, 0.05), heads=(6, 2), path=30, every=2, window=20)
    case.sinks = torch.randn(6, generator=torch.Generator().manual_seed(7))
    leaves = case.q, case.k, case.v, case.sinks
    for leaf in leaves:
        leaf.requires_grad_(True)
    weights = torch.randn(case.q.shape)
    found = torch.autograd.grad((case.run() * weights).sum(), leaves)
    wanted = torch.autograd.grad((case.expected() * weights.double()).sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# Each pair of a dtype, a window and spans; all eight of them are slow.
@pytest.mark.parametrize(
    ("dtype", "window", "spans"),
    [
        (torch.float32, None, False),
        (torch.float32, 20, True),
        (torch.bfloat16, None, True),
        (torch.bfloat16, 20, False),
        pytest.param(torch.float32, None, True, marks=pytest.mark.slow),
        pytest.param(torch.float32, 20, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, None, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 20, True, marks=pytest.mark.slow),
    ],
)
def test_gradients(dtype, window, spans):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    nest = random_nest(np.random.default_rng(8), 110, 0.05)
    if spans:
        nest = with_spans(np.random.default_rng(8), nest, 0.3)
    case = RowCase(nest, heads=(6, 2), path=30, every=2, window=window)
    weights = torch.randn(case.q.shape)
    leaves = [getattr(case, name).to(dtype).requires_grad_(True) for name in ("q", "k", "v")]
    case.q, case.k, case.v = leaves
    found = torch.autograd.grad((case.run() * weights).sum(), leaves)
    exact = [leaf.detach().double().requires_grad_(True) for leaf in leaves]
    q, k, v = exact[0], *(x.repeat_interleave(3, 1) for x in exact[1:])
    scores = torch.einsum("ihd,jhd->hij", q, k) * case.scale
    hidden = ~torch.from_numpy(case.visible)
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    wanted = torch.autograd.grad((out * weights).sum(), exact)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_gradients_where_blocks_are_seen_whole():
    case = RowCase(chains([110, 40]), heads=(2, 1), dim=16)
    leaves = [getattr(case, name).requires_grad_(True) for name in ("q", "k", "v")]
    found = torch.autograd.grad(case.run().square().sum(), leaves)
    doubles = [leaf.detach().double().requires_grad_(True) for leaf in leaves]
    scores = torch.einsum("ihd,jd->hij", doubles[0], doubles[1][:, 0]) * case.scale
    scores = scores.masked_fill(~torch.from_numpy(case.visible), -torch.inf).softmax(-1)
    wanted = torch.autograd.grad(torch.einsum("hij,jd->ihd", scores, doubles[2][:, 0]).square().sum(), doubles)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [40, pytest.param(80, marks=pytest.mark.slow)])
@FEW
@given(data=st.data())
def test_slots_of_random_tries(most, data):
    rows, branching = data.draw(st.integers(1, most)), data.draw(st.sampled_from([0.02, 0.3, 0.8]))
    nest = random_nest(np.random.default_rng(data.draw(st.integers(0, 999))), rows, branching)
    group = data.draw(st.integers(1, 7))
    SlotCase(
        nest,
        seed=data.draw(st.integers(0, 999)),
        heads=(2 * group, 2),
        dim=data.draw(st.sampled_from([6, 33, 64, 80])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        every=data.draw(st.sampled_from([1, 3, 40])),
        jumps=data.draw(st.sampled_from([0.02, 0.3, 0.8])),
        window=data.draw(st.sampled_from([None, 1, 7, 50])),
    ).check()


def test_decoding_in_several_items():
    """Keys of one tile read in several places, and joined."""
    nest, rows = groups([2, 3], 150, 20)
    case = SlotCase(nest, query_rows=rows, heads=(4, 2), dim=16)
    tables = gpu.place_slots(case.plan(), Heads(4, 2, 16, torch.float32), torch.device("cpu"))
    assert tables.num_items > len(tables.tile_items) - 1
    case.check()


def test_no_runs():
    plan = plan_slots(KeyRuns(*[np.empty(0, np.int64)] * 5), 0)
    store = KVStore([Heads(4, 2, 8, torch.float32)] * 1, 4)
    assert store.attend(0, torch.empty(0, 4, 8), plan, 1.0).shape == (0, 4, 8)
    store.write(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, 8), torch.empty(0, 2, 8))


def test_slots_that_are_not_there_are_not_written():
    store = KVStore([Heads(1, 1, 8, torch.float32)] * 1, 4)
    keys, values = store.plane(0)
    expected = torch.zeros_like(keys)
    expected[2] = 1
    gpu.write_slots(keys, values, torch.tensor([4, -1, 2]), torch.ones(3, 1, 8), torch.ones(3, 1, 8))
    assert torch.equal(keys, expected) and torch.equal(values, expected)
