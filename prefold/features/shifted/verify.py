"""`prefold verify --reuse shifted`: how much reuse at other positions changes the first tokens after a user's prompts.

It compares two runs of the same prompts, one prompt at a time: with exact rows, and with reuse.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import click

from ...engine.calls import stream
from ...errors import InputError, JobError
from ...spec.model import CacheOptions
from ...spec.requests import Generated, Request, Sampling
from .measured import Bound, Drift, Measurement
from .options import SETTINGS, ShiftedReuse

# Number of likeliest first tokens of each prompt that are compared.
TOP = 20


def run(
    input: Any,
    rows: Iterable[Any],
    *,
    count: int,
    seed: int,
    tolerance: float | None,
    as_json: bool,
    max_changed: float | None,
    output: str | None,
    **settings: Any,
) -> None:
    """Run the prompts of a sample with exact rows and with reuse, print the differences, and write the file if asked.

    Exit with status 1 if the bound is not met.

    Args:
        count: number of prompts in the sample
        seed: the seed of the sample
        settings: the parameters of SETTINGS
    """
    from ...jobs.verify import sample_items

    if tolerance is None:
        raise click.UsageError("--reuse shifted needs --tolerance, the largest allowed change of a log-probability")
    given = {setting: settings[name] for name, (setting, *_) in SETTINGS.items() if settings[name] is not None}
    reuse = ShiftedReuse(**given, trial=True)
    items, bad = sample_items(rows, input.adapter, count, seed=seed)
    if any(task != "generate" for task, _ in items):
        raise JobError(f"{input.source.name} has records that do not generate text; only generation reuses chunks")
    works = [work for work in input.tasks["generate"].prepare([item for _, item in items])]
    requests = [request for work in works if not isinstance(work, InputError) for request in work.requests]
    bad += sum(isinstance(work, InputError) for work in works)
    answers = []
    for shifted in (None, reuse):
        llm = input.load(replace(input.spec.model, cache=CacheOptions(shifted=shifted)))
        answers.append(first_tokens(llm.engine, requests))
        identity, dtype = llm.identity, str(llm.dtype).removeprefix("torch.")
        llm.close()
        del llm
    drift = drift_between(requests, *answers)
    bound = Bound(tolerance, 0.01 if max_changed is None else max_changed)
    reason = drift.unmet(bound)
    if output is not None:
        Measurement(identity, reuse, bound, drift).write(output)
    if as_json:
        click.echo(json.dumps({"bound": asdict(bound), "drift": asdict(drift), "met": reason is None}))
    else:
        click.echo(f"{len(requests):,} prompts of {input.source.name}, {bad:,} unusable records skipped; {dtype}\n")
        for line in _lines(drift):
            click.echo(line)
    if reason is not None:
        click.echo(f"\nthe bound is not met: {reason}", err=True)
        sys.exit(1)


def _lines(drift: Any) -> list[str]:
    share = drift.approximate_tokens / max(1, drift.tokens)
    return [
        f"prompts with reused chunks                   {drift.shifted:,} of {drift.prompts:,}",
        f"their tokens with copied K/V                 {drift.approximate_tokens:,} of {drift.tokens:,} ({share:.0%})",
        f"largest change of a log-probability          {drift.logprob:.3g}",
        f"mean change for the likeliest token          {drift.mean_logprob:.3g}",
        f"first choices that changed                   {drift.changed:,}",
    ]


def first_tokens(engine: Any, requests: Sequence[Request]) -> list[Generated | None]:
    """Return the first token after each prompt, with the TOP likeliest tokens, or None for a prompt that fails.

    Prompts run one after the other, so that each may reuse rows of the prompts before it.
    """
    sampling = Sampling(max_tokens=1, logprobs=TOP, ignore_eos=True)
    answers: list[Generated | None] = []
    for request in requests:
        events: list[Any] = list(stream(engine, [replace(request, sampling=sampling)], None))
        ((_, answer),) = events
        answers.append(None if isinstance(answer, InputError) else answer[0])
    return answers


def drift_between(
    requests: Sequence[Request], exact: Sequence[Generated | None], reused: Sequence[Generated | None]
) -> Drift:
    """Return how far the first tokens of a run with reuse at other positions are from an exact run's.

    Only prompts with copied rows count. If a likely token of the exact run is not listed in the other run, its
    log-probability there is taken as the lowest listed one, which is an upper bound.
    """
    tokens = approximate = changed = shifted = prompts = 0
    largest, likeliest = 0.0, []
    for request, first, second in zip(requests, exact, reused, strict=True):
        if first is None or second is None:
            continue
        prompts += 1
        if not second.approximate_tokens:
            continue
        assert first.logprobs is not None and second.logprobs is not None
        shifted, tokens = shifted + 1, tokens + len(request.tokens)
        approximate += second.approximate_tokens
        a, b = dict(first.logprobs[0].top), dict(second.logprobs[0].top)
        least = min(b.values())
        moved = [abs(value - b.get(token, least)) for token, value in a.items()]
        largest = max(largest, *moved)
        best = max(a, key=lambda token: a[token])
        likeliest.append(abs(a[best] - b.get(best, least)))
        changed += first.tokens != second.tokens
    return Drift(prompts, shifted, tokens, approximate, largest, sum(likeliest) / max(1, len(likeliest)), changed)
