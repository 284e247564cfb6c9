"""Attention over slots in Triton, for generation: tiles of queries over the keys that any query of the tile sees.

Like flash-decoding (Dao et al. 2023), the kernel splits a long list of keys into parts, reads them in parallel, and
joins the sums. Here a list belongs to a tile of neighbouring queries, so keys that sequences share are read once per
tile. `slot_tiles` makes the lists as stretches of neighbouring slots; `_spread` writes them out key by key, once per
step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.slot_plan import SlotPlan, pick_rows, slot_tiles, stretches
from ..device import upload
from .heads import Heads
from .row_triton import LOG2_E, fitting_on, hide, load_rows, padded, precision, stack, take_block, take_sink


@dataclass(frozen=True, slots=True)
class BlockSize:
    """The block sizes of the kernel."""

    keys: int  # processed at once
    stages: int  # Triton's pipeline stages
    many_rows: int  # tiles with at least this many rows use eight warps instead of four


# By bytes per number and padded head dimension. Not measured on a GPU yet; `benchmarks/gpu.py --sections kernels`
# compares them. With five stages, Triton keeps two blocks in flight, because it counts the loads of slots too.
BLOCK_SIZES = {
    (2, 64): BlockSize(64, 5, 128),
    (2, 128): BlockSize(64, 5, 128),
    (2, 256): BlockSize(32, 5, 64),
    (4, 64): BlockSize(32, 2, 32),
    (4, 128): BlockSize(16, 2, 32),
    (4, 256): BlockSize(16, 1, 32),
}
# Replacements for devices on which the large blocks do not fit in shared memory.
SMALL_BLOCK_SIZES = {(2, 256): BlockSize(16, 2, 64)}
SPREAD = 256  # keys that `_spread` writes at once
WRITTEN = 4096  # numbers of k, or of v, that `_write` writes at once


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The tiles of a plan on the device, int32, as in SlotTiles."""

    rows: int
    block_q: int
    block: BlockSize
    keys: Tensor  # [4, num_keys]: of each list entry its slot, first query, one past the last query, and position
    items: Tensor
    tile_items: Tensor
    query_positions: Tensor | None  # with a sliding window only

    @property
    def num_items(self) -> int:
        """Return the number of work items."""
        return self.items.shape[1]


def block_size(heads: Heads, device: torch.device) -> BlockSize:
    """Return the block sizes for these heads on a device."""
    return fitting_on(device, (heads.dtype.itemsize, padded(heads.head_dim)), BLOCK_SIZES, SMALL_BLOCK_SIZES)


def slot_tables(plan: SlotPlan, heads: Heads, device: torch.device) -> SlotTables:
    """Return the kernel's tables of a plan, on the device.

    Some of them are computed on the device, after the work that is queued there.
    """
    block = block_size(heads, device)
    joined = stretches(plan.runs)
    rows = pick_rows(joined, heads.group, heads.dtype.itemsize)
    block_q = rows // heads.group
    tiles = slot_tiles(plan, joined, block_q, block.keys)
    arrays = {"stretches": tiles.stretches, "items": tiles.items, "tile_items": tiles.tile_items}
    if plan.window is not None:
        arrays["query_positions"] = plan.query_positions
    on_device = upload(arrays, device)
    keys = torch.empty((4, tiles.num_keys), dtype=torch.int32, device=device)
    spread(on_device["stretches"], keys)
    return SlotTables(
        rows=rows,
        block_q=block_q,
        block=block,
        keys=keys,
        items=on_device["items"],
        tile_items=on_device["tile_items"],
        query_positions=on_device.get("query_positions"),
    )


def spread(stretches: Tensor, keys: Tensor) -> None:
    """Expand stretches, int32 [STRETCH_FIELDS, s], into keys, int32 [4, at least their number of keys]."""
    count = stretches.shape[1]
    if count:
        _spread[(count,)](stretches, keys, count, keys.shape[1], SPREAD=SPREAD)


def attend_slots(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: SlotTables,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention of q [queries, heads, dim], shaped like q. The last dimension of q is contiguous.

    Args:
        keys, values: [slots, kv_heads, dim].
        sinks: [heads].
    """
    queries, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.empty((queries, heads, dim), dtype=q.dtype, device=q.device)
    if not queries:
        return out
    rows, items = tables.rows, tables.num_items
    sums = torch.empty((items, kv_heads, rows), dtype=torch.float32, device=q.device)
    parts = torch.empty((items, kv_heads, rows, dim), dtype=torch.float32, device=q.device)
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "GROUP": group, "BLOCK_Q": tables.block_q, "DIM": dim}
    shape |= {"PADDED": padded(dim), "ROWS": rows, "SINKS": sinks is not None}
    of_heads = q if sinks is None else sinks
    _attend[(items * kv_heads,)](
        q, keys, values, out, parts, sums, of_heads, tables.items, tables.keys,
        tables.items if tables.query_positions is None else tables.query_positions,
        queries, items, tables.keys.shape[1],
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        scale * LOG2_E, window or 0,
        **shape, KEYS=tables.block.keys, WINDOW=window is not None, PRECISION=precision(q.dtype),
        num_warps=8 if rows >= tables.block.many_rows else 4, num_stages=tables.block.stages,
    )  # fmt: skip
    _join[(queries * kv_heads,)](
        parts, sums, of_heads, tables.tile_items, out, **shape, GROUPS=triton.next_power_of_2(group), num_warps=2
    )
    return out


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k, v [n, kv_heads, dim] to slots int64 [n] of keys, values [slots, kv_heads, dim]."""
    rows, heads, dim = k.shape
    if not rows:
        return
    width = triton.next_power_of_2(heads * dim)
    block = max(1, WRITTEN // width)
    _write[(triton.cdiv(rows, block),)](
        k, v, keys, values, slots, rows, keys.shape[0], k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1),
        v.stride(2), keys.stride(0), values.stride(0),
        HEADS=heads, DIM=dim, PADDED=width, ROWS=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _spread(STRETCHES, KEYS, stretches, keys, SPREAD: tl.constexpr):
    """Write one stretch, key by key."""
    field = STRETCHES + tl.program_id(0)
    place = tl.load(field)
    slot = tl.load(field + stretches)
    count = tl.load(field + 2 * stretches)
    position = tl.load(field + 3 * stretches)
    first = tl.load(field + 4 * stretches)
    step = tl.load(field + 5 * stretches)
    last = tl.load(field + 6 * stretches)
    for begin in range(0, count, SPREAD):
        at = begin + tl.arange(0, SPREAD)
        mask = at < count
        to = KEYS + place + at
        tl.store(to, slot + at, mask=mask)
        tl.store(to + keys, first + at * step, mask=mask)
        tl.store(to + 2 * keys, last + at * 0, mask=mask)
        tl.store(to + 3 * keys, position + at, mask=mask)


@triton.jit
def _visit(
    acc, total, largest, q, query, positions, K, V, k_row, v_row, LISTS, keys, start, stop, scale, window,
    DIM: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the online softmax after the list entries [start, stop)."""
    for begin in range(start, stop, KEYS):
        at = begin + tl.arange(0, KEYS)
        inside = at < stop
        slots = tl.load(LISTS + at, mask=inside, other=0)
        k = load_rows(K, slots, k_row, inside, DIM, PADDED)
        v = load_rows(V, slots, v_row, inside, DIM, PADDED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            first = tl.load(LISTS + keys + at, mask=inside, other=0)
            last = tl.load(LISTS + 2 * keys + at, mask=inside, other=0)
            visible = (first[None, :] <= query[:, None]) & (query[:, None] < last[None, :])
            if WINDOW:
                place = tl.load(LISTS + 3 * keys + at, mask=inside, other=0)
                visible = visible & (positions[:, None] - place[None, :] < window)
            scores, v = hide(scores, v, visible)
        acc, total, largest = take_block(acc, total, largest, scores, v, MASKED, PRECISION)
    return acc, total, largest


@triton.jit
def _attend(
    Q, K, V, OUT, PARTS, SUMS, OF_HEADS, ITEMS, LISTS, POSITIONS, queries, items, keys,
    q_row, q_head, k_row, k_head, v_row, v_head, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) // KV_HEADS
    tile = tl.load(ITEMS + item)
    if tile < 0:  # a padding entry
        return
    start = tl.load(ITEMS + items + item)
    whole = tl.load(ITEMS + 2 * items + item)
    stop = tl.load(ITEMS + 3 * items + item)
    alone = tl.load(ITEMS + 4 * items + item)
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    query, head, real = stack(tile, kv_head, queries, ROWS, GROUP, BLOCK_Q)
    positions = tl.load(POSITIONS + query, mask=real, other=0) if WINDOW else query
    q = load_rows(Q, query.to(tl.int64) * q_row + head * q_head, 1, real, DIM, PADDED)
    # Padding queries see nothing.
    query = tl.where(real, query, -1)

    acc = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    largest = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    acc, total, largest = _visit(
        acc, total, largest, q, query, positions, K + kv_head * k_head, V + kv_head * v_head, k_row, v_row,
        LISTS, keys, start, whole, scale, window, DIM, PADDED, KEYS, False, WINDOW, PRECISION,
    )  # fmt: skip
    acc, total, largest = _visit(
        acc, total, largest, q, query, positions, K + kv_head * k_head, V + kv_head * v_head, k_row, v_row,
        LISTS, keys, whole, stop, scale, window, DIM, PADDED, KEYS, True, WINDOW, PRECISION,
    )  # fmt: skip

    dims = tl.arange(0, PADDED)
    if SINKS:  # if items are joined, `_join` adds the sink
        sink = tl.load(OF_HEADS + head, mask=real & (alone != 0), other=-float("inf"))
        acc, total, largest = take_sink(acc, total, largest, sink)
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    acc = acc / total[:, None]
    if alone != 0:
        place = (query.to(tl.int64) * HEADS + head) * DIM
        mask = real[:, None] & (dims[None, :] < DIM)
        tl.store(OUT + place[:, None] + dims[None, :], acc.to(OUT.dtype.element_ty), mask=mask)
    else:
        place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(PARTS + place[:, None] * DIM + dims[None, :], acc, mask=dims[None, :] < DIM)
        tl.store(SUMS + place, tl.where(seen, largest + tl.log2(total), -float("inf")))


@triton.jit
def _join(
    PARTS, SUMS, OF_HEADS, TILE_ITEMS, OUT,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write one query and KV head: the results of the tile's items, weighted by their sums of weights."""
    query = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    tile = query // BLOCK_Q
    first = tl.load(TILE_ITEMS + tile)
    last = tl.load(TILE_ITEMS + tile + 1)
    if last - first < 2:
        return
    member = tl.arange(0, GROUPS)
    real = member < GROUP
    row = (query - tile * BLOCK_Q) * GROUP + member
    base_row = (kv_head * ROWS + row).to(tl.int64)
    dims = tl.arange(0, PADDED)
    acc = tl.zeros([GROUPS, PADDED], dtype=tl.float32)
    total = tl.zeros([GROUPS], dtype=tl.float32)
    largest = tl.full([GROUPS], -float("inf"), dtype=tl.float32)
    for item in range(first, last):
        place = item * (KV_HEADS * ROWS) + base_row
        sums = tl.load(SUMS + place, mask=real, other=-float("inf"))
        mask = real[:, None] & (dims[None, :] < DIM)
        part = tl.load(PARTS + place[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
        new = tl.maximum(largest, sums)
        base = tl.where(new == -float("inf"), 0.0, new)
        weight = tl.exp2(sums - base)
        shrink = tl.exp2(largest - base)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        largest = new
    if SINKS:
        sink = tl.load(OF_HEADS + kv_head * GROUP + member, mask=real, other=-float("inf"))
        acc, total, largest = take_sink(acc, total, largest, sink)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = query.to(tl.int64) * HEADS + kv_head * GROUP + member
    mask = real[:, None] & (dims[None, :] < DIM)
    tl.store(OUT + place[:, None] * DIM + dims[None, :], acc.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _write(
    K, V, KEYS, VALUES, SLOTS, rows, count, k_row, k_head, k_dim, v_row, v_head, v_dim, key_row, value_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(SLOTS + row, mask=row < rows, other=-1)
    number = tl.arange(0, PADDED)
    head = number // DIM
    dim = number % DIM
    # Invalid slots are skipped. The host cannot check them without waiting for the device.
    mask = ((slot >= 0) & (slot < count))[:, None] & (number < HEADS * DIM)[None, :]
    k = tl.load(K + row[:, None] * k_row + (head * k_head + dim * k_dim)[None, :], mask=mask)
    v = tl.load(V + row[:, None] * v_row + (head * v_head + dim * v_dim)[None, :], mask=mask)
    tl.store(KEYS + slot[:, None] * key_row + number[None, :], k, mask=mask)
    tl.store(VALUES + slot[:, None] * value_row + number[None, :], v, mask=mask)
