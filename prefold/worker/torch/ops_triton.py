"""The position-wise operations of `ops` in Triton: one pass over memory each, with the same rounding. No gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16  # processed at once
WIDTH = 1024


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Write x + delta to x, and return its RMS norm. Arguments: as in `Ops.add_rms_norm`"""
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows:
        size = triton.next_power_of_2(hidden)
        _add_rms_norm[(rows,)](
            x, x if delta is None else delta, weight, out, x.stride(0), 0 if delta is None else delta.stride(0), eps,
            HIDDEN=hidden, PADDED=size, ADD=delta is not None, num_warps=4 if size <= 2048 else 8,
        )  # fmt: skip
    return out


def rope(x: Tensor, cos_sin: Tensor, norm_weight: Tensor | None, eps: float) -> None:
    """Rotate x in place by its rotary positions. Arguments: as in `Ops.rope`"""
    rows, heads, dim = x.shape
    block = min(HEADS, triton.next_power_of_2(heads))
    if rows:
        _rope[(rows, triton.cdiv(heads, block))](
            x, cos_sin, cos_sin if norm_weight is None else norm_weight, x.stride(0), x.stride(1), heads, eps,
            HALF=dim // 2, PADDED=triton.next_power_of_2(dim // 2), BLOCK=block, NORM=norm_weight is not None,
            num_warps=4,
        )  # fmt: skip


def gate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, [rows, width]. Arguments: as in `Ops.gate`"""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    is_silu = {"silu": True, "gelu_tanh": False}[activation]
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        size = min(WIDTH, triton.next_power_of_2(width))
        _gate[(rows, triton.cdiv(width, size))](
            gate_up, out, gate_up.stride(0), width, SIZE=size, SILU=is_silu, num_warps=4
        )
    return out


@triton.jit
def _scaled(h, weight):
    """Return weight * h, rounded like PyTorch: h to the weight's dtype, then the product."""
    wide = weight.to(tl.float32) * h.to(weight.dtype).to(tl.float32)
    return wide.to(weight.dtype)


@triton.jit
def _add_rms_norm(
    X, DELTA, WEIGHT, OUT, x_row, delta_row, eps, HIDDEN: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = column < HIDDEN
    x = tl.load(X + row * x_row + column, mask=mask, other=0.0)
    if ADD:
        delta = tl.load(DELTA + row * delta_row + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(X + row * x_row + column, x, mask=mask)
    h = x.to(tl.float32)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / HIDDEN + eps)
    weight = tl.load(WEIGHT + column, mask=mask, other=0.0)
    tl.store(OUT + row * HIDDEN + column, _scaled(h, weight).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _rope(
    X, COS_SIN, WEIGHT, x_row, x_head, heads, eps,
    HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, PADDED)
    real = dim < HALF
    mask = (head < heads)[:, None] & real[None, :]
    first = X + row * x_row + head.to(tl.int64)[:, None] * x_head + dim[None, :]
    a = tl.load(first, mask=mask, other=0.0)
    b = tl.load(first + HALF, mask=mask, other=0.0)
    a_wide = a.to(tl.float32)
    b_wide = b.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(a_wide * a_wide + b_wide * b_wide, 1) / (2 * HALF) + eps)[:, None]
        weight_a = tl.load(WEIGHT + dim, mask=real, other=0.0)[None, :]
        weight_b = tl.load(WEIGHT + HALF + dim, mask=real, other=0.0)[None, :]
        a_wide = _scaled(a_wide * factor, weight_a).to(a.dtype).to(tl.float32)
        b_wide = _scaled(b_wide * factor, weight_b).to(b.dtype).to(tl.float32)
    cos = tl.load(COS_SIN + row * (2 * HALF) + dim, mask=real, other=0.0)[None, :]
    sin = tl.load(COS_SIN + row * (2 * HALF) + HALF + dim, mask=real, other=0.0)[None, :]
    tl.store(first, (a_wide * cos - b_wide * sin).to(a.dtype), mask=mask)
    tl.store(first + HALF, (b_wide * cos + a_wide * sin).to(b.dtype), mask=mask)


@triton.jit
def _gate(X, OUT, x_row, width, SIZE: tl.constexpr, SILU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = column < width
    gate = tl.load(X + row * x_row + column, mask=mask, other=0.0)
    up = tl.load(X + row * x_row + width + column, mask=mask, other=0.0)
    g = gate.to(tl.float32)
    # The tanh form of gelu is 0.5 g (1 + tanh u), and (1 + tanh u) / 2 = sigmoid(2 u).
    bent = g if SILU else 1.5957691216057308 * (g + 0.044715 * g * g * g)
    product = (g * tl.sigmoid(bent)).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(OUT + row * width + column, product.to(OUT.dtype.element_ty), mask=mask)
