"""Drawing a token from a row of logits: temperature, min_p, top_k and top_p, and the noise of a key.

Each filter keeps the tokens at least as likely as some token, so of equally likely ones it keeps all or none, and
nothing depends on the order in which a sort leaves them. Of what is left, the token whose logit over the temperature
plus its noise (`noise`) is the largest is drawn, the first of equals. Here in NumPy; where nothing is filtered out a
compiled kernel does it, and `draw_triton` does all of it where the logits are on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..device import runs_triton, send
from ..types import Sampling
from .noise import gumbel, hash_ids

__all__ = ["draw", "draw_on_device", "inverse_temperatures", "kept"]

# Logits worked on at once, as float32 numbers: 4 MiB, about a second-level cache's worth of each intermediate.
WORK_SIZE = 1 << 20
# A probability that top_k tokens are at least as likely as is looked for among the largest of so many numbers each.
BLOCK = 128
# Candidates for top_p that are tried first, at least.
CANDIDATES = 256


def inverse_temperatures(options: Sequence[Sampling]) -> np.ndarray:
    """1 / temperature, rounded to float32 [n]: what logits are multiplied by, wherever tokens are drawn."""
    return (1.0 / np.array([sampling.temperature for sampling in options], np.float64)).astype(np.float32)


def draw(logits: Tensor, rows: Sequence[int], options: Sequence[Sampling], keys: Sequence[int]) -> list[int]:
    """A token for each of `rows` of logits float32 [r, vocab], by the options and the key (`noise.make_key`) of each.

    The largest logit of each row must be finite.
    """
    if runs_triton(logits.device):
        return draw_on_device(logits, rows, options, keys).tolist()
    tokens = np.zeros(len(rows), np.int64)
    numbers, places, inverses = np.array(keys, np.uint64), np.array(rows, np.int64), inverse_temperatures(options)
    filters = np.array([sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 for sampling in options])
    compiled = kernels.load() if logits.device.type == "cpu" else None
    if compiled is not None and not filters.all():
        bare = np.flatnonzero(~filters)
        tokens[bare] = compiled.draw(logits, places[bare], inverses[bare], numbers[bare])
    left = np.arange(len(rows)) if compiled is None else np.flatnonzero(filters)
    at_once = max(1, WORK_SIZE // logits.shape[-1])
    for first in range(0, len(left), at_once):
        part = left[first : first + at_once]
        scaled = _scaled(logits, places[part], inverses[part])
        tokens[part] = _draw_scaled(scaled, [options[i] for i in part], numbers[part])
    return tokens.tolist()


def _scaled(logits: Tensor, rows: np.ndarray, inverses: np.ndarray) -> Tensor:
    """(logit - the row's largest) / temperature of `rows`, float32 [rows, vocab]: at most 0, and 0 for the largest."""
    work = logits.index_select(0, send(rows, logits.device))
    return work.sub_(work.amax(-1, keepdim=True)).mul_(send(inverses[:, None], logits.device))


def _draw_scaled(scaled: Tensor, options: Sequence[Sampling], keys: np.ndarray) -> np.ndarray:
    """The token of each row [r, vocab], int64 [r]."""
    probs = torch.softmax(scaled, -1).cpu().numpy()
    values = scaled.cpu().numpy()
    ids = [_candidates(*one) for one in zip(probs, options, keys, strict=True)]
    counts = [len(some) for some in ids]
    all_ids = np.concatenate(ids)
    noise = gumbel(hash_ids(all_ids, keys.repeat(counts)))
    scores = values[np.arange(len(values)).repeat(counts), all_ids] + noise
    ends = np.cumsum(counts)
    return np.array([some[scores[end - len(some) : end].argmax()] for some, end in zip(ids, ends, strict=True)])


def _candidates(probs: np.ndarray, sampling: Sampling, key: np.uint64) -> np.ndarray:
    """Ids, ascending, among which the one to be drawn is: what the filters leave, or without any what noise can lift.

    -log(1 - v) is at least v, so that no token can be drawn whose v over its probability is larger than that of some
    other token is without this approximation; the upper bits of v are compared.
    """
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        return kept(probs, sampling)[0]
    every, one = np.arange(probs.size, dtype=np.uint32), np.array([key])
    top = int(probs.argmax())
    hashes = hash_ids(every, one)
    reach = 1.001 * 2.0**24 * np.exp(-gumbel(hashes[top : top + 1])) / probs[top]
    return np.flatnonzero((hashes >> np.uint32(8)).astype(np.float32) <= probs * reach.astype(np.float32))


def draw_on_device(logits: Tensor, rows: Sequence[int], options: Sequence[Sampling], keys: Sequence[int]) -> Tensor:
    """`draw` by Triton's kernel: int64 on the logits' device, without waiting for it; -1 where a row's largest number
    is not finite."""
    from . import draw_triton

    asked = [
        (row, inverse, sampling.min_p, sampling.top_k, sampling.top_p, key & 0xFFFFFFFF, key >> 32)
        for row, inverse, sampling, key in zip(rows, inverse_temperatures(options).tolist(), options, keys, strict=True)
    ]
    return draw_triton.draw(logits, send(np.array(asked, np.float64).reshape(-1, 7), logits.device))


def kept(probs: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """What min_p, top_k and top_p leave of probabilities float32 [vocab]: (ids ascending, their probabilities).

    A row is never sorted whole: first come the candidates, all tokens above a bound that no token can be kept below.
    """
    top_k = sampling.top_k if sampling.top_k < probs.size else 0
    least = np.float32(sampling.min_p) * probs.max()
    if top_k:
        ids = np.flatnonzero(probs >= max(least, _below_top(probs, top_k)))
    elif sampling.min_p or sampling.top_p == 1.0:
        ids = np.flatnonzero(probs >= least)
    else:
        ids = _nucleus(probs, sampling.top_p)
    values = probs[ids]
    if top_k or sampling.top_p < 1.0:
        falling = np.sort(values)[::-1]
        if top_k:
            least = max(least, falling[min(top_k, falling.size) - 1])
            falling = falling[falling >= least]
        if sampling.top_p < 1.0:
            sums = falling.cumsum(dtype=np.float64)
            total = sums[-1] if top_k or sampling.min_p else 1.0
            # Kept is a token before which there is less than top_p.
            least = falling[min(np.searchsorted(sums, sampling.top_p * total), falling.size - 1)]
    left = values >= least
    return ids[left], values[left]


def _nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Ids, ascending, of the tokens above some bound, together at least top_p; mostly a few hundred."""
    bound = _below_top(probs, min(CANDIDATES, probs.size))
    # All tokens below this have together less than half of what may be left out.
    lowest = (1.0 - top_p) / (2 * probs.size)
    while True:
        ids = np.flatnonzero(probs >= bound)
        if bound <= lowest or probs[ids].sum(dtype=np.float64) >= top_p:
            return ids
        bound = max(bound / 8, np.float32(lowest))


def _below_top(probs: np.ndarray, top_k: int) -> np.float32:
    """A probability with at least top_k not below it: the top_k-th of the largest ones of at least top_k groups."""
    size = min(BLOCK, probs.size // top_k)
    groups = probs.size // size
    largest = probs[: groups * size].reshape(size, groups).max(0)
    return np.partition(largest, -top_k)[-top_k]
