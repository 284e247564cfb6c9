"""Interval attention, compiled and in PyTorch, against attention by its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import RowCase
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import kernels_in_use
from nests import Nest, chains, random_nest, with_spans

from prefold import kernels
from prefold.worker.attention import visibility
from prefold.worker.torch.attention.row_attention import blocked_attention


def test_visibility_is_the_definition():
    nest = random_nest(np.random.default_rng(0), 40, 0.3)
    rows = np.array([0, 3, 3, 17, 39])
    visible = visibility(nest.end, rows, nest.positions, 5)
    for i, row in enumerate(rows):
        for j in range(40):
            seen = j <= row < nest.end[j] and nest.positions[row] - nest.positions[j] < 5
            assert visible[i, j] == seen


@settings(max_examples=200)
@given(data=st.data())
@pytest.mark.parametrize("compiled", [True, False])
def test_random_tries(compiled, data):
    rows, branching = data.draw(st.integers(1, 150)), data.draw(st.sampled_from([0.02, 0.3, 0.8]))
    nest = random_nest(np.random.default_rng(data.draw(st.integers(0, 999))), rows, branching)
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    if data.draw(st.booleans()):
        nest = with_spans(np.random.default_rng(rows), nest, data.draw(st.sampled_from([0.05, 1.0])))
    case = RowCase(
        nest,
        seed=data.draw(st.integers(0, 999)),
        heads=(kv_heads * group, kv_heads),
        dim=data.draw(st.sampled_from([6, 16, 32, 33, 64, 80])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        path=data.draw(st.integers(0, rows - 1)),
        every=data.draw(st.sampled_from([1, 3, 40])),
        window=data.draw(st.sampled_from([None, 1, 7, 50])),
    )
    with kernels_in_use(kernels.load() if compiled else None):
        case.check()


@pytest.mark.parametrize("dim", [1, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (16, 1), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(backend, dim, heads, dtype):
    nest = random_nest(np.random.default_rng(1), 70, 0.1)
    RowCase(nest, heads=heads, dim=dim, dtype=dtype, path=9).check()


def test_long_rows_cross_chunks_and_blocks(backend):
    RowCase(chains([700, 3, 130]), dim=16).check()
    RowCase(chains([700, 3, 130]), dim=16, window=100).check()


def test_who_computes_is_chosen_once(backend, monkeypatch):
    case = RowCase(random_nest(np.random.default_rng(2), 90, 0.2))
    attention, plan = case.attention(), case.plan()
    asked = []
    monkeypatch.setattr(kernels, "load", lambda: asked.append("kernels"))
    monkeypatch.setattr("prefold.worker.torch.attention.heads.runs_triton", lambda device: asked.append("triton"))
    out = attention.attend(case.q, case.k, case.v, plan, scale=case.scale)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=1e-5)
    assert not asked, "a plane of a step does not choose"


def test_one_row(backend):
    RowCase(chains([1])).check()


def test_no_queries(backend):
    case = RowCase(chains([5]))
    case.query_rows, case.q = np.empty(0, np.int64), case.q[:0]
    assert case.run().shape == (0, 6, 32)


def test_repeated_query_rows(backend):
    case = RowCase(chains([20, 20]))
    case.query_rows = np.sort(np.concatenate((case.query_rows[:20], case.query_rows[:20])))
    case.check()


def test_query_per_hundred_rows(backend):
    RowCase(random_nest(np.random.default_rng(3), 1600, 0.01), every=100, dim=16).check()


def test_path_in_another_layout(backend):
    case = RowCase(random_nest(np.random.default_rng(5), 80, 0.1), path=30)
    plain = case.run()
    case.k = case.k.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(case.run(), plain, rtol=0, atol=0)


def test_an_image_longer_than_the_window_sees_itself_forwards_and_the_window_backwards():
    """Rows 10 to 39 are an image, in a layer whose window is 8: as (causal or same image) and window."""
    nest = chains([60])
    nest = nest._replace(first=np.where((np.arange(60) >= 10) & (np.arange(60) < 40), 10, np.arange(60)))
    visible = visibility(nest.end, np.arange(60), nest.positions, 8, nest.first)
    np.testing.assert_array_equal(np.flatnonzero(visible[9]), np.arange(2, 10))
    np.testing.assert_array_equal(np.flatnonzero(visible[10]), np.arange(3, 40))
    np.testing.assert_array_equal(np.flatnonzero(visible[30]), np.arange(23, 40))
    np.testing.assert_array_equal(np.flatnonzero(visible[40]), np.arange(33, 41))


@pytest.mark.parametrize("window", [None, 8])
def test_images_as_spans(backend, window):
    """Spans at the first row, one behind the other, and one that is the last of all; each with rows of its own
    behind."""
    nest = chains([150, 40])
    first = np.arange(190)
    for start, stop in ((0, 33), (33, 70), (90, 91), (140, 150), (150, 190)):
        first[start:stop] = start
    nest = nest._replace(first=first)
    RowCase(nest, window=window).check()
    RowCase(nest, window=window, path=70).check()
    RowCase(nest, window=window, every=7).check()


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("block", [7, 128])
def test_gradients(monkeypatch, block, spans):
    monkeypatch.setattr("prefold.worker.attention.row_plan.BLOCK_QUERIES", block)
    nest = random_nest(np.random.default_rng(8), 50, 0.2)
    if spans:
        nest = with_spans(np.random.default_rng(8), nest, 1.0)
    case = RowCase(nest, dtype=torch.float64, path=10, window=20)
    for name in ("q", "k", "v"):
        getattr(case, name).requires_grad_(True)
    weights = torch.randn(case.q.shape, dtype=torch.float64)
    found = torch.autograd.grad((case.run() * weights).sum(), (case.q, case.k, case.v))
    visible = torch.from_numpy(case.visible)
    k, v = case.k.repeat_interleave(3, 1), case.v.repeat_interleave(3, 1)
    scores = torch.einsum("ihd,jhd->hij", case.q, k) * case.scale
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    wanted = torch.autograd.grad(
        (torch.einsum("hij,jhd->ihd", probabilities, v) * weights).sum(), (case.q, case.k, case.v)
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_float32_gradients_do_not_reach_the_kernel():
    case = RowCase(chains([10]))
    case.q.requires_grad_(True)
    case.run().sum().backward()
    assert case.q.grad is not None


@pytest.mark.parametrize("change", ["queries", "keys", "heads", "kv_heads", "dtype", "path"])
def test_shapes_that_do_not_fit(change):
    case = RowCase(chains([8]))
    plan = case.plan()
    q, k, v, carried = case.q, case.k, case.v, {}
    if change == "queries":
        q = q[:-1]
    elif change == "keys":
        k, v = k[:-1], v[:-1]
    elif change == "heads":
        q = q[:, :4]
    elif change == "kv_heads":
        k, v = k[:, :1], v[:, :1]
    elif change == "dtype":
        v = v.bfloat16()
    else:
        carried = {"path_k": k[:4]}
        k, v = k[4:], v[4:]
    with pytest.raises(ValueError):
        case.attention().attend(q, k, v, plan, scale=1.0, **carried)


def test_the_pytorch_form_does_not_need_a_compiled_plan():
    case = RowCase(random_nest(np.random.default_rng(9), 400, 0.05))
    compiled_plan = case.plan()
    with kernels_in_use(None):
        plan = case.plan()
    assert plan.lists is None
    a = blocked_attention(case.q, case.k, case.v, plan, scale=0.1)
    b = blocked_attention(case.q, case.k, case.v, compiled_plan, scale=0.1)
    assert torch.equal(a, b)


def test_gradients_of_a_key_that_many_see_are_rounded_once():
    """One root and 8,192 leaves, in bfloat16, by PyTorch: what each block adds to the root is added in float32."""
    leaves = 8192
    end = np.r_[leaves + 1, np.arange(2, leaves + 2)]
    case = RowCase(Nest(end, np.r_[0, np.ones(leaves, np.int64)]), heads=(1, 1), dim=16, dtype=torch.bfloat16)
    grad = torch.rand(leaves + 1, 1, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        q, k, v = (x.clone().to(dtype).requires_grad_() for x in (case.q, case.k, case.v))
        blocked_attention(q, k, v, case.plan(), scale=case.scale).backward(grad.to(dtype))
        found.append((k.grad[0].double(), v.grad[0].double()))
    for one, exact in zip(*found, strict=True):
        assert float((one - exact).norm() / exact.norm()) < 0.004
