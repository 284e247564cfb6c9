"""The position-wise operations in Triton, against those in PyTorch."""

from __future__ import annotations

import pytest
import torch
from tritons import on_triton  # noqa: F401 (a fixture)

from prefold.worker.torch.ops import PYTORCH, choose_ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 2e-3}


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def both(on_triton, monkeypatch):  # noqa: F811
    """Calls an operation by Triton on copies, and by PyTorch; checks that Triton was used and that both agree."""

    def compare(call, *tensors, tolerance=None):
        from prefold.worker.torch import ops_triton

        used = []
        for name in ("add_rms_norm", "gate_mul", "rope"):
            kernel = getattr(ops_triton, name)
            monkeypatch.setattr(ops_triton, name, lambda *a, kernel=kernel: used.append(1) or kernel(*a))
        with torch.inference_mode():
            found = call(choose_ops(tensors[0].dtype, tensors[0].device), *(t.clone() for t in tensors))
        assert used, "fell back to PyTorch"
        wanted = call(PYTORCH, *(t.clone() for t in tensors))
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            limit = TOLERANCE[a.dtype] if tolerance is None else tolerance
            torch.testing.assert_close(a.float(), b.float(), rtol=limit, atol=limit)

    return compare


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("hidden", [36, 64, 1000])
def test_add_rms_norm(both, dtype, hidden):
    x, delta, weight = random(5, hidden, dtype=dtype), random(5, hidden, dtype=dtype), random(hidden, dtype=dtype)
    both(lambda ops, x, d, w: ops.add_rms_norm(x, d, w, 1e-6), x, delta, weight)
    both(lambda ops, x, w: ops.add_rms_norm(x, None, w, 1e-6), x, weight)
    both(lambda ops, x, d, w: ops.add_rms_norm(x, d, w, 1e-6), x, delta, weight.float())
    both(
        lambda ops, x, d, w: ops.add_rms_norm(x[:, :hidden], d[:, hidden:], w, 1e-6),
        x.repeat(1, 2),
        delta.repeat(1, 2),
        weight,
    )


@pytest.mark.parametrize(("heads", "dim"), [(3, 10), (16, 64), (40, 32)])
@pytest.mark.parametrize("norm", [False, True])
def test_rope(both, dtype, heads, dim, norm):
    x, weight = random(7, heads, dim, dtype=dtype), random(dim, dtype=dtype)
    angles = random(7, dim // 2, dtype=torch.float32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    both(lambda ops, x, c, w: ops.rope(x, c, w if norm else None, 1e-6), x, cos_sin, weight)
    # A part of a fused buffer: what lies beside it stays as it is.
    fused = random(7, 2 * heads, dim, dtype=dtype)

    def part(ops, fused, c, w):
        out = ops.rope(fused[:, :heads], c, w.float() if norm else None, 1e-6)
        return out, fused[:, heads:]

    both(part, fused, cos_sin, weight)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [50, 1500])
def test_gates(both, dtype, activation, width):
    both(lambda ops, x: ops.gate(x, activation), random(4, 2 * width, dtype=dtype) * 3)


def test_a_gate_that_the_kernel_has_not_is_not_taken_for_another(on_triton):  # noqa: F811
    from prefold.worker.torch import ops_triton

    with pytest.raises(KeyError, match="relu"):
        ops_triton.gate_mul(torch.ones(1, 4), "relu")


def test_no_rows(both):
    empty = torch.empty(0, 8)
    both(lambda ops, x, w: ops.add_rms_norm(x, None, w, 1e-6), empty, torch.ones(8))
    both(lambda ops, x: ops.gate(x, "silu"), empty)
    both(lambda ops, x, c: ops.rope(x, c), torch.empty(0, 2, 4), torch.empty(0, 4))


def test_with_gradients_it_is_pytorch(on_triton):  # noqa: F811
    assert choose_ops(torch.float32, torch.device("cpu")) is PYTORCH
    with torch.inference_mode():
        assert choose_ops(torch.float32, torch.device("cpu")) is not PYTORCH


def test_no_rotation_is_pytorch(on_triton):  # noqa: F811
    x = torch.randn(3, 2, 8)
    with torch.inference_mode():
        assert torch.equal(choose_ops(x.dtype, x.device).rope(x.clone(), torch.empty(3, 0)), x)
