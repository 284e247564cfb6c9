"""What kernels read of rows of logits, and tokens that they draw, against float64 and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import kernels_in_use
from tensors import tensor_kernels

from prefold import kernels
from prefold.spec.task import FILTERS
from prefold.worker.sampler import draw_scaled
from prefold.worker.torch import ops

needs_kernels = pytest.mark.skipif(kernels.load() is None, reason="no kernels")


@needs_kernels
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("columns", [1, 15, 64, 65, 1023, 1024, 1041, 5000])
@pytest.mark.parametrize("scale", [0.1, 4.0, 300.0])
def test_against_float64(rows, columns, scale):
    torch.manual_seed(columns)
    logits = torch.randn(rows, columns) * scale - 7
    sums, largest = tensor_kernels().log_sum_exp(logits)
    torch.testing.assert_close(sums.double(), torch.logsumexp(logits.double(), -1), rtol=3e-7, atol=2e-6)
    assert torch.equal(largest, torch.from_numpy(logits.numpy().argmax(-1)))


@needs_kernels
def test_the_first_of_equals():
    logits = torch.zeros(3, 3000)
    logits[1, 1500:] = 1
    logits[2, [2047, 2048]] = 1
    assert tensor_kernels().log_sum_exp(logits)[1].tolist() == [0, 1500, 2047]


@needs_kernels
def test_rows_of_a_wider_tensor():
    wide = torch.randn(4, 300)
    for found, wanted in zip(
        ops.log_sum_exp(wide[:, 20:90]), ops.log_sum_exp(wide[:, 20:90].contiguous()), strict=True
    ):
        assert torch.equal(found, wanted)


@needs_kernels
def test_numbers_that_are_not_finite():
    """As PyTorch sums them; a NaN is not the largest."""
    logits = torch.randn(6, 100)
    logits[0, 7] = torch.nan
    logits[1, :90] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4, 5], logits[4, 80] = torch.inf, torch.nan
    logits[5] = torch.nan
    sums, largest = tensor_kernels().log_sum_exp(logits)
    torch.testing.assert_close(sums, torch.logsumexp(logits, -1), equal_nan=True)
    assert largest[0] == logits[0].nan_to_num(-100).argmax()
    assert largest[1] == logits[1].argmax()
    assert largest[2] == 0
    assert largest[3:5].tolist() == [5, 5]


def test_without_kernels_and_with_gradients():
    logits = torch.randn(5, 70, requires_grad=True)
    sums, largest = ops.log_sum_exp(logits)
    sums.sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1))
    with kernels_in_use(None):
        other, place = ops.log_sum_exp(logits.detach())
    torch.testing.assert_close(other, sums.detach())
    assert torch.equal(place, largest)


@needs_kernels
@pytest.mark.parametrize("columns", [1, 15, 65, 600, 5000])
@pytest.mark.parametrize("scale", [0.1, 4.0, 300.0])
def test_entropies_against_float64(columns, scale):
    torch.manual_seed(columns)
    logits = torch.randn(9, columns) * scale - 7
    logits[3, columns // 2] = -torch.inf  # adds nothing
    logits[4, 0] = 1000.0  # nobody else counts
    sums, largest, found = tensor_kernels().entropy(logits)
    expected = torch.special.entr(torch.log_softmax(logits.double(), -1).exp()).sum(-1)
    if columns == 1:
        expected[3] = torch.nan
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    for one, other in zip((sums, largest), tensor_kernels().log_sum_exp(logits), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    with_gradients = ops.entropy(logits.clone().requires_grad_())
    assert not with_gradients[2].requires_grad


@needs_kernels
def test_entropies_of_numbers_that_are_not_finite():
    """As by PyTorch: NaN."""
    logits = torch.randn(4, 100)
    logits[0, 7], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    found = ops.entropy(logits)[2]
    assert found[:3].isnan().all() and found[3].isfinite()
    with kernels_in_use(None):
        torch.testing.assert_close(ops.entropy(logits)[2], found, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("columns", [1, 15, 64, 255, 256, 257, 3000])
@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_the_largest_of_rows(columns, count):
    """In falling order, the first of equals first; rising rows make each number one of the largest so far."""
    if count > columns:
        with pytest.raises(ValueError, match="largest"):
            kernels.load().largest(np.zeros((2, columns), np.float32), count)
        return
    rng = np.random.default_rng(columns)
    wide = rng.normal(size=(5, columns + 3)).astype(np.float32)
    logits = wide[:, :columns]
    logits[1], logits[2] = logits[1].round(), np.sort(logits[2])
    logits[3] = -np.inf
    logits[4, rng.random(columns) < 0.5] = np.nan
    values, places = kernels.load().largest(logits, count)
    falling = np.argsort(np.where(np.isnan(logits), np.inf, -logits), kind="stable")[:, :count]
    assert places.tolist() == falling.tolist()
    np.testing.assert_array_equal(values, np.take_along_axis(logits, falling, -1))


@needs_kernels
@pytest.mark.parametrize("columns", [1, 17, 1024, 1025, 3000])
def test_ranks(columns):
    rng = np.random.default_rng(columns)
    logits = np.round(rng.normal(size=(4, columns)) * 2).astype(np.float32)
    logits[2, rng.random(columns) < 0.5] = np.nan
    rows = np.array([3, 0, 0, 2, 1, 3])
    values = np.array([0.0, -np.inf, np.inf, 1.0, np.nan, logits[3].max()], np.float32)
    found = kernels.load().count_larger(logits, rows, values)
    assert found.tolist() == [int((logits[row] > value).sum()) for row, value in zip(rows, values, strict=True)]
    with pytest.raises(ValueError, match="rows"):
        kernels.load().count_larger(logits, np.array([4]), values[:1])


@needs_kernels
@settings(max_examples=300, deadline=None)
@given(
    columns=st.sampled_from([1, 2, 15, 17, 127, 128, 129, 300, 5000]),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["plain", "equals", "forbidden", "flat"]),
    temperature=st.sampled_from([0.2, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 200, 9999]),
    top_p=st.sampled_from([1.0, 0.0, 0.1, 0.5, 0.95, 0.999, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.0013, 0.047, 0.53, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.57, 1.13, 1.91]),
)
def test_draws_with_filters_are_those_that_numpy_defines(columns, seed, kind, **options):
    rng, compiled = np.random.default_rng(seed), kernels.load()
    logits = (rng.normal(size=(3, columns)) * rng.choice([0.1, 1.0, 4.0, 30.0])).astype(np.float32)
    if kind == "equals":
        logits = logits.round()
    elif kind == "forbidden":
        logits[rng.random(logits.shape) < 0.7] = -np.inf
        logits[:, 0] = 0.0
    elif kind == "flat":
        logits[:] = 1.0
    filters = np.tile([options[name] for name in FILTERS], (3, 1)).astype(np.float64)
    inverses, keys = (1 / filters[:, 0]).astype(np.float32), rng.integers(0, 2**64, 3, np.uint64)
    scaled = (logits - logits.max(-1, keepdims=True)) * inverses[:, None]
    probs = np.exp(scaled.astype(np.float64))
    probs = (probs / probs.sum(-1, keepdims=True)).astype(np.float32)
    columns_of = [FILTERS.index(name) for name in ("top_n_sigma", "min_p", "top_k", "top_p")]
    found = compiled.draw(logits, np.arange(3), inverses, keys, filters[:, columns_of])
    assert found.tolist() == draw_scaled(scaled, probs, filters, keys).tolist()


@needs_kernels
def test_no_draw_with_filters_from_numbers_that_are_not_finite():
    logits = np.zeros((4, 40), np.float32)
    logits[0, 3], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    inverses, keys = np.ones(4, np.float32), np.arange(4, dtype=np.uint64)
    found = kernels.load().draw(logits, np.arange(4), inverses, keys, np.tile([0.0, 0.0, 5, 0.9], (4, 1)))
    assert found[:3].tolist() == [-1] * 3 and found[3] >= 0
    with pytest.raises(ValueError, match="filters"):
        kernels.load().draw(logits, np.arange(4), inverses, keys, np.zeros((4, 5)))
