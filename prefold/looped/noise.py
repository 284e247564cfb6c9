"""The noise that the residual stream of a looped model begins as: a row's is decided by a seed and its position alone.

So a row that is computed again, or by another rank or step, begins as before, and what is cached of it stays right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD = 2**32 - 1
# The noise is cut off at so many standard deviations.
_BOUND = 3.0
# Rows that are drawn at once: to draw one takes some 40 bytes a column.
_ROWS = 128


def position_noise(seed: int, positions: Tensor, columns: int) -> Tensor:
    """Returns float32 [rows, columns] of the standard normal distribution within three deviations of 0.

    positions  int64 [rows], below 2**32
    """
    return torch.cat([_drawn(seed, some, columns) for some in positions.split(_ROWS)])


def _drawn(seed: int, positions: Tensor, columns: int) -> Tensor:
    seeds = seed & _WORD, seed >> 32 & _WORD
    # Each position has a key of 64 bits.
    low = _mixed(positions ^ seeds[0], seeds[1])
    high = _mixed(positions ^ seeds[1], ~seeds[0] & _WORD)
    hashes = _mixed(torch.arange(columns, device=positions.device) ^ low[:, None], high[:, None])
    inside = math.erf(_BOUND / 2**0.5)  # the share of the distribution within the bound
    uniform = (hashes.double() + 0.5) * 2.0**-31 - 1.0  # between -1 and 1
    return (torch.erfinv(uniform.mul_(inside)) * 2**0.5).float()


def _mixed(x: Tensor, key: Tensor | int) -> Tensor:
    """Returns 32 random bits of each number in x, int64 of 32 bits: Wellons' `triple32`, with a key put in midway."""
    x = (x ^ x >> 17) * 0xED5AD4BB & _WORD
    x = (x ^ x >> 11 ^ key) * 0xAC4C1B51 & _WORD
    x = (x ^ x >> 15) * 0x31848BAB & _WORD
    return x ^ x >> 14
