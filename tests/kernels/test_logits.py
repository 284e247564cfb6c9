"""log sum exp and the largest of rows of logits, compiled, against float64."""

from __future__ import annotations

import pytest
import torch
from machines import kernels_in_use
from tensors import tensor_kernels

from prefold import kernels
from prefold.model import ops

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
