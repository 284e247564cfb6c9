"""Matrices packed for the kernels' bfloat16 products: the layout that src/head.cpp describes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["PANEL", "pack_pairs"]

PANEL = 64  # columns


def pack_pairs(weight: Tensor) -> Tensor:
    """bfloat16 weight [columns, k], k even -> int32 [columns / 64, k / 2, 64]: pairs along k, zeros past the last."""
    columns, k = weight.shape
    # From NumPy, which asks for huge pages: with few rows the panels are read at the speed of memory.
    packed = torch.from_numpy(np.zeros((-(-columns // PANEL), k // 2, PANEL), np.int32))
    words = weight.detach().contiguous().view(torch.int32)
    for panel, rows in zip(packed, words.split(PANEL), strict=True):
        panel[:, : len(rows)] = rows.T
    return packed
