"""Attention over a store of K/V in slots, as generation wants it: plan once a step, write and attend once a plane."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..errors import InputError
from . import gpu
from .blocked import attend_block, finite
from .packed import PackedLayout, PackedPlane, can_pack

__all__ = ["KVStore", "KeyRuns", "SlotPlan", "plan_slots"]

# Queries that share one gathered key list in the PyTorch form: as many as see, together, at least so much of
# the square of queries and keys.
BLOCK_QUERIES = 256
BLOCK_FILLED = 0.4
MAX_SLOTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KeyRuns:
    """Keys as runs of neighbouring slots; int64 arrays of equal length, ancestors before descendants.

    start        first slot
    count        slots, at least one
    position     position of the first key; those after it follow one by one
    first, last  queries [first, last) see all keys of the run
    """

    start: np.ndarray
    count: np.ndarray
    position: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class SlotBlock:
    """Queries [start, stop), and the keys any of them sees: int64 [keys] each, as in KeyRuns."""

    start: int
    stop: int
    slots: np.ndarray
    positions: np.ndarray
    first: np.ndarray
    last: np.ndarray


@dataclass(frozen=True)
class SlotPlan:
    """What attention over slots needs to know about a step, for one window size. Made by `plan_slots`; never changed.

    runs             who sees which slots
    num_queries      rows of the step
    query_positions  int64 [queries] when there is a window, else None
    window           a key must also be fewer than this many positions before the query; None: no limit
    slots_needed     one more than the last slot of a run
    tiles            what the compiled kernel reads; None where there is none
    """

    runs: KeyRuns
    num_queries: int
    query_positions: np.ndarray | None
    window: int | None
    slots_needed: int
    tiles: kernels.SlotTiles | None = None
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once a key: a step has many planes."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def gathers(self, device: torch.device) -> list[_Gather]:
        """What the PyTorch form reads."""
        return self.kept(("gathers", device), lambda: [_Gather.of(block, self, device) for block in slot_blocks(self)])


@dataclass(frozen=True, slots=True)
class _Gather:
    """A block on its device: slots int64 [keys], visible bool [queries, keys]."""

    start: int
    stop: int
    slots: Tensor
    visible: Tensor

    @classmethod
    def of(cls, block: SlotBlock, plan: SlotPlan, device: torch.device) -> _Gather:
        slots, positions, first, last = (
            torch.from_numpy(a).to(device) for a in (block.slots, block.positions, block.first, block.last)
        )
        query = torch.arange(block.start, block.stop, device=device)[:, None]
        visible = (first <= query) & (query < last)
        if plan.window is not None:
            of_queries = torch.from_numpy(plan.query_positions[block.start : block.stop]).to(device)
            visible &= of_queries[:, None] - positions < plan.window
        return cls(block.start, block.stop, slots, visible)


def plan_slots(
    runs: KeyRuns,
    num_queries: int,
    query_positions: np.ndarray | None = None,
    window: int | None = None,
    *,
    group: int = 1,
    compiled: bool = True,
) -> SlotPlan:
    """Plan attention of queries 0 to num_queries - 1 over the keys of `runs`.

    query_positions  int64 [queries]; needed with a window only
    group            query heads that share a KV head: a hint, the plan is right for any number
    compiled         whether to make what the compiled CPU kernel reads

    Every query must see a key: its own row is a run of one, seen from its own query on. Work of the host
    without a tensor. InputError where an array breaks these rules.
    """
    arrays = tuple(
        np.ascontiguousarray(a, dtype=np.int64) for a in (runs.start, runs.count, runs.position, runs.first, runs.last)
    )
    runs = KeyRuns(*arrays)
    if any(a.shape != (len(runs),) for a in arrays):
        raise InputError("the arrays of the runs differ in length", field="runs", remedy="pass a number a run in each")
    if window is not None:
        if window < 1 or query_positions is None or len(query_positions) != num_queries:
            raise InputError(
                "a window needs the position of every query, and at least one position",
                field="window",
                remedy="pass query_positions [queries] and window >= 1",
            )
        query_positions = np.ascontiguousarray(query_positions, dtype=np.int64)
    else:
        query_positions = None
    wrong = (runs.count < 1) | (runs.start < 0) | (runs.first < 0) | (runs.last <= runs.first)
    slots_needed = int((runs.start + runs.count).max(initial=0))
    if wrong.any() or runs.last.max(initial=0) > num_queries or slots_needed > MAX_SLOTS:
        raise InputError(
            "a run without keys, of slots that cannot be, or seen by queries that are not there",
            field="runs",
            remedy=f"count >= 1, slots in [0, {MAX_SLOTS}), 0 <= first < last <= number of queries",
        )
    if not (seen_by_query(runs, num_queries) > 0).all():
        raise InputError("a query sees no key", field="runs", remedy="pass each row's own key as a run of one")
    library = kernels.load() if compiled else None
    tiles = library.plan_slots(arrays, num_queries, query_positions, window, group) if library else None
    return SlotPlan(runs, num_queries, query_positions, window, slots_needed, tiles)


def seen_by_query(runs: KeyRuns, num_queries: int) -> np.ndarray:
    """How many keys each query sees, windows aside; int64 [queries]."""
    change = np.zeros(num_queries + 1, np.int64)
    np.add.at(change, runs.first, runs.count)
    np.subtract.at(change, runs.last, runs.count)
    return change[:num_queries].cumsum()


def slot_blocks(plan: SlotPlan) -> Iterator[SlotBlock]:
    """Blocks of queries with the keys any query of the block sees."""
    runs = plan.runs
    seen = seen_by_query(runs, plan.num_queries).tolist()
    fresh = np.bincount(runs.first, runs.count, plan.num_queries).astype(np.int64).tolist()
    start = 0
    while start < plan.num_queries:
        stop, keys, filled = start + 1, seen[start], seen[start]
        while stop < min(plan.num_queries, start + BLOCK_QUERIES):
            keys, filled = keys + fresh[stop], filled + seen[stop]
            if filled < BLOCK_FILLED * keys * (stop + 1 - start):
                break
            stop += 1
        yield slot_block(plan, start, stop)
        start = stop


def slot_block(plan: SlotPlan, start: int, stop: int) -> SlotBlock:
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


class KVStore:
    """K/V of `slots` rows for every plane.

    On a CPU with the compiled kernels it lies as they read it (PackedLayout); elsewhere as tensors
    [slots, kv_heads, head_dim], which any device and dtype has. Slot 0 is scratch: any number of rows of
    one write may go there, and no run names it.
    """

    def __init__(
        self,
        planes: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        self.planes, self.kv_heads, self.head_dim, self.slots = planes, kv_heads, head_dim, slots
        self.dtype, self.device = dtype, torch.device(device)
        self._compiled = can_pack(head_dim, dtype, self.device)
        if self._compiled:
            layout = PackedLayout.of(self._compiled, kv_heads, head_dim, dtype)
            self._memory = _zeros(planes, layout.plane_bytes(slots))
            self._packed = [PackedPlane(memory, layout, slots) for memory in self._memory]
        else:
            self._memory = torch.zeros((planes, 2, slots, kv_heads, head_dim), dtype=dtype, device=self.device)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    @staticmethod
    def bytes_per_slot(
        planes: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> int:
        """Bytes of one slot in all planes, rounded up, to find out how many slots fit."""
        compiled = can_pack(head_dim, dtype, torch.device(device))
        if compiled:
            return -(-planes * PackedLayout.of(compiled, kv_heads, head_dim, dtype).pair_bytes // 2)
        return planes * 2 * kv_heads * head_dim * dtype.itemsize

    def write(self, plane: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put rows into slots int64 [n]; k, v [n, kv_heads, head_dim]. No two rows into one slot, but for slot 0.

        All on the store's device. InputError where a slot is not there or the shapes do not fit.
        """
        fits = k.shape == v.shape == (len(slots), self.kv_heads, self.head_dim)
        if not fits or k.dtype != self.dtype or v.dtype != self.dtype or slots.dtype != torch.int64:
            raise InputError(
                f"k {list(k.shape)} ({k.dtype}) and v {list(v.shape)} ({v.dtype}) do not fit {len(slots)} slots",
                field="k",
                remedy=f"int64 slots, k and v [slots, {self.kv_heads}, {self.head_dim}] of {self.dtype}",
            )
        if not self._compiled:
            if slots.device.type == "cpu":  # another device checks by itself, and would have to be waited for
                _check_slots(slots, self.slots)
            if gpu.can_write(self._memory, k, v):
                gpu.write_slots(*self.plane(plane), slots, k, v)
                return
            self._memory[plane, 0].index_copy_(0, slots, k)
            self._memory[plane, 1].index_copy_(0, slots, v)
            return
        slots, k, v = slots.contiguous(), *(x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        if not self._compiled.write_slots(self._packed[plane].struct, slots, k, v):
            _check_slots(slots, self.slots)

    def read(self, plane: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What lies in slots int64 [n]: keys and values, [n, kv_heads, head_dim] each."""
        if self._compiled:
            return self._packed[plane].read(slots)
        return self._memory[plane, 0].index_select(0, slots), self._memory[plane, 1].index_select(0, slots)

    def plane(self, plane: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one plane, [slots, kv_heads, head_dim] each; not for the layout of compiled kernels."""
        return self._memory[plane, 0], self._memory[plane, 1]

    def attend(self, plane: int, q: Tensor, plan: SlotPlan, scale: float) -> Tensor:
        """softmax(q k^T * scale) v, each query over the slots that `plan` makes visible to it.

        q [queries, heads, head_dim], heads a multiple of kv_heads; returns the same shape. InputError where
        q does not fit the plan, or the plan names slots that are not there.
        """
        self._check(q, plan)
        if self._compiled and plan.tiles is not None and scale > 0:
            q = q if q.stride(-1) == 1 else q.contiguous()
            return self._compiled.slot_attention(self._packed[plane].struct, q, plan.tiles, scale)
        if not self._compiled and gpu.can_attend(q, self._memory):
            return gpu.attend_slots(q, *self.plane(plane), plan, scale=scale)
        out = torch.empty_like(q)
        for gather in plan.gathers(self.device):
            keys, values, bad = finite(*self.read(plane, gather.slots))
            block = slice(gather.start, gather.stop)
            out[block] = attend_block(q[block], keys, values, bad, gather.visible, scale)
        return out

    def _check(self, q: Tensor, plan: SlotPlan) -> None:
        if len(q) != plan.num_queries:
            raise InputError(
                f"{len(q)} queries in place of {plan.num_queries}", field="plan", remedy="pass the plan of this step"
            )
        if q.shape[1] % self.kv_heads or q.shape[2] != self.head_dim or q.dtype != self.dtype:
            raise InputError(
                f"q {list(q.shape)} ({q.dtype}) does not fit {self.kv_heads} heads of {self.head_dim} ({self.dtype})",
                field="q",
                remedy="q [queries, heads, head_dim], heads a multiple of kv_heads",
            )
        if plan.slots_needed > self.slots:
            raise InputError(
                f"the plan needs {plan.slots_needed} slots, the store has {self.slots}",
                field="plan",
                remedy="pass runs of this store's slots",
            )


def _zeros(*shape: int) -> Tensor:
    """Zeros, uint8, of which a page takes memory when it is first written (torch would write them all now)."""
    return torch.from_numpy(np.zeros(shape, np.uint8))


def _check_slots(slots: Tensor, count: int) -> None:
    if len(slots) and (slots.min() < 0 or slots.max() >= count):
        raise InputError("a slot that is not there", field="slots", remedy=f"pass slots in [0, {count})")
