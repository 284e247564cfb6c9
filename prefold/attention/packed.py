"""K/V in memory as the compiled kernel reads it, so that a step packs only the rows it adds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from .heads import Heads

__all__ = ["PackedLayout", "PackedPlane"]

LANES = 16
PAGE = 4096


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A layout says how one plane lies in memory: the keys and the values of all pairs of slots, one KV head after the
    other, then a byte for each pair.

    interleaved  whether two bfloat16 numbers that are summed at once lie side by side: the values of a pair of slots.
                 If not, numbers are float32, as the processor sums them
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    interleaved: bool

    @classmethod
    def of(cls, compiled: kernels.Kernels, heads: Heads) -> PackedLayout:
        """Returns the layout that these kernels read for such heads."""
        interleaved = heads.dtype == torch.bfloat16 and compiled.stores_bf16_pairs
        return cls(heads.kv_heads, heads.head_dim, heads.dtype, interleaved)

    @property
    def stored(self) -> torch.dtype:
        """Returns the dtype of the numbers in memory."""
        return torch.bfloat16 if self.interleaved else torch.float32

    @property
    def padded_dim(self) -> int:
        """Returns how many numbers a row of one head takes."""
        return -(-self.head_dim // LANES) * LANES

    @property
    def pair_bytes(self) -> int:
        """Returns the bytes of a pair of slots: keys and values of all heads, and a byte a head about them."""
        return self.kv_heads * (4 * self.padded_dim * self.stored.itemsize + 1)

    def plane_bytes(self, slots: int) -> int:
        """Returns the bytes of a plane of so many slots, in whole pages, with one more byte about all of its pairs."""
        return -(-((slots + 1) // 2 * self.pair_bytes + 1) // PAGE) * PAGE


class PackedPlane:
    """A plane of a store lies in `memory`, uint8 [layout.plane_bytes(slots)], all zeros at first."""

    def __init__(self, memory: Tensor, layout: PackedLayout, slots: int):
        self.layout = layout
        pairs, dim = (slots + 1) // 2, layout.padded_dim
        size = layout.kv_heads * pairs * 2 * dim * layout.stored.itemsize
        keys, values, unsafe = memory[:size], memory[size : 2 * size], memory[2 * size :]
        addresses = (keys.data_ptr(), values.data_ptr(), unsafe.data_ptr())
        self.struct = kernels.SlotPlane(*addresses, slots, layout.kv_heads, layout.head_dim)
        # Both as [kv_heads, pairs, 2, dim].
        self._keys = keys.view(layout.stored).view(layout.kv_heads, pairs, 2, dim)
        if layout.interleaved:
            self._values = values.view(layout.stored).view(layout.kv_heads, pairs, dim, 2).transpose(2, 3)
        else:
            self._values = values.view(layout.stored).view(layout.kv_heads, pairs, 2, dim)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values in slots int64 [n], [n, kv_heads, head_dim] each."""
        pair, half = slots // 2, slots % 2
        keys, values = (x[:, pair, half, : self.layout.head_dim].transpose(0, 1) for x in (self._keys, self._values))
        return keys.to(self.layout.dtype), values.to(self.layout.dtype)
