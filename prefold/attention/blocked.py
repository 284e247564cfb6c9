"""Interval attention in PyTorch: blocks of queries over gathered keys; any device, any float dtype, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .plan import AttentionPlan

__all__ = ["attend_block", "blocked_attention", "finite"]


def blocked_attention(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, *, scale: float) -> Tensor:
    """q [queries, heads, dim], keys and values [keys, kv_heads, dim] -> [queries, heads, dim].

    One scaled_dot_product_attention a block of queries; memory grows with the block, not with the square
    of the step. A key or value that is not finite makes the rows that see it NaN, and no other row.
    """
    device = q.device
    end = torch.from_numpy(plan.end).to(device)
    rows = torch.from_numpy(plan.query_rows).to(device)
    positions = None if plan.window is None else torch.from_numpy(plan.positions).to(device)
    keys, values, bad = finite(keys, values)
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
        part = attend_block(q[block.start : block.stop], keys[index], values[index], bad[index], visible, scale)
        if out is None:
            parts.append(part)
        else:
            out[block.start : block.stop] = part
    if out is not None:
        return out
    return torch.cat(parts) if parts else torch.zeros_like(q)


def finite(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """keys and values [keys, kv_heads, dim] with zeros for those that are not finite, and bool [keys, kv_heads]: which.

    SDPA multiplies hidden values by zero, and zero times infinity is NaN: they are taken out here, and
    `attend_block` puts NaN back where it belongs.
    """
    bad = ~(keys.isfinite().all(-1) & values.isfinite().all(-1))
    return torch.where(bad[..., None], 0, keys), torch.where(bad[..., None], 0, values), bad


def attend_block(q: Tensor, k: Tensor, v: Tensor, bad: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [queries, heads, dim] over what `finite` gives, as far as visible bool [queries, keys] -> shaped as q.

    The heads of a group are stacked as further queries of their KV head, so that keys are never repeated.
    """
    queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    stacked = q.reshape(queries, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * queries, dim)
    mask = visible.repeat(group, 1)
    out = scaled_dot_product_attention(
        stacked, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, scale=scale
    )
    out = out.reshape(kv_heads, group, queries, dim).permute(2, 0, 1, 3).reshape(queries, heads, dim)
    poisoned = (visible.to(q.dtype) @ bad.to(q.dtype)) > 0
    return out.masked_fill(poisoned.repeat_interleave(group, 1)[..., None], torch.nan)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
