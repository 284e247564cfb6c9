"""The position-wise operations of a transformer block, each in one place.

Every function has a PyTorch form (any device, differentiable) and, without gradients, a compiled one for CPU tensors
and one in Triton for those of a GPU, with the same result up to floating-point rounding.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import kernels
from ..device import TRITON_DTYPES, runs_triton


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta (the residual stream), and its RMS norm scaled by `weight`.

    x, delta [rows, hidden]; weight [hidden], of x's dtype or float32. May write into x. Returns (x + delta, norm).
    Zhang and Sennrich 2019.
    """
    compiled = _compiled(x, delta, weight)
    fits = x.dim() == 2 and weight.shape == x.shape[1:] and (delta is None or delta.shape == x.shape)
    if compiled and fits:
        return x, compiled.add_rms_norm(x, delta, weight, eps)
    if fits and (fused := _fused(x, delta, weight)):
        return fused.add_rms_norm(x, delta, weight, eps)
    if delta is not None:
        x = x + delta
    h = wide(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return x, (weight * h.to(weight.dtype)).to(x.dtype)


def add_layer_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta (the residual stream), and its LayerNorm. Shapes as `add_rms_norm`; bias [hidden]. Ba et al. 2016."""
    if delta is not None:
        x = x + delta
    return x, torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def rope(x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Rotary position embedding of x [rows, heads, dim], halves rotated against each other (as in Llama).

    cos_sin float32 [rows, dim]: cosines then sines of the row's dim/2 angles, already multiplied by the
    RoPE variant's attention factor. norm_weight [dim]: an RMS norm over dim before the rotation (Qwen3's
    q/k norm). cos_sin [rows, 0]: no rotation. May write into x.
    """
    compiled = _compiled(x, weight=norm_weight)
    dim = x.shape[-1]
    fits = x.dim() == 3 and dim % 2 == 0 and (norm_weight is None or norm_weight.shape == (dim,))
    angles_fit = cos_sin.shape == (len(x), dim) and cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
    if compiled and fits and angles_fit:
        compiled.rope(x, cos_sin, norm_weight, eps)
        return x
    if fits and angles_fit and (fused := _fused(x, weight=norm_weight)):
        return fused.rope(x, cos_sin, norm_weight, eps)
    if norm_weight is not None:
        _, x = add_rms_norm(x, None, norm_weight, eps)
    if not cos_sin.shape[1]:
        return x
    cos, sin = cos_sin[:, None, :].chunk(2, -1)
    a, b = wide(x).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of gate_up [rows, 2 * width] -> [rows, width]."""
    if compiled := _compiled_gate(gate_up):
        return compiled.silu_mul(gate_up)
    if fused := _fused_gate(gate_up):
        return fused.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the approximation of GELU by tanh; shapes as `silu_mul`."""
    if compiled := _compiled_gate(gate_up):
        return compiled.gelu_mul(gate_up)
    if fused := _fused_gate(gate_up):
        return fused.gelu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def log_sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits [rows, columns]: log sum exp [rows], and the place of the largest, int64 [rows].

    The first of equals on a CPU.
    """
    compiled = _compiled(logits) if logits.dtype == torch.float32 and logits.dim() == 2 else None
    if compiled:
        return compiled.log_sum_exp(logits)
    return torch.logsumexp(logits, -1), logits.argmax(-1)


def wide(x: Tensor) -> Tensor:
    """x in the dtype that sums are made in: float32, or float64 where x is."""
    return x if x.dtype == torch.float64 else x.float()


def _compiled_gate(gate_up: Tensor) -> kernels.Kernels | None:
    return _compiled(gate_up) if gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 else None


def _compiled(x: Tensor, delta: Tensor | None = None, weight: Tensor | None = None) -> kernels.Kernels | None:
    """The compiled kernels where they can take these tensors, write into x, and no gradient is wanted.

    weight: of a norm; unlike delta it may be float32 beside bfloat16.
    """
    if not x.is_cpu or _needs_grad(x, delta, weight):
        return None
    loaded = kernels.load()
    return loaded if loaded and loaded.can_compute(x, delta, weight) else None


def _fused_gate(gate_up: Tensor) -> ModuleType | None:
    return _fused(gate_up) if gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 else None


def _fused(x: Tensor, delta: Tensor | None = None, weight: Tensor | None = None) -> ModuleType | None:
    """The operations in Triton where they can take these tensors, write into x, and no gradient is wanted."""
    tensors = [t for t in (x, delta, weight) if t is not None]
    if not runs_triton(x.device) or _needs_grad(*tensors):
        return None
    if any(t.dtype not in TRITON_DTYPES or t.device != x.device or t.stride(-1) != 1 for t in tensors):
        return None
    if delta is not None and delta.dtype != x.dtype:
        return None
    from . import ops_triton

    return ops_triton


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
