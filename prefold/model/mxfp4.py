"""MXFP4 (OCP Microscaling): numbers of four bits, in blocks of 32 that have a power of two in common."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # numbers, in 16 bytes
BIAS = 127  # of the exponents
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate((VALUES, -VALUES))
# The two numbers of each byte: the lower bits are the first.
PAIRS = np.stack((np.tile(VALUES, 16), np.repeat(VALUES, 16)), 1)
with np.errstate(over="ignore"):
    SCALES = np.ldexp(np.float32(1), np.arange(256) - BIAS)  # by their exponents


def numbers(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of rows, float32 [rows, inputs]: exact in bfloat16, too. blocks: uint8 [rows, inputs / 32,
    16]; scales: uint8 [rows, inputs / 32], exponents."""
    values = PAIRS[blocks].reshape(*scales.shape, BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        values *= SCALES[scales][..., None]
    return values.reshape(len(scales), -1)
