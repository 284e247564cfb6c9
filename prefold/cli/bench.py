"""Runs `prefold bench`, which times the three ways of sharing against each other."""

from __future__ import annotations

import json
import statistics
import time
from itertools import islice
from typing import Any

import click

from .options import machine_options, number, sample_options

MODES = ("full", "mlp", "off")


@click.command(short_help="Time sharing full, mlp and off.")
@sample_options(number("--repeat", "Runs of each mode.", 3), needs_input=False)
@machine_options
@number("--max-batch-rows", "Rows of a step.")
def bench(**o: Any) -> None:
    """Time sharing full, mlp and off on INPUT (100 records, or --limit of them), or on the demo's data.

    Tokenising and loading are left out; the modes take turns, and the median of --repeat runs counts. Text is not
    generated with mlp.

    \b
    prefold bench pairs.jsonl --task rerank --limit 200
    """
    tasks, prepared, name, left_out, model = _prepare(o)
    from .build import load_llm

    llm = load_llm({**o, "sharing": "full"}, *model, media=tasks.media)
    found = measure(llm.engine, tasks, prepared, o["repeat"], o["window"])
    dtype = str(llm.dtype).removeprefix("torch.")
    prompts, repeated = _repeated(prepared)
    if o["as_json"]:
        head = {"input": name, "left_out": left_out, "prompts": prompts, "repeated_prompts": repeated}
        head |= {"model": o["model"], "dtype": dtype, "machine": _machine()}
        click.echo(json.dumps(head | {"modes": found}))
        return
    click.echo(f"{name}; {left_out:,} records left out as unusable")
    click.echo(f"{prompts:,} prompts, {repeated:,} of which repeat an earlier one")
    click.echo(f"{o['model']}, {dtype}, {llm.engine.max_batch_rows} rows a step, median of {o['repeat']}")
    click.echo("; ".join(f"{key} {value}" for key, value in _machine().items()) + "\n")
    for line in table(found):
        click.echo(line)


def _prepare(o: dict[str, Any]) -> tuple[Any, dict[str, list[Any]], str, int, tuple[Any, Any]]:
    """Returns (tasks, works by task, a name for them, records that are unusable, (checkpoint, tokenizer))."""
    from .build import LazyTasks, open_model
    from .demo import demo_items
    from .input import draw, open_input

    if not o["input"]:
        model = open_model(o)
        tasks = LazyTasks(("rerank",), o, *model)
        return tasks, {"rerank": tasks["rerank"].prepare(demo_items())}, "reranking the demo's passages", 0, model
    input = open_input(o["task"], o["input"], o)
    limit = o["limit"] or 100
    sample = draw(input, islice(input.source.records(input.adapter.columns), limit), limit)
    name = f"{o['task'] or 'batch lines'} of {input.source.name}, the first {limit} records"
    return input.tasks, sample.works, name, sample.left_out, (input.checkpoint, input.tokenizer)


def _repeated(prepared: dict[str, list[Any]]) -> tuple[int, int]:
    """Returns (prompts, how many of them are equal to an earlier one)."""
    prompts = [
        (task, request.adapter, request.tokens.tobytes())
        for task, works in prepared.items()
        for work in works
        for request in work.requests
    ]
    return len(prompts), len(prompts) - len(set(prompts))


def measure(
    engine: Any, tasks: Any, prepared: dict[str, list[Any]], repeat: int, window: int
) -> dict[str, dict[str, Any]]:
    """Returns the seconds of each run, tokens and rows, by mode. window: how many tokens a window may have.

    The modes take turns, so that a busy moment of the machine affects all of them.
    """
    from ..tasks.run import checked, run_works

    modes = [mode for mode in MODES if mode != "mlp" or "generate" not in prepared]
    found: dict[str, dict[str, Any]] = {mode: {"seconds": []} for mode in modes}
    for turn in range(-1, repeat):  # the first turn warms up and is not counted
        for mode in modes:
            engine.reset_stats()
            started = time.perf_counter()
            for task, works in prepared.items():
                checked(run_works(engine, tasks[task], works, window=window, sharing=mode, seed=0))
            seconds = time.perf_counter() - started
            if turn >= 0:
                found[mode]["seconds"].append(seconds)
                found[mode] |= {"tokens": engine.stats.tokens, "rows": engine.stats.rows_computed}
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the numbers of `measure` as the lines of a table."""
    base = statistics.median(found["off"]["seconds"])
    head = ("tokens", 10), ("rows", 10), ("saved", 8), ("seconds", 10), ("spread", 16), ("rows/s", 10), ("speed", 8)
    lines = [f"{'sharing':<9}" + "".join(f"{name:>{width}}" for name, width in head)]
    for mode, numbers in found.items():
        seconds = statistics.median(numbers["seconds"])
        spread = f"{min(numbers['seconds']):.2f} .. {max(numbers['seconds']):.2f}"
        saved = 1 - numbers["rows"] / numbers["tokens"]
        lines.append(
            f"{mode:<9}{numbers['tokens']:>10,}{numbers['rows']:>10,}{saved:>8.1%}{seconds:>10.2f}{spread:>16}"
            f"{numbers['rows'] / seconds:>10,.0f}{base / seconds:>7.2f}x"
        )
    return lines


def _machine() -> dict[str, str]:
    from ..report.page import machine

    return dict(machine())
