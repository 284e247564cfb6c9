"""The noise that tokens are drawn with: a number for every seed, sample, position and token, whoever computes it.

A token is drawn as the one whose logit over the temperature plus its noise is the largest. With independent noise of
the standard Gumbel distribution, -log(-log(u)), that draws each token with its probability (Gumbel 1954; Maddison et
al. 2014). The noise of a token does not depend on the other tokens, so a small change of the logits changes what is
drawn only where two tokens come within that change of each other. (Were the cumulative distribution inverted instead,
each change of a probability would move the places of all tokens behind it.)

Here in NumPy; `kernels/src/draw.cpp` and `draw_triton` do the same, operation by operation.
"""

from __future__ import annotations

import numpy as np

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: the step of SplitMix64


def _mix(x: int) -> int:
    """Returns x after the finaliser of SplitMix64 (Steele et al. 2014): every bit of x changes about half of the 64."""
    x &= _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def make_stream(seed: int, sample: int) -> int:
    """Returns the 64-bit number from which the keys of one sample's positions are made."""
    return _mix(_mix(seed + _GOLDEN) + sample)


def make_key(stream: int, position: int) -> int:
    """Returns the 64-bit key of the draw at a position of a sample: the `position`-th number of SplitMix64."""
    return _mix(stream + (position + 1) * _GOLDEN)


def hash_ids(ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns a number of 32 random bits for each token id, uint32 [n].

    ids [n], any whole numbers below 2**32; keys uint64 [n], or [1] for all. Wellons' `triple32`, with half of the key
    put in before each of its first two products.
    """
    keys = keys.astype(np.uint64, copy=False)
    x = ids.astype(np.uint32) ^ keys.astype(np.uint32)
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x ^= x >> np.uint32(11)
    x ^= (keys >> np.uint64(32)).astype(np.uint32)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    return x


def gumbel(hashes: np.ndarray) -> np.ndarray:
    """Returns the noise of hashes uint32 [n], float64 [n]: between -3.2 and 22.9, for 32 bits bound how rare it can
    be."""
    return -np.log(-np.log(1.0 - (hashes + 0.5) * 2.0**-32))
