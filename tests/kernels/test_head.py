"""The LM head's kernel against float64 products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefold import kernels

needs_kernels = pytest.mark.skipif(kernels.load() is None, reason="no kernels")


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """What float32 sums of exact products may be off: a rounding of each partial sum."""
    return x.double().abs() @ weight.double().abs().T * 2.0**-23 * 8 + 1e-30


@needs_kernels
@pytest.mark.parametrize("rows", [*range(14), 24, 25, 64, 130])
@pytest.mark.parametrize(("columns", "k"), [(1, 2), (63, 36), (64, 64), (65, 30), (700, 576)])
def test_against_float64(rows, columns, k):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, k).bfloat16(), torch.randn(columns, k).bfloat16()
    found = kernels.load().linear(x, kernels.pack_words(weight), columns, float32=True)
    assert found.shape == (rows, columns)
    assert found.dtype == torch.float32
    assert ((found.double() - exact(x, weight)).abs() <= bound(x, weight)).all()


@needs_kernels
def test_rows_of_a_wider_tensor():
    x, weight = torch.randn(9, 50).bfloat16()[:, 3:39], torch.randn(70, 36).bfloat16()
    packed = kernels.pack_words(weight)
    assert torch.equal(kernels.load().linear(x, packed, 70, float32=True), kernels.load().linear(x.contiguous(), packed, 70, float32=True))


@needs_kernels
def test_a_row_is_the_same_in_any_company():
    """A batch does not change what a sequence gets: every row's sums run in the same order."""
    x, packed = torch.randn(40, 96).bfloat16(), kernels.pack_words(torch.randn(300, 96).bfloat16())
    together = kernels.load().linear(x, packed, 300, float32=True)
    for rows in (1, 2, 5, 7, 33):
        assert torch.equal(kernels.load().linear(x[:rows], packed, 300, float32=True), together[:rows])


@needs_kernels
def test_a_nan_stays_in_its_row():
    x = torch.randn(13, 40).bfloat16()
    x[4, 7] = torch.nan
    found = kernels.load().linear(x, kernels.pack_words(torch.randn(100, 40).bfloat16()), 100, float32=True)
    assert found[4].isnan().all()
    assert found[[*range(4), *range(5, 13)]].isfinite().all()


@needs_kernels
def test_every_thread_count_gives_the_same():
    torch.manual_seed(0)
    x, packed = torch.randn(30, 128).bfloat16(), kernels.pack_words(torch.randn(5000, 128).bfloat16())
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(kernels.load().linear(x, packed, 5000, float32=True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_kernels
def test_what_does_not_fit_never_reaches_the_kernel():
    packed = kernels.pack_words(torch.randn(100, 40).bfloat16())
    for x in (torch.randn(3, 40), torch.randn(3, 38).bfloat16(), torch.randn(3, 42).bfloat16()):
        with pytest.raises(ValueError, match="no product"):
            kernels.load().linear(x, packed, 100, float32=True)
