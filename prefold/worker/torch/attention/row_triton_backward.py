"""Gradients of interval attention over rows, in Triton, after FlashAttention-2 (Dao 2023).

One kernel walks the key blocks of a tile of queries (gradients of q). The other walks the tiles that see a block of
keys (gradients of k and v, summed over the heads of a group). Path keys and new keys are concatenated first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.row_plan import RowPlan, key_tiles
from ..device import upload
from .row_triton import (
    LOG2_E,
    RowTables,
    TileSize,
    attend_rows,
    fitting,
    fitting_on,
    load_rows,
    padded,
    precision,
    row_tables,
    see,
    stack,
)

# By bytes per number and padded head dimension; not measured on a GPU yet. Tiles with fewer than 64 rows do not use
# Hopper's matrix instructions; they are chosen where larger tiles would not fit in the registers.
TILE_SIZES = {
    (2, 64): TileSize(64, 64, 4, 2),
    (2, 128): TileSize(64, 64, 8, 2),
    (2, 256): TileSize(32, 64, 8, 1),
    (4, 64): TileSize(32, 32, 4, 1),
    (4, 128): TileSize(32, 32, 8, 1),
    (4, 256): TileSize(32, 32, 8, 1),
}
# Replacements for devices on which the large tiles do not fit in shared memory.
SMALL_TILE_SIZES = {(2, 256): TileSize(32, 32, 8, 1)}


@dataclass(frozen=True, slots=True)
class KeyTables:
    """The tables of the backward pass: a plan's tiles of queries, and the tiles by key block, int32, as in KeyTiles."""

    rows: RowTables
    bounds: Tensor
    tiles: Tensor
    order: Tensor


def backward_tables(plan: RowPlan, group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> KeyTables:
    """Return the tables of a plan for the backward pass.

    Args:
        group: Query heads per KV head.
    """
    kind = dtype.itemsize, padded(head_dim)
    size = fitting(fitting_on(device, kind, TILE_SIZES, SMALL_TILE_SIZES), group)
    rows = row_tables(plan, 0, group, size, device)
    tiles = key_tiles(plan, rows.block_q, size.keys)
    return KeyTables(rows, **upload({"bounds": tiles.bounds, "tiles": tiles.tiles, "order": tiles.order}, device))


def attend_rows_with_gradient(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: RowPlan, forward: RowTables, *, scale: float
) -> Tensor:
    """Compute `RowAttention.attend`, differentiable, with all keys in k and v.

    Args:
        forward: The plan's tables.
    """
    group = q.shape[1] // k.shape[1]
    backward = plan.kept(
        ("keys", group, q.shape[2], q.dtype, q.device),
        lambda: backward_tables(plan, group, q.shape[2], q.dtype, q.device),
    )
    return _Attention.apply(q, k, v, sinks, forward, backward, scale, plan.window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, forward: RowTables, backward: KeyTables,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        out, sums = attend_rows(q, k, v, forward, scale=scale, window=window, sinks=sinks, with_sums=True)
        ctx.save_for_backward(q, k, v, sinks, out, sums)
        ctx.tables, ctx.scale, ctx.window = backward, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, sums = ctx.saved_tensors
        of_sinks = None
        if sinks is not None:  # a key with value zero; its softmax weight is one minus the weights of the other keys
            shares = torch.exp2(sinks.float() * LOG2_E - sums)
            of_sinks = -(shares * (out.float() * grad.float()).sum(-1)).sum(0).to(sinks.dtype)
        of_rows = gradients(q, k, v, out, sums, grad, ctx.tables, scale=ctx.scale, window=ctx.window)
        return *of_rows, of_sinks, *[None] * 4


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    grad: Tensor,
    tables: KeyTables,
    *,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        out, sums: From `attend_rows`.
        grad: The gradient of out, shaped like it.
    """
    queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    grad = grad.contiguous()
    deltas = (out.float() * grad.float()).sum(-1)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    rows, size = tables.rows, tables.rows.size
    shared = (
        rows.query_rows, rows.end, rows.end if rows.positions is None else rows.positions,
        rows.end if rows.starts is None else rows.starts,
    )  # fmt: skip
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    constants: dict[str, Any] = {
        "HEADS": heads, "KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "BLOCK_Q": rows.block_q, "DIM": dim,
        "PADDED": padded(dim), "ROWS": size.rows, "KEYS": size.keys, "WINDOW": window is not None,
        "SPANS": rows.starts is not None,
        "PRECISION": precision(q.dtype), "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
    numbers = (scale * LOG2_E, scale, window or 0)
    if queries:
        _gradient_q[(len(rows.order), kv_heads)](
            q, k, v, grad, sums, deltas, dq, *shared, rows.bounds, rows.blocks, rows.order,
            queries, len(k), len(rows.order), *strides, *numbers, **constants,
        )  # fmt: skip
    if len(k):
        _gradient_kv[(len(tables.order), kv_heads)](
            q, k, v, grad, sums, deltas, dk, dv, *shared, tables.bounds, tables.tiles, tables.order,
            queries, len(k), len(tables.order), *strides, *numbers, **constants,
        )  # fmt: skip
    return dq, dk, dv


@triton.jit
def _gradient_q(
    Q, K, V, GRAD, SUMS, DELTAS, DQ, QUERY_ROWS, END, POSITIONS, STARTS, BOUNDS, BLOCKS, ORDER,
    queries, count, tiles, q_row, q_head, k_row, k_head, v_row, v_head, scale2, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SPANS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.load(ORDER + tl.program_id(0))
    kv_head = tl.program_id(1).to(tl.int64)
    query, head, real = stack(tile, kv_head, queries, ROWS, GROUP, BLOCK_Q)
    rows = tl.load(QUERY_ROWS + query, mask=real, other=-1)
    positions = tl.load(POSITIONS + rows, mask=real, other=0) if WINDOW else rows
    place = query.to(tl.int64) * HEADS + head
    q = load_rows(Q, query.to(tl.int64) * q_row + head * q_head, 1, real, DIM, PADDED)
    grad = load_rows(GRAD, place, DIM, real, DIM, PADDED)
    sums = tl.load(SUMS + place, mask=real, other=float("inf"))
    deltas = tl.load(DELTAS + place, mask=real, other=0.0)

    keys = tl.arange(0, KEYS)
    dq = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    for part in tl.static_range(2):  # fully visible blocks, then partly visible ones
        bounds = BOUNDS + (2 + part) * (tiles + 1) + tile
        for i in range(tl.load(bounds), tl.load(bounds + 1)):
            at = tl.load(BLOCKS + i) + keys
            inside = at < count
            k = load_rows(K + kv_head * k_head, at, k_row, inside, DIM, PADDED)
            v = load_rows(V + kv_head * v_head, at, v_row, inside, DIM, PADDED)
            weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2 - sums[:, None])
            slopes = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - deltas[:, None])
            if part == 1:
                visible = see(rows, positions, 0, at, inside, END, POSITIONS, STARTS, window, WINDOW, SPANS)
                slopes = tl.where(visible, slopes, 0.0)
            dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision=PRECISION)
    load_dims = tl.arange(0, PADDED)
    pointers = DQ + place[:, None] * DIM + load_dims[None, :]
    tl.store(pointers, (dq * scale).to(DQ.dtype.element_ty), mask=real[:, None] & (load_dims[None, :] < DIM))


@triton.jit
def _gradient_kv(
    Q, K, V, GRAD, SUMS, DELTAS, DK, DV, QUERY_ROWS, END, POSITIONS, STARTS, BOUNDS, TILES, ORDER,
    queries, count, blocks, q_row, q_head, k_row, k_head, v_row, v_head, scale2, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SPANS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.load(ORDER + tl.program_id(0))
    kv_head = tl.program_id(1).to(tl.int64)
    at = block * KEYS + tl.arange(0, KEYS)
    inside = at < count
    k = load_rows(K + kv_head * k_head, at, k_row, inside, DIM, PADDED)
    v = load_rows(V + kv_head * v_head, at, v_row, inside, DIM, PADDED)

    dk = tl.zeros([KEYS, PADDED], dtype=tl.float32)
    dv = tl.zeros([KEYS, PADDED], dtype=tl.float32)
    for part in tl.static_range(2):
        bounds = BOUNDS + part * (blocks + 1) + block
        for i in range(tl.load(bounds), tl.load(bounds + 1)):
            query, head, real = stack(tl.load(TILES + i), kv_head, queries, ROWS, GROUP, BLOCK_Q)
            place = query.to(tl.int64) * HEADS + head
            q = load_rows(Q, query.to(tl.int64) * q_row + head * q_head, 1, real, DIM, PADDED)
            grad = load_rows(GRAD, place, DIM, real, DIM, PADDED)
            # Padding queries contribute exp2(-inf) = 0.
            sums = tl.load(SUMS + place, mask=real, other=float("inf"))
            deltas = tl.load(DELTAS + place, mask=real, other=0.0)
            weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2 - sums[:, None])
            slopes = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - deltas[:, None])
            if part == 1:
                rows = tl.load(QUERY_ROWS + query, mask=real, other=-1)
                positions = tl.load(POSITIONS + rows, mask=real, other=0) if WINDOW else rows
                visible = see(rows, positions, 0, at, inside, END, POSITIONS, STARTS, window, WINDOW, SPANS)
                weights = tl.where(visible, weights, 0.0)
                slopes = tl.where(visible, slopes, 0.0)
            dv = tl.dot(tl.trans(weights.to(grad.dtype)), grad, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(slopes.to(q.dtype)), q, dk, input_precision=PRECISION)
    dims = tl.arange(0, PADDED)
    place = ((at.to(tl.int64) * KV_HEADS + kv_head) * DIM)[:, None] + dims[None, :]
    mask = inside[:, None] & (dims[None, :] < DIM)
    tl.store(DK + place, (dk * scale).to(DK.dtype.element_ty), mask=mask)
    tl.store(DV + place, dv.to(DV.dtype.element_ty), mask=mask)
