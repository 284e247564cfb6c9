"""Runs `prefold verify`, which measures how far sharing and a lower precision move the results, and with --reuse
shifted whether reuse at other positions keeps to a bound on a user's prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from math import isnan
from typing import Any

import click

from ..errors import InputError, JobError
from ..model_options import CacheOptions
from .options import all_of, engine_options, number, sample_options

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


reuse_options = all_of(
    click.option("--reuse", type=click.Choice(["shifted"]),
                 help="Measure reuse of chunks at other positions, with the prompts of --task generate, and write what "
                      "--cache-reuse-shifted takes."),
    *(
        click.option(
            f"--{name.replace('_', '-')}", type=click.FloatRange(0, 1) if least is None else click.IntRange(least),
            metavar="SHARE" if least is None else "N", help=f"{doc}  [default: {default}]",
        )
        for name, (_, default, least, doc) in _SETTINGS.items()
    ),
    click.option("--max-changed", type=click.FloatRange(0, 1), metavar="SHARE",
                 help="With --reuse: the part of first choices that may change.  [default: 0.01]"),
    click.option("-o", "--output", metavar="FILE", help="With --reuse: the file that is written."),
)  # fmt: skip


@click.command(short_help="Measure what sharing and precision do to results.")
@sample_options(
    number("--sample", "Records to run, drawn evenly over the input in groups of neighbours.", 64),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the draw."),
    click.option("--tolerance", type=click.FloatRange(min=0), metavar="X",
                 help="Fail (status 1) if sharing, or reuse, moves a value by more than X."),
)  # fmt: skip
@engine_options
@reuse_options
def verify(**o: Any) -> None:
    """Run a sample of a job shared and unshared, and in float32, and print how far the results are apart.

    Three comparisons: sharing alone (the given --sharing against off, same dtype), precision alone
    (the given --dtype against float32, both off), and the two together. In float32 there is only the
    first. Of --task generate the texts are compared: how many changed, and at which token first.

    With --reuse shifted the prompts of --task generate are run one after the other, with exact rows and with chunks of
    text reused at other positions (see docs/serving.md), and what likely first tokens changed by is compared with the
    bound: --tolerance, --max-changed.

    \b
    prefold verify pairs.jsonl --task rerank --dtype bfloat16 --sample 200
    prefold verify asked.jsonl --task generate --reuse shifted --tolerance 0.5 -o shifted.json
    """
    from ..records.lines import plain
    from .input import draw, open_input

    if o["reuse"] is None:
        refuse_reuse_options(o)
    input = open_input(o["task"], o["input"], o)
    rows = islice(input.source.records(input.adapter.columns), o["limit"])
    if o["reuse"] is not None:
        verify_reuse(o, input, rows)
        return
    sample = draw(input, rows, o["sample"], o["seed"])
    if "generate" in sample.works and o["tolerance"] is not None:
        raise click.UsageError("--tolerance bounds numbers, and texts have none; leave it out")
    count = sum(map(len, sample.works.values()))
    differences = _compare(sample, input, o)
    if o["as_json"]:
        click.echo(json.dumps(plain(differences)))
    else:
        left_out = f"{sample.left_out:,} records left out as unusable"
        click.echo(f"{count:,} items of {input.source.name}, {left_out}; {o['model']}\n")
        for line in _lines(differences):
            click.echo(line)
    moved = [f["values"] for f in differences if "values" in f and f["comparison"].startswith("sharing")]
    # What is no number is not within the tolerance, and compares as neither more nor less.
    beyond = [by for by in moved if not by <= o["tolerance"]] if o["tolerance"] is not None else []
    if beyond:
        most = next(filter(isnan, beyond), max(beyond))
        click.echo(f"\nsharing moved a value by {most:.3g}, not by {o['tolerance']:.3g} at most", err=True)
        sys.exit(1)


def _compare(sample: Any, input: Any, o: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a dict for each comparison and task: its name, the task, and the numbers of a Difference."""
    from dataclasses import asdict

    from ..job.verify import compare, compare_texts

    sharing = "full" if o["sharing"] == "auto" else o["sharing"]
    llm = input.load(o)
    dtype = str(llm.dtype).removeprefix("torch.")
    shared = _run(llm.engine, input.tasks, sample.works, o, sharing)
    plain = _run(llm.engine, input.tasks, sample.works, o, "off")
    pairs = [(f"sharing ({sharing} against off, {dtype})", shared, plain)]
    if dtype != "float32":
        llm.close()
        del llm
        exact = _run(input.load({**o, "dtype": "float32"}).engine, input.tasks, sample.works, o, "off")
        pairs.append((f"precision ({dtype} against float32, off)", plain, exact))
        pairs.append((f"both ({sharing}, {dtype} against off, float32)", shared, exact))
    differences = []
    for name, a, b in pairs:
        for task, items in sample.items.items():
            if task == "generate":
                difference: Any = compare_texts(a[task], b[task])
            else:
                difference = compare(items, sample.works[task], a[task], b[task])
            differences.append({"comparison": name, "task": task, **asdict(difference)})
    return differences


def _run(engine: Any, tasks: Any, works: dict[str, list[Any]], o: dict[str, Any], sharing: str) -> dict[str, Any]:
    """Returns the Run of each task. A task that is to be calibrated is so with what this run makes of the model."""
    from ..job.verify import Run
    from ..tasks.run import calibrated, checked, run_works

    # Batch lines may sample: with one seed for all runs only what the runs compute differs.
    how: dict[str, Any] = {"window": o["window"], "sharing": sharing, "seed": 0}
    made = {name: calibrated(engine, tasks[name], **how) for name in works}
    return {name: Run(made[name], checked(run_works(engine, made[name], works[name], **how))) for name in works}


def _lines(differences: list[dict[str, Any]]) -> list[str]:
    lines = []
    for f in differences:
        lines.append(click.style(f"{f['task']}: {f['comparison']}", bold=True))
        if f["task"] == "generate":
            lines.append(f"  texts               {len(f['first_changed']):,} of {f['texts']:,} changed")
            if first := sorted(f["first_changed"]):
                where = f"{first[0]:,} at the earliest, {first[len(first) // 2]:,} in the middle"
                lines.append(f"  first other token   number {where} of these texts")
            continue
        largest = f"{f['values']:.3g} in what the model gave, {f['results']:.3g} in the results"
        lines.append(f"  largest difference  {largest}")
        if f["groups"]:
            pairs = f"{f['pairs']:,} of {f['all_pairs']:,} pairs"
            orders = f"{f['first']} changed first place, {f['orders']} changed order ({pairs})"
            lines.append(f"  {f['groups']:,} rankings".ljust(22) + orders)
        if f["all_tokens"]:
            lines.append(f"  arg-maxes           {f['greedy']} of {f['all_tokens']:,} target tokens changed")
    return lines


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
    chosen = {setting: o[name] for name, (setting, *_) in _SETTINGS.items() if o[name] is not None}
    settings = ShiftedReuse(**chosen, trial=True)
    items, bad = sample_items(rows, input.adapter, o["sample"], seed=o["seed"])
    if any(task != "generate" for task, _ in items):
        raise JobError(f"{input.source.name} asks for numbers, and these are read of exact rows only")
    works = [work for work in input.tasks["generate"].prepare([item for _, item in items])]
    requests = [request for work in works if not isinstance(work, InputError) for request in work.requests]
    bad += sum(isinstance(work, InputError) for work in works)
    logprobs = []
    for shifted in (None, settings):
        llm = input.load(o | {"cache": CacheOptions(shifted=shifted)})
        logprobs.append(first_tokens(llm.engine, requests))
        identity, dtype = llm.identity, str(llm.dtype).removeprefix("torch.")
        llm.close()
        del llm
    drift = drift_between(requests, *logprobs)
    bound = Bound(o["tolerance"], 0.01 if o["max_changed"] is None else o["max_changed"])
    why = drift.unmet(bound)
    if o["output"] is not None:
        Measured(identity, settings, bound, drift).write(o["output"])
    if o["as_json"]:
        click.echo(json.dumps({"bound": asdict(bound), "drift": asdict(drift), "met": why is None}))
    else:
        click.echo(f"{len(requests):,} prompts of {input.source.name}, {bad:,} records left out as unusable; {dtype}\n")
        share = drift.approximate_tokens / max(1, drift.tokens)
        copied = f"{drift.approximate_tokens:,} of {drift.tokens:,} ({share:.0%})"
        click.echo(f"prompts with chunks that were met elsewhere  {drift.shifted:,} of {drift.prompts:,}")
        click.echo(f"their tokens whose K/V was copied            {copied}")
        click.echo(f"largest change of a log-probability          {drift.logprob:.3g}")
        click.echo(f"mean change, of the likeliest token          {drift.mean_logprob:.3g}")
        click.echo(f"first choices that changed                   {drift.changed:,}")
    if why is not None:
        click.echo(f"\nthe bound is not met: {why}", err=True)
        sys.exit(1)
