"""`draw` in Triton, where the logits are on a GPU: a program a row, and nothing but the token leaves the device.

No row is sorted. A filter's bound is looked for among all float32 numbers, four ways at a time: what is at least as
likely as a bound is summed in one pass over the row, which lies in the second-level cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw"]

FIELDS = 6  # of a row of `asked`
SIZE = 2048  # logits worked on at once


def draw(logits: Tensor, asked: Tensor) -> Tensor:
    """logits float32 [r, vocab]; asked float64 [n, FIELDS]: row of the logits, log2(e) / temperature, min_p, top_k (0:
    all), top_p, uniform number. Returns int64 [n]: the token, or -1 where a row has no finite number."""
    count, vocab = len(asked), logits.shape[1]
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        size = min(SIZE, triton.next_power_of_2(vocab))
        _draw[(count,)](logits, asked, tokens, vocab, logits.stride(0), SIZE=size, FIELDS=FIELDS, num_warps=8)
    return tokens


@triton.jit
def _rank(x):
    """float32 numbers as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load(ROW, start, vocab, largest, scale, min_p, least, SIZE: tl.constexpr):
    """Logits from `start` on: their ranks, and their weights (the most likely has 1), zero for what is filtered out."""
    at = start + tl.arange(0, SIZE)
    inside = at < vocab
    x = tl.load(ROW + at, mask=inside, other=-float("inf")) + 0.0  # of -0.0 too
    weight = tl.exp2((x - largest) * scale)
    rank = _rank(x)
    left = inside & (weight >= min_p) & (rank >= least)
    return rank, left, tl.where(left, weight, 0.0)


@triton.jit
def _total(ROW, vocab, largest, scale, min_p, least, SIZE: tl.constexpr):
    """The weights of what is left."""
    sums = tl.zeros([SIZE], tl.float32)
    for start in range(0, vocab, SIZE):
        _, _, weight = _load(ROW, start, vocab, largest, scale, min_p, least, SIZE)
        sums += weight
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit
def _bound(ROW, vocab, largest, scale, min_p, least, target, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The highest rank at which as much as `target` is at or above it, of what is left; `least` where there is none.
    COUNT: as many, else as much weight."""
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
            rank, left, weight = _load(ROW, start, vocab, largest, scale, min_p, least, SIZE)
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
def _draw(LOGITS, ASKED, TOKENS, vocab, stride, SIZE: tl.constexpr, FIELDS: tl.constexpr):
    asked = ASKED + tl.program_id(0) * FIELDS
    ROW = LOGITS + tl.load(asked).to(tl.int64) * stride
    scale = tl.load(asked + 1).to(tl.float32)
    min_p = tl.load(asked + 2).to(tl.float32)
    top_k = tl.load(asked + 3)
    top_p = tl.load(asked + 4)
    uniform = tl.load(asked + 5)

    most = tl.full([SIZE], -float("inf"), tl.float32)
    for start in range(0, vocab, SIZE):
        at = start + tl.arange(0, SIZE)
        most = tl.maximum(most, tl.load(ROW + at, mask=at < vocab, other=-float("inf")) + 0.0)
    largest = tl.max(most, 0)

    least = tl.full([], -2147483648, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        least = _bound(ROW, vocab, largest, scale, min_p, least, top_k, True, SIZE)
    if top_p < 1:
        total = _total(ROW, vocab, largest, scale, min_p, least, SIZE)
        least = _bound(ROW, vocab, largest, scale, min_p, least, top_p * total, False, SIZE)

    goal = uniform * _total(ROW, vocab, largest, scale, min_p, least, SIZE)
    before = tl.zeros([], tl.float64)
    token = tl.full([], -1, tl.int32)
    final = tl.full([], -1, tl.int32)
    for start in range(0, vocab, SIZE):
        _, _, narrow = _load(ROW, start, vocab, largest, scale, min_p, least, SIZE)
        weight = narrow.to(tl.float64)
        at = start + tl.arange(0, SIZE)
        here = tl.sum(weight, 0)
        highest = tl.max(tl.where(weight > 0, at, -1), 0)
        if (token < 0) & (before + here > goal):
            passed = (before + tl.cumsum(weight, 0) > goal) & (weight > 0)
            first = tl.min(tl.where(passed, at, vocab), 0)
            token = tl.where(first < vocab, first, highest)  # the latter only by rounding
        final = tl.maximum(final, highest)
        before += here
    token = tl.where(token < 0, final, token)
    tl.store(TOKENS + tl.program_id(0), tl.where(largest > -float("inf"), token, -1).to(tl.int64))
