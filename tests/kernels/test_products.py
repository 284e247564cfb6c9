"""Products with packed matrices, as in the linears and the LM head, against float64."""

from __future__ import annotations

import pytest
import torch
from machines import threads_in_use
from tensors import tensor_kernels
from torch import Tensor

from prefold import kernels
from prefold.worker.torch.products import can_pack
from prefold.worker.torch.tensors import ARRAY_DTYPES

needs_kernels = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
F32, BF16 = torch.float32, torch.bfloat16
KINDS = ((F32, F32), (BF16, BF16), (BF16, F32))  # of the numbers and of the result


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=out_dtype or x.dtype)
    loaded = tensor_kernels()
    found = loaded.linear(x, loaded.pack_words(weight), len(weight), bias, out=out)
    assert found.data_ptr() == out.data_ptr()
    return found


def check(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within the roundings of the sums, and one of the result."""
    bias = torch.zeros(len(weight)) if bias is None else bias
    exact = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    result = 2.0**-8 if found.dtype == BF16 else 2.0**-23
    assert ((found.double() - exact).abs() <= size * 2.0**-20 + exact.abs() * result + 1e-30).all()


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [*range(18), 24, 25, 31, 32, 33, 49, 64, 130, 200])
@pytest.mark.parametrize(("columns", "k"), [(1, 2), (31, 36), (32, 64), (33, 30), (100, 576)])
def test_against_float64(kind, rows, columns, k):
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, k).to(kind[0]), torch.randn(columns, k).to(kind[0]), torch.randn(columns)
    bias = bias.to(kind[0])
    check(product(x, weight, out_dtype=kind[1]), x, weight)
    check(product(x, weight, bias, out_dtype=kind[1]), x, weight, bias)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "k"), [(800, 40, 64), (30, 70, 2048), (13, 33, 4352), (400, 32, 2176)])
def test_large(kind, rows, columns, k):
    """Several groups of rows, several slabs, rows at distances that are copied."""
    x, weight = torch.randn(rows, k).to(kind[0]), torch.randn(columns, k).to(kind[0])
    check(product(x, weight, out_dtype=kind[1]), x, weight)


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_views(dtype):
    """Rows of a wider tensor, at an odd distance too, and numbers that are not side by side."""
    weight = torch.randn(70, 36).to(dtype)
    for x in (
        torch.randn(20, 51).to(dtype)[:, 3:39],
        torch.randn(20, 1024).to(dtype)[:, 2:38],
        torch.randn(36, 20).to(dtype).T,
    ):
        assert torch.equal(product(x, weight), product(x.contiguous(), weight))


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [96, 2304])
def test_a_row_is_the_same_in_any_company(kind, k):
    """A batch does not change what a sequence gets: every row's sums run in the same order."""
    if not tensor_kernels().has_products(kind[0]):
        pytest.skip("PyTorch computes products of this type on this machine")
    x, weight = torch.randn(40, k).to(kind[0]), torch.randn(300, k).to(kind[0])
    together = product(x, weight, out_dtype=kind[1])
    for rows in (1, 2, 5, 7, 12, 33):
        assert torch.equal(product(x[:rows], weight, out_dtype=kind[1]), together[:rows])


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 70), (2, 32), (15, 300), (33, 1000)])
def test_the_largest_of_each_row(dtype, rows, columns):
    """The first of equal ones; none where a row has a NaN, or its largest number is infinite."""
    torch.manual_seed(rows)
    weight = torch.randn(columns, 40).to(dtype)
    weight[columns // 2 :] = weight[: columns - columns // 2].clone()
    x = torch.randn(rows, 40).to(dtype)
    x[0] = 0  # all are zero, of either sign
    if rows > 2:
        x[1, 3], x[2, 5] = torch.nan, torch.inf
    packed, ids = tensor_kernels().pack_words(weight), torch.full((rows,), -7)
    found = kernels.load()._calls["greedy", ARRAY_DTYPES[dtype]](
        x.data_ptr(), packed.data_ptr(), None, ids.data_ptr(), rows, columns, 40, -2, kernels.threads(), 0, None
    )
    logits = product(x, weight, out_dtype=F32)
    finite = logits.isfinite().all(1) if rows > 2 else torch.ones(rows, dtype=torch.bool)
    expected = torch.tensor(logits.numpy().argmax(1))
    assert found == 0 and torch.equal(ids, torch.where(finite, expected, -2))


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_nan_stays_in_its_row(dtype):
    x = torch.randn(13, 40).to(dtype)
    x[4, 7] = torch.nan
    found = product(x, torch.randn(100, 40).to(dtype))
    assert found[4].isnan().all()
    assert found[[*range(4), *range(5, 13)]].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_thread_count_gives_the_same(dtype):
    torch.manual_seed(0)
    for rows, columns in ((3, 5000), (30, 5000), (500, 33)):
        x, weight = torch.randn(rows, 128).to(dtype), torch.randn(columns, 128).to(dtype)
        results = []
        for count in (1, 2, 5):
            with threads_in_use(count):
                results.append(product(x, weight))
        assert all(torch.equal(results[0], other) for other in results[1:])


@needs_kernels
def test_what_does_not_fit_never_reaches_the_kernel():
    packed = tensor_kernels().pack_words(torch.randn(100, 40).bfloat16())
    for x in (
        torch.randn(3, 40),
        torch.randn(3, 38).bfloat16(),
        torch.randn(3, 42).bfloat16(),
        torch.randn(3, 40).double(),
    ):
        with pytest.raises(ValueError, match="no product"):
            tensor_kernels().linear(x, packed, 100)


@needs_kernels
def test_packing():
    """Words of a panel's columns side by side, zeros past the last; matrices of a pool do not overlap."""
    pool = kernels.PanelPool()
    for dtype, width in ((F32, 1), (BF16, 2)):
        weights = [torch.randn(columns, 12).to(dtype) for columns in (1, 32, 45, 300)]
        packed = [tensor_kernels().pack_words(weight, pool) for weight in weights]
        for weight, words in zip(weights, packed, strict=True):
            assert words.data_ptr() % 64 == 0
            rows = words.transpose(1, 2).reshape(-1, 12 // width)
            assert torch.equal(rows[: len(weight)].contiguous().view(dtype), weight)
            assert not rows[len(weight) :].any()
    assert can_pack(torch.zeros(3, 5))
    assert not can_pack(torch.zeros(3, 5).bfloat16())
    assert not can_pack(torch.zeros(3, 4).half())
