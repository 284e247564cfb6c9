"""Drawing a token from a row of logits: temperature, top_n_sigma, min_p, top_k and top_p, and the noise of a key.

Each filter keeps the tokens at least as likely as some token, so of equally likely ones it keeps all or none, and
nothing depends on the order in which a sort leaves them. Of what is left, the token whose logit over the temperature
plus its noise (`noise`) is the largest is drawn, the first of equals. Here in NumPy; where nothing is filtered out a
compiled kernel does it, and `draw_triton` does all of it where the logits are on a GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..engine.noise import gumbel, hash_ids
from ..model.device import runs_triton, send
from ..spec.task import FILTERS, SamplerOptions, filters_of

# Logits worked on at once, as float32 numbers: 4 MiB, about a second-level cache's worth of each intermediate.
WORK_SIZE = 1 << 20
# A probability that top_k tokens are at least as likely as is looked for among the largest of so many numbers each.
BLOCK = 128
# Candidates for top_p that are tried first, at least.
CANDIDATES = 256
_OFF = np.array(filters_of(SamplerOptions())[1:])  # what filters are that leave all tokens
_KEPT = [FILTERS.index(name) for name in ("min_p", "top_k", "top_p")]  # the columns that `kept` takes
_TOP_N_SIGMA = FILTERS.index("top_n_sigma")


def draw(logits: Tensor, rows: np.ndarray, filters: np.ndarray, keys: np.ndarray) -> Tensor:
    """Returns a token drawn for each of `rows` of logits float32 [r, vocab], int64 [n] on the logits' device.

    It is -1 where a row's largest logit is not finite. A GPU that runs Triton is not waited for.

    rows     int64 [n]
    filters  float64 [n, FILTERS]; the temperature, the first of them, is above 0
    keys     uint64 [n]: of the noise (`noise.make_key`)
    """
    inverses = (1.0 / filters[:, 0]).astype(np.float32)
    if runs_triton(logits.device):
        from . import draw_triton

        halves = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
        draws = np.column_stack((rows, *halves, inverses, filters[:, 1:])).astype(np.float64)
        return draw_triton.draw(logits, send(draws, logits.device))
    tokens = np.zeros(len(rows), np.int64)
    has_filters = np.logical_or.reduce(filters[:, 1:] != _OFF, axis=1)
    library = kernels.load() if logits.device.type == "cpu" else None
    if library is not None and not has_filters.all():
        bare = np.flatnonzero(~has_filters)
        tokens[bare] = library.draw(logits, rows[bare], inverses[bare], keys[bare])
    remaining = np.arange(len(rows)) if library is None else np.flatnonzero(has_filters)
    at_once = max(1, WORK_SIZE // logits.shape[-1])
    for first in range(0, len(remaining), at_once):
        part = remaining[first : first + at_once]
        tokens[part] = _draw_scaled(_scaled(logits, rows[part], inverses[part]), filters[part], keys[part])
    return send(tokens, logits.device)


def _scaled(logits: Tensor, rows: np.ndarray, inverses: np.ndarray) -> Tensor:
    """Returns (logit - the row's largest) / temperature of `rows`, float32 [rows, vocab]: 0 for the largest one."""
    work = logits.index_select(0, send(rows, logits.device))
    return work.sub_(work.amax(-1, keepdim=True)).mul_(send(inverses[:, None], logits.device))


def _draw_scaled(scaled: Tensor, filters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the token of each row [r, vocab], int64 [r]. filters: of each, as those of `draw`."""
    probs = torch.softmax(scaled, -1).cpu().numpy()
    values = scaled.cpu().numpy()
    tokens = np.full(len(values), -1)
    finite = np.flatnonzero(~np.isnan(probs[:, 0]))  # all of a row are NaN where its largest is not finite
    if not finite.size:
        return tokens
    limits = filters[:, _KEPT].tolist()
    for i in finite[filters[finite, _TOP_N_SIGMA] > 0.0].tolist():
        limits[i][0] = max(limits[i][0], _likeliness(values[i], filters[i, _TOP_N_SIGMA]))
    ids = [_candidates(probs[i], *limits[i], keys[i]) for i in finite]
    counts = [len(row_ids) for row_ids in ids]
    all_ids = np.concatenate(ids)
    noise = gumbel(hash_ids(all_ids, keys[finite].repeat(counts)))
    scores = values[finite.repeat(counts), all_ids] + noise
    ends = np.cumsum(counts)
    tokens[finite] = [
        row_ids[scores[end - len(row_ids) : end].argmax()] for row_ids, end in zip(ids, ends, strict=True)
    ]
    return tokens


def _likeliness(scaled: np.ndarray, sigmas: float) -> float:
    """Returns how likely a token is, relative to the most likely one, whose logit is `sigmas` standard deviations below
    the largest. Tokens that are forbidden do not count. scaled: a row, as `_scaled` gives it."""
    return float(np.exp(-sigmas * scaled[np.isfinite(scaled)].std(dtype=np.float64)))


def _candidates(probs: np.ndarray, min_p: float, top_k: float, top_p: float, key: np.uint64) -> np.ndarray:
    """Returns the ids, ascending, of the tokens that may be drawn: those that the filters leave, or without any filter
    those that noise can lift above all others.

    -log(1 - v) is at least v, so that no token can be drawn whose v over its probability is larger than that of some
    other token is without this approximation; the upper bits of v are compared.
    """
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        return filter_tokens(probs, min_p, int(top_k), top_p)[0]
    all_ids, key_array = np.arange(probs.size, dtype=np.uint32), np.array([key])
    top = int(probs.argmax())
    hashes = hash_ids(all_ids, key_array)
    reach = 1.001 * 2.0**24 * np.exp(-gumbel(hashes[top : top + 1])) / probs[top]
    return np.flatnonzero((hashes >> np.uint32(8)).astype(np.float32) <= probs * reach.astype(np.float32))


def filter_tokens(probs: np.ndarray, min_p: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids, ascending, that min_p, top_k (0: all) and top_p leave of probabilities float32 [vocab], and
    their probabilities.

    A row is never sorted whole: first come the candidates, all tokens above a bound that no token can be kept below.
    """
    top_k = top_k if top_k < probs.size else 0
    least = np.float32(min_p) * probs.max()
    if top_k:
        ids = np.flatnonzero(probs >= max(least, _below_top(probs, top_k)))
    elif min_p or top_p == 1.0:
        ids = np.flatnonzero(probs >= least)
    else:
        ids = _nucleus(probs, top_p)
    values = probs[ids]
    if top_k or top_p < 1.0:
        falling = np.sort(values)[::-1]
        if top_k:
            least = max(least, falling[min(top_k, falling.size) - 1])
            falling = falling[falling >= least]
        if top_p < 1.0:
            sums = falling.cumsum(dtype=np.float64)
            total = sums[-1] if top_k or min_p else 1.0
            # Kept is a token before which there is less than top_p.
            least = falling[min(np.searchsorted(sums, top_p * total), falling.size - 1)]
    is_inside = values >= least
    return ids[is_inside], values[is_inside]


def _nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Returns the ids, ascending, of the tokens above some bound, together at least top_p; mostly a few hundred."""
    bound = _below_top(probs, min(CANDIDATES, probs.size))
    # All tokens below this have together less than half of what may be left out.
    lowest = (1.0 - top_p) / (2 * probs.size)
    while True:
        ids = np.flatnonzero(probs >= bound)
        if bound <= lowest or probs[ids].sum(dtype=np.float64) >= top_p:
            return ids
        bound = max(bound / 8, np.float32(lowest))


def _below_top(probs: np.ndarray, top_k: int) -> np.float32:
    """Returns a probability that at least top_k are not below: the top_k-th of the largest ones of that many groups or
    more."""
    size = min(BLOCK, probs.size // top_k)
    groups = probs.size // size
    largest = probs[: groups * size].reshape(size, groups).max(0)
    return np.partition(largest, -top_k)[-top_k]
