"""The sampler: logits and what each sample asks for, to tokens.

What is done to a row of logits, in this order (that of vLLM; each step as transformers defines it):

    logit_bias, the grammar's mask
    repetition penalty                 logits of tokens in prompt or output: divided if positive, else multiplied
    presence and frequency penalty     of tokens in the output
    min_tokens                         what would end the sample is banned
    temperature                        below GREEDY_BELOW: the most likely token, the first of equals
    min_p, top_k, top_p                each among what the one before left

The last two lines, and drawing from what is left, are `draw`'s. The noise a token is drawn with is made of the seed,
the sample, the position and the token (`noise`), so it depends on neither neighbours nor batch nor what ran before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..device import runs_triton, send
from ..text.grammar import Matcher
from ..types import Sampling, TokenLogprobs
from .draw import WORK_SIZE, draw, draw_on_device
from .noise import make_key, make_stream

__all__ = ["NOT_FINITE", "Choice", "Sampler", "SamplerState", "greedy"]

# A temperature this small divides logits into numbers that float32 cannot tell apart.
GREEDY_BELOW = 1e-5
# In place of a token: the logits are no finite numbers, so that no token follows from them.
NOT_FINITE = -2


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


class SamplerState:
    """What the sampler knows about one sample: its options, key, position, and the tokens so far.

    position   of the token chosen next in the output: 0 for the first
    matcher    its grammar's, None without one
    end_ids    ids that end it, banned below min_tokens
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        sample: int = 0,
        prompt: Sequence[int] | np.ndarray = (),
        end_ids: Iterable[int] = (),
        matcher: Matcher | None = None,
    ):
        """`prompt` is read only for a repetition penalty. With the matcher, which the state advances, comes its end."""
        self.sampling = sampling
        self.matcher = matcher
        self.position = 0
        self.end_ids = np.array(sorted(set(end_ids)), np.int64)
        self.greedy = sampling.temperature < GREEDY_BELOW
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self.bias = np.array([value for _, value in sampling.logit_bias], np.float32)
        self.penalised = bool(
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
        )
        self._bare = self.greedy and not self.penalised and not sampling.logit_bias
        self._bare = self._bare and matcher is None and sampling.logprobs is None
        self._stream = make_stream(seed, sample)
        seen = prompt if sampling.repetition_penalty != 1.0 else ()
        self._ids = np.unique(np.asarray(seen, np.int64))
        self._counts = np.zeros(self._ids.size, np.float32)
        self._place = {token: i for i, token in enumerate(self._ids.tolist())} if self.penalised else {}

    def plain(self, ahead: int = 0) -> bool:
        """The next token is the row's most likely one, and nothing else is wanted. ahead: tokens to come before it."""
        return self._bare and not self.banned(ahead).size

    @property
    def independent(self) -> bool:
        """What is done to the logits depends on no token of the output, and of the result only the token is wanted."""
        return not self.penalised and self.matcher is None and self.sampling.logprobs is None

    def banned(self, ahead: int = 0) -> np.ndarray:
        """Ids that may not come next, for the sample would be too short."""
        return self.end_ids if self.position + ahead < self.sampling.min_tokens else self.end_ids[:0]

    @property
    def grammar_done(self) -> bool:
        """The grammar allows nothing after the tokens so far; the sample ends with them."""
        return self.matcher is not None and self.matcher.is_done

    def advance(self, token: int) -> None:
        """Take `token` for the next one of the output."""
        self.position += 1
        if self.matcher is not None:
            self.matcher.accept(token)
        if self.penalised:
            self._count(token)

    def key(self, ahead: int = 0) -> int:
        """The 64-bit key of the noise that the token at `position` + `ahead` is drawn with."""
        return make_key(self._stream, self.position + ahead)

    @property
    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids that penalties concern, int64, how often each is in the output, float32)"""
        return self._ids[: len(self._place)], self._counts[: len(self._place)]

    def _count(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == self._ids.size:
            more = np.zeros(max(64, place), np.int64)
            self._ids, self._counts = np.append(self._ids, more), np.append(self._counts, more.astype(np.float32))
        self._ids[place] = token
        self._counts[place] += 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of each sample; None: it may have none, and ends; NOT_FINITE: the logits are no finite numbers.
    `logprobs` where they were asked for."""

    ids: list[int | None]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Chooses the next token of every sample of a step. Holds nothing; never changes logits or states."""

    @torch.inference_mode()
    def choose(self, logits: Tensor, states: Sequence[SamplerState], rows: Sequence[int] | None = None) -> Choice:
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
    def can_start(device: torch.device, states: Iterable[SamplerState]) -> bool:
        """Whether `start` chooses for them."""
        return runs_triton(device) and all(state.independent for state in states)

    @torch.inference_mode()
    def start(
        self, logits: Tensor, states: Sequence[SamplerState], rows: Sequence[int], ahead: Sequence[int]
    ) -> Tensor:
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


def _choose(work: Tensor, states: list[SamplerState]) -> Choice:
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


def _add_bias(work: Tensor, states: list[SamplerState]) -> None:
    rows = [i for i, state in enumerate(states) if state.bias_ids.size]
    if rows:
        places = _places(work, rows, [states[i].bias_ids for i in rows])
        work.view(-1)[places] += send(np.concatenate([states[i].bias for i in rows]), work.device)


def _mask(work: Tensor, states: list[SamplerState]) -> None:
    for row, state in zip(work, states, strict=True):
        if state.matcher is not None:
            allowed = send(state.matcher.mask(), work.device)
            row.masked_fill_(~allowed, -torch.inf)


def _penalise(work: Tensor, states: list[SamplerState]) -> None:
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


def _ban(work: Tensor, states: list[SamplerState], ahead: Sequence[int]) -> None:
    banned = [state.banned(n) for state, n in zip(states, ahead, strict=True)]
    rows = [i for i, ids in enumerate(banned) if ids.size]
    if rows:
        work.view(-1)[_places(work, rows, [banned[i] for i in rows])] = -torch.inf


def _logprobs(own: Tensor, states: list[SamplerState], ids: list[int | None]) -> list[TokenLogprobs | None]:
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
