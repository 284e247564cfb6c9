"""The KV store of the native executor, in memory as the compiled kernels read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ... import kernels
from .memory import zero_pages

LANES = 16
PAGE = 4096


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """A StoreLayout says how one plane lies in memory: the keys and the values of all pairs of slots, one KV head after
    the other, then a byte for each pair.

    dtype        of the rows that are written and read
    stored       of the numbers in memory: float32 rows may be kept as bfloat16
    interleaved  whether two bfloat16 numbers that are summed at once lie side by side: the values of a pair of slots
    """

    kv_heads: int
    head_dim: int
    dtype: np.dtype
    stored: np.dtype
    interleaved: bool

    @classmethod
    def of(
        cls, compiled: kernels.Kernels, kv_heads: int, head_dim: int, dtype: np.dtype, kept: np.dtype | None
    ) -> StoreLayout:
        """Return the layout that these kernels read. kept: the dtype of the numbers in memory; None: that of rows"""
        interleaved = dtype == kernels.BFLOAT16 and compiled.stores_bf16_pairs
        return cls(kv_heads, head_dim, dtype, kept or dtype, interleaved)

    @property
    def padded_dim(self) -> int:
        """Return how many numbers a row of one head takes."""
        return -(-self.head_dim // LANES) * LANES

    @property
    def pair_bytes(self) -> int:
        """Return the bytes of a pair of slots: keys and values of all heads, and a byte a head about them."""
        return self.kv_heads * (4 * self.padded_dim * self.stored.itemsize + 1)

    def plane_bytes(self, slots: int) -> int:
        """Return the bytes of a plane of so many slots, in whole pages, with one more byte about all of its pairs."""
        return -(-((slots + 1) // 2 * self.pair_bytes + 1) // PAGE) * PAGE

    def slot_bytes(self, planes: int) -> int:
        """Return the bytes of one slot in all planes, rounded up."""
        return -(-planes * self.pair_bytes // 2)


class StorePlane:
    """A StorePlane is a plane of a store in `memory`, uint8 [layout.plane_bytes(slots)], all zeros at first."""

    def __init__(self, memory: np.ndarray, layout: StoreLayout, slots: int):
        self.layout = layout
        pairs, dim = (slots + 1) // 2, layout.padded_dim
        size = layout.kv_heads * pairs * 2 * dim * layout.stored.itemsize
        keys, values, unsafe = memory[:size], memory[size : 2 * size], memory[2 * size :]
        addresses = (keys.ctypes.data, values.ctypes.data, unsafe.ctypes.data)
        rounded = layout.stored != layout.dtype
        self.struct = kernels.SlotPlane(*addresses, slots, layout.kv_heads, layout.head_dim, layout.head_dim, rounded)
        # Both as [kv_heads, pairs, 2, dim].
        self._keys = keys.view(layout.stored).reshape(layout.kv_heads, pairs, 2, dim)
        if layout.interleaved:
            self._values = values.view(layout.stored).reshape(layout.kv_heads, pairs, dim, 2).swapaxes(2, 3)
        else:
            self._values = values.view(layout.stored).reshape(layout.kv_heads, pairs, 2, dim)

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values in slots int64 [n], [n, kv_heads, head_dim] each."""
        pair, half = slots // 2, slots % 2
        keys, values = (x[:, pair, half, : self.layout.head_dim].swapaxes(0, 1) for x in (self._keys, self._values))
        return keys.astype(self.layout.dtype), values.astype(self.layout.dtype)


class NativeStore:
    """A NativeStore keeps the K/V of `slots` rows for every plane. Slot 0 is scratch: any number of rows may be written
    there, and no run names it."""

    def __init__(self, planes: int, layout: StoreLayout, slots: int, compiled: kernels.Kernels):
        self.layout, self.slots, self._kernels = layout, slots, compiled
        self._memory = zero_pages(planes * layout.plane_bytes(slots)).reshape(planes, -1)
        self.planes = [StorePlane(memory, layout, slots) for memory in self._memory]

    @cached_property
    def structs(self) -> Any:
        """Return an array of `kernels.SlotPlane`, which says where the planes lie."""
        return (kernels.SlotPlane * len(self.planes))(*(plane.struct for plane in self.planes))

    def read(self, plane: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and values in slots int64 [n], [n, kv_heads, head_dim] each."""
        return self.planes[plane].read(slots)

    def write(self, plane: int, slots: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Put rows keys, values [n, kv_heads, head_dim] into slots [n]. Raise ValueError for a slot that is not
        there."""
        slots = np.ascontiguousarray(slots, np.int64)
        if not self._kernels.write_slots(self.planes[plane].struct, slots, keys, values):
            raise ValueError(f"a slot that is not there; pass slots in [0, {self.slots})")

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all planes."""
        return self._memory.nbytes
