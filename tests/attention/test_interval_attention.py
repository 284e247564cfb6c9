"""Interval attention, compiled and in PyTorch, against attention by its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nests import Nest, chains, random_nest

from prefold import kernels
from prefold.attention import Heads, RowAttention, RowPlan, dense_attention, visibility
from prefold.attention.row_torch import blocked_attention
from prefold.errors import InputError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(params=["compiled", "pytorch"])
def backend(request, monkeypatch) -> str:
    """Both forms behind the same call."""
    if request.param == "compiled":
        if kernels.load() is None:
            pytest.skip(kernels.status())

        def refuse(*args, **kwargs):
            raise AssertionError("fell back to PyTorch")

        monkeypatch.setattr("prefold.attention.row_attention.blocked_attention", refuse)
    else:
        monkeypatch.setattr(kernels, "load", lambda: None)
    return request.param


class Case:
    """A step: its plan, random tensors, and what attention must give."""

    def __init__(self, nest: Nest, *, seed=0, heads=(6, 2), dim=32, dtype=torch.float32, path=0, every=1, window=None):
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        rows = np.arange(path, nest.rows)
        self.query_rows = rows if every == 1 else np.sort(rng.choice(rows, -(-len(rows) // every), replace=False))
        self.nest, self.window, self.path = nest, window, path
        self.scale = dim**-0.5
        self.q = torch.randn(len(self.query_rows), heads[0], dim, generator=generator).to(dtype)
        self.k = torch.randn(nest.rows, heads[1], dim, generator=generator).to(dtype)
        self.v = torch.randn(nest.rows, heads[1], dim, generator=generator).to(dtype)

    def plan(self) -> RowPlan:
        plan = self.attention().plan
        return plan(self.nest.end, self.query_rows, self.nest.positions, self.window, path=self.path)

    def attention(self) -> RowAttention:
        return RowAttention(Heads(self.q.shape[1], *self.k.shape[1:], self.q.dtype), self.q.device)

    @property
    def visible(self) -> np.ndarray:
        return visibility(self.nest.end, self.query_rows, self.nest.positions, self.window)

    def run(self) -> torch.Tensor:
        new = slice(self.path, None)
        carried = {"path_k": self.k[: self.path], "path_v": self.v[: self.path]} if self.path else {}
        attend = self.attention().attend
        return attend(self.q, self.k[new], self.v[new], self.plan(), scale=self.scale, **carried)

    def expected(self) -> torch.Tensor:
        return dense_attention(self.q.double(), self.k.double(), self.v.double(), self.visible, scale=self.scale)

    def check(self) -> None:
        out = self.run()
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        torch.testing.assert_close(out.double(), self.expected(), rtol=0, atol=TOLERANCE[self.q.dtype])


def test_visibility_is_the_definition():
    nest = random_nest(np.random.default_rng(0), 40, 0.3)
    rows = np.array([0, 3, 3, 17, 39])
    visible = visibility(nest.end, rows, nest.positions, 5)
    for i, row in enumerate(rows):
        for j in range(40):
            seen = j <= row < nest.end[j] and nest.positions[row] - nest.positions[j] < 5
            assert visible[i, j] == seen


@settings(max_examples=200, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("compiled", [True, False])
def test_random_tries(compiled, data):
    rows, branching = data.draw(st.integers(1, 150)), data.draw(st.sampled_from([0.02, 0.3, 0.8]))
    nest = random_nest(np.random.default_rng(data.draw(st.integers(0, 999))), rows, branching)
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    case = Case(
        nest,
        seed=data.draw(st.integers(0, 999)),
        heads=(kv_heads * group, kv_heads),
        dim=data.draw(st.sampled_from([6, 16, 32, 33, 64, 80])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        path=data.draw(st.integers(0, rows - 1)),
        every=data.draw(st.sampled_from([1, 3, 40])),
        window=data.draw(st.sampled_from([None, 1, 7, 50])),
    )
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(kernels, "load", lambda: None)
        case.check()


@pytest.mark.parametrize("dim", [1, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (16, 1), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(backend, dim, heads, dtype):
    nest = random_nest(np.random.default_rng(1), 70, 0.1)
    Case(nest, heads=heads, dim=dim, dtype=dtype, path=9).check()


def test_long_rows_cross_chunks_and_blocks(backend):
    Case(chains([700, 3, 130]), dim=16).check()
    Case(chains([700, 3, 130]), dim=16, window=100).check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_take_the_pytorch_form(dtype):
    Case(random_nest(np.random.default_rng(2), 90, 0.2), dtype=dtype, path=5).check()


def test_who_computes_is_chosen_once(backend, monkeypatch):
    case = Case(random_nest(np.random.default_rng(2), 90, 0.2))
    attention, plan = case.attention(), case.plan()
    asked = []
    monkeypatch.setattr(kernels, "load", lambda: asked.append("kernels"))
    monkeypatch.setattr("prefold.attention.heads.runs_triton", lambda device: asked.append("triton"))
    out = attention.attend(case.q, case.k, case.v, plan, scale=case.scale)
    torch.testing.assert_close(out.double(), case.expected(), rtol=0, atol=1e-5)
    assert not asked, "a plane of a step does not choose"


def test_head_dim_beyond_the_kernel():
    Case(random_nest(np.random.default_rng(2), 30, 0.2), dim=272).check()


def test_one_row(backend):
    Case(chains([1])).check()


def test_no_queries(backend):
    case = Case(chains([5]))
    case.query_rows, case.q = np.empty(0, np.int64), case.q[:0]
    assert case.run().shape == (0, 6, 32)


def test_repeated_query_rows(backend):
    case = Case(chains([20, 20]))
    case.query_rows = np.sort(np.concatenate((case.query_rows[:20], case.query_rows[:20])))
    case.check()


def test_query_per_hundred_rows(backend):
    Case(random_nest(np.random.default_rng(3), 1600, 0.01), every=100, dim=16).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_one_fused_buffer(backend, dtype):
    case = Case(random_nest(np.random.default_rng(4), 60, 0.2), dim=20, dtype=dtype)
    plain = case.run()
    fused = torch.cat((case.q, case.k, case.v), 1).flatten(1)
    case.q, case.k, case.v = fused.unflatten(1, (-1, 20)).split((6, 2, 2), 1)
    assert not case.q.is_contiguous()
    torch.testing.assert_close(case.run(), plain, rtol=0, atol=0)


def test_path_in_another_layout(backend):
    case = Case(random_nest(np.random.default_rng(5), 80, 0.1), path=30)
    plain = case.run()
    case.k = case.k.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(case.run(), plain, rtol=0, atol=0)


def test_every_thread_count_gives_the_same(backend):
    case = Case(random_nest(np.random.default_rng(6), 300, 0.1), dtype=torch.bfloat16)
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
        case = Case(nest, heads=(4, 2), dtype=dtype)
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


def test_scores_far_apart_and_far_from_zero(backend):
    case = Case(chains([100]))
    case.k *= 40
    case.scale = 3.0
    # A score of 2000 is rounded by 1e-4, so its probability by as much of itself.
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("block", [7, 128])
def test_gradients(monkeypatch, block):
    monkeypatch.setattr("prefold.attention.row_plan.BLOCK_QUERIES", block)
    case = Case(random_nest(np.random.default_rng(8), 50, 0.2), dtype=torch.float64, path=10, window=20)
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
    case = Case(chains([10]))
    case.q.requires_grad_(True)
    case.run().sum().backward()
    assert case.q.grad is not None


@pytest.mark.parametrize("change", ["queries", "keys", "heads", "kv_heads", "dtype", "path"])
def test_shapes_that_do_not_fit(change):
    case = Case(chains([8]))
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
    with pytest.raises(InputError):
        case.attention().attend(q, k, v, plan, scale=1.0, **carried)


def test_the_pytorch_form_does_not_need_a_compiled_plan(monkeypatch):
    case = Case(random_nest(np.random.default_rng(9), 400, 0.05))
    compiled_plan = case.plan()
    monkeypatch.setattr(kernels, "load", lambda: None)
    plan = case.plan()
    assert plan.lists is None
    a = blocked_attention(case.q, case.k, case.v, plan, scale=0.1)
    b = blocked_attention(case.q, case.k, case.v, compiled_plan, scale=0.1)
    assert torch.equal(a, b)
