"""Interval attention in PyTorch: blocks of queries over gathered keys; any device, any float dtype, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .plan import AttentionPlan

__all__ = ["blocked_attention"]


def blocked_attention(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, *, scale: float) -> Tensor:
    """q [queries, heads, dim], keys and values [keys, kv_heads, dim] -> [queries, heads, dim].

    One scaled_dot_product_attention a block of queries; memory grows with the block, not with the square
    of the step. A key or value that is not finite makes the rows that see it NaN, and no other row.
    """
    device, kv_heads = q.device, keys.shape[1]
    end = torch.from_numpy(plan.end).to(device)
    rows = torch.from_numpy(plan.query_rows).to(device)
    positions = None if plan.window is None else torch.from_numpy(plan.positions).to(device)
    # SDPA multiplies hidden values by zero, and zero times infinity is NaN: take them out, and put NaN
    # back where it belongs.
    bad = ~(keys.isfinite().all(-1) & values.isfinite().all(-1))
    keys = torch.where(bad[..., None], 0, keys)
    values = torch.where(bad[..., None], 0, values)
    out = torch.empty_like(q) if not _needs_grad(q, keys, values) else None
    parts = []
    for block in plan.blocks:
        index = block.keys()
        if not isinstance(index, slice):
            index = torch.from_numpy(index).to(device)
        numbers = torch.arange(len(end), device=device)[index]
        query = rows[block.start : block.stop, None]
        visible = (numbers <= query) & (query < end[index])
        if positions is not None:
            visible &= positions[query] - positions[index] < plan.window
        part = _attend(q[block.start : block.stop], keys[index], values[index], visible, scale)
        poisoned = (visible.to(q.dtype) @ bad[index].to(q.dtype)) > 0
        part = part.masked_fill(poisoned.repeat_interleave(q.shape[1] // kv_heads, 1)[..., None], torch.nan)
        if out is None:
            parts.append(part)
        else:
            out[block.start : block.stop] = part
    if out is not None:
        return out
    return torch.cat(parts) if parts else torch.zeros_like(q)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The heads of a group are stacked as further queries of their KV head, so that keys are never repeated."""
    queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    stacked = q.reshape(queries, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * queries, dim)
    mask = visible.repeat(group, 1)
    out = scaled_dot_product_attention(
        stacked, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, scale=scale
    )
    return out.reshape(kv_heads, group, queries, dim).permute(2, 0, 1, 3).reshape(queries, heads, dim)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
