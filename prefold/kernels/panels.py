"""Matrices packed for the kernels' products: the layout that src/products.h describes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["PanelPool", "can_pack_words", "pack_words"]

COLUMNS = 32  # of a panel
# Memory comes from NumPy, which asks for huge pages, in pieces this large: with few rows the time of a product is
# that of reading the matrix, and most matrices are smaller than a huge page.
PIECE = 32 << 20


def can_pack_words(weight: Tensor) -> bool:
    """Returns whether rows of `weight` [columns, k] are whole words of four bytes."""
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.shape[1] * weight.itemsize % 4 == 0


def pack_words(weight: Tensor, pool: PanelPool | None = None) -> Tensor:
    """Returns weight [columns, k] packed: int32 [columns / 32, words along k, 32], zeros past the last column."""
    words = weight.detach().contiguous().view(torch.int32)
    packed = (pool or PanelPool()).take((-(-len(words) // COLUMNS), words.shape[1], COLUMNS))
    for panel, rows in zip(packed, words.split(COLUMNS), strict=True):
        panel[:, : len(rows)] = rows.T
        panel[:, len(rows) :] = 0
    return packed


class PanelPool:
    """Hands out memory of a few large pieces; a piece lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.int32)

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Returns an uninitialised int32 tensor that starts at a cache line."""
        size = int(np.prod(shape))
        if size > len(self._free):
            self._free = torch.from_numpy(np.empty(max(size, PIECE // 4) + 15, np.int32))
            self._free = self._free[-self._free.data_ptr() // 4 % 16 :]
        taken, self._free = self._free[:size], self._free[-(-size // 16) * 16 :]
        return taken.view(shape)
