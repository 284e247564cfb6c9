"""Runs `prefold verify --reuse shifted`: whether reuse at other positions keeps to a bound on a user's prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from ..errors import InputError, JobError
from ..model_options import CacheOptions
from .options import Decorator, all_of

# {option: (setting of ShiftedReuse, its default, the least it may be (None: it is a share), what it is)}. The class
# is not imported for a help text.
_SETTINGS: dict[str, tuple[str, float, int | None, str]] = {
    "cache_reuse": ("min_tokens", 64, 16, "With --reuse: the fewest tokens of a chunk."),
    "cache_reuse_recompute": ("recompute", 64, 0, "The first rows of each chunk that are computed anew."),
    "cache_reuse_max_matches": ("max_matches", 64, 1, "The most chunks of a prompt."),
    "cache_reuse_min_overlap": (
        "min_share", 0.25, None, "The least part of a prompt, behind its exact prefix, that chunks must cover."
    ),
    "cache_reuse_window": ("window", 8192, 2, "Tokens behind the exact prefix among which chunks are sought."),
}  # fmt: skip
DEFAULTS = {setting: default for setting, default, _, _ in _SETTINGS.values()}


def _setting(name: str) -> Decorator:
    _, default, least, doc = _SETTINGS[name]
    kind = click.FloatRange(0, 1) if least is None else click.IntRange(least)
    metavar, flag = "SHARE" if least is None else "N", f"--{name.replace('_', '-')}"
    return click.option(flag, type=kind, metavar=metavar, help=f"{doc}  [default: {default}]")


reuse_options = all_of(
    click.option("--reuse", type=click.Choice(["shifted"]),
                 help="Measure reuse of chunks at other positions, with the prompts of --task generate, and write what "
                      "--cache-reuse-shifted takes."),
    *map(_setting, _SETTINGS),
    click.option("--max-changed", type=click.FloatRange(0, 1), metavar="SHARE",
                 help="With --reuse: the part of first choices that may change.  [default: 0.01]"),
    click.option("-o", "--output", metavar="FILE", help="With --reuse: the file that is written."),
)  # fmt: skip


def refuse_reuse_options(o: dict[str, Any]) -> None:
    """Raises UsageError where an option was given that only reuse has."""
    for name in (*_SETTINGS, "max_changed", "output"):
        if o[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is for --reuse shifted")


def verify_reuse(o: dict[str, Any], input: Any, rows: Iterable[Any]) -> None:
    """Runs the prompts of a sample with exact rows and with reuse, prints how far they are apart, and writes the file
    where one is asked for. Exits with status 1 where the bound is not met."""
    from ..job.verify import sample_items
    from ..shifted.chunks import ShiftedReuse
    from ..shifted.drift import drift_between, first_tokens
    from ..shifted.measured import Bound, Measured

    if o["tolerance"] is None:
        raise click.UsageError("--reuse shifted needs a bound: the most that a log-probability may change, --tolerance")
    given = {setting: o[name] for name, (setting, *_) in _SETTINGS.items() if o[name] is not None}
    settings = ShiftedReuse(**given, trial=True)
    items, bad = sample_items(rows, input.adapter, o["sample"], seed=o["seed"])
    if any(task != "generate" for task, _ in items):
        raise JobError(f"{input.source.name} asks for numbers, and these are read of exact rows only")
    works = [work for work in input.tasks["generate"].prepare([item for _, item in items])]
    requests = [request for work in works if not isinstance(work, InputError) for request in work.requests]
    bad += sum(isinstance(work, InputError) for work in works)
    found = []
    for shifted in (None, settings):
        llm = input.load(o | {"cache": CacheOptions(shifted=shifted)})
        found.append(first_tokens(llm.engine, requests))
        identity, dtype = llm.identity, str(llm.dtype).removeprefix("torch.")
        llm.close()
        del llm
    drift = drift_between(requests, *found)
    bound = Bound(o["tolerance"], 0.01 if o["max_changed"] is None else o["max_changed"])
    why = drift.unmet(bound)
    if o["output"] is not None:
        Measured(identity, settings, bound, drift).write(o["output"])
    if o["as_json"]:
        click.echo(json.dumps({"bound": asdict(bound), "drift": asdict(drift), "met": why is None}))
    else:
        click.echo(f"{len(requests):,} prompts of {input.source.name}, {bad:,} records left out as unusable; {dtype}\n")
        for line in _lines(drift):
            click.echo(line)
    if why is not None:
        click.echo(f"\nthe bound is not met: {why}", err=True)
        sys.exit(1)


def _lines(drift: Any) -> list[str]:
    share = drift.approximate_tokens / max(1, drift.tokens)
    return [
        f"prompts with chunks that were met elsewhere  {drift.shifted:,} of {drift.prompts:,}",
        f"their tokens whose K/V was copied            {drift.approximate_tokens:,} of {drift.tokens:,} ({share:.0%})",
        f"largest change of a log-probability          {drift.logprob:.3g}",
        f"mean change, of the likeliest token          {drift.mean_logprob:.3g}",
        f"first choices that changed                   {drift.changed:,}",
    ]
