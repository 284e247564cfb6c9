"""The KV store of the native executor, in the memory layout of the compiled kernels."""

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
    """The memory layout of one plane.

    It has the keys and values of all pairs of slots, KV head by KV head, then one byte per pair and head.
    """

    sizes: KVSizes  # sizes of the keys and values of a row
    dtype: np.dtype  # dtype of rows that are written and read
    stored: np.dtype  # dtype in memory: float32 rows may be stored as bfloat16
    interleaved: bool  # the two values of a pair of slots lie side by side, because a bfloat16 kernel sums both at once

    @classmethod
    def of(cls, compiled: kernels.Kernels, sizes: KVSizes, dtype: np.dtype, kept: np.dtype | None) -> StoreLayout:
        """Return the layout that these kernels read.

        Args:
            kept: The dtype in memory; None: the dtype of rows.
        """
        interleaved = dtype == kernels.BFLOAT16 and compiled.stores_bf16_pairs
        return cls(sizes, dtype, kept or dtype, interleaved)

    @property
    def keeps_values(self) -> bool:
        """Return True if values are stored separately from keys, which interleaving requires."""
        return self.interleaved or not self.sizes.in_keys

    @property
    def key_dim(self) -> int:
        """Return the stored numbers per key of one head."""
        return -(-self.sizes.dim // LANES) * LANES

    @property
    def value_dim(self) -> int:
        """Return the stored numbers per value of one head, beside its key."""
        return -(-self.sizes.value_dim // LANES) * LANES if self.keeps_values else 0

    @property
    def pair_bytes(self) -> int:
        """Return the bytes of a pair of slots: keys and values of all heads, and one byte per head."""
        return self.sizes.heads * (2 * (self.key_dim + self.value_dim) * self.stored.itemsize + 1)

    def plane_bytes(self, slots: int) -> int:
        """Return the bytes of a plane, in whole pages, including one final byte for all pairs of the plane."""
        return -(-((slots + 1) // 2 * self.pair_bytes + 1) // PAGE) * PAGE


def layouts_of(compiled: kernels.Kernels, config: ModelConfig, dtype: np.dtype) -> list[StoreLayout]:
    """Return the layout of each plane of a model, or of a rank's part of it.

    Args:
        dtype: The dtype of rows.
    """
    kept = kernels.BFLOAT16 if config.kv_dtype == "bfloat16" else None
    sizes = (config.kv_sizes(number) for number in range(len(config.planes)))
    return [StoreLayout.of(compiled, of_plane, dtype, kept) for of_plane in sizes]


def slot_bytes(layouts: Iterable[StoreLayout]) -> int:
    """Return the bytes of one slot in all planes, rounded up."""
    return -(-sum(layout.pair_bytes for layout in layouts) // 2)


class StorePlane:
    """One plane of a store, in `memory`: uint8 [layout.plane_bytes(slots)], all zeros at first."""

    def __init__(self, memory: np.ndarray, layout: StoreLayout, slots: int):
        self.layout, sizes = layout, layout.sizes
        rows = sizes.heads * ((slots + 1) // 2) * 2 * layout.stored.itemsize  # bytes of one number of each row
        ends = np.cumsum([rows * layout.key_dim, rows * layout.value_dim]).tolist()
        keys, values, unsafe = memory[: ends[0]], memory[ends[0] : ends[1]], memory[ends[1] :]
        values = values if layout.keeps_values else keys
        addresses = (keys.ctypes.data, values.ctypes.data, unsafe.ctypes.data)
        rounded = layout.stored != layout.dtype
        self.struct = kernels.SlotPlane(*addresses, slots, sizes.heads, sizes.dim, sizes.value_dim, rounded)
        # Views of shape [kv_heads, pairs, 2, dim].
        shape = (sizes.heads, (slots + 1) // 2)
        self._keys = keys.view(layout.stored).reshape(*shape, 2, layout.key_dim)
        if layout.interleaved:
            self._values = values.view(layout.stored).reshape(*shape, layout.value_dim, 2).swapaxes(2, 3)
        else:
            self._values = values.view(layout.stored).reshape(*shape, 2, -1)

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys [n, kv_heads, dim] and values [n, kv_heads, value dim] of slots int64 [n]."""
        pair, half, sizes = slots // 2, slots % 2, self.layout.sizes
        both = ((self._keys, sizes.dim), (self._values, sizes.value_dim))
        keys, values = (x[:, pair, half, :dim].swapaxes(0, 1) for x, dim in both)
        return keys.astype(self.layout.dtype), values.astype(self.layout.dtype)


class NativeStore:
    """The K/V of `slots` rows for every plane. Slot 0 is scratch: any row may be written there, and no run names it.

    Args:
        layouts: One per plane.
    """

    def __init__(self, layouts: Sequence[StoreLayout], slots: int, compiled: kernels.Kernels):
        self.slots, self._kernels = slots, compiled
        ends = np.cumsum([0, *(layout.plane_bytes(slots) for layout in layouts)]).tolist()
        self._memory = zero_pages(ends[-1])
        self.planes = [
            StorePlane(self._memory[first:stop], layout, slots)
            for layout, (first, stop) in zip(layouts, pairwise(ends), strict=True)
        ]

    @cached_property
    def structs(self) -> Any:
        """Return a C array of `kernels.SlotPlane`, with the addresses of the planes."""
        return (kernels.SlotPlane * len(self.planes))(*(plane.struct for plane in self.planes))

    def read(self, plane: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys [n, kv_heads, dim] and values [n, kv_heads, value dim] of slots int64 [n]."""
        return self.planes[plane].read(slots)

    def write(self, plane: int, slots: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Write keys [n, kv_heads, dim] and values [n, kv_heads, value dim] to slots [n].

        Raise ValueError for a slot outside the store.
        """
        slots = np.ascontiguousarray(slots, np.int64)
        if not self._kernels.write_slots(self.planes[plane].struct, slots, keys, values):
            raise ValueError(f"a slot is outside the KV store; pass slots in [0, {self.slots})")

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all planes."""
        return self._memory.nbytes
