"""The KV store of generation: steps write rows to its slots, and attend over slots.

On a CPU it has the memory layout of the compiled kernels. `attend_slots` is the PyTorch code: blocks of queries over
gathered keys, for any device and any float dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .... import kernels
from ...attention.slot_plan import KeyRuns, SlotPlan, plan_slots, seen_by_query
from ...native.memory import zero_pages
from ...native.store import NativeStore, StoreLayout, slot_bytes
from ..tensors import ARRAY_DTYPES, array_of, tensor_of
from . import gpu
from .heads import Heads, check_sinks
from .row_attention import attend_block, finite

# Queries share one gathered list of keys if, together, they see at least this part of the rectangle of queries and
# keys. At most this many queries share a list.
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
    """Return softmax(q k^T * scale) v; each query attends over its visible slots in `plan`.

    Args:
        q: [queries, heads, dim].
        read: Returns the keys and values of slots int64 [n], [n, kv_heads, dim] each.
        cap: As in Heads.
        sinks: As in `RowAttention.attend`.
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
    """Queries [start, stop), and the keys that any of them sees: int64 [keys] arrays, as in KeyRuns."""

    start: int
    stop: int
    slots: np.ndarray
    positions: np.ndarray
    first: np.ndarray
    last: np.ndarray


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A SlotBlock on its device."""

    start: int
    stop: int
    slots: Tensor  # int64 [keys]
    visible: Tensor  # bool [queries, keys]

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
    """Yield blocks of queries with the keys that any query of the block sees."""
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
    """Return the block of the queries [start, stop)."""
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


def layout_of(compiled: kernels.Kernels, heads: Heads) -> StoreLayout:
    """Return the memory layout of K/V of these heads for the compiled kernels."""
    kept = None if heads.kept is None else ARRAY_DTYPES[heads.kept]
    return StoreLayout.of(compiled, heads.sizes, ARRAY_DTYPES[heads.dtype], kept)


def _compiled(heads: Sequence[Heads], device: torch.device) -> kernels.Kernels | None:
    """Return the compiled kernels if they support the heads of all planes."""
    found = [of.compiled(device) for of in heads]
    return found[0] if found and all(found) else None


class KVStore:
    """The K/V of `slots` rows for every plane, and attention over it.

    The implementation is chosen at construction: the compiled kernels on a CPU, Triton on a GPU, else PyTorch. Without
    compiled kernels, a plane is two tensors: keys [slots, kv_heads, head_dim] and values. Slot 0 is scratch: any number
    of rows of one write may go there, and no run names it.

    Attributes:
        heads: The heads of each plane.
        packed: The store of the compiled kernels.
        compiled: The compiled kernels. None: Triton or PyTorch is used.
    """

    def __init__(self, heads: Sequence[Heads], slots: int, device: torch.device | str = "cpu"):
        self.heads, self.slots, self.device = list(heads), slots, torch.device(device)
        self.compiled = _compiled(heads, self.device)
        self._fused = not self.compiled and all(of.fits(self.device) for of in heads)
        if self.compiled:
            layouts = [layout_of(self.compiled, of) for of in heads]
            self.packed = NativeStore(layouts, slots, self.compiled)
        else:
            self._memory = list(map(self._plane, heads))

    def _plane(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Allocate the keys and values of a plane."""
        keys = self._rows(heads, heads.head_dim)
        return keys, keys[..., : heads.value_dim] if heads.in_keys else self._rows(heads, heads.value_dim)

    def _rows(self, heads: Heads, dim: int) -> Tensor:
        """Return zeros, [slots, kv_heads, dim]."""
        shape, dtype = (self.slots, heads.kv_heads, dim), heads.kept or heads.dtype
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.from_numpy(zero_pages(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all planes."""
        return self.packed.num_bytes if self.compiled else self.slots * self.bytes_per_slot(self.heads, self.device)

    @staticmethod
    def bytes_per_slot(heads: Sequence[Heads], device: torch.device | str = "cpu") -> int:
        """Return the bytes of one slot in all planes, rounded up."""
        compiled = _compiled(heads, torch.device(device))
        if compiled:
            return slot_bytes([layout_of(compiled, of) for of in heads])
        return sum(of.sizes.numbers * (of.kept or of.dtype).itemsize for of in heads)

    def plan(
        self,
        runs: KeyRuns,
        num_queries: int,
        query_positions: np.ndarray | None = None,
        window: int | None = None,
        plane: int = 0,
    ) -> SlotPlan:
        """Return the plan of a step for attention over a plane. Arguments and errors are as in `plan_slots`."""
        group, is_compiled = self.heads[plane].group, self.compiled is not None
        return plan_slots(runs, num_queries, query_positions, window, group=group, compiled=is_compiled)

    def write(self, plane: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k [n, kv_heads, head_dim] and v [n, kv_heads, value_dim] to slots int64 [n], on the store's device.

        The slots are distinct, except that slot 0 may repeat. Raise ValueError for a slot outside the store, or if
        shapes do not fit.
        """
        heads = self.heads[plane]
        fits = k.shape == (len(slots), heads.kv_heads, heads.head_dim) and v.shape == (*k.shape[:2], heads.value_dim)
        if not fits or not k.dtype == v.dtype == heads.dtype or slots.dtype != torch.int64:
            raise ValueError(
                f"k {list(k.shape)} ({k.dtype}) and v {list(v.shape)} ({v.dtype}) do not fit {len(slots)} slots"
                f"; pass int64 slots, k [slots, {heads.kv_heads}, {heads.head_dim}] and v [slots, {heads.kv_heads}, "
                f"{heads.value_dim}] of {heads.dtype}"
            )
        if self.compiled:
            self.packed.write(plane, *(array_of(x) for x in (slots.contiguous(), gpu.dense(k), gpu.dense(v))))
            return
        if slots.device.type == "cpu":  # a GPU checks on its own; checking here would wait for it
            _check_slots(slots, self.slots)
        keys, values = self.plane(plane)
        if self._fused:
            gpu.write_slots(keys, values, slots, k, v)
        else:
            keys.index_copy_(0, slots, k.to(keys.dtype))
            if not heads.in_keys:
                values.index_copy_(0, slots, v.to(values.dtype))

    def read(self, plane: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of slots int64 [n], [n, kv_heads, head_dim] each."""
        if self.compiled:
            keys, values = map(tensor_of, self.packed.read(plane, array_of(slots)))
            return keys, values
        keys, values = (x.index_select(0, slots).to(self.heads[plane].dtype) for x in self.plane(plane))
        return keys, values

    def plane(self, plane: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one plane, [slots, kv_heads, head_dim] each. Not for the compiled kernels."""
        keys, values = self._memory[plane]
        return keys, values

    def attend(self, plane: int, q: Tensor, plan: SlotPlan, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Return softmax(q k^T * scale) v; each query attends over its visible slots in `plan`.

        Return [queries, heads, value_dim]. Raise ValueError if the tensors do not fit the plan or the heads, or if the
        plan has slots outside the store.

        Args:
            q: [queries, heads, head_dim].
            sinks: As in `RowAttention.attend`.
        """
        heads = self.heads[plane]
        self._check(q, plan, heads)
        check_sinks(sinks, heads)
        if self.compiled and plan.lists is not None and scale > 0:
            numbers, cap = array_of(gpu.dense(q)), heads.cap
            struct = self.packed.planes[plane].struct
            return tensor_of(self.compiled.slot_attention(struct, numbers, plan.lists, scale, cap, array_of(sinks)))
        if self._fused:
            return gpu.attend_slots(q, *self.plane(plane), plan, heads, scale=scale, sinks=sinks)
        read = partial(self.read, plane)
        return attend_slots(q, read, plan, scale=scale, cap=heads.cap, sinks=sinks)

    def _check(self, q: Tensor, plan: SlotPlan, heads: Heads) -> None:
        if len(q) != plan.num_queries:
            raise ValueError(f"got {len(q)} queries, the plan has {plan.num_queries}; pass the plan of this step")
        if q.shape[1:] != (heads.heads, heads.head_dim) or q.dtype != heads.dtype:
            raise ValueError(
                f"q {list(q.shape)} ({q.dtype}) does not fit {heads.heads} heads of {heads.head_dim} ({heads.dtype})"
                "; pass q [queries, heads, head_dim]"
            )
        if plan.slots_needed > self.slots:
            raise ValueError(
                f"the plan needs {plan.slots_needed} slots, the store has {self.slots}; pass runs within the store"
            )


def _check_slots(slots: Tensor, count: int) -> None:
    if len(slots) and (slots.min() < 0 or slots.max() >= count):
        raise ValueError(f"a slot is outside the KV store; pass slots in [0, {count})")
