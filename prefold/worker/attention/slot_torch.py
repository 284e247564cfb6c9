"""Attention over slots in PyTorch: blocks of queries over gathered keys; any device, any float dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .row_attention import attend_block, finite
from .slot_plan import SlotPlan, seen_by_query

# Queries share one gathered list of keys as long as they see, together, at least this part of the square of queries
# and keys; and at most so many of them.
BLOCK_FILLED = 0.4
BLOCK_QUERIES = 256


def attend_slots(
    q: Tensor,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    plan: SlotPlan,
    *,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns softmax(q k^T * scale) v, each query over the slots that `plan` shows it; q [queries, heads, dim].

    read: gives the keys and values in slots int64 [n], [n, kv_heads, dim] each. cap: as of Heads; sinks: as of
    `RowAttention.attend`.
    """
    gathers = plan.kept(("gathers", q.device), lambda: [DeviceBlock.of(b, plan, q.device) for b in slot_blocks(plan)])
    out = torch.empty_like(q)
    for gather in gathers:
        keys, values, bad = finite(*read(gather.slots))
        block = slice(gather.start, gather.stop)
        out[block] = attend_block(q[block], keys, values, bad, gather.visible, scale, cap, sinks)
    return out


@dataclass(frozen=True, slots=True)
class SlotBlock:
    """A block is queries [start, stop), and the keys any of them sees: int64 [keys] each, as in KeyRuns."""

    start: int
    stop: int
    slots: np.ndarray
    positions: np.ndarray
    first: np.ndarray
    last: np.ndarray


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A DeviceBlock is a block on its device: slots int64 [keys], visible bool [queries, keys]."""

    start: int
    stop: int
    slots: Tensor
    visible: Tensor

    @classmethod
    def of(cls, block: SlotBlock, plan: SlotPlan, device: torch.device) -> DeviceBlock:
        slots, positions, first, last = (
            torch.from_numpy(a).to(device) for a in (block.slots, block.positions, block.first, block.last)
        )
        query = torch.arange(block.start, block.stop, device=device)[:, None]
        visible = (first <= query) & (query < last)
        if plan.window is not None:
            of_queries = torch.from_numpy(plan.query_positions[block.start : block.stop]).to(device)
            visible &= of_queries[:, None] - positions < plan.window
        return cls(block.start, block.stop, slots, visible)


def slot_blocks(plan: SlotPlan) -> Iterator[SlotBlock]:
    """Yields blocks of queries with the keys any query of the block sees."""
    runs = plan.runs
    visible = seen_by_query(runs, plan.num_queries).tolist()
    fresh = np.bincount(runs.first, runs.count, plan.num_queries).astype(np.int64).tolist()
    start = 0
    while start < plan.num_queries:
        stop, keys, filled = start + 1, visible[start], visible[start]
        while stop < min(plan.num_queries, start + BLOCK_QUERIES):
            keys, filled = keys + fresh[stop], filled + visible[stop]
            if filled < BLOCK_FILLED * keys * (stop + 1 - start):
                break
            stop += 1
        yield slot_block(plan, start, stop)
        start = stop


def slot_block(plan: SlotPlan, start: int, stop: int) -> SlotBlock:
    """Returns the block of the queries [start, stop)."""
    runs = plan.runs
    at = np.flatnonzero((runs.first < stop) & (runs.last > start))
    count = runs.count[at]
    within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    slots, positions, first, last = (
        np.repeat(a[at], count) for a in (runs.start, runs.position, runs.first, runs.last)
    )
    slots, positions = slots + within, positions + within
    if plan.window is not None:
        near = positions > plan.query_positions[start:stop].min() - plan.window
        slots, positions, first, last = slots[near], positions[near], first[near], last[near]
    return SlotBlock(start, stop, slots, positions, first, last)
