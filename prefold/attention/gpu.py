"""Attention on a GPU: which kernel takes what, and what a plan must have ready on the device for it.

Triton is imported here only when it is there and used. Which form is best for what is said in this file alone:
now Triton's for everything it can take; benchmarks/gpu.py --sections kernels measures it beside others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..device import TRITON_DTYPES, runs_triton, takes_triton
from .row_plan import RowPlan

if TYPE_CHECKING:
    from .row_triton import RowTables
    from .slot_plan import SlotPlan
    from .slot_triton import FixedTables, SlotTables

__all__ = [
    "FixedTables", "Heads", "attend_fixed", "attend_rows", "attend_slots", "can_attend", "fixed_tables",
    "pick_tile", "place_rows", "place_slots", "write_slots",
]  # fmt: skip

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Heads:
    """What the kernels' tiles depend on. heads: of queries; dtype: of q, k and v."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    def fits(self, device: torch.device) -> bool:
        """Whether Triton's kernels take such heads on this device."""
        return self.head_dim <= MAX_HEAD_DIM and self.dtype in TRITON_DTYPES and runs_triton(device)


def can_attend(*tensors: Tensor | None) -> bool:
    """Whether Triton's kernels take these tensors, q [queries, heads, dim] first."""
    return takes_triton(*tensors) and tensors[0] is not None and tensors[0].shape[2] <= MAX_HEAD_DIM


def place_rows(plan: RowPlan, path_rows: int, heads: Heads, device: torch.device) -> RowTables:
    """What the kernel reads of a plan, made once: called ahead of a step, so that its planes find it there."""
    from .row_triton import row_tables, tile_size

    key = ("rows", path_rows, heads.group, heads.head_dim, heads.dtype, device)
    size = tile_size(heads.head_dim, heads.dtype)
    return plan.kept(key, lambda: row_tables(plan, path_rows, heads.group, size, device))


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RowPlan,
    *,
    scale: float,
    path_k: Tensor | None = None,
    path_v: Tensor | None = None,
) -> Tensor:
    """`interval_attention` by Triton's kernels; differentiable."""
    tensors = (q, k, v, path_k, path_v)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        from .row_triton_backward import attend_rows_with_gradient

        if path_k is not None:
            k, v = torch.cat((path_k, k)), torch.cat((path_v, v))
        return attend_rows_with_gradient(*map(dense, (q, k, v)), plan, scale=scale)
    from . import row_triton

    path_rows = 0 if path_k is None else len(path_k)
    tables = place_rows(plan, path_rows, Heads(q.shape[1], k.shape[1], q.shape[2], q.dtype), q.device)
    q, k, v, path_k, path_v = (None if t is None else dense(t) for t in tensors)
    window = plan.window
    return row_triton.attend_rows(q, k, v, tables, scale=scale, window=window, path_k=path_k, path_v=path_v)[0]


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Rows k, v [n, kv_heads, dim] into slots int64 [n] of keys and values [slots, kv_heads, dim], in one launch."""
    from . import slot_triton

    slot_triton.write_slots(keys, values, slots, k, v)


def place_slots(plan: SlotPlan, heads: Heads, device: torch.device) -> SlotTables:
    """What the kernel reads of a plan over slots, made once: called ahead of a step, and its planes find it there."""
    from .slot_triton import slot_tables

    key = ("slots", heads.group, heads.head_dim, heads.dtype, device)
    return plan.kept(key, lambda: slot_tables(plan, heads.group, heads.head_dim, heads.dtype, device))


def attend_slots(q: Tensor, keys: Tensor, values: Tensor, plan: SlotPlan, *, scale: float) -> Tensor:
    """`KVStore.attend` by Triton's kernels; keys and values [slots, kv_heads, dim]."""
    from . import slot_triton

    tables = place_slots(plan, Heads(q.shape[1], keys.shape[1], q.shape[2], q.dtype), q.device)
    return slot_triton.attend_slots(dense(q), keys, values, tables, scale=scale, window=plan.window)


def pick_tile(plan: SlotPlan, heads: Heads) -> tuple[int, int]:
    """Rows of the tiles that are best for a plan, and how many keys its lists then have at most."""
    from .slot_tiles import listed_keys, pick_rows, stretches

    joined = stretches(plan.runs)
    rows = pick_rows(joined, heads.group, heads.dtype.itemsize)
    return rows, listed_keys(joined, rows // heads.group)


def fixed_tables(heads: Heads, size: int, rows: int, keys: int, windowed: bool, device: torch.device) -> FixedTables:
    """Tables of a fixed place and size, for captured graphs; see FixedTables."""
    from . import slot_triton

    return slot_triton.FixedTables(heads.group, heads.head_dim, heads.dtype, size, rows, keys, windowed, device)


def attend_fixed(
    q: Tensor, keys: Tensor, values: Tensor, tables: FixedTables, *, scale: float, window: int | None
) -> Tensor:
    """`attend_slots` of what was loaded into `tables` last."""
    from . import slot_triton

    return slot_triton.attend_slots(dense(q), keys, values, tables.tables, scale=scale, window=window)


def dense(x: Tensor) -> Tensor:
    """x, or a copy of it, with the numbers of a head side by side in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()
