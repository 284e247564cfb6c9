"""The KV store of the native executor, in memory as the compiled kernels read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ... import kernels
from ...model.config import KVSizes, ModelConfig
from .memory import zero_pages

LANES = 16
PAGE = 4096


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """A StoreLayout says how one plane lies in memory: the keys and the values of all pairs of slots, one KV head after
    the other, then a byte for each pair.

    sizes        of a row's keys and values
    dtype        of the rows that are written and read
    stored       of the numbers in memory: float32 rows may be kept as bfloat16
    interleaved  whether two bfloat16 numbers that are summed at once lie side by side: the values of a pair of slots
    """

    sizes: KVSizes
    dtype: np.dtype
    stored: np.dtype
    interleaved: bool

    @classmethod
    def of(cls, compiled: kernels.Kernels, sizes: KVSizes, dtype: np.dtype, kept: np.dtype | None) -> StoreLayout:
        """Return the layout that these kernels read. kept: the dtype of the numbers in memory; None: that of rows"""
        interleaved = dtype == kernels.BFLOAT16 and compiled.stores_bf16_pairs
        return cls(sizes, dtype, kept or dtype, interleaved)

    @property
    def keeps_values(self) -> bool:
        """Return whether values lie apart from keys. Values in pairs do, also if they are numbers of the keys."""
        return self.interleaved or not self.sizes.in_keys

    @property
    def key_dim(self) -> int:
        """Return how many numbers a key of one head takes."""
        return -(-self.sizes.dim // LANES) * LANES

    @property
    def value_dim(self) -> int:
        """Return how many numbers a value of one head takes beside its key."""
        return -(-self.sizes.value_dim // LANES) * LANES if self.keeps_values else 0

    @property
    def pair_bytes(self) -> int:
        """Return the bytes of a pair of slots: keys and values of all heads, and a byte a head about them."""
        return self.sizes.heads * (2 * (self.key_dim + self.value_dim) * self.stored.itemsize + 1)

    def plane_bytes(self, slots: int) -> int:
        """Return the bytes of a plane of so many slots, in whole pages, with one more byte about all of its pairs."""
        return -(-((slots + 1) // 2 * self.pair_bytes + 1) // PAGE) * PAGE


def layouts_of(compiled: kernels.Kernels, config: ModelConfig, dtype: np.dtype) -> list[StoreLayout]:
    """Return how each plane of a model, or of a rank's part of it, lies in memory. dtype: of rows"""
    kept = kernels.BFLOAT16 if config.kv_dtype == "bfloat16" else None
    sizes = (config.kv_sizes(number) for number in range(len(config.planes)))
    return [StoreLayout.of(compiled, of_plane, dtype, kept) for of_plane in sizes]


def slot_bytes(layouts: Iterable[StoreLayout]) -> int:
    """Return the bytes of one slot in all planes, rounded up."""
    return -(-sum(layout.pair_bytes for layout in layouts) // 2)


class StorePlane:
    """A StorePlane is a plane of a store in `memory`, uint8 [layout.plane_bytes(slots)], all zeros at first."""

    def __init__(self, memory: np.ndarray, layout: StoreLayout, slots: int):
        self.layout, sizes = layout, layout.sizes
        rows = sizes.heads * ((slots + 1) // 2) * 2 * layout.stored.itemsize  # bytes of one number of each row
        ends = np.cumsum([rows * layout.key_dim, rows * layout.value_dim]).tolist()
        keys, values, unsafe = memory[: ends[0]], memory[ends[0] : ends[1]], memory[ends[1] :]
        values = values if layout.keeps_values else keys
        addresses = (keys.ctypes.data, values.ctypes.data, unsafe.ctypes.data)
        rounded = layout.stored != layout.dtype
        self.struct = kernels.SlotPlane(*addresses, slots, sizes.heads, sizes.dim, sizes.value_dim, rounded)
        # Both as [kv_heads, pairs, 2, dim].
        shape = (sizes.heads, (slots + 1) // 2)
        self._keys = keys.view(layout.stored).reshape(*shape, 2, layout.key_dim)
        if layout.interleaved:
            self._values = values.view(layout.stored).reshape(*shape, layout.value_dim, 2).swapaxes(2, 3)
        else:
            self._values = values.view(layout.stored).reshape(*shape, 2, -1)

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys [n, kv_heads, dim] and values [n, kv_heads, value dim] in slots int64 [n]."""
        pair, half, sizes = slots // 2, slots % 2, self.layout.sizes
        both = ((self._keys, sizes.dim), (self._values, sizes.value_dim))
        keys, values = (x[:, pair, half, :dim].swapaxes(0, 1) for x, dim in both)
        return keys.astype(self.layout.dtype), values.astype(self.layout.dtype)


class NativeStore:
    """A NativeStore keeps the K/V of `slots` rows for every plane. Slot 0 is scratch: any number of rows may be written
    there, and no run names it."""

    def __init__(self, layouts: Sequence[StoreLayout], slots: int, compiled: kernels.Kernels):
        """layouts: of each plane"""
        self.slots, self._kernels = slots, compiled
        ends = np.cumsum([0, *(layout.plane_bytes(slots) for layout in layouts)]).tolist()
        self._memory = zero_pages(ends[-1])
        self.planes = [
            StorePlane(self._memory[first:stop], layout, slots)
            for layout, (first, stop) in zip(layouts, pairwise(ends), strict=True)
        ]

    @cached_property
    def structs(self) -> Any:
        """Return an array of `kernels.SlotPlane`, which says where the planes lie."""
        return (kernels.SlotPlane * len(self.planes))(*(plane.struct for plane in self.planes))

    def read(self, plane: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys [n, kv_heads, dim] and values [n, kv_heads, value dim] in slots int64 [n]."""
        return self.planes[plane].read(slots)

    def write(self, plane: int, slots: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Put rows keys [n, kv_heads, dim] and values [n, kv_heads, value dim] into slots [n]. Raise ValueError for a
        slot that is not there."""
        slots = np.ascontiguousarray(slots, np.int64)
        if not self._kernels.write_slots(self.planes[plane].struct, slots, keys, values):
            raise ValueError(f"a slot that is not there; pass slots in [0, {self.slots})")

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all planes."""
        return self._memory.nbytes
