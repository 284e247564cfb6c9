"""The K/V of generation: a store of rows in slots, which steps write and attend over."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from . import gpu, slot_torch
from .heads import Heads
from .packed import PackedLayout, PackedPlane
from .slot_plan import SlotPlan

__all__ = ["KVStore"]


class KVStore:
    """The K/V of `slots` rows for every plane.

    Who reads and writes it is chosen when it is made. For the compiled kernels of a CPU it lies as they read it
    (PackedLayout); for Triton's kernels on a GPU, and for the form in PyTorch, which takes any device and dtype, it is
    a tensor [planes, 2, slots, kv_heads, head_dim]. Slot 0 is scratch: any number of rows of one write may go there,
    and no run names it.
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
        heads = Heads(kv_heads, kv_heads, head_dim, dtype)
        self._compiled = heads.compiled(self.device)
        if self._compiled:
            layout = PackedLayout.of(self._compiled, kv_heads, head_dim, dtype)
            self._memory = _zeros(planes, layout.plane_bytes(slots))
            self._packed = [PackedPlane(memory, layout, slots) for memory in self._memory]
        else:
            self._fused = heads.fits(self.device)
            self._memory = torch.zeros((planes, 2, slots, kv_heads, head_dim), dtype=dtype, device=self.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all planes."""
        return self._memory.nbytes

    @staticmethod
    def bytes_per_slot(
        planes: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> int:
        """Bytes of one slot in all planes, rounded up, to find out how many slots fit."""
        compiled = Heads(kv_heads, kv_heads, head_dim, dtype).compiled(torch.device(device))
        if compiled:
            return -(-planes * PackedLayout.of(compiled, kv_heads, head_dim, dtype).pair_bytes // 2)
        return planes * 2 * kv_heads * head_dim * dtype.itemsize

    def write(self, plane: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts rows into slots int64 [n]; k, v [n, kv_heads, head_dim]. Two rows of one call may share slot 0 alone.

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
            if self._fused:
                gpu.write_slots(*self.plane(plane), slots, k, v)
                return
            self._memory[plane, 0].index_copy_(0, slots, k)
            self._memory[plane, 1].index_copy_(0, slots, v)
            return
        slots, k, v = slots.contiguous(), *(x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        if not self._compiled.write_slots(self._packed[plane].struct, slots, k, v):
            _check_slots(slots, self.slots)

    def read(self, plane: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values in slots int64 [n], [n, kv_heads, head_dim] each."""
        if self._compiled:
            return self._packed[plane].read(slots)
        return self._memory[plane, 0].index_select(0, slots), self._memory[plane, 1].index_select(0, slots)

    def plane(self, plane: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one plane, [slots, kv_heads, head_dim] each; not in the layout of compiled kernels."""
        return self._memory[plane, 0], self._memory[plane, 1]

    def attend(self, plane: int, q: Tensor, plan: SlotPlan, scale: float) -> Tensor:
        """softmax(q k^T * scale) v, each query over the slots that `plan` makes visible to it.

        q [queries, heads, head_dim], heads a multiple of kv_heads; returns the same shape. InputError where
        q does not fit the plan, or the plan names slots that are not there.
        """
        self._check(q, plan)
        if self._compiled and plan.lists is not None and scale > 0:
            q = q if q.stride(-1) == 1 else q.contiguous()
            return self._compiled.slot_attention(self._packed[plane].struct, q, plan.lists, scale)
        if not self._compiled and self._fused:
            return gpu.attend_slots(q, *self.plane(plane), plan, scale=scale)
        return slot_torch.attend_slots(q, partial(self.read, plane), plan, scale=scale)

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
