"""Measures how far reuse at other positions moves what follows a prompt: two runs of the same prompts, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import InputError
from ..types import Generated, Request, Sampling
from .measured import Drift

# Of each prompt so many likeliest first tokens are compared.
TOP = 20


def first_tokens(engine: Any, requests: Sequence[Request]) -> list[Generated | None]:
    """Returns the first token that follows each prompt, with the TOP likeliest; None for a prompt that cannot be run.

    The prompts are run one after the other, so that each may reuse what those before it left.
    """
    sampling = Sampling(max_tokens=1, logprobs=TOP, ignore_eos=True)
    found: list[Generated | None] = []
    for request in requests:
        ((_, answer),) = engine.stream([replace(request, sampling=sampling)], None)
        found.append(None if isinstance(answer, InputError) else answer[0])
    return found


def drift_between(
    requests: Sequence[Request], exact: Sequence[Generated | None], reused: Sequence[Generated | None]
) -> Drift:
    """Returns how far the first tokens of a run with reuse at other positions are from those of an exact run.

    Only prompts of which rows were copied count. Where a token is among the likeliest of one run only, its
    log-probability in the other is taken as that of the last which is listed there: it is that at most.
    """
    tokens = approximate = changed = shifted = prompts = 0
    largest, first = 0.0, []
    for request, one, other in zip(requests, exact, reused, strict=True):
        if one is None or other is None:
            continue
        prompts += 1
        if not other.approximate_tokens:
            continue
        assert one.logprobs is not None and other.logprobs is not None
        shifted, tokens = shifted + 1, tokens + len(request.tokens)
        approximate += other.approximate_tokens
        a, b = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
        least = min(b.values())
        moved = [abs(value - b.get(token, least)) for token, value in a.items()]
        largest = max(largest, *moved)
        best = max(a, key=lambda token: a[token])
        first.append(abs(a[best] - b.get(best, least)))
        changed += one.tokens != other.tokens
    return Drift(prompts, shifted, tokens, approximate, largest, sum(first) / max(1, len(first)), changed)
