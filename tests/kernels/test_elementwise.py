"""The element-wise operations of a block, compiled, against their PyTorch form and transformers."""

from __future__ import annotations

import pytest
import torch
from machines import threads_in_use
from torch import Tensor

from prefold import kernels
from prefold.worker.torch.ops import ACTIVATIONS, FUSED_GATES, PYTORCH, choose_ops

needs_kernels = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
DTYPES = (torch.float32, torch.bfloat16)
# bfloat16: one rounding of the result, and nothing lost before it.
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5}}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def compiled(name: str, x: Tensor, *args):
    """The operation `name` as it is chosen for a pass."""
    return getattr(choose_ops(x.dtype, x.device), name)(x, *args)


def pytorch_form(name: str, *args):
    """In float32, from copies."""
    return getattr(PYTORCH, name)(*(a.float().clone() if isinstance(a, Tensor) else a for a in args))


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
def test_add_rms_norm(dtype, rows, width, with_delta):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, width).to(dtype) * 3, torch.randn(width).to(dtype)
    delta = torch.randn(rows, width).to(dtype) if with_delta else None
    sums = x.clone() if delta is None else x + delta
    _, norm = pytorch_form("add_rms_norm", sums, None, weight, 1e-5)
    found_sums, found = compiled("add_rms_norm", x, delta, weight, 1e-5)
    assert torch.equal(found_sums, sums)
    assert_same(found, norm)


@needs_kernels
def test_add_rms_norm_of_views():
    """Rows of a wider tensor: the columns beside them stay as they are."""
    wide = torch.randn(50, 100)
    x, delta = wide[:, 10:46], torch.randn(50, 80)[:, 3:39]
    before = wide.clone()
    sums, norm = pytorch_form("add_rms_norm", x, delta, torch.ones(36), 1e-6)
    found_sums, found = compiled("add_rms_norm", x, delta, torch.ones(36), 1e-6)
    assert torch.equal(found_sums, sums)
    assert_same(found, norm)
    assert torch.equal(wide[:, :10], before[:, :10])
    assert torch.equal(wide[:, 46:], before[:, 46:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 10, 32, 64, 80, 128])
@pytest.mark.parametrize("normed", [True, False])
def test_rope(dtype, dim, normed):
    torch.manual_seed(0)
    x, cos_sin = torch.randn(130, 3, dim).to(dtype), angles(130, dim)
    weight = torch.randn(dim).to(dtype) if normed else None
    wanted = pytorch_form("rope", x, cos_sin, weight, 1e-6)
    assert_same(compiled("rope", x, cos_sin, weight, 1e-6), wanted)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_rope_of_the_first_numbers_of_heads(dtype, normed):
    torch.manual_seed(0)
    fused, cos_sin = torch.randn(40, 7, 32).to(dtype), angles(40, 12)
    weight = torch.randn(32) if normed else None
    x = fused[:, 4:6].clone()
    # The norm is rounded before the rotation, as in transformers.
    normed = x if weight is None else compiled("add_rms_norm", x.flatten(0, 1), None, weight, 1e-6)[1].view(x.shape)
    wanted = pytorch_form("rope", normed, cos_sin)
    assert torch.equal(wanted[..., 12:], normed[..., 12:].float())
    assert_same(compiled("rope", fused[:, 4:6], cos_sin, weight, 1e-6), wanted)


@needs_kernels
def test_rope_of_heads_in_a_fused_buffer():
    fused = torch.randn(40, 7, 32)
    before, cos_sin = fused.clone(), angles(40, 32)
    wanted = pytorch_form("rope", fused[:, 4:6], cos_sin)
    assert_same(compiled("rope", fused[:, 4:6], cos_sin), wanted)
    assert torch.equal(fused[:, :4], before[:, :4])
    assert torch.equal(fused[:, 6:], before[:, 6:])


@needs_kernels
@pytest.mark.parametrize("rows", [0, 5])
def test_norm_weights_in_float32_beside_bfloat16(rows):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 50).bfloat16(), torch.randn(50)
    delta = torch.randn(rows, 50).bfloat16()
    found_sums, found = compiled("add_rms_norm", x.clone(), delta, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    _, wanted = pytorch_form("add_rms_norm", found_sums, None, weight, 1e-6)
    assert_same(found, wanted)
    heads, cos_sin = x.view(rows, 5, 10), angles(rows, 10)
    wanted = pytorch_form("rope", heads, cos_sin, weight[:10], 1e-6)
    assert_same(compiled("rope", heads.clone(), cos_sin, weight[:10], 1e-6), wanted)
    _, plain = PYTORCH.add_rms_norm(found_sums, None, weight, 1e-6)  # without the kernels: one rounding too
    assert plain.dtype == torch.bfloat16
    assert_same(plain, found.float())


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 50, 1536])
@pytest.mark.parametrize("activation", FUSED_GATES)
def test_gates(activation, dtype, width):
    torch.manual_seed(0)
    gate_up = torch.randn(60, 2 * width).to(dtype) * 8
    gate, up = gate_up.double().chunk(2, -1)
    assert_same(compiled("gate", gate_up, activation), (ACTIVATIONS[activation](gate) * up).float())


@needs_kernels
@pytest.mark.parametrize("activation", FUSED_GATES)
def test_gates_at_the_ends_of_the_range(activation):
    gate = torch.tensor([-1e30, -300.0, -88.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 300.0, 1e30, torch.nan])
    found = compiled("gate", torch.cat((gate, torch.ones(11)))[None], activation)[0]
    torch.testing.assert_close(found, ACTIVATIONS[activation](gate), equal_nan=True, rtol=1e-6, atol=1e-30)


@needs_kernels
def test_as_in_transformers():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    x, cos_sin = torch.randn(30, 4, 64), angles(30, 64)
    cos, sin = (part.repeat(1, 2)[None] for part in cos_sin.chunk(2, 1))
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    assert_same(compiled("rope", x.clone(), cos_sin), wanted[0].transpose(0, 1))

    norm = LlamaRMSNorm(576, eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(30, 576)
        _, found = compiled("add_rms_norm", x.clone(), None, norm.weight, 1e-5)
        assert_same(found, norm(x))


@needs_kernels
def test_a_nan_stays_in_its_row():
    x = torch.randn(5, 40)
    x[2, 7] = torch.nan
    _, norm = compiled("add_rms_norm", x, None, torch.ones(40), 1e-6)
    assert norm[2].isnan().all()
    assert norm[[0, 1, 3, 4]].isfinite().all()


def test_gradients_take_the_pytorch_form():
    with torch.enable_grad():
        assert choose_ops(torch.float32, torch.device("cpu")) is PYTORCH
    norm, turned = torch.randn(6, 12, requires_grad=True), torch.randn(6, 3, 4, requires_grad=True)
    with torch.enable_grad():
        compiled("add_rms_norm", norm, None, torch.ones(12), 1e-6)[1].sum().backward()
        compiled("rope", turned, angles(6, 4)).sum().backward()
    assert norm.grad is not None
    assert turned.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_take_the_pytorch_form(dtype):
    x = torch.randn(4, 6, dtype=dtype)
    assert choose_ops(dtype, x.device) is PYTORCH
    assert compiled("gate", x, "silu").dtype == dtype
    assert compiled("add_rms_norm", x, x.clone(), torch.ones(6, dtype=dtype), 1e-6)[1].dtype == dtype


@needs_kernels
def test_shapes_that_do_not_fit_never_reach_the_kernel():
    """A wrong shape is an error, not memory read past its end."""
    with pytest.raises(ValueError, match="fit"):
        compiled("add_rms_norm", torch.randn(4, 6), torch.randn(3, 6), torch.ones(6), 1e-6)
    with pytest.raises(ValueError, match="fit"):
        compiled("rope", torch.randn(4, 2, 8), angles(3, 8))
    with pytest.raises(ValueError, match="fit"):
        compiled("rope", torch.randn(4, 2, 8), angles(4, 10))


@needs_kernels
def test_every_thread_count_gives_the_same():
    x, delta, cos_sin = torch.randn(401, 576), torch.randn(401, 576), angles(401, 64)
    results = []
    for count in (1, 2, 5):
        with threads_in_use(count):
            sums, norm = compiled("add_rms_norm", x.clone(), delta, torch.ones(576), 1e-6)
            results.append(
                (sums, norm, compiled("rope", x.clone().view(401, 9, 64), cos_sin), compiled("gate", x, "silu"))
            )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
