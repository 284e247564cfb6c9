"""Interval attention over rows in Triton: tiles of queries over the key blocks that they see.

After FlashAttention-2 (Dao 2023): one block of scores at a time, with an online softmax. The query heads that share a
KV head are stacked in a tile, so that a key is loaded once for all of them. `row_tiles` lists the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.row_plan import RowPlan, row_tiles
from ..device import block_memory, upload

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class TileSize:
    """The tile sizes of the kernel, and Triton's compile options."""

    rows: int  # queries times heads of a group, processed at once
    keys: int  # processed at once
    warps: int
    stages: int


# By bytes per number and padded head dimension. Not measured on a GPU yet; `benchmarks/gpu.py --sections kernels`
# compares them.
TILE_SIZES = {
    (2, 64): TileSize(128, 64, 4, 3),
    (2, 128): TileSize(128, 64, 8, 3),
    (2, 256): TileSize(128, 32, 8, 2),
    (4, 64): TileSize(64, 32, 8, 2),
    (4, 128): TileSize(64, 16, 8, 2),
    (4, 256): TileSize(32, 16, 8, 1),
}
# Replacements for devices on which the large tiles do not fit in shared memory.
SMALL_TILE_SIZES = {(2, 256): TileSize(64, 32, 8, 2)}

MUCH_MEMORY = 128 << 10  # bytes of shared memory per thread block, from which on the large tiles fit
Size = TypeVar("Size")


def tile_size(head_dim: int, dtype: torch.dtype, device: torch.device) -> TileSize:
    """Return the tile size for these heads on a device."""
    return fitting_on(device, (dtype.itemsize, padded(head_dim)), TILE_SIZES, SMALL_TILE_SIZES)


def fitting_on(device: torch.device, kind: tuple[int, int], large: dict[Any, Size], small: dict[Any, Size]) -> Size:
    """Return the size for a kind of heads: from `small` if it has the kind and the device has little shared memory.

    Otherwise the size is from `large`.
    """
    return small[kind] if kind in small and block_memory(device) < MUCH_MEMORY else large[kind]


def padded(head_dim: int) -> int:
    """Return the head dimension padded for the kernels: a power of two, at least 64."""
    return max(64, triton.next_power_of_2(head_dim))


def precision(dtype: torch.dtype) -> str:
    """Return Triton's name of the precision of products: full float32 instead of TF32 for float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


@dataclass(frozen=True, slots=True)
class RowTables:
    """The tiles of a plan on the device, int32, as in RowTiles."""

    size: TileSize
    block_q: int
    end: Tensor
    query_rows: Tensor
    positions: Tensor | None  # position of every key; None without a sliding window
    starts: Tensor | None  # the first row that sees each key; None without spans
    bounds: Tensor
    blocks: Tensor
    order: Tensor


def row_tables(plan: RowPlan, path_rows: int, group: int, size: TileSize, device: torch.device) -> RowTables:
    """Return the kernel's tables of a plan, on the device.

    Args:
        group: Query heads per KV head.
    """
    size = fitting(size, group)
    block_q = size.rows // group
    tiles = row_tiles(plan, path_rows, block_q, size.keys)
    arrays = {"end": plan.end, "query_rows": plan.query_rows, "bounds": tiles.bounds, "order": tiles.order}
    arrays["blocks"] = tiles.blocks
    if plan.window is not None:
        arrays["positions"] = plan.positions
    if plan.first is not None:
        arrays["starts"] = plan.first
    return RowTables(size=size, block_q=block_q, **({"positions": None, "starts": None} | upload(arrays, device)))


def fitting(size: TileSize, group: int) -> TileSize:
    """Return a tile size that fits at least one query."""
    if group <= size.rows:
        return size
    return TileSize(triton.next_power_of_2(group), size.keys, size.warps, size.stages)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: RowTables,
    *,
    scale: float,
    window: int | None = None,
    path_k: Tensor | None = None,
    path_v: Tensor | None = None,
    sinks: Tensor | None = None,
    with_sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `RowAttention.attend`. Shapes: as there, with contiguous last dimensions.

    Args:
        with_sums: Also return the base-2 log-sum-exp of each query's scores and sink, float32 [queries, heads].
    """
    queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty((queries, heads, dim), dtype=q.dtype, device=q.device)
    sums = torch.empty((queries, heads), dtype=torch.float32, device=q.device) if with_sums else None
    if not queries:
        return out, sums
    has_path = path_k is not None and len(path_k) > 0
    carried_k, carried_v = (path_k, path_v) if has_path else (k, v)
    size = tables.size
    _forward[(len(tables.order), kv_heads)](
        q, k, v, carried_k, carried_v, out, out if sums is None else sums, q if sinks is None else sinks,
        tables.query_rows, tables.end, tables.end if tables.positions is None else tables.positions,
        tables.end if tables.starts is None else tables.starts,
        tables.bounds, tables.blocks, tables.order,
        queries, len(k), len(path_k) if has_path else 0, len(tables.order),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        carried_k.stride(0), carried_k.stride(1), carried_v.stride(0), carried_v.stride(1),
        scale * LOG2_E, window or 0,
        HEADS=heads, GROUP=heads // kv_heads, BLOCK_Q=tables.block_q, DIM=dim, PADDED=padded(dim),
        ROWS=size.rows, KEYS=size.keys, HAS_PATH=has_path, WINDOW=window is not None,
        SPANS=tables.starts is not None, SUMS=with_sums, SINKS=sinks is not None, PRECISION=precision(q.dtype),
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return out, sums


@triton.jit
def stack(tile, kv_head, queries, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Return the query and the head of each row of a tile, and the mask of real rows.

    The heads of a group are stacked under each query.
    """
    row = tl.arange(0, ROWS)
    query = tile * BLOCK_Q + row // GROUP
    return query, kv_head * GROUP + row % GROUP, (row // GROUP < BLOCK_Q) & (query < queries)


@triton.jit
def see(
    rows, positions, base, at, inside, END, POSITIONS, STARTS, window, WINDOW: tl.constexpr, SPANS: tl.constexpr
):  # fmt: skip
    """Return a mask of the keys `at`, counted from `base`, that the queries at `rows` see: bool [queries, keys]."""
    end = tl.load(END + base + at, mask=inside, other=0)
    start = tl.load(STARTS + base + at, mask=inside, other=0) if SPANS else base + at
    visible = (start[None, :] <= rows[:, None]) & (rows[:, None] < end[None, :])
    if WINDOW:
        place = tl.load(POSITIONS + base + at, mask=inside, other=0)
        visible = visible & (positions[:, None] - place[None, :] < window)
    return visible


@triton.jit
def load_rows(X, offset, stride, inside, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of DIM numbers at X + offset * stride, [len(offset), PADDED]; masked and padding entries are zero."""
    dims = tl.arange(0, PADDED)
    pointers = X + offset[:, None].to(tl.int64) * stride + dims[None, :]
    return tl.load(pointers, mask=inside[:, None] & (dims[None, :] < DIM), other=0.0)


@triton.jit
def take_block(acc, total, largest, scores, v, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add a block to an online softmax, and return the new sums.

    Args:
        scores: To base 2, -inf for hidden keys.
    """
    new = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen no key yet: -inf minus -inf is NaN.
    base = tl.where(new == -float("inf"), 0.0, new) if MASKED else new
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, new


@triton.jit
def take_sink(acc, total, largest, sink):
    """Add a sink, a score without a value, to an online softmax, and return the new sums. -inf: no sink"""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new = tl.maximum(largest, sink)
    base = tl.where(new == -float("inf"), 0.0, new)
    shrink = tl.exp2(largest - base)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - base), new


@triton.jit
def hide(scores, v, visible):
    """Return scores and v with hidden keys removed.

    Scores are -inf for hidden keys, and NaN for visible keys with non-finite values. Non-finite values of v become
    zero, because zero times infinity is NaN: a row must not be affected by keys that it cannot see.
    """
    finite = tl.abs(v.to(tl.float32)) < float("inf")
    bad = tl.max(tl.where(finite, 0, 1), 1)
    scores = tl.where(bad[None, :] > 0, float("nan"), scores)
    return tl.where(visible, scores, -float("inf")), tl.where(finite, v, 0.0)


@triton.jit
def _visit(
    acc, total, largest, q, rows, positions,
    K, V, stride_k, stride_v, END, POSITIONS, STARTS, BLOCKS, first, last, base, count, scale, window,
    DIM: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    SPANS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the online softmax after the blocks [first, last) of the lists, over `count` keys counted from `base`."""
    keys = tl.arange(0, KEYS)
    dims = tl.arange(0, PADDED)
    for i in range(first, last):
        at = tl.load(BLOCKS + i) + keys
        offset = at.to(tl.int64)
        k_pointers = K + offset[None, :] * stride_k + dims[:, None]
        v_pointers = V + offset[:, None] * stride_v + dims[None, :]
        if MASKED:
            inside = at < count
            k = tl.load(k_pointers, mask=inside[None, :] & (dims[:, None] < DIM), other=0.0)
            v = tl.load(v_pointers, mask=inside[:, None] & (dims[None, :] < DIM), other=0.0)
        elif DIM == PADDED:
            k = tl.load(k_pointers)
            v = tl.load(v_pointers)
        else:
            k = tl.load(k_pointers, mask=dims[:, None] < DIM, other=0.0)
            v = tl.load(v_pointers, mask=dims[None, :] < DIM, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if MASKED:
            visible = see(rows, positions, base, at, inside, END, POSITIONS, STARTS, window, WINDOW, SPANS)
            scores, v = hide(scores, v, visible)
        acc, total, largest = take_block(acc, total, largest, scores, v, MASKED, PRECISION)
    return acc, total, largest


@triton.jit
def _forward(
    Q, K, V, PATH_K, PATH_V, OUT, SUMS_OUT, OF_HEADS, QUERY_ROWS, END, POSITIONS, STARTS, BOUNDS, BLOCKS, ORDER,
    queries, count, path_count, tiles,
    q_row, q_head, k_row, k_head, v_row, v_head, pk_row, pk_head, pv_row, pv_head,
    scale, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_PATH: tl.constexpr, WINDOW: tl.constexpr, SPANS: tl.constexpr,
    SUMS: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.load(ORDER + tl.program_id(0))
    kv_head = tl.program_id(1).to(tl.int64)
    query, head, real = stack(tile, kv_head, queries, ROWS, GROUP, BLOCK_Q)
    # Rows past the last query see nothing.
    rows = tl.load(QUERY_ROWS + query, mask=real, other=-1)
    positions = tl.load(POSITIONS + rows, mask=real, other=0) if WINDOW else rows
    q = load_rows(Q, query.to(tl.int64) * q_row + head * q_head, 1, real, DIM, PADDED)

    acc = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    largest = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    bounds = BOUNDS + tile
    lists = tiles + 1
    if HAS_PATH:
        acc, total, largest = _visit(
            acc, total, largest, q, rows, positions, PATH_K + kv_head * pk_head, PATH_V + kv_head * pv_head,
            pk_row, pv_row, END, POSITIONS, STARTS, BLOCKS, tl.load(bounds), tl.load(bounds + 1), 0, path_count, scale,
            window, DIM, PADDED, KEYS, False, WINDOW, SPANS, PRECISION,
        )  # fmt: skip
        acc, total, largest = _visit(
            acc, total, largest, q, rows, positions, PATH_K + kv_head * pk_head, PATH_V + kv_head * pv_head,
            pk_row, pv_row, END, POSITIONS, STARTS, BLOCKS, tl.load(bounds + lists), tl.load(bounds + lists + 1), 0,
            path_count, scale, window, DIM, PADDED, KEYS, True, WINDOW, SPANS, PRECISION,
        )  # fmt: skip
    acc, total, largest = _visit(
        acc, total, largest, q, rows, positions, K + kv_head * k_head, V + kv_head * v_head, k_row, v_row,
        END, POSITIONS, STARTS, BLOCKS, tl.load(bounds + 2 * lists), tl.load(bounds + 2 * lists + 1), path_count, count,
        scale, window, DIM, PADDED, KEYS, False, WINDOW, SPANS, PRECISION,
    )  # fmt: skip
    acc, total, largest = _visit(
        acc, total, largest, q, rows, positions, K + kv_head * k_head, V + kv_head * v_head, k_row, v_row,
        END, POSITIONS, STARTS, BLOCKS, tl.load(bounds + 3 * lists), tl.load(bounds + 3 * lists + 1), path_count, count,
        scale, window, DIM, PADDED, KEYS, True, WINDOW, SPANS, PRECISION,
    )  # fmt: skip

    if SINKS:
        sink = tl.load(OF_HEADS + head, mask=real, other=-float("inf"))
        acc, total, largest = take_sink(acc, total, largest, sink)
    total = tl.where(total == 0.0, 1.0, total)
    dims = tl.arange(0, PADDED)
    place = (query.to(tl.int64) * HEADS + head) * DIM
    mask = real[:, None] & (dims[None, :] < DIM)
    tl.store(OUT + place[:, None] + dims[None, :], (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
    if SUMS:
        tl.store(SUMS_OUT + query.to(tl.int64) * HEADS + head, largest + tl.log2(total), mask=real)
