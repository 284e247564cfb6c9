"""Sampling: choose tokens from logits, with the options of each sample.

A row of logits is processed in this order (the order of vLLM; each step as transformers defines it):

    logit_bias, the grammar's mask
    repetition penalty                 logits of tokens in prompt or output: divided if positive, else multiplied
    presence and frequency penalty     subtracted from the logits of tokens in the output
    min_tokens                         tokens that would end the sample are banned
    temperature                        at 0: the most likely token; ties go to the lowest id
    the filters                        each filters the tokens that the filter before left

`draw_scaled` does the last two lines and draws from the remaining tokens. It is the reference for the kernels on CPUs
and GPUs. The noise of a draw is computed from the seed, the sample, the position and the token (`engine.sampling`). So
it does not depend on neighbours, the batch or earlier steps.
"""

from __future__ import annotations

import math

import numpy as np

from ..engine.sampling import gumbel, hash_ids
from ..engine.schedule.steps import NOT_FINITE, Drawing, RaggedLists
from ..spec.requests import TokenLogprobs
from ..spec.task import FILTERS, SamplerOptions, filters_of
from .arrays import Array, Arrays

# Number of float32 logits processed at once: 4 MiB, about the size of a second-level cache, for each intermediate.
WORK_SIZE = 1 << 20
# Group size in the search for a probability that at least top_k tokens reach: the largest of each group is compared.
BLOCK = 128
# Minimum number of candidates that top_p tries first.
CANDIDATES = 256
_OFF = np.array(filters_of(SamplerOptions())[1:])  # the values of filters that keep all tokens
_KEPT = [FILTERS.index(name) for name in ("min_p", "top_k", "top_p")]  # columns for `_candidates`
_TOP_N_SIGMA = FILTERS.index("top_n_sigma")


def bare(filters: np.ndarray) -> np.ndarray:
    """Return True for each draw that has no filter but the temperature, bool [n]; filters float64 [n, FILTERS]."""
    return ~np.logical_or.reduce(filters[:, 1:] != _OFF, axis=1)


def draw_scaled(values: np.ndarray, probs: np.ndarray, filters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return one drawn token per row, int64 [r]; -1 if the row's largest logit is not finite.

    The draw is the argmax of value + Gumbel noise over the tokens that the filters keep.

    Args:
        values: float32 [r, vocab]: (logit - the row's largest) / temperature.
        probs: float32 [r, vocab]: the softmax of each row.
        filters: float64 [r, FILTERS]. The temperature, in column 0, is above 0.
        keys: uint64 [r], for the noise (`engine.sampling.make_key`).
    """
    tokens = np.full(len(values), -1)
    finite = np.flatnonzero(~np.isnan(probs[:, 0]))  # a row is all NaN if its largest logit is not finite
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
    """Return exp(-sigmas * standard deviation of the row): the min_p that keeps the same tokens as top_n_sigma.

    Forbidden tokens (-inf) are left out of the deviation.

    Args:
        scaled: a row of `values` of `draw_scaled`
    """
    return float(np.exp(-sigmas * scaled[np.isfinite(scaled)].std(dtype=np.float64)))


def _candidates(probs: np.ndarray, min_p: float, top_k: float, top_p: float, key: np.uint64) -> np.ndarray:
    """Return the ids that may be drawn, ascending: the tokens that the filters keep.

    Without a filter: the tokens whose noise may be large enough to win. The token with the least
    -log(1 - v) / probability wins, where v is its hash in [0, 1), and -log(1 - v) >= v. So a token cannot win if its
    v / probability exceeds the exact value of another token, here the most likely one. Only the upper 24 bits of v are
    compared.
    """
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        return filter_tokens(probs, min_p, int(top_k), top_p)[0]
    all_ids, key_array = np.arange(probs.size, dtype=np.uint32), np.array([key])
    top = int(probs.argmax())
    hashes = hash_ids(all_ids, key_array)
    reach = 1.001 * 2.0**24 * np.exp(-gumbel(hashes[top : top + 1])) / probs[top]
    return np.flatnonzero((hashes >> np.uint32(8)).astype(np.float32) <= probs * reach.astype(np.float32))


def filter_tokens(probs: np.ndarray, min_p: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that min_p, top_k (0: all) and top_p keep, ascending, and their probabilities.

    Only the candidates are sorted, not the whole row. Candidates are all tokens that are at least as likely as a lower
    bound for the least likely kept token.

    Args:
        probs: float32 [vocab]
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
            # A token is kept if the more likely tokens sum to less than top_p.
            least = falling[min(np.searchsorted(sums, top_p * total), falling.size - 1)]
    is_inside = values >= least
    return ids[is_inside], values[is_inside]


def _nucleus(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Return ids, ascending, of all tokens above some bound; together at least top_p. Mostly a few hundred."""
    bound = _below_top(probs, min(CANDIDATES, probs.size))
    # All tokens below `lowest` together have less than half of the probability that may be left out.
    lowest = (1.0 - top_p) / (2 * probs.size)
    while True:
        ids = np.flatnonzero(probs >= bound)
        if bound <= lowest or probs[ids].sum(dtype=np.float64) >= top_p:
            return ids
        bound = max(bound / 8, np.float32(lowest))


def _below_top(probs: np.ndarray, top_k: int) -> np.float32:
    """Return a probability that at least top_k tokens reach: the top_k-th largest of the maxima of groups.

    There are at least top_k groups.
    """
    size = min(BLOCK, probs.size // top_k)
    groups = probs.size // size
    largest = probs[: groups * size].reshape(size, groups).max(0)
    return np.partition(largest, -top_k)[-top_k]


def choose(
    arrays: Arrays[Array], logits: Array, rows: np.ndarray, drawing: Drawing | None
) -> tuple[Array, dict[int, TokenLogprobs]]:
    """Choose the token of each read.

    Return (tokens, int64 [p] on the device of the logits; {read: log-probabilities} for the reads that ask for them). A
    token is -1 if all tokens are forbidden, and NOT_FINITE if logits are infinite or NaN. The call waits for the
    device only if log-probabilities are requested, or on a GPU without Triton.

    Args:
        logits: float32 [r, vocab]; not modified.
        rows: int64 [p]: the row of each read. Several reads may share a row.
        drawing: Sampling options for some of the reads. The other reads get the most likely token.
    """
    likely = arrays.take(arrays.most_likely(logits), arrays.send(rows))
    if drawing is None:
        return likely, {}
    ids = likely
    logprobs: dict[int, TokenLogprobs] = {}
    count = len(drawing.reads)
    # On a CPU, the rows of one block stay in the cache.
    at_once = max(1, WORK_SIZE // logits.shape[-1] if arrays.in_cache else count)
    for first in range(0, count, at_once):
        part = drawing.part(first, min(count, first + at_once))
        reads, of_part = arrays.send(part.reads), rows[part.reads]
        tokens = _choose(arrays, logits, of_part, arrays.take(likely, reads), part)
        ids = arrays.put(ids, reads, tokens)
        places = np.flatnonzero(part.logprobs >= 0)
        if places.size:
            own, at = arrays.take(logits, arrays.send(of_part[places])), arrays.send(places)
            values = _logprobs(arrays, own, part.logprobs[places], arrays.take(tokens, at))
            logprobs |= {read: value for read, value in zip(part.reads[places].tolist(), values, strict=True) if value}
    return ids, logprobs


def likeliest(logits: np.ndarray) -> np.ndarray:
    """Return the most likely id of each row of float32 logits [r, vocab], int64 [r]. Ties go to the lowest id.

    NOT_FINITE marks a row whose largest logit is infinite or that contains NaN (argmax treats NaN as the largest).
    """
    places = logits.argmax(-1).tolist()  # NumPy's argmax needs a tenth of the time of torch's
    finite = (math.isfinite(logits.item(row, place)) for row, place in enumerate(places))
    return np.array([place if is_finite else NOT_FINITE for place, is_finite in zip(places, finite, strict=True)], int)


def _choose(arrays: Arrays[Array], logits: Array, rows: np.ndarray, likely: Array, drawing: Drawing) -> Array:
    """Return the tokens of a drawing's reads.

    Args:
        likely: `Arrays.most_likely` of the row of each read
    """
    ids = likely
    if any(x is not None for x in (drawing.bias, drawing.grammar_masks, drawing.output_counts, drawing.banned_ids)):
        logits, rows = arrays.take(logits, arrays.send(rows)), np.arange(len(rows))
        _alter(arrays, logits, drawing)
        ids = arrays.most_likely(logits)
        # The logits were finite before, so a row without a finite maximum has all tokens forbidden.
        ids = arrays.where(ids == NOT_FINITE, -1, ids)
    places = np.flatnonzero(drawing.filters[:, 0] > 0.0)
    if places.size:
        drawn = arrays.draw(logits, rows[places], drawing.filters[places], drawing.keys[places])
        ids = arrays.put(ids, arrays.send(places), drawn)
    return arrays.where(likely == NOT_FINITE, NOT_FINITE, ids)


def _alter(arrays: Arrays[Array], work: Array, drawing: Drawing) -> None:
    """Apply every step before the temperature to `work`, in place. `work` has one row per read of the drawing."""
    line = work.reshape(-1)  # a view
    with np.errstate(over="ignore", invalid="ignore"):  # rows that overflow here end up without a token
        if drawing.bias is not None:
            line[_places(arrays, work, drawing.bias)] += arrays.send(drawing.bias.values)
        if drawing.grammar_masks is not None:
            arrays.forbid(work, drawing.grammar_reads, ~drawing.grammar_masks)
        if drawing.output_counts is not None:
            _penalise(arrays, work, drawing.penalties, drawing.output_counts)
        if drawing.banned_ids is not None:
            line[_places(arrays, work, drawing.banned_ids)] = -math.inf


def forbid(work: np.ndarray, rows: np.ndarray, bits: np.ndarray) -> None:
    """Implement `Arrays.forbid` in CPU memory."""
    # One pass over each row needs a sixth of the time of a boolean mask in torch.
    forbidden = np.unpackbits(bits, axis=-1, count=work.shape[-1], bitorder="little").view(np.bool_)
    for row, is_forbidden in zip(rows.tolist(), forbidden, strict=True):
        np.copyto(work[row], -np.inf, where=is_forbidden)


def _places(arrays: Arrays[Array], work: Array, ragged: RaggedLists) -> Array:
    """Return the index of each row's ids in the flattened `work`."""
    starts = np.arange(len(work), dtype=np.int64) * work.shape[-1]
    return arrays.send(ragged.ids + starts.repeat(np.diff(ragged.offsets)))


def _penalise(arrays: Arrays[Array], work: Array, penalties: np.ndarray | None, counts: RaggedLists) -> None:
    """Apply the penalties to `work`, in place.

    Repetition is as in CTRL (Keskar et al. 2019), presence and frequency are as in OpenAI's API reference."""
    assert penalties is not None
    weights = penalties.astype(np.float32).repeat(np.diff(counts.offsets), axis=0)
    repetition, presence, frequency = weights.T  # in the order of PENALTIES
    less = arrays.send(presence * (counts.values > 0) + frequency * counts.values)
    factor = arrays.send(repetition)
    places, line = _places(arrays, work, counts), work.reshape(-1)
    values = line[places]
    line[places] = arrays.where(values > 0, values / factor, values * factor) - less


def _logprobs(arrays: Arrays[Array], logits: Array, counts: np.ndarray, ids: Array) -> list[TokenLogprobs | None]:
    """Return log-probabilities under the model's own distribution, for each row [a, vocab].

    An entry has the log-probability of the row's token and of the `counts` most likely tokens. None: the row has no
    token.
    """
    wanted = min(int(counts.max()), logits.shape[-1])
    chosen, values, places = arrays.likely_tokens(logits, wanted, arrays.where(ids < 0, 0, ids))
    (tokens,) = arrays.fetch(ids)()
    rows: list[TokenLogprobs | None] = []
    for token, value, many, place, count in zip(
        tokens.tolist(), chosen.tolist(), values, places, counts.tolist(), strict=True
    ):
        order = np.lexsort((place, -many))[:count]
        top = tuple(zip(place[order].tolist(), many[order].tolist(), strict=True))
        rows.append(None if token < 0 else TokenLogprobs(value, top))
    return rows
