"""MXFP4 (OCP Microscaling): numbers of four bits, in blocks of 32 that have a power of two in common."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK, BLOCK_BYTES = 32, 17  # numbers of a block; its bytes with its exponent
BIAS = 127  # of the exponents
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate((VALUES, -VALUES))
# The two numbers of each byte: the lower bits are the first.
PAIRS = np.stack((np.tile(VALUES, 16), np.repeat(VALUES, 16)), 1)
with np.errstate(over="ignore"):
    SCALES = np.ldexp(np.float32(1), np.arange(256) - BIAS)  # by their exponents


def as_blocks(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows as GGUF has them, uint8 [rows, bytes]: a block is its exponent, then bytes with a number of its first
    half in the lower bits, and one of its second half in the upper bits. blocks, scales: as of `numbers`"""
    half = blocks.shape[-1] // 2
    first, second = blocks[..., :half], blocks[..., half:]
    rows = np.empty((*scales.shape, 1 + 2 * half), np.uint8)
    rows[..., 0] = scales
    rows[..., 1::2] = (first & 15) | (second << 4)
    rows[..., 2::2] = (first >> 4) | (second & 240)
    return rows.reshape(len(scales), -1)


def numbers(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of rows, float32 [rows, inputs]: exact in bfloat16, too. blocks: uint8 [rows, inputs / 32,
    16]; scales: uint8 [rows, inputs / 32], exponents."""
    values = PAIRS[blocks].reshape(*scales.shape, BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        values *= SCALES[scales][..., None]
    return values.reshape(len(scales), -1)
