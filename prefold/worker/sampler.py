"""The sampler makes tokens of logits and of what each sample asks for.

What is done to a row of logits, in this order (that of vLLM; each step as transformers defines it):

    logit_bias, the grammar's mask
    repetition penalty                 logits of tokens in prompt or output: divided if positive, else multiplied
    presence and frequency penalty     of tokens in the output
    min_tokens                         what would end the sample is banned
    temperature                        at 0: the most likely token, the first of equals
    the filters                        each among what the one before left

`draw` does the last two lines, and draws from the tokens left. The noise of a draw is made of the seed, the sample, the
position and the token (`engine.sampling`), so it depends on neither neighbours nor batch nor earlier steps.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..engine.sampling import gumbel, hash_ids
from ..engine.schedule.steps import NOT_FINITE, Drawing, RaggedLists
from ..model.arrays import array_of
from ..model.device import runs_triton, send
from ..spec.requests import TokenLogprobs
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
    keys     uint64 [n]: of the noise (`engine.sampling.make_key`)
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
        tokens[bare] = library.draw(array_of(logits), rows[bare], inverses[bare], keys[bare])
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


def choose(logits: Tensor, rows: np.ndarray, drawing: Drawing | None) -> tuple[Tensor, dict[int, TokenLogprobs]]:
    """Returns the token of each read, int64 [p] on the logits' device, and log-probabilities by read, where asked for.

    A token is -1 where all are forbidden, and NOT_FINITE where the logits are no finite numbers. The device is waited
    for only where log-probabilities are asked for, or where it is a GPU without Triton.

    logits   float32 [r, vocab]; they are not changed
    rows     int64 [p]: the row of each read; several reads may be at one
    drawing  of some of these reads; all others get the most likely token
    """
    device = logits.device
    likely = most_likely(logits)[send(rows, device)]
    if drawing is None:
        return likely, {}
    ids = likely.clone()
    logprobs: dict[int, TokenLogprobs] = {}
    count = len(drawing.reads)
    # On a CPU the rows that are worked on stay in its cache.
    at_once = max(1, WORK_SIZE // logits.shape[-1] if device.type == "cpu" else count)
    for first in range(0, count, at_once):
        part = drawing.part(first, min(count, first + at_once))
        reads, of_part = send(part.reads, device), rows[part.reads]
        ids[reads] = tokens = _choose(logits, of_part, likely[reads], part)
        places = np.flatnonzero(part.logprobs >= 0)
        if places.size:
            own = logits.index_select(0, send(of_part[places], device))
            values = _logprobs(own, part.logprobs[places], tokens[send(places, device)])
            logprobs |= {read: value for read, value in zip(part.reads[places].tolist(), values, strict=True) if value}
    return ids, logprobs


def most_likely(logits: Tensor) -> Tensor:
    """Returns the most likely id of each row, the first of equals, int64 [r] on the logits' device.

    It is NOT_FINITE where the largest logit is infinite or any logit is NaN, which arg-max takes for the largest.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(likeliest(logits.numpy()))
    ids = logits.argmax(-1)
    return torch.where(logits.gather(-1, ids[:, None])[:, 0].isfinite(), ids, NOT_FINITE)


def likeliest(logits: np.ndarray) -> np.ndarray:
    """Returns what `most_likely` does, of logits in the memory of a CPU."""
    places = logits.argmax(-1).tolist()  # NumPy's takes a tenth of the time of torch's
    finite = (math.isfinite(logits.item(row, place)) for row, place in enumerate(places))
    return np.array([place if is_finite else NOT_FINITE for place, is_finite in zip(places, finite, strict=True)], int)


def _choose(logits: Tensor, rows: np.ndarray, likely: Tensor, drawing: Drawing) -> Tensor:
    """Returns the tokens of a drawing's reads. likely: what `most_likely` gives for the row of each."""
    device = logits.device
    ids = likely
    if any(x is not None for x in (drawing.bias, drawing.grammar_masks, drawing.output_counts, drawing.banned_ids)):
        logits, rows = logits.index_select(0, send(rows, device)), np.arange(len(rows))
        _alter(logits, drawing)
        ids = most_likely(logits)
        # Of finite logits nothing is left only where all tokens are forbidden.
        ids = torch.where(ids == NOT_FINITE, -1, ids)
    places = np.flatnonzero(drawing.filters[:, 0] > 0.0)
    if places.size:
        ids = ids.clone()
        ids[send(places, device)] = draw(logits, rows[places], drawing.filters[places], drawing.keys[places])
    return torch.where(likely == NOT_FINITE, NOT_FINITE, ids)


def _alter(work: Tensor, drawing: Drawing) -> None:
    """Changes `work`, a row for each read of a drawing, by all that comes before the temperature."""
    line, device = work.view(-1), work.device
    if drawing.bias is not None:
        line[_places(work, drawing.bias)] += send(drawing.bias.values, device)
    if drawing.grammar_masks is not None:
        _forbid(work, drawing.grammar_reads, ~drawing.grammar_masks)
    if drawing.output_counts is not None:
        _penalise(work, drawing.penalties, drawing.output_counts)
    if drawing.banned_ids is not None:
        line[_places(work, drawing.banned_ids)] = -torch.inf


def _forbid(work: Tensor, rows: np.ndarray, bits: np.ndarray) -> None:
    """Puts -inf into `rows` of `work` [n, vocab] for the tokens whose bit is set, as in `Drawing.grammar_masks`."""
    vocab = work.shape[-1]
    if work.device.type == "cpu" and not runs_triton(work.device):
        # In one pass over each row: a sixth of the time that torch takes with a mask of truth values.
        forbidden = np.unpackbits(bits, axis=-1, count=vocab, bitorder="little").view(np.bool_)
        for row, is_forbidden in zip(rows.tolist(), forbidden, strict=True):
            np.copyto(work[row].numpy(), -np.inf, where=is_forbidden)
        return
    places, packed = send(rows, work.device), send(bits, work.device)
    forbidden = (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=work.device)) & 1
    work[places] = work[places].masked_fill_(forbidden.flatten(1)[:, :vocab].bool(), -torch.inf)


def _places(work: Tensor, ragged: RaggedLists) -> Tensor:
    """Returns where in `work`, taken as one line, lie the ids of each row."""
    starts = np.arange(len(work), dtype=np.int64) * work.shape[-1]
    return send(ragged.ids + starts.repeat(np.diff(ragged.offsets)), work.device)


def _penalise(work: Tensor, penalties: np.ndarray, counts: RaggedLists) -> None:
    """Changes logits as CTRL (Keskar et al. 2019) says for the repetition penalty, and OpenAI's API reference for the
    other two."""
    weights = penalties.astype(np.float32).repeat(np.diff(counts.offsets), axis=0)
    repetition, presence, frequency = weights.T  # in the order of PENALTIES
    less = send(presence * (counts.values > 0) + frequency * counts.values, work.device)
    factor = send(repetition, work.device)
    places = _places(work, counts)
    values = work.view(-1)[places]
    work.view(-1)[places] = torch.where(values > 0, values / factor, values * factor) - less


def _logprobs(logits: Tensor, counts: np.ndarray, ids: Tensor) -> list[TokenLogprobs | None]:
    """Returns log-probabilities of the model's own distribution, for each row [a, vocab]: of its token, and of as many
    of the most likely ones as `counts` says; None where there is no token."""
    own = torch.log_softmax(logits, -1)
    values, places = (x.cpu().numpy() for x in own.topk(min(int(counts.max()), own.shape[-1]), -1))
    chosen = own.gather(1, ids.clamp(min=0)[:, None])[:, 0].tolist()
    rows: list[TokenLogprobs | None] = []
    for token, value, many, place, count in zip(ids.tolist(), chosen, values, places, counts.tolist(), strict=True):
        order = np.lexsort((place, -many))[:count]
        top = tuple(zip(place[order].tolist(), many[order].tolist(), strict=True))
        rows.append(None if token < 0 else TokenLogprobs(value, top))
    return rows
