"""MXFP4 (OCP Microscaling): numbers of four bits, in blocks of 32 that have a power of two in common."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # numbers, in 16 bytes
BIAS = 127  # of the exponents
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat((VALUES, -VALUES))
# The two numbers of each byte: the lower bits are the first.
PAIRS = torch.stack((VALUES.repeat(16), VALUES.repeat_interleave(16)), 1)


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the numbers of rows, float32 [rows, inputs]: exact in bfloat16, too. blocks: uint8 [rows, inputs / 32,
    16]; scales: uint8 [rows, inputs / 32], exponents."""
    return torch.ldexp(PAIRS[blocks.int()].flatten(2), scales.int()[..., None] - BIAS).flatten(1)
