"""`draw` in Triton, where the logits are on a GPU: a program a row, and nothing but the token leaves the device.

No row is sorted. A filter's bound is searched for among all float32 numbers, four ways at a time: one pass over the
row, which lies in the second-level cache, sums the tokens that are at least as likely as a bound. Logits and noise (see
`engine.sampling`) are added in float64, with the operations that NumPy does, so that both draw the same token; a
comparison in float32 leaves few blocks for which that is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec.task import FILTERS

# The columns of `draws`: the row of the logits, the lower and the upper half of the key, then the filters, with the
# inverse of the temperature in its place.
FIELDS = 3 + len(FILTERS)
TEMPERATURE, TOP_N_SIGMA, MIN_P, TOP_K, TOP_P = (
    tl.constexpr(3 + FILTERS.index(name)) for name in ("temperature", "top_n_sigma", "min_p", "top_k", "top_p")
)
SIZE = 2048  # logits worked on at once


def draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Returns the token that each draw gives, int64 [n]; -1 where a row's largest logit is not finite.

    logits float32 [r, vocab]; draws float64 [n, FIELDS].
    """
    count, vocab = len(draws), logits.shape[1]
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        size = min(SIZE, triton.next_power_of_2(vocab))
        _draw[(count,)](logits, draws, tokens, vocab, logits.stride(0), SIZE=size, FIELDS=FIELDS, num_warps=8)
    return tokens


@triton.jit
def _rank(x):
    """Returns float32 numbers as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _hash(ids, low, high):
    """Return what `engine.sampling.hash_ids` returns, for whole numbers as uint32."""
    x = ids.to(tl.uint32) ^ low
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11) ^ high) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _upper(hashes):
    """Returns the upper 24 bits of hashes, as a float32 number in [0, 1)."""
    return (hashes >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _scaled(ROW, at, vocab, largest, inverse):
    """Returns (logit - the row's largest) / temperature."""
    return (tl.load(ROW + at, mask=at < vocab, other=-float("inf")) - largest) * inverse


@triton.jit
def _deviation(ROW, vocab, largest, SIZE: tl.constexpr):
    """Returns the standard deviation of the logits that are finite, as a float64 number."""
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
    """Returns the ranks of logits from `start` on, which of them are left, and their weights: 1 for the most likely
    one, zero for what is filtered out."""
    at = start + tl.arange(0, SIZE)
    inside = at < vocab
    x = tl.load(ROW + at, mask=inside, other=-float("inf")) + 0.0  # of -0.0 too
    weight = tl.exp2((x - largest) * inverse * 1.4426950408889634)
    rank = _rank(x)
    left = inside & (weight >= min_p) & (rank >= least)
    return rank, left, tl.where(left, weight, 0.0)


@triton.jit
def _total(ROW, vocab, largest, inverse, min_p, least, SIZE: tl.constexpr):
    """Returns the sum of the weights of what is left."""
    sums = tl.zeros([SIZE], tl.float32)
    for start in range(0, vocab, SIZE):
        _, _, weight = _load(ROW, start, vocab, largest, inverse, min_p, least, SIZE)
        sums += weight
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit
def _bound(ROW, vocab, largest, inverse, min_p, least, target, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Returns the highest rank at which as much as `target` is at or above it, of what is left; `least` where there is
    none. COUNT: as many tokens, else as much weight."""
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
    """Returns the token whose logit over the temperature plus noise is the largest, of what is left: the first of
    equals.

    It is the one with the least -log(1 - v) / weight, v being its hash as a number in (0, 1). That is at most
    v / (1 - v) / weight, and no token can have the least for which v / weight alone is more than that of another.
    """
    bound = tl.full([SIZE], float("inf"), tl.float32)
    for start in range(0, vocab, SIZE):
        _, _, weight = _load(ROW, start, vocab, largest, inverse, min_p, least, SIZE)
        v = _upper(_hash(start + tl.arange(0, SIZE), low, high)) + 1.0 / 16777216
        bound = tl.minimum(bound, tl.where(weight > 0, v / ((1 - v) * weight), float("inf")))
    reach = tl.min(bound, 0) * 1.001  # with room for rounding

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
