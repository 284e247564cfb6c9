"""Drawing a token from a row of logits: temperature, min_p, top_k and top_p, and one uniform number.

Each filter keeps the tokens at least as likely as some token, so of equally likely ones it keeps all or none, and
nothing depends on the order in which a sort leaves them. What is left is drawn from by inverting its cumulative
distribution in the order of the ids. Here in NumPy; `draw_triton` does the same where the logits are on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..device import runs_triton, send
from ..types import Sampling

__all__ = ["draw", "draw_on_device", "kept"]

LOG2_E = 1.4426950408889634
# Probabilities summed at once when a token is looked for in a whole row.
BLOCK = 128
# Candidates for top_p that are tried first, at least.
CANDIDATES = 256


def draw(logits: Tensor, options: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """A token for each row of logits float32 [r, vocab], which may be overwritten; every row has a finite number.

    uniforms: in [0, 1), one a row.
    """
    if runs_triton(logits.device):
        return draw_on_device(logits, range(len(options)), options, uniforms).tolist()
    temperature = torch.tensor([sampling.temperature for sampling in options], device=logits.device)
    probs = torch.softmax(logits.div_(temperature[:, None]), -1)
    filtered = [sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 for sampling in options]
    sums = None if all(filtered) else _block_sums(probs).cpu().numpy()
    tokens = []
    for i, (row, sampling, uniform) in enumerate(zip(probs.cpu().numpy(), options, uniforms, strict=True)):
        if filtered[i]:
            ids, left = kept(row, sampling)
            tokens.append(int(ids[_invert(left, uniform)]))
        else:
            assert sums is not None
            tokens.append(_invert_row(row, sums[i], uniform))
    return tokens


def draw_on_device(
    logits: Tensor, rows: Sequence[int], options: Sequence[Sampling], uniforms: Sequence[float]
) -> Tensor:
    """A token for each of `rows` of logits, int64 on their device, without waiting for it; -1 where a row has no
    finite number. By Triton's kernel."""
    from . import draw_triton

    asked = [
        (row, LOG2_E / sampling.temperature, sampling.min_p, sampling.top_k, sampling.top_p, uniform)
        for row, sampling, uniform in zip(rows, options, uniforms, strict=True)
    ]
    return draw_triton.draw(logits, send(np.array(asked, np.float64).reshape(-1, 6), logits.device))


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


def _block_sums(probs: Tensor) -> Tensor:
    whole = probs.shape[-1] // BLOCK * BLOCK
    sums = probs[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    return sums if whole == probs.shape[-1] else torch.cat((sums, probs[:, whole:].sum(-1, keepdim=True)), -1)


def _invert_row(probs: np.ndarray, sums: np.ndarray, uniform: float) -> int:
    """`_invert` of a whole row: the block by its sum, then the token in it."""
    ends = sums.cumsum(dtype=np.float64)
    block = _invert(sums, uniform)
    start = ends[block - 1] if block else 0.0
    inside = probs[block * BLOCK : (block + 1) * BLOCK]
    return block * BLOCK + _invert(inside, max(0.0, (uniform * ends[-1] - start) / sums[block]))


def _invert(weights: np.ndarray, uniform: float) -> int:
    """The first place up to which there is more than `uniform` of the weights; never one that weighs nothing."""
    ends = weights.cumsum(dtype=np.float64)
    place = int(np.searchsorted(ends, uniform * ends[-1], side="right"))
    if place == len(ends):  # only by rounding
        place = int(np.flatnonzero(weights)[-1])
    return place
