"""`draw` in Triton, for logits on a GPU: one program per row, and only the token leaves the device.

No row is sorted. The bound of a filter is found by a four-way search over all float32 numbers. Each pass over the row,
which stays in the second-level cache, sums the tokens at or above a bound. Logits and noise (see `engine.sampling`) are
added in float64, with NumPy's operations, so that both draw the same token. A float32 comparison first leaves few
blocks that need this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec.task import FILTERS

# The columns of `draws`: the row of the logits, the lower and the upper half of the key, then the filters. The column
# of the temperature has its inverse.
FIELDS = 3 + len(FILTERS)
TEMPERATURE, TOP_N_SIGMA, MIN_P, TOP_K, TOP_P = (
    tl.constexpr(3 + FILTERS.index(name)) for name in ("temperature", "top_n_sigma", "min_p", "top_k", "top_p")
)
SIZE = 2048  # logits processed at once


def draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Return the token of each draw, int64 [n]; -1 if the row's largest logit is not finite.

    Args:
        logits: float32 [r, vocab].
        draws: float64 [n, FIELDS].
    """
    count, vocab = len(draws), logits.shape[1]
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        size = min(SIZE, triton.next_power_of_2(vocab))
        _draw[(count,)](logits, draws, tokens, vocab, logits.stride(0), SIZE=size, FIELDS=FIELDS, num_warps=8)
    return tokens


@triton.jit
def _rank(x):
    """Convert float32 numbers to int32 numbers of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _hash(ids, low, high):
    """Compute `engine.sampling.hash_ids` for integers, as uint32."""
    x = ids.to(tl.uint32) ^ low
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11) ^ high) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _upper(hashes):
    """Return the upper 24 bits of hashes, as float32 in [0, 1)."""
    return (hashes >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _scaled(ROW, at, vocab, largest, inverse):
    """Return (logit - the row's largest) / temperature."""
    return (tl.load(ROW + at, mask=at < vocab, other=-float("inf")) - largest) * inverse


@triton.jit
def _deviation(ROW, vocab, largest, SIZE: tl.constexpr):
    """Return the standard deviation of the finite logits, as float64."""
    count = tl.zeros([SIZE], tl.float64)
    sums = tl.zeros([SIZE], tl.float64)
    for start in range(0, vocab, SIZE):
        below = _scaled(ROW, start + tl.arange(0, SIZE), vocab, largest, 1.0).to(tl.float64)
        count += tl.where(below > -float("inf"), 1.0, 0.0)
        sums += tl.where(below > -float("inf"), below, 0.0)
    mean = tl.sum(sums, 0) / tl.sum(count, 0)
    squares = tl.zeros([SIZE], tl.float64)
    for start in range(0, vocab, SIZE):
        below = _scaled(ROW, start + tl.arange(0, SIZE), vocab, largest, 1.0).to(tl.float64)
        squares += tl.where(below > -float("inf"), (below - mean) * (below - mean), 0.0)
    return tl.sqrt(tl.sum(squares, 0) / tl.sum(count, 0))


@triton.jit
def _load(ROW, start, vocab, largest, inverse, min_p, least, SIZE: tl.constexpr):
    """Return ranks, a mask of remaining tokens, and weights, for the logits from `start` on.

    The weight is exp((logit - largest) / temperature): 1 for the most likely token, 0 for a filtered token.
    """
    at = start + tl.arange(0, SIZE)
    inside = at < vocab
    x = tl.load(ROW + at, mask=inside, other=-float("inf")) + 0.0  # turns -0.0 into 0.0
    weight = tl.exp2((x - largest) * inverse * 1.4426950408889634)
    rank = _rank(x)
    left = inside & (weight >= min_p) & (rank >= least)
    return rank, left, tl.where(left, weight, 0.0)


@triton.jit
def _total(ROW, vocab, largest, inverse, min_p, least, SIZE: tl.constexpr):
    """Return the sum of the weights of the remaining tokens."""
    sums = tl.zeros([SIZE], tl.float32)
    for start in range(0, vocab, SIZE):
        _, _, weight = _load(ROW, start, vocab, largest, inverse, min_p, least, SIZE)
        sums += weight
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit
def _bound(ROW, vocab, largest, inverse, min_p, least, target, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Return the highest rank such that the remaining tokens at or above it amount to at least `target`.

    `least` if there is no such rank. COUNT: the amount is a number of tokens, else a sum of weights.
    """
    low = least.to(tl.int64)
    high = _rank(largest).to(tl.int64)
    while low < high:
        step = (high - low + 3) // 4
        a = low + step
        b = tl.minimum(a + step, high)
        c = tl.minimum(b + step, high)
        above_a = tl.zeros([SIZE], tl.float32)
        above_b = tl.zeros([SIZE], tl.float32)
        above_c = tl.zeros([SIZE], tl.float32)
        for start in range(0, vocab, SIZE):
            rank, left, weight = _load(ROW, start, vocab, largest, inverse, min_p, least, SIZE)
            part = tl.where(left, 1.0, 0.0) if COUNT else weight
            above_a += tl.where(rank >= a.to(tl.int32), part, 0.0)
            above_b += tl.where(rank >= b.to(tl.int32), part, 0.0)
            above_c += tl.where(rank >= c.to(tl.int32), part, 0.0)
        at_a = tl.sum(above_a.to(tl.float64), 0) >= target
        at_b = tl.sum(above_b.to(tl.float64), 0) >= target
        at_c = tl.sum(above_c.to(tl.float64), 0) >= target
        high = tl.where(at_c, high, tl.where(at_b, c - 1, tl.where(at_a, b - 1, a - 1)))
        low = tl.where(at_c, c, tl.where(at_b, b, tl.where(at_a, a, low)))
    return low.to(tl.int32)


@triton.jit
def _draw(LOGITS, DRAWS, TOKENS, vocab, stride, SIZE: tl.constexpr, FIELDS: tl.constexpr):
    draws = DRAWS + tl.program_id(0) * FIELDS
    ROW = LOGITS + tl.load(draws).to(tl.int64) * stride
    low = tl.load(draws + 1).to(tl.int64).to(tl.uint32)
    high = tl.load(draws + 2).to(tl.int64).to(tl.uint32)
    inverse = tl.load(draws + TEMPERATURE).to(tl.float32)
    min_p = tl.load(draws + MIN_P).to(tl.float32)
    top_k = tl.load(draws + TOP_K)
    top_p = tl.load(draws + TOP_P)

    most = tl.full([SIZE], -float("inf"), tl.float32)
    for start in range(0, vocab, SIZE):
        at = start + tl.arange(0, SIZE)
        most = tl.maximum(most, tl.load(ROW + at, mask=at < vocab, other=-float("inf")) + 0.0)
    largest = tl.max(most, 0)

    sigmas = tl.load(draws + TOP_N_SIGMA)
    if sigmas > 0:
        sigma = _deviation(ROW, vocab, largest, SIZE) * inverse
        min_p = tl.maximum(min_p, tl.exp(-sigmas * sigma).to(tl.float32))
    least = tl.full([], -2147483648, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        least = _bound(ROW, vocab, largest, inverse, min_p, least, top_k, True, SIZE)
    if top_p < 1:
        total = _total(ROW, vocab, largest, inverse, min_p, least, SIZE)
        least = _bound(ROW, vocab, largest, inverse, min_p, least, top_p * total, False, SIZE)

    token = _most_lifted(ROW, vocab, largest, inverse, min_p, least, low, high, SIZE)
    is_finite = (largest > -float("inf")) & (largest < float("inf"))
    tl.store(TOKENS + tl.program_id(0), tl.where(is_finite, token, -1).to(tl.int64))


@triton.jit
def _most_lifted(ROW, vocab, largest, inverse, min_p, least, low, high, SIZE: tl.constexpr):
    """Return the argmax of logit / temperature + noise over the remaining tokens. Ties go to the lowest id.

    This is the token with the least -log(1 - v) / weight, where v is its hash as a number in (0, 1). Because
    v <= -log(1 - v) <= v / (1 - v), a token cannot be the least if its v / weight exceeds the v / (1 - v) / weight of
    another token.
    """
    bound = tl.full([SIZE], float("inf"), tl.float32)
    for start in range(0, vocab, SIZE):
        _, _, weight = _load(ROW, start, vocab, largest, inverse, min_p, least, SIZE)
        v = _upper(_hash(start + tl.arange(0, SIZE), low, high)) + 1.0 / 16777216
        bound = tl.minimum(bound, tl.where(weight > 0, v / ((1 - v) * weight), float("inf")))
    reach = tl.min(bound, 0) * 1.001  # allows for rounding

    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], -1, tl.int32)
    for start in range(0, vocab, SIZE):
        at = start + tl.arange(0, SIZE)
        _, _, weight = _load(ROW, start, vocab, largest, inverse, min_p, least, SIZE)
        hashes = _hash(at, low, high)
        near = (weight > 0) & (_upper(hashes) <= reach * weight)
        if tl.max(near.to(tl.int32), 0) > 0:
            v = (hashes.to(tl.float64) + 0.5) * (1.0 / 4294967296)
            score = _scaled(ROW, at, vocab, largest, inverse).to(tl.float64) - tl.log(-tl.log(1 - v))
            score = tl.where(near, score, -float("inf"))
            here = tl.max(score, 0)
            if here > best:
                token = tl.min(tl.where(score == here, at, vocab), 0)
                best = here
    return token
