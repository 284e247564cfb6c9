"""Scores prompts that are to be continued: the log-probabilities of their tokens, read as `prefold score` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..api.echo import Echo
from ..engine.samples import Sample
from ..errors import InputError
from ..prefix import MEDIA_BASE
from ..tasks import GenerateTask, Work
from ..tasks.base import attempt
from ..types import Generated, Readout, Request, Result, Sampling, TokenLogprobs


class PromptTask:
    """Reads the log-probabilities of the tokens of prompts that a GenerateTask would continue.

    Result: {"prompt": one entry a token}, an entry being one of "logprobs" in a result of generation, with the token's
    "rank"; "logprob" is None in the first. Where no token is to be made, or only the most likely one, which is known
    too, the result of generation is there as well.
    """

    name = "generate"

    def __init__(self, inner: GenerateTask, echo: Echo, eos_ids: Sequence[int]):
        assert echo.top is not None
        self._inner, self._echo, self._eos_ids = inner, echo, eos_ids
        self.inputs = inner.inputs
        self.readout = Readout("logprobs", top=echo.top)

    def prepare(self, items: Sequence[Any]) -> list[Work | InputError]:
        """Returns a Work for each item, or its InputError."""
        works = self._inner.prepare(items)
        return [work if isinstance(work, InputError) else attempt(self._scored, work) for work in works]

    def _scored(self, work: Work) -> Work:
        (request,) = work.requests
        assert request.sampling is not None
        if request.media or (request.tokens >= MEDIA_BASE).any():
            message, remedy = "the prompt has images, whose rows have no probabilities", "leave it out"
            raise InputError(message, field="prompt_logprobs", remedy=remedy, code="unsupported")
        self.readout = replace(self.readout, exits=request.sampling.exits)  # all items have the same
        # Every row is read: behind the last one there is no token of the prompt, but the most likely one is wanted.
        targets = np.concatenate((request.tokens[1:], request.tokens[:1]))
        note = {"note": work.note, "request": request}
        return Work([replace(request, targets=targets, sampling=None)], note)

    def finish(self, note: Any, results: Sequence[Result]) -> dict[str, Any]:
        """Returns the answer to an item."""
        (result,), request = results, note["request"]
        names, values = self._inner.token_logprobs, result.values.tolist()
        rows = [TokenLogprobs(row[0], _top(row)) for row in values]
        before = [None, *zip(values, rows, strict=True)][:-1]
        prompt = []
        for token, found in zip(request.tokens.tolist(), before, strict=True):
            if found is None:
                prompt.append(names(token, TokenLogprobs(0.0)) | {"logprob": None, "rank": None})
            else:
                prompt.append(names(token, found[1]) | {"rank": int(found[0][1])})
        made = self._made(request, rows[-1])
        return ({} if made is None else self._inner.finish(note["note"], [[made]])) | {"prompt": prompt}

    def _made(self, request: Request, last: TokenLogprobs) -> Generated | None:
        """Returns what is generated, None where that is not known. last: what was read behind the prompt."""
        sampling = request.sampling
        assert sampling is not None
        tokenizer = self.inputs.tokenizer
        if self._echo.is_all:
            text = None if tokenizer is None else ""
            return Generated((), text, "length", logprobs=None if sampling.logprobs is None else ())
        if replace(sampling, seed=None, logprobs=None) != Sampling(max_tokens=1):
            return None
        sample = Sample(request, 0, seed=0, limit=1, eos_ids=self._eos_ids, tokenizer=tokenizer, detokenizer=None)
        token, logprob = last.top[0]
        sample.take(token, TokenLogprobs(logprob, last.top[: sampling.logprobs or 0]))
        return sample.result(0)


def _top(row: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Returns the most likely (id, log-probability) of a row that was read with `Readout.top`."""
    count = len(row) // 2 - 1
    return tuple((int(id), value) for value, id in zip(row[2 : 2 + count], row[2 + count :], strict=True))
