"""The element-wise operations of a block, compiled, against their PyTorch form and transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefold import kernels
from prefold.model import ops

needs_kernels = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
DTYPES = (torch.float32, torch.bfloat16)
# bfloat16: one rounding of the result, and nothing lost before it.
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5}}


def pytorch_form(monkeypatch, operation, *args):
    """In float32, from copies."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "load", lambda: None)
        return operation(*(a.float().clone() if isinstance(a, Tensor) else a for a in args))


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted, **TOLERANCE[found.dtype])


def angles(rows: int, dim: int) -> Tensor:
    """cos_sin of positions up to 5000."""
    positions = torch.randint(0, 5000, (rows, 1)).double()
    inverse = 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    return torch.cat(((positions * inverse).cos(), (positions * inverse).sin()), 1).float()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 77, 300])
@pytest.mark.parametrize("width", [1, 16, 36, 48, 576])
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(monkeypatch, dtype, rows, width, with_delta):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width).to(dtype) * 3, torch.randn(width).to(dtype)
    delta = torch.randn(rows, width).to(dtype) if with_delta else None
    sums = x.clone() if delta is None else x + delta
    _, norm = pytorch_form(monkeypatch, ops.add_rms_norm, sums, None, weight, 1e-5)
    found_sums, found = ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(found_sums, sums)
    assert_same(found, norm)


@needs_kernels
def test_add_rms_norm_of_views(monkeypatch):
    """Rows of a wider tensor: the columns beside them stay as they are."""
    wide = torch.randn(50, 100)
    x, delta = wide[:, 10:46], torch.randn(50, 80)[:, 3:39]
    before = wide.clone()
    sums, norm = pytorch_form(monkeypatch, ops.add_rms_norm, x, delta, torch.ones(36), 1e-6)
    found_sums, found = ops.add_rms_norm(x, delta, torch.ones(36), 1e-6)
    assert torch.equal(found_sums, sums)
    assert_same(found, norm)
    assert torch.equal(wide[:, :10], before[:, :10])
    assert torch.equal(wide[:, 46:], before[:, 46:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 10, 32, 64, 80, 128])
@pytest.mark.parametrize("normed", [True, False])
def test_rope(monkeypatch, dtype, dim, normed):
    torch.manual_seed(0)
    x, cos_sin = torch.randn(130, 3, dim).to(dtype), angles(130, dim)
    weight = torch.randn(dim).to(dtype) if normed else None
    wanted = pytorch_form(monkeypatch, ops.rope, x, cos_sin, weight, 1e-6)
    assert_same(ops.rope(x, cos_sin, weight, 1e-6), wanted)


@needs_kernels
def test_rope_of_heads_in_a_fused_buffer(monkeypatch):
    fused = torch.randn(40, 7, 32)
    before, cos_sin = fused.clone(), angles(40, 32)
    wanted = pytorch_form(monkeypatch, ops.rope, fused[:, 4:6], cos_sin)
    assert_same(ops.rope(fused[:, 4:6], cos_sin), wanted)
    assert torch.equal(fused[:, :4], before[:, :4])
    assert torch.equal(fused[:, 6:], before[:, 6:])


@needs_kernels
@pytest.mark.parametrize("rows", [0, 5])
def test_norm_weights_in_float32_beside_bfloat16(monkeypatch, rows):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 50).bfloat16(), torch.randn(50)
    delta = torch.randn(rows, 50).bfloat16()
    found_sums, found = ops.add_rms_norm(x.clone(), delta, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    _, wanted = pytorch_form(monkeypatch, ops.add_rms_norm, found_sums, None, weight, 1e-6)
    assert_same(found, wanted)
    heads, cos_sin = x.view(rows, 5, 10), angles(rows, 10)
    wanted = pytorch_form(monkeypatch, ops.rope, heads, cos_sin, weight[:10], 1e-6)
    assert_same(ops.rope(heads.clone(), cos_sin, weight[:10], 1e-6), wanted)
    with monkeypatch.context() as patch:  # and without the kernels: one rounding too
        patch.setattr(kernels, "load", lambda: None)
        _, plain = ops.add_rms_norm(found_sums, None, weight, 1e-6)
    assert plain.dtype == torch.bfloat16
    assert_same(plain, found.float())


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 50, 1536])
@pytest.mark.parametrize("gate_mul", [ops.silu_mul, ops.gelu_mul])
def test_gates(monkeypatch, gate_mul, dtype, width):
    torch.manual_seed(0)
    gate_up = torch.randn(60, 2 * width).to(dtype) * 8
    gate, up = gate_up.double().chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) if gate_mul is ops.silu_mul else gelu_tanh(gate)
    assert_same(gate_mul(gate_up), (wanted * up).float())


def gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@needs_kernels
@pytest.mark.parametrize(("gate_mul", "wanted"), [(ops.silu_mul, torch.nn.functional.silu), (ops.gelu_mul, gelu_tanh)])
def test_gates_at_the_ends_of_the_range(gate_mul, wanted):
    gate = torch.tensor([-1e30, -300.0, -88.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 300.0, 1e30, torch.nan])
    found = gate_mul(torch.cat((gate, torch.ones(11)))[None])[0]
    torch.testing.assert_close(found, wanted(gate), equal_nan=True, rtol=1e-6, atol=1e-30)


@needs_kernels
def test_as_in_transformers():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    x, cos_sin = torch.randn(30, 4, 64), angles(30, 64)
    cos, sin = (part.repeat(1, 2)[None] for part in cos_sin.chunk(2, 1))
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    assert_same(ops.rope(x.clone(), cos_sin), wanted[0].transpose(0, 1))

    norm = LlamaRMSNorm(576, eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(30, 576)
        _, found = ops.add_rms_norm(x.clone(), None, norm.weight, 1e-5)
        assert_same(found, norm(x))


@needs_kernels
def test_a_nan_stays_in_its_row():
    x = torch.randn(5, 40)
    x[2, 7] = torch.nan
    _, norm = ops.add_rms_norm(x, None, torch.ones(40), 1e-6)
    assert norm[2].isnan().all()
    assert norm[[0, 1, 3, 4]].isfinite().all()


def test_gradients_take_the_pytorch_form():
    for operation, shape, rest in (
        (lambda x: ops.add_rms_norm(x, None, torch.ones(12), 1e-6)[1], (6, 12), ()),
        (lambda x: ops.rope(x, angles(6, 4)), (6, 3, 4), ()),
        (ops.silu_mul, (6, 12), ()),
    ):
        x = torch.randn(shape, requires_grad=True)
        operation(x, *rest).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_take_the_pytorch_form(dtype):
    x = torch.randn(4, 6, dtype=dtype)
    assert ops.silu_mul(x).dtype == dtype
    assert ops.add_rms_norm(x, x.clone(), torch.ones(6, dtype=dtype), 1e-6)[1].dtype == dtype


@needs_kernels
def test_shapes_that_do_not_fit_never_reach_the_kernel():
    """A wrong shape is PyTorch's error, not memory read past its end."""
    with pytest.raises(RuntimeError):
        ops.add_rms_norm(torch.randn(4, 6), torch.randn(3, 6), torch.ones(6), 1e-6)
    with pytest.raises(RuntimeError):
        ops.rope(torch.randn(4, 2, 8), angles(3, 8))
    with pytest.raises(RuntimeError):
        ops.rope(torch.randn(4, 2, 8), angles(4, 6))


@needs_kernels
def test_rows_that_are_one_another_are_not_written_into():
    x = torch.randn(1, 16).expand(5, 16)
    sums, _ = ops.add_rms_norm(x, torch.ones(5, 16), torch.ones(16), 1e-6)
    torch.testing.assert_close(sums, x + 1)


@needs_kernels
def test_every_thread_count_gives_the_same():
    x, delta, cos_sin = torch.randn(401, 576), torch.randn(401, 576), angles(401, 64)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            sums, norm = ops.add_rms_norm(x.clone(), delta, torch.ones(576), 1e-6)
            results.append((sums, norm, ops.rope(x.clone().view(401, 9, 64), cos_sin), ops.silu_mul(x)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
