"""Attention on a GPU: calls of the Triton kernels, and the tables of a plan that they read.

Triton is imported only on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...attention.row_plan import RowPlan
from ...attention.slot_plan import SlotPlan
from .heads import Heads

if TYPE_CHECKING:
    from .row_triton import RowTables
    from .slot_triton import SlotTables


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return True if a result computed from these tensors needs gradients."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def place_rows(plan: RowPlan, path_rows: int, heads: Heads, device: torch.device) -> RowTables:
    """Return the kernel's tables of a plan, made once. Called before a step, so that its planes find them ready."""
    from .row_triton import row_tables, tile_size

    size = tile_size(heads.head_dim, heads.dtype, device)
    return plan.kept(("rows", path_rows, heads, device), lambda: row_tables(plan, path_rows, heads.group, size, device))


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    path_k: Tensor | None,
    path_v: Tensor | None,
    plan: RowPlan,
    heads: Heads,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `RowAttention.attend` with Triton; differentiable."""
    tensors = (q, k, v, path_k, path_v)
    if wants_gradient(*tensors, sinks):
        from .row_triton_backward import attend_rows_with_gradient

        if path_k is not None:
            k, v = torch.cat((path_k, k)), torch.cat((path_v, v))
        tables = place_rows(plan, 0, heads, q.device)
        return attend_rows_with_gradient(dense(q), dense(k), dense(v), sinks, plan, tables, scale=scale)
    from . import row_triton

    tables = place_rows(plan, 0 if path_k is None else len(path_k), heads, q.device)
    q, k, v, path_k, path_v = (None if t is None else dense(t) for t in tensors)
    return row_triton.attend_rows(
        q, k, v, tables, scale=scale, window=plan.window, path_k=path_k, path_v=path_v, sinks=sinks
    )[0]


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k, v [n, kv_heads, dim] to slots int64 [n] of keys and values [slots, kv_heads, dim], in one launch."""
    from . import slot_triton

    slot_triton.write_slots(keys, values, slots, k, v)


def place_slots(plan: SlotPlan, heads: Heads, device: torch.device) -> SlotTables:
    """Return the kernel's tables of a plan over slots, made by the first plane that asks."""
    from .slot_triton import slot_tables

    return plan.kept(("slots", heads, device), lambda: slot_tables(plan, heads, device))


def attend_slots(
    q: Tensor, keys: Tensor, values: Tensor, plan: SlotPlan, heads: Heads, *, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute `KVStore.attend` with Triton; keys and values [slots, kv_heads, dim]."""
    from . import slot_triton

    tables = place_slots(plan, heads, q.device)
    return slot_triton.attend_slots(dense(q), keys, values, tables, scale=scale, window=plan.window, sinks=sinks)


def dense(x: Tensor) -> Tensor:
    """Return x with contiguous heads: x itself, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
