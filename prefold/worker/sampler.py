"""The sampler: logits and what each sample asks for, to tokens.

What is done to a row of logits, in this order (that of vLLM; each step as transformers defines it):

    logit_bias, the grammar's mask
    repetition penalty                 logits of tokens in prompt or output: divided if positive, else multiplied
    presence and frequency penalty     of tokens in the output
    min_tokens                         what would end the sample is banned
    temperature                        at 0: the most likely token, the first of equals
    min_p, top_k, top_p                each among what the one before left

The last two lines, and drawing from what is left, are `draw`'s. The noise a token is drawn with is made of the seed,
the sample, the position and the token (`noise`), so it depends on neither neighbours nor batch nor what ran before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..device import runs_triton, send
from ..schedule.steps import NOT_FINITE, Drawing
from ..types import TokenLogprobs
from .draw import WORK_SIZE, draw, draw_on_device

__all__ = ["Asked", "Choice", "Options", "Sampler", "asked_of", "greedy", "most_likely"]

NONE = np.empty(0, np.int64)


def greedy(logits: Tensor) -> np.ndarray:
    """The most likely id of each row [r, vocab], int64 [r]; the first of equals."""
    # NumPy's arg-max is a tenth of the work of torch's.
    return logits.numpy().argmax(-1) if logits.device.type == "cpu" else logits.argmax(-1).cpu().numpy()


def _greedy_checked(logits: Tensor) -> np.ndarray:
    """`greedy`, with NOT_FINITE where the largest logit is infinite or any logit is NaN (which arg-max then finds)."""
    if logits.device.type != "cpu":
        return _start_greedy(logits).cpu().numpy()
    ids = greedy(logits)
    return np.where(np.isfinite(logits.numpy()[np.arange(len(ids)), ids]), ids, NOT_FINITE)


def _start_greedy(logits: Tensor) -> Tensor:
    """`_greedy_checked` on the logits' device, without waiting for it."""
    ids = logits.argmax(-1)
    return torch.where(logits.gather(-1, ids[:, None])[:, 0].isfinite(), ids, NOT_FINITE)


def most_likely(logits: Tensor, rows: np.ndarray) -> Tensor:
    """The most likely id of each of `rows`, int64 on the logits' device, without waiting for it; NOT_FINITE where the
    logits are no finite numbers."""
    if logits.device.type == "cpu":
        return torch.from_numpy(_greedy_checked(logits)[rows])
    return _start_greedy(logits)[send(rows, logits.device)]


class Options(NamedTuple):
    """Of one choice; the fields of Sampling that the sampler reads."""

    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None


class Asked:
    """How one token is to be chosen: a read of a Drawing. (`SamplerState` has all this too, for tests.)"""

    greedy = True
    bias_ids, bias, penalised, counted = NONE, NONE, False, (NONE, NONE)

    def __init__(self, drawing: Drawing | None = None, number: int = 0):
        """The `number`-th of a drawing; None: the most likely token."""
        self.is_plain = drawing is None
        self._banned, self._key, self.allowed = NONE, 0, None
        self.sampling = Options()
        if drawing is None:
            return
        temperature, min_p, top_k, top_p = drawing.filters[number].tolist()
        penalties = (1.0, 0.0, 0.0) if drawing.penalties is None else drawing.penalties[number].tolist()
        logprobs = int(drawing.logprobs[number])
        self.sampling = Options(temperature, min_p, int(top_k), top_p, *penalties, None if logprobs < 0 else logprobs)
        self.greedy, self._key = temperature == 0.0, int(drawing.keys[number])
        if drawing.bias is not None:
            self.bias_ids, self.bias = drawing.bias[number]
        if drawing.banned is not None:
            self._banned = drawing.banned[number][0]
        if drawing.counted is not None:
            self.counted = drawing.counted[number]
            self.penalised = penalties != [1.0, 0.0, 0.0]
        if drawing.allowed is not None and (place := np.flatnonzero(drawing.masked == number)).size:
            self.allowed = drawing.allowed[place[0]]

    def plain(self, ahead: int = 0) -> bool:
        return self.is_plain

    def banned(self, ahead: int = 0) -> np.ndarray:
        return self._banned

    def key(self, ahead: int = 0) -> int:
        return self._key

    @property
    def independent(self) -> bool:
        return not self.penalised and self.allowed is None and self.sampling.logprobs is None


PLAIN = Asked()


def asked_of(drawing: Drawing | None, reads: int) -> list[Asked]:
    """How the token of each of a step's reads is chosen."""
    asked = [PLAIN] * reads
    if drawing is not None:
        for number, read in enumerate(drawing.reads.tolist()):
            asked[read] = Asked(drawing, number)
    return asked


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of each sample; None: it may have none, and ends; NOT_FINITE: the logits are no finite numbers.
    `logprobs` where they were asked for."""

    ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Chooses the next token of every sample of a step. Holds nothing; never changes logits or states."""

    @torch.inference_mode()
    def choose(self, logits: Tensor, states: Sequence[Asked], rows: Sequence[int] | None = None) -> Choice:
        """logits float32 [r, vocab]; `rows[i]` is the row of states[i], by default i. Rows may be shared."""
        places = np.arange(len(states)) if rows is None else np.asarray(rows, np.int64)
        ids: list[int | None] = _greedy_checked(logits)[places].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(states)
        other = [i for i, state in enumerate(states) if ids[i] != NOT_FINITE and not state.plain()]
        at_once = max(1, WORK_SIZE // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(states))
        for first in range(0, len(other), at_once):
            part = other[first : first + at_once]
            work = logits.index_select(0, send(places[part], logits.device))
            chosen = _choose(work, [states[i] for i in part])
            for i, token, found in zip(part, chosen.ids, chosen.logprobs, strict=True):
                ids[i], logprobs[i] = token, found
        return Choice(ids, logprobs)

    @staticmethod
    def can_start(device: torch.device, states: Iterable[Asked]) -> bool:
        """Whether `start` chooses for them."""
        return runs_triton(device) and all(state.independent for state in states)

    @torch.inference_mode()
    def start(self, logits: Tensor, states: Sequence[Asked], rows: Sequence[int], ahead: Sequence[int]) -> Tensor:
        """`choose`, without waiting for the device: int64 [states] on it, -1 where there is no token, or NOT_FINITE.

        ahead: how many tokens of a sample its state has not been told of yet.
        """
        device, places = logits.device, np.asarray(rows, np.int64)
        likely = _start_greedy(logits)[send(places, device)]
        ids = likely.clone()
        at = [i for i, (state, n) in enumerate(zip(states, ahead, strict=True)) if not state.plain(n)]
        if not at:
            return ids
        other, later = [states[i] for i in at], [ahead[i] for i in at]
        if any(state.bias_ids.size or state.banned(n).size for state, n in zip(other, later, strict=True)):
            work, rows = logits.index_select(0, send(places[at], device)), range(len(at))
            _add_bias(work, other)
            _ban(work, other, later)
            ids[send(np.array(at), device)] = torch.where(work.amax(-1) > -torch.inf, work.argmax(-1), -1)
        else:
            work, rows = logits, places[at].tolist()
        drawn = [i for i, state in enumerate(other) if not state.greedy]
        if drawn:
            options = [other[i].sampling for i in drawn]
            keys = [other[i].key(later[i]) for i in drawn]
            places = send(np.array([at[i] for i in drawn]), device)
            ids[places] = draw_on_device(work, [rows[i] for i in drawn], options, keys)
        return torch.where(likely == NOT_FINITE, NOT_FINITE, ids)


def _choose(work: Tensor, states: list[Asked]) -> Choice:
    """`work`: a row a state, overwritten."""
    asked = [i for i, state in enumerate(states) if state.sampling.logprobs is not None]
    own = torch.log_softmax(work[asked], -1) if asked else None
    _add_bias(work, states)
    _mask(work, states)
    _penalise(work, states)
    _ban(work, states, [0] * len(states))
    # Of finite logits nothing is left only where all tokens are forbidden.
    ids: list[int | None] = [None if token == NOT_FINITE else token for token in _greedy_checked(work).tolist()]
    drawn = [i for i, state in enumerate(states) if not state.greedy and ids[i] is not None]
    if drawn:
        chosen = draw(work, drawn, [states[i].sampling for i in drawn], [states[i].key() for i in drawn])
        for i, token in zip(drawn, chosen, strict=True):
            ids[i] = token
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    if own is not None:
        for i, found in zip(asked, _logprobs(own, [states[i] for i in asked], [ids[i] for i in asked]), strict=True):
            logprobs[i] = found
    return Choice(ids, logprobs)


def _places(work: Tensor, rows: Sequence[int], ids: Sequence[np.ndarray]) -> Tensor:
    """Where in `work`, taken as one line, lie the ids of each row."""
    starts = np.repeat(np.array(rows, np.int64) * work.shape[-1], [len(some) for some in ids])
    return send(np.concatenate(ids) + starts, work.device)


def _add_bias(work: Tensor, states: list[Asked]) -> None:
    rows = [i for i, state in enumerate(states) if state.bias_ids.size]
    if rows:
        places = _places(work, rows, [states[i].bias_ids for i in rows])
        work.view(-1)[places] += send(np.concatenate([states[i].bias for i in rows]), work.device)


def _mask(work: Tensor, states: list[Asked]) -> None:
    for row, state in zip(work, states, strict=True):
        if state.allowed is not None:
            allowed = send(state.allowed, work.device)
            row.masked_fill_(~allowed, -torch.inf)


def _penalise(work: Tensor, states: list[Asked]) -> None:
    """CTRL (Keskar et al. 2019) for the repetition penalty, OpenAI's API reference for the others."""
    rows = [i for i, state in enumerate(states) if state.penalised]
    counted = [states[i].counted for i in rows]
    if not sum(ids.size for ids, _ in counted):
        return
    places = _places(work, rows, [ids for ids, _ in counted])
    options = [states[i].sampling for i in rows]
    each = np.array([(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in options], np.float32)
    each = np.repeat(each, [ids.size for ids, _ in counted], axis=0)
    counts = np.concatenate([some for _, some in counted])
    less = send(each[:, 1] * (counts > 0) + each[:, 2] * counts, work.device)
    factor = send(each[:, 0], work.device)
    values = work.view(-1)[places]
    work.view(-1)[places] = torch.where(values > 0, values / factor, values * factor) - less


def _ban(work: Tensor, states: list[Asked], ahead: Sequence[int]) -> None:
    banned = [state.banned(n) for state, n in zip(states, ahead, strict=True)]
    rows = [i for i, ids in enumerate(banned) if ids.size]
    if rows:
        work.view(-1)[_places(work, rows, [banned[i] for i in rows])] = -torch.inf


def _logprobs(own: Tensor, states: list[Asked], ids: list[int | None]) -> list[TokenLogprobs | None]:
    """own [a, vocab]: log-probabilities of the model's own distribution."""
    most = min(max(state.sampling.logprobs or 0 for state in states), own.shape[-1])
    values, places = own.topk(most, -1)
    values, places = values.cpu().numpy(), places.cpu().numpy()
    chosen = torch.tensor([[token or 0] for token in ids], device=own.device)
    chosen_values = own.gather(1, chosen)[:, 0].tolist()
    found: list[TokenLogprobs | None] = []
    for i, (state, token) in enumerate(zip(states, ids, strict=True)):
        order = np.lexsort((places[i], -values[i]))[: state.sampling.logprobs]
        top = tuple(zip(places[i][order].tolist(), values[i][order].tolist(), strict=True))
        found.append(None if token is None else TokenLogprobs(chosen_values[i], top))
    return found
