"""Products of int8, against whole numbers that NumPy multiplies."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from machines import threads_in_use
from tensors import tensor_kernels

from prefold import kernels
from prefold.kernels.products import GROUPS, RUN

compiled = tensor_kernels()
pytestmark = pytest.mark.skipif(kernels.load() is None or not compiled.has_int8, reason="no kernels for int8")
F32, BF16 = torch.float32, torch.bfloat16
# Numbers, the first of those that share a scale and a minimum, the zero, and whether there is a minimum.
FILE_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def quantised(x: torch.Tensor, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers [rows, groups, group], and their scales [rows, groups]."""
    rows = x.float().numpy()
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % group)))
    rows = rows.reshape(len(rows), rows.shape[1] // group, group)
    largest = np.abs(rows).max(-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    # One rounding, as where multiplying and adding are fused: the product is exact in float64.
    return np.rint(rows.astype(np.float64) * inverse[..., None]).astype(np.int64), largest / np.float32(127)


def group_of(k: int) -> int:
    return next(group for group in GROUPS if -(-k // RUN) * RUN % group == 0)


def by_numpy(x: torch.Tensor, weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The product, summed in whole numbers within groups, and how large what is summed is."""
    (a, a_scale), (w, w_scale) = quantised(x, group := group_of(x.shape[1])), quantised(weight, group)
    whole = np.einsum("rgk,cgk->rcg", a, w) * (a_scale[:, None] * w_scale.astype(np.float64))
    return whole.sum(-1), np.abs(whole).sum(-1)


def product(x: torch.Tensor, blocks: kernels.Blocks) -> torch.Tensor:
    return compiled.linear(x, blocks, blocks.outputs, out=torch.full((len(x), blocks.outputs), torch.nan))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 12, 13, 16, 17, 31, 32, 33, 70, 400])
@pytest.mark.parametrize(("columns", "k"), [(1, 2), (33, 36), (64, 128), (70, 576), (40, 320), (100, 2304)])
def test_against_whole_numbers(dtype, rows, columns, k):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, k).to(dtype), torch.randn(columns, k).to(dtype)
    x[::3] *= 100 * torch.rand(k)
    exact, size = by_numpy(x, weight)
    assert (np.abs(product(x, compiled.pack_int8(weight)).numpy() - exact) <= size * 2.0**-20 + 1e-30).all()


def stored(name: str, columns: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks, and what they stand for."""
    kind, rng = gguf.GGMLQuantizationType[name], np.random.default_rng(columns)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (columns, k // numbers, size), dtype=np.uint8)
    # The float16 numbers of a block are small ones; where they lie depends on the type.
    places = {"Q6_K": (208,)}.get(name, (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,))
    for at in places:
        halves = (rng.random((columns, k // numbers, 1)) * 0.02).astype(np.float16)
        raw[:, :, at : at + 2] = halves.view(np.uint8)
    raw = raw.reshape(columns, -1)
    return raw, quants.dequantize(raw, kind)


@pytest.mark.parametrize("name", FILE_TYPES)
@pytest.mark.parametrize("rows", [1, 7, 40, 300])
@pytest.mark.parametrize("columns", [5, 70])
def test_blocks_of_files_are_used_as_they_are(name, rows, columns):
    raw, weight = stored(name, columns, 768)
    blocks = compiled.in_int8(compiled.pack_blocks([kernels.StoredRows(name, raw)], 768))
    x = torch.randn(rows, 768)
    whole, scales = quantised(x, 32)
    values = (whole * scales[..., None].astype(np.float64)).reshape(rows, -1)
    exact, size = values @ weight.T.astype(np.float64), np.abs(values) @ (np.abs(weight) + np.abs(weight).max()).T
    assert (np.abs(product(x, blocks).numpy() - exact) <= size * 2.0**-20).all()


def test_types_side_by_side():
    """As q, k and v of a file are: of other types, whose groups are of other sizes."""
    parts = [stored(name, columns, 512) for name, columns in (("Q4_K", 64), ("Q6_K", 32), ("Q8_0", 20))]
    rows = [kernels.StoredRows(name, raw) for name, (raw, _) in zip(("Q4_K", "Q6_K", "Q8_0"), parts, strict=True)]
    blocks, x = compiled.in_int8(compiled.pack_blocks(rows, 512)), torch.randn(50, 512)
    alone = [compiled.in_int8(compiled.pack_blocks([part], 512)) for part in rows]
    assert torch.equal(product(x, blocks), torch.cat([product(x, part) for part in alone], 1))


@pytest.mark.parametrize("k", [36, 576, 1152, 4352])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads(dtype, k):
    torch.manual_seed(k)
    x, weight = torch.randn(500, k).to(dtype), torch.randn(1000, k).to(dtype)
    blocks = compiled.pack_int8(weight)
    together = product(x, blocks)
    for rows in (1, 2, 5, 12, 15, 16, 17, 31, 33, 140, 500):
        with threads_in_use(1 + rows % 3):
            assert torch.equal(product(x[:rows], blocks), together[:rows])
            assert np.array_equal(compiled.pack_int8(weight).held[0], blocks.held[0])


def test_what_is_no_number_stays_in_its_row_and_tiny_ones_are_zeros():
    x, blocks = torch.randn(20, 256), compiled.pack_int8(torch.randn(100, 256))
    plain = product(x, blocks)
    x[4, 7], x[9, 200], x[11] = torch.nan, torch.inf, 1e-36
    out = product(x, blocks)
    assert out[[4, 9]].isnan().all() and not out[11].any()
    rest = [row for row in range(20) if row not in (4, 9, 11)]
    assert torch.equal(out[rest], plain[rest])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_bias_and_gate(activation):
    x, weight, bias = torch.randn(40, 96), torch.randn(64, 96) / 8, torch.randn(64)
    blocks = compiled.pack_int8(weight)
    plain = product(x, blocks)
    torch.testing.assert_close(compiled.linear(x, blocks, 64, bias), plain + bias)
    gate, up = (plain + bias).unflatten(1, (2, 2, 16)).unbind(2)
    act = {"silu": torch.nn.functional.silu, "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh")}
    found = compiled.gated_linear(x, blocks, 32, bias, activation)
    torch.testing.assert_close(found, (act[activation](gate) * up).flatten(1), rtol=1e-4, atol=1e-4)


def test_a_channel_of_huge_numbers_spoils_its_group_alone():
    x, weight = torch.randn(30, 512), torch.randn(40, 512)
    x[:, 5] = 0
    exact = x @ weight.T
    error = (product(x, compiled.pack_int8(weight)) - exact).abs().max()
    huge = x.clone()
    huge[:, 5] = 1e4
    found = product(huge, compiled.pack_int8(torch.cat([torch.zeros(40, 128), weight[:, 128:]], 1)))
    others = x[:, 128:] @ weight[:, 128:].T
    assert (found - others).abs().max() < 2 * error
