"""MXFP4 (OCP Microscaling): 4-bit numbers in blocks of 32 with a shared power-of-two scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK, BLOCK_BYTES = 32, 17  # numbers per block; bytes per block, exponent included
BIAS = 127  # bias of the exponents
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate((VALUES, -VALUES))
# The two numbers of each byte. The lower bits are the first number.
PAIRS = np.stack((np.tile(VALUES, 16), np.repeat(VALUES, 16)), 1)
with np.errstate(over="ignore"):
    SCALES = np.ldexp(np.float32(1), np.arange(256) - BIAS)  # by exponent


def as_blocks(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows in GGUF's layout, uint8 [rows, bytes]. Arguments as for `numbers`.

    A block is its exponent, then 16 bytes. The lower 4 bits of a byte belong to the block's first half, the upper 4
    bits to its second half.
    """
    half = blocks.shape[-1] // 2
    first, second = blocks[..., :half], blocks[..., half:]
    rows = np.empty((*scales.shape, 1 + 2 * half), np.uint8)
    rows[..., 0] = scales
    rows[..., 1::2] = (first & 15) | (second << 4)
    rows[..., 2::2] = (first >> 4) | (second & 240)
    return rows.reshape(len(scales), -1)


def numbers(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values, float32 [rows, inputs]. They are exact in bfloat16, too.

    Args:
        blocks: uint8 [rows, inputs / 32, 16].
        scales: uint8 [rows, inputs / 32], exponents.
    """
    values = PAIRS[blocks].reshape(*scales.shape, BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        values *= SCALES[scales][..., None]
    return values.reshape(len(scales), -1)
