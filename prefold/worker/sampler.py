"""The sampler makes tokens of logits and of what each sample asks for.

What is done to a row of logits, in this order (that of vLLM; each step as transformers defines it):

    logit_bias, the grammar's mask
    repetition penalty                 logits of tokens in prompt or output: divided if positive, else multiplied
    presence and frequency penalty     of tokens in the output
    min_tokens                         what would end the sample is banned
    temperature                        at 0: the most likely token, the first of equals
    the filters                        each among what the one before left

The last two lines, and drawing from what is left, are `draw`'s. The noise a token is drawn with is made of the seed,
the sample, the position and the token (`noise`), so it depends on neither neighbours nor batch nor what ran before.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..engine.schedule.steps import NOT_FINITE, Drawing, RaggedLists
from ..model.device import runs_triton, send
from ..spec.requests import TokenLogprobs
from .draw import WORK_SIZE, draw


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
