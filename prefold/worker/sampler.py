"""The sampler makes tokens of logits and of what each sample asks for.

What is done to a row of logits, in this order (that of vLLM; each step as transformers defines it):

    logit_bias, the grammar's mask
    repetition penalty                 logits of tokens in prompt or output: divided if positive, else multiplied
    presence and frequency penalty     of tokens in the output
    min_tokens                         what would end the sample is banned
    temperature                        at 0: the most likely token, the first of equals
    the filters                        each among what the one before left

`draw_scaled` does the last two lines, and draws from the tokens left; kernels for CPUs and GPUs do what it defines. The
noise of a draw is made of the seed, the sample, the position and the token (`engine.sampling`). So it depends on
neither neighbours nor batch nor earlier steps.
"""

from __future__ import annotations

import math

import numpy as np

from ..engine.sampling import gumbel, hash_ids
from ..engine.schedule.steps import NOT_FINITE, Drawing, RaggedLists
from ..spec.requests import TokenLogprobs
from ..spec.task import FILTERS, SamplerOptions, filters_of
from .arrays import Array, Arrays

# Logits worked on at once, as float32 numbers: 4 MiB, about a second-level cache's worth of each intermediate.
WORK_SIZE = 1 << 20
# A probability that top_k tokens are at least as likely as is looked for among the largest of so many numbers each.
BLOCK = 128
# Candidates for top_p that are tried first, at least.
CANDIDATES = 256
_OFF = np.array(filters_of(SamplerOptions())[1:])  # what filters are that leave all tokens
_KEPT = [FILTERS.index(name) for name in ("min_p", "top_k", "top_p")]  # the columns that `kept` takes
_TOP_N_SIGMA = FILTERS.index("top_n_sigma")


def bare(filters: np.ndarray) -> np.ndarray:
    """Returns which draws have no filter but the temperature, bool [n]; filters float64 [n, FILTERS]."""
    return ~np.logical_or.reduce(filters[:, 1:] != _OFF, axis=1)


def draw_scaled(values: np.ndarray, probs: np.ndarray, filters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns a token drawn for each row, int64 [r]; -1 where a row's largest logit is not finite.

    values   float32 [r, vocab]: (logit - the row's largest) / temperature
    probs    float32 [r, vocab]: the softmax of each row
    filters  float64 [r, FILTERS]; the temperature, the first of them, is above 0
    keys     uint64 [r]: of the noise (`engine.sampling.make_key`)
    """
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
    the largest. Tokens that are forbidden do not count. scaled: a row of `values` of `draw_scaled`"""
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


def choose(
    arrays: Arrays[Array], logits: Array, rows: np.ndarray, drawing: Drawing | None
) -> tuple[Array, dict[int, TokenLogprobs]]:
    """Returns the token of each read, int64 [p] where the logits are, and log-probabilities by read, where asked for.

    A token is -1 where all are forbidden, and NOT_FINITE where the logits are no finite numbers. The device is waited
    for only where log-probabilities are asked for, or where it is a GPU without Triton.

    logits   float32 [r, vocab]; they are not changed
    rows     int64 [p]: the row of each read; several reads may be at one
    drawing  of some of these reads; all others get the most likely token
    """
    likely = arrays.take(arrays.most_likely(logits), arrays.send(rows))
    if drawing is None:
        return likely, {}
    ids = likely
    logprobs: dict[int, TokenLogprobs] = {}
    count = len(drawing.reads)
    # On a CPU the rows that are worked on stay in its cache.
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
    """Returns the most likely id of each row of float32 logits [r, vocab], the first of equals, int64 [r].

    It is NOT_FINITE where the largest logit is infinite or any logit is NaN, which arg-max takes for the largest.
    """
    places = logits.argmax(-1).tolist()  # NumPy's takes a tenth of the time of torch's
    finite = (math.isfinite(logits.item(row, place)) for row, place in enumerate(places))
    return np.array([place if is_finite else NOT_FINITE for place, is_finite in zip(places, finite, strict=True)], int)


def _choose(arrays: Arrays[Array], logits: Array, rows: np.ndarray, likely: Array, drawing: Drawing) -> Array:
    """Returns the tokens of a drawing's reads. likely: what `Arrays.most_likely` gives for the row of each."""
    ids = likely
    if any(x is not None for x in (drawing.bias, drawing.grammar_masks, drawing.output_counts, drawing.banned_ids)):
        logits, rows = arrays.take(logits, arrays.send(rows)), np.arange(len(rows))
        _alter(arrays, logits, drawing)
        ids = arrays.most_likely(logits)
        # Of finite logits nothing is left only where all tokens are forbidden.
        ids = arrays.where(ids == NOT_FINITE, -1, ids)
    places = np.flatnonzero(drawing.filters[:, 0] > 0.0)
    if places.size:
        drawn = arrays.draw(logits, rows[places], drawing.filters[places], drawing.keys[places])
        ids = arrays.put(ids, arrays.send(places), drawn)
    return arrays.where(likely == NOT_FINITE, NOT_FINITE, ids)


def _alter(arrays: Arrays[Array], work: Array, drawing: Drawing) -> None:
    """Changes `work`, a row for each read of a drawing, by all that comes before the temperature."""
    line = work.reshape(-1)  # the same memory
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then has no token
        if drawing.bias is not None:
            line[_places(arrays, work, drawing.bias)] += arrays.send(drawing.bias.values)
        if drawing.grammar_masks is not None:
            arrays.forbid(work, drawing.grammar_reads, ~drawing.grammar_masks)
        if drawing.output_counts is not None:
            _penalise(arrays, work, drawing.penalties, drawing.output_counts)
        if drawing.banned_ids is not None:
            line[_places(arrays, work, drawing.banned_ids)] = -math.inf


def forbid(work: np.ndarray, rows: np.ndarray, bits: np.ndarray) -> None:
    """Does what `Arrays.forbid` does, in the memory of a CPU."""
    # In one pass over each row: a sixth of the time that torch takes with a mask of truth values.
    forbidden = np.unpackbits(bits, axis=-1, count=work.shape[-1], bitorder="little").view(np.bool_)
    for row, is_forbidden in zip(rows.tolist(), forbidden, strict=True):
        np.copyto(work[row], -np.inf, where=is_forbidden)


def _places(arrays: Arrays[Array], work: Array, ragged: RaggedLists) -> Array:
    """Returns where in `work`, taken as one line, lie the ids of each row."""
    starts = np.arange(len(work), dtype=np.int64) * work.shape[-1]
    return arrays.send(ragged.ids + starts.repeat(np.diff(ragged.offsets)))


def _penalise(arrays: Arrays[Array], work: Array, penalties: np.ndarray | None, counts: RaggedLists) -> None:
    """Changes logits as CTRL (Keskar et al. 2019) says for the repetition penalty, and OpenAI's API reference for the
    other two."""
    assert penalties is not None
    weights = penalties.astype(np.float32).repeat(np.diff(counts.offsets), axis=0)
    repetition, presence, frequency = weights.T  # in the order of PENALTIES
    less = arrays.send(presence * (counts.values > 0) + frequency * counts.values)
    factor = arrays.send(repetition)
    places, line = _places(arrays, work, counts), work.reshape(-1)
    values = line[places]
    line[places] = arrays.where(values > 0, values / factor, values * factor) - less


def _logprobs(arrays: Arrays[Array], logits: Array, counts: np.ndarray, ids: Array) -> list[TokenLogprobs | None]:
    """Returns log-probabilities of the model's own distribution, for each row [a, vocab]: of its token, and of as many
    of the most likely ones as `counts` says; None where there is no token."""
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
