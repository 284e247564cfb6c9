"""`prefold verify`: measure how much sharing and lower precision change results."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from importlib import import_module
from itertools import islice
from math import isnan
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from ..spec.job import JobSpec
from ..spec.plugins import MEASUREMENTS
from ..spec.task import DecideOptions
from .options import all_of, command, engine_options, number, sample_options
from .process import notice
from .specs import takes_job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..engine import Engine
    from ..jobs.opening import Input, Sample
    from ..jobs.verify import Run
    from ..tasks.base import Work

_OPTIONS = {name: import_module(f"{package}.options") for name, package in MEASUREMENTS.items()}


@command(short_help="Measure how sharing and precision change results.")
@sample_options(
    number("--sample", "Number of records to run, in groups of neighbours spread over the input.", 64),
    click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed for sampling records."),
    click.option("--tolerance", type=click.FloatRange(min=0), metavar="X",
                 help="Fail (status 1) if sharing, or reuse, changes a value by more than X."),
)  # fmt: skip
@engine_options
@click.option("--reuse", type=click.Choice(list(MEASUREMENTS)), help="Measure this kind of reuse instead of sharing.")
@all_of(*(option for measurement in _OPTIONS.values() for option in measurement.command_options()))
@takes_job(own=(*(name for measurement in _OPTIONS.values() for name in measurement.names),))
def verify(
    spec: JobSpec, sample: int, seed: int, tolerance: float | None, reuse: str | None, as_json: bool, **measured: Any
) -> None:
    """Run a sample of a job with and without sharing, and in float32, and print how much the results differ.

    There are three comparisons: sharing alone (--sharing against off, same dtype), precision alone (--dtype
    against float32, both without sharing), and both together. With --dtype float32 only sharing is compared.
    --arithmetic int8 adds a comparison of int8 alone (against float, without sharing); the comparison of both then
    includes int8 too. For --task generate, the number of changed texts and the first changed token are printed; for
    --task decide, the number of changed answers.

    With --first state or --first question, decisions are also compared with the other order of state and question:
    the number of changed answers, and the largest change of a probability. The two orders are different prompts.

    With --reuse shifted, the prompts of --task generate run one after the other. They run once with exact rows, and
    once with chunks of text reused at other positions (see docs/serving.md). The change of likely first tokens is
    compared with the bounds --tolerance and --max-changed.

    \b
    prefold verify pairs.jsonl --task rerank --dtype bfloat16 --sample 200
    prefold verify reviews.jsonl --task classify --labels good,bad --arithmetic int8
    prefold verify tickets.csv --task decide --questions questions.yaml --first question
    prefold verify asked.jsonl --task generate --reuse shifted --tolerance 0.5 -o shifted.json
    """
    from ..jobs.opening import draw, open_input
    from ..jobs.record import plain

    for kind, measurement in _OPTIONS.items():
        for name in measurement.names if kind != reuse else ():
            if measured[name] is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} is for --reuse {kind}")
    input = open_input(spec, notice)
    rows = islice(input.source.records(input.adapter.columns), spec.input.limit)
    if reuse is not None:
        run = import_module(f"{MEASUREMENTS[reuse]}.verify").run
        return run(input, rows, count=sample, seed=seed, tolerance=tolerance, as_json=as_json, **measured)
    drawn = draw(input, rows, sample, seed)
    if "generate" in drawn.works and tolerance is not None:
        raise click.UsageError("--tolerance bounds values, but --task generate compares texts; leave it out")
    count = sum(map(len, drawn.works.values()))
    differences = _compare(drawn, input)
    if as_json:
        click.echo(json.dumps(plain(differences)))
    else:
        left_out = f"{drawn.left_out:,} unusable records left out"
        click.echo(f"{count:,} items of {input.source.name}, {left_out}; {spec.model_name}\n")
        for line in _lines(differences):
            click.echo(line)
    moved = [f["values"] for f in differences if "values" in f and f["comparison"].startswith("sharing")]
    # `not <=` also finds NaN, which is never within the tolerance.
    beyond = [] if tolerance is None else [by for by in moved if not by <= tolerance]
    if tolerance is not None and beyond:
        most = next(filter(isnan, beyond), max(beyond))
        click.echo(f"\nsharing changed a value by {most:.3g}, more than the tolerance {tolerance:.3g}", err=True)
        sys.exit(1)


# Options of a rare measurement, so only --help-all shows them.
for _option in verify.params:
    if any(_option.name in measurement.names for measurement in _OPTIONS.values()):
        vars(_option).update(group="Advanced", common=False)


def _compare(sample: Any, input: Any) -> list[dict[str, Any]]:
    """Return a dict for each comparison and task: its name, the task, and the fields of a Difference."""
    from ..jobs.verify import compare, compare_texts

    model, window = input.spec.model, input.spec.input.window
    sharing = "full" if model.sharing == "auto" else model.sharing
    llm = input.load()
    dtype = str(llm.dtype).removeprefix("torch.")
    shared = _run(llm.engine, input.tasks, sample.works, window, sharing)
    plain = _run(llm.engine, input.tasks, sample.works, window, "off")
    pairs = [(f"sharing ({sharing} against off, {dtype})", shared, plain)]
    order = _compare_orders(llm.engine, sample, input, shared, sharing)

    def alone(**reference: Any) -> Any:
        """Close the model, load it with other options, and return its runs without sharing."""
        nonlocal llm
        llm.close()
        llm = None
        llm = input.load(replace(model, arithmetic="float", **reference))
        return _run(llm.engine, input.tasks, sample.works, window, "off")

    words = dtype
    if model.arithmetic != "float":
        words = f"{model.arithmetic} in {dtype}"
        reference = {} if model.weights != "int8" else {"weights": "auto"}
        quantised, plain = plain, alone(**reference)
        pairs[0] = (f"sharing ({sharing} against off, {words})", shared, quantised)
        pairs.append((f"arithmetic ({words} against {dtype}, off)", quantised, plain))
    if dtype != "float32":
        exact = alone(dtype="float32", weights="auto")
        pairs.append((f"precision ({dtype} against float32, off)", plain, exact))
        pairs.append((f"both ({sharing}, {words} against off, float32)", shared, exact))
    differences = []
    for name, a, b in pairs:
        for task, items in sample.items.items():
            if task == "generate":
                difference: Any = compare_texts(a[task], b[task])
            else:
                difference = compare(items, sample.works[task], a[task], b[task])
            differences.append({"comparison": name, "task": task, **asdict(difference)})
    return differences + order


def _compare_orders(
    engine: Engine, sample: Sample, input: Input, shared: Mapping[str, Run], sharing: str
) -> list[dict[str, object]]:
    """Compare decisions with the other order of state and question. Return no comparison without --first.

    Args:
        shared: The runs of the sample in the order of --first.
    """
    from ..jobs.verify import Run, compare

    spec = input.spec
    options = spec.tasks.get("decide")
    if not isinstance(options, DecideOptions) or options.first is None or "decide" not in sample.works:
        return []
    task, items, works = input.tasks["decide"].swapped(), sample.items["decide"], sample.works["decide"]
    others = task.prepare(items)
    # A prompt may be too long in only one of the orders.
    both = [i for i, (a, b) in enumerate(zip(works, others, strict=True)) if len(a.requests) == _num_requests(b)]
    chosen = [others[i] for i in both]
    found = _run(engine, {"decide": task}, {"decide": chosen}, spec.input.window, sharing)["decide"]
    own = Run(shared["decide"].task, [shared["decide"].results[i] for i in both])
    difference = compare([items[i] for i in both], chosen, own, found)
    name = f"order ({options.first} first against {task.first} first)"
    return [{"comparison": name, "task": "decide", **asdict(difference)}]


def _num_requests(work: Work | InputError) -> int:
    return 0 if isinstance(work, InputError) else len(work.requests)


def _run(engine: Any, tasks: Any, works: dict[str, list[Any]], window: int, sharing: str) -> dict[str, Any]:
    """Return the Run of each task. Tasks with `calibrate` are calibrated with the same sharing."""
    from ..jobs.verify import Run
    from ..tasks.run import calibrated, checked, run_works

    # Batch lines may sample, so all runs have the same seed.
    options: dict[str, Any] = {"window": window, "sharing": sharing, "seed": 0}
    calibrated_tasks = {name: calibrated(engine, tasks[name], **options) for name in works}
    return {
        name: Run(calibrated_tasks[name], checked(run_works(engine, calibrated_tasks[name], works[name], **options)))
        for name in works
    }


def _lines(differences: list[dict[str, Any]]) -> list[str]:
    lines = []
    for f in differences:
        lines.append(click.style(f"{f['task']}: {f['comparison']}", bold=True))
        if f["task"] == "generate":
            lines.append(f"  texts               {len(f['first_changed']):,} of {f['texts']:,} changed")
            if first := sorted(f["first_changed"]):
                places = f"{first[0]:,} at the earliest, {first[len(first) // 2]:,} in the median"
                lines.append(f"  first other token   number {places} of these texts")
            continue
        largest = f"{f['values']:.3g} in the model's values, {f['results']:.3g} in the results"
        lines.append(f"  largest difference  {largest}")
        if f["task"] == "decide":
            lines.append(f"  answers             {f['first']:,} of {f['groups']:,} changed")
        elif f["groups"]:
            pairs = f"{f['pairs']:,} of {f['all_pairs']:,} pairs"
            orders = f"{f['first']} changed first place, {f['orders']} changed order ({pairs})"
            lines.append(f"  {f['groups']:,} rankings".ljust(22) + orders)
        if f["all_tokens"]:
            lines.append(f"  arg-maxes           {f['greedy']} of {f['all_tokens']:,} target tokens changed")
    return lines
