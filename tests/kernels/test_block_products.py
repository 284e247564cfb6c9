"""Products with matrices in the blocks of a file give the same bits as with the numbers that these stand for; of few
rows they are nearer to the exact product than that (`few_rows.h`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks import dequantized, stored_bytes
from machines import threads_in_use
from tensors import TensorKernels, tensor_kernels
from torch import Tensor

from prefold import kernels
from prefold.kernels import BLOCK_TYPES, StoredRows

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
DTYPES = (torch.float32, torch.bfloat16)
# Rows that may be multiplied in another way than by decoding the matrix, and the most that is rounded there.
MOST_FEW, ROUNDED = 12, {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-16}


def packed(kind: str, rows: int, inputs: int, loaded: TensorKernels | None = None) -> tuple[kernels.Blocks, Tensor]:
    stored = stored_bytes(kind, rows, inputs)
    blocks = (loaded or tensor_kernels()).pack_blocks([StoredRows(kind, stored)], inputs)
    return blocks, dequantized(kind, stored)


def check_products(
    loaded: TensorKernels, kind: str, rows: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 12, 13, 40, 200)
) -> None:
    """Compares products of several numbers of rows, in both dtypes."""
    for columns, inputs in ((70, 768), (96, 2304)):
        blocks, weight = packed(kind, columns, inputs, loaded)
        for dtype in DTYPES:
            words = loaded.pack_words(weight.to(dtype))
            for count in rows:
                torch.manual_seed(count)
                x, bias = torch.randn(count, inputs).to(dtype), torch.randn(columns).to(dtype)
                x *= 100 ** torch.rand(inputs).to(dtype)
                expected = loaded.linear(x, words, columns, bias)
                same = torch.equal(loaded.linear(x, blocks, columns, bias), expected)
                assert same or count <= MOST_FEW, (kind, dtype, count)
                if not same:
                    out = loaded.linear(x, blocks, columns, bias, out=torch.empty(count, columns))
                    exact = x.double() @ weight.double().T + bias.double()
                    # Of the largest number that a row has, which is not far from that of any 32.
                    size = x.double().abs().amax(1, keepdim=True) * weight.double().abs().sum(1)
                    assert ((out - exact).abs() <= size * ROUNDED[dtype]).all(), (kind, dtype, count)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_type(kind):
    check_products(tensor_kernels(), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_type_with_many_rows(kind):
    check_products(tensor_kernels(), kind, (63, 64, 65, 384, 700, 1300, 2100))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding(kind, dtype):
    blocks, weight = packed(kind, 70, 512)
    ids = torch.tensor([69, 0, 31, 32, 5, 5])
    assert torch.equal(tensor_kernels().block_rows(blocks, ids, dtype), weight[ids].to(dtype))
    assert tensor_kernels().block_rows(blocks, ids[:0], dtype).shape == (0, 512)
    for wrong in (-1, 70):  # a panel has columns beyond the last row
        with pytest.raises(IndexError, match="the matrix has 70 rows"):
            tensor_kernels().block_rows(blocks, torch.tensor([1, wrong]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("types", "floats"),
    [
        ([("Q4_K", 48), ("Q4_K", 16), ("Q6_K", 40)], 0),  # as queries, keys and values are in most files
        ([("Q4_K", 64), ("Q5_K", 32), ("F32", 20), ("F32", 20)], 2),  # as the parts of a gated delta net
        ([("Q4_K", 48), ("Q6_K", 18), ("Q8_0", 3), ("F32", 12), ("BF16", 7)], 2),  # no type ends with a panel
    ],
)
def test_a_matrix_of_several_types(types, floats, dtype):
    """A panel of several types has floats. Few rows are multiplied with each panel in the way that its type has."""
    loaded = tensor_kernels()
    parts = [StoredRows(kind, stored_bytes(kind, rows, 512, rows)) for kind, rows in types]
    weight = torch.cat([dequantized(part.type, part.rows) for part in parts])
    blocks = loaded.pack_blocks(parts, 512)
    assert blocks.outputs == len(weight)
    assert sum((blocks.table[:, 1] == BLOCK_TYPES["F32"]).tolist()) == floats
    assert torch.equal(loaded.block_rows(blocks, torch.arange(len(weight)), torch.float32), weight)
    words = loaded.pack_words(weight.to(dtype))
    for rows in (1, 2, 5, 40):
        x = torch.randn(rows, 512).to(dtype)
        found, same = loaded.linear(x, blocks, len(weight)), loaded.linear(x, words, len(weight))
        most = x.float().abs() @ weight.abs().T * (1e-6 if dtype == torch.float32 else 2**-7)  # weights are rounded
        assert ((found.float() - same.float()).abs() <= most).all()
        assert rows < 40 or torch.equal(found, same)
        in_one_form = loaded.linear(x, loaded.in_one_form(blocks), len(weight))
        assert torch.equal(in_one_form, same)


def test_every_number_of_mxfp4():
    """Under every exponent; the least ones are below the normal numbers of float32."""
    codes = np.arange(256, dtype=np.uint8)
    stored = np.empty((256, 16, 17), np.uint8)
    stored[..., 0], stored[..., 1:] = codes[:, None], codes.reshape(16, 16)
    with np.errstate(over="ignore"):
        expected = dequantized("MXFP4", stored.reshape(256, -1))
    blocks = tensor_kernels().pack_blocks([StoredRows("MXFP4", stored.reshape(256, -1))], 512)
    assert torch.equal(tensor_kernels().block_rows(blocks, torch.arange(256), torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
def test_gates(dtype, activation):
    loaded = tensor_kernels()
    blocks, weight = packed("Q4_1", 128, 96)
    x = torch.randn(21, 96).to(dtype)
    expected = loaded.gated_linear(x, loaded.pack_words(weight.to(dtype)), 64, None, activation)
    assert torch.equal(loaded.gated_linear(x, blocks, 64, None, activation), expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_neither_threads_nor_other_rows_change_a_row(threads):
    loaded = tensor_kernels()
    blocks, _ = packed("Q5_K", 640, 1024)
    x = torch.randn(300, 1024).bfloat16()
    whole = loaded.linear(x, blocks, 640)
    with threads_in_use(threads):
        for start, stop in ((3, 20), (17, 90), (0, 299)):
            assert torch.equal(loaded.linear(x[start:stop], blocks, 640), whole[start:stop])
        few = loaded.linear(x[:3], blocks, 640)  # there is a way of few rows, and another one
        for start, stop in ((0, 1), (1, 2), (2, 3), (1, 3)):
            assert torch.equal(loaded.linear(x[start:stop], blocks, 640), few[start:stop])


def test_what_is_not_finite():
    """Scales that are infinite, not a number or below the normal numbers of float16."""
    stored = stored_bytes("Q8_0", 64, 64)
    for row, scale in enumerate((np.inf, -np.inf, np.nan, 6e-8, -3e-5, 0)):
        stored[row, :2] = np.array([scale], np.float16).view(np.uint8)
    stored[:, 2:34] |= 1  # no infinity times zero
    blocks = kernels.load().pack_blocks([StoredRows("Q8_0", stored)], 64)
    expected = dequantized("Q8_0", stored)
    torch.testing.assert_close(
        tensor_kernels().block_rows(blocks, torch.arange(64), torch.float32)[3:], expected[3:], rtol=0, atol=0
    )
    assert not tensor_kernels().block_rows(blocks, torch.arange(3), torch.float32)[:, :32].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_that_are_not_finite_or_tiny(dtype):
    blocks, weight = packed("Q4_K", 64, 512)
    x = torch.randn(3, 512).to(dtype)
    x[0, 40], x[1, :64], x[1, 64:] = torch.inf, 0, 1e-35
    out = tensor_kernels().linear(x, blocks, 64)
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all() and (out[1].abs() < 1e-30).all()
    torch.testing.assert_close(out[2], (x[2].double() @ weight.double().T).to(dtype), rtol=2e-2, atol=1e-3)


def test_which_rows_can_be_packed():
    loaded = kernels.load()
    assert loaded.has_blocks("Q8_0", 96)
    assert not loaded.has_blocks("Q8_0", 80), "no whole number of blocks"
    assert not loaded.has_blocks("Q4_K", 96)
    assert not loaded.has_blocks("IQ4_XS", 256)


def test_bytes_are_those_of_the_file():
    """But for scales of six bits, which have a byte each."""
    for kind in BLOCK_TYPES:
        stored = stored_bytes(kind, 64, 1024)
        blocks = kernels.load().pack_blocks([StoredRows(kind, stored)], 1024)
        assert stored.nbytes <= blocks.nbytes <= 1.03 * stored.nbytes
