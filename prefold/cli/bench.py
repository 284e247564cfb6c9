"""`prefold bench`: time the three sharing modes. `prefold demo`: rerank a few passages and show what sharing saves."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click

from ..spec.job import DEFAULT_MODEL, JobSpec
from .options import command, engine_options, machine_options, model_options, number, sample_options
from .process import notice
from .specs import takes_job

MODES = ("full", "mlp", "off")


@command(short_help="Time the sharing modes full, mlp and off.")
@sample_options(number("--repeat", "Number of runs of each mode.", 3), needs_input=False)
@machine_options
@number("--max-batch-rows", "Maximum number of rows in a step.")
@takes_job()
def bench(spec: JobSpec, repeat: int, as_json: bool) -> None:
    """Time the sharing modes full, mlp and off on INPUT (100 records, or --limit), or on the demo's data.

    Tokenising and loading are not timed. The modes run in turns, and the median of --repeat runs is printed. mlp
    does not support generation.

    \b
    prefold bench pairs.jsonl --task rerank --limit 200
    """
    from ..jobs.models import load_llm
    from ..jobs.report.page import machine

    tasks, prepared, name, left_out, model = _prepare(spec)
    llm = load_llm(replace(spec.model, sharing="full"), *model, media=tasks.media)
    seconds = measure(llm.engine, tasks, prepared, repeat, spec.input.window)
    dtype = str(llm.dtype).removeprefix("torch.")
    prompts, repeated = _repeated(prepared)
    if as_json:
        head = {"input": name, "left_out": left_out, "prompts": prompts, "repeated_prompts": repeated}
        head |= {"model": spec.model_name, "dtype": dtype, "machine": dict(machine())}
        click.echo(json.dumps(head | {"modes": seconds}))
        return
    click.echo(f"{name}; {left_out:,} unusable records left out")
    click.echo(f"{prompts:,} prompts; {repeated:,} of them repeat an earlier prompt")
    click.echo(f"{spec.model_name}, {dtype}, {llm.engine.facts.max_rows} rows a step, median of {repeat}")
    click.echo("; ".join(f"{key} {value}" for key, value in machine()) + "\n")
    for line in table(seconds):
        click.echo(line)


def _prepare(spec: JobSpec) -> tuple[Any, dict[str, list[Any]], str, int, tuple[Any, Any]]:
    """Return (tasks, {task: works}, name of the data, number of unusable records, (checkpoint, tokenizer))."""
    from ..cluster.backends import backend_for
    from ..jobs.models import LazyTasks, open_model
    from ..jobs.opening import draw, open_input

    if not spec.input.names:
        if spec.task not in (None, "rerank"):
            raise click.UsageError("--task needs INPUT; without INPUT the demo's passages are reranked")
        model = open_model(spec, backend_for(spec), notice)
        tasks = LazyTasks(("rerank",), spec, *model)
        return tasks, {"rerank": tasks["rerank"].prepare(_demo_items())}, "reranking the demo's passages", 0, model
    input = open_input(spec, notice)
    limit = spec.input.limit or 100
    sample = draw(input, islice(input.source.records(input.adapter.columns), limit), limit)
    name = f"{spec.task or 'batch lines'} of {input.source.name}, the first {limit} records"
    return input.tasks, sample.works, name, sample.left_out, (input.checkpoint, input.tokenizer)


def _repeated(prepared: dict[str, list[Any]]) -> tuple[int, int]:
    """Return (number of prompts, number of prompts that repeat an earlier prompt)."""
    prompts = [
        (task, request.namespace.adapter, request.tokens.tobytes())
        for task, works in prepared.items()
        for work in works
        for request in work.requests
    ]
    return len(prompts), len(prompts) - len(set(prompts))


def measure(
    engine: Any, tasks: Any, prepared: dict[str, list[Any]], repeat: int, window: int
) -> dict[str, dict[str, Any]]:
    """Return {mode: {"seconds": of each run, "tokens": ..., "rows": ...}}.

    The modes run in turns, so that a busy machine affects all of them.

    Args:
        window: Maximum number of tokens in a window.
    """
    from ..tasks.run import checked, run_works

    modes = [mode for mode in MODES if mode != "mlp" or "generate" not in prepared]
    runs: dict[str, dict[str, Any]] = {mode: {"seconds": []} for mode in modes}
    for turn in range(-1, repeat):  # the first turn warms up and is not counted
        for mode in modes:
            engine.reset_stats()
            started = time.perf_counter()
            for task, works in prepared.items():
                checked(run_works(engine, tasks[task], works, window=window, sharing=mode, seed=0))
            seconds = time.perf_counter() - started
            if turn >= 0:
                runs[mode]["seconds"].append(seconds)
                runs[mode] |= {"tokens": engine.stats.tokens, "rows": engine.stats.rows_computed}
    return runs


def table(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of a table of the results of `measure`."""
    base = statistics.median(runs["off"]["seconds"])
    head = ("tokens", 10), ("rows", 10), ("saved", 8), ("seconds", 10), ("spread", 16), ("rows/s", 10), ("speed", 8)
    lines = [f"{'sharing':<9}" + "".join(f"{name:>{width}}" for name, width in head)]
    for mode, numbers in runs.items():
        seconds = statistics.median(numbers["seconds"])
        spread = f"{min(numbers['seconds']):.2f} .. {max(numbers['seconds']):.2f}"
        saved = 1 - numbers["rows"] / numbers["tokens"]
        lines.append(
            f"{mode:<9}{numbers['tokens']:>10,}{numbers['rows']:>10,}{saved:>8.1%}{seconds:>10.2f}{spread:>16}"
            f"{numbers['rows'] / seconds:>10,.0f}{base / seconds:>7.2f}x"
        )
    return lines


# A small general model judges better with its own chat format than with Qwen3-Reranker's prompt.
SMALL_MODEL = {
    "template": (
        "<|im_start|>system\nYou judge whether a text answers a question. Answer only Yes or No.<|im_end|>\n"
        "<|im_start|>user\nQuestion: {query}\n\nText: {document}\n\nDoes the text answer the question?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "words": ("Yes", "No"),
}


def _demo_lines() -> str:
    return resources.files(__package__).joinpath("demo.jsonl").read_text(encoding="utf-8")


def _demo_items() -> list[dict[str, Any]]:
    """Return the demo's queries, each with its documents."""
    records = map(json.loads, _demo_lines().splitlines())
    return [{name: record[name] for name in ("query", "documents")} for record in records]


@command(short_help="Show reranking, and what sharing saves.")
@model_options
@engine_options
@click.option("--write", metavar="FILE", help="Only write the demo's data to FILE (JSONL), as input for a job.")
@takes_job()
def demo(spec: JobSpec, write: str | None) -> None:
    """Rerank a few passages, and show the shared prefixes and the time they save."""
    if write:
        Path(write).write_text(_demo_lines(), encoding="utf-8")
        click.echo(f"wrote {write}: try  prefold run {write} --task rerank --id id -o scores.jsonl")
        return
    from ..jobs.models import find_model, load_llm
    from ..tasks import make_task
    from ..text import tokenizer_or_none

    started = time.perf_counter()
    items = _demo_items()
    count = sum(len(item["documents"]) for item in items)
    click.echo(
        f"{len(items)} queries, {len(items[0]['documents'])} passages each: {count} prompts for {spec.model_name}."
    )
    checkpoint = find_model(spec.model_name, spec.model, notice)
    tokenizer = tokenizer_or_none(checkpoint)
    task = make_task("rerank", checkpoint, tokenizer, **(SMALL_MODEL if spec.model_name == DEFAULT_MODEL else {}))
    works = task.prepare(items)
    llm = load_llm(replace(spec.model, sharing="full"), checkpoint, tokenizer)
    loaded = time.perf_counter() - started
    # The first query warms up the model. Its result is printed at once, to read while the rest runs.
    _show_ranking(items[:1], _rerank(llm.engine, task, works[:1], "full")["scores"])
    full = _rerank(llm.engine, task, works, "full")
    _show_ranking(items[1:], full["scores"][1:])
    _show_trie(_shape(works))
    _show_saving(full, _rerank(llm.engine, task, works, "off"))
    click.echo(f"\n{loaded:.1f} s to start, {time.perf_counter() - started:.1f} s in all. Next:\n")
    for line, purpose in (
        ('prefold rerank "a query" "a text" "another text"', "your own texts"),
        ("prefold demo --write demo.jsonl", "these passages as a file"),
        ("prefold plan demo.jsonl --task rerank", "what a job would share"),
        ("prefold run demo.jsonl --task rerank -o out.jsonl", "the job (--report page.html draws it)"),
    ):
        click.echo(f"  {click.style(line, bold=True):<66}{purpose}")


def _rerank(engine: Any, task: Any, works: list[Any], sharing: str) -> dict[str, Any]:
    """Return the scores of each query, the seconds, and the engine's counters."""
    from ..tasks.run import finish_items, run_works

    engine.reset_stats()
    started = time.perf_counter()
    results = run_works(engine, task, works, sharing=sharing)
    seconds, stats = time.perf_counter() - started, engine.stats
    scores = [ranking.scores.tolist() for ranking in finish_items(task, works, results)]
    return {"seconds": seconds, "stats": stats, "scores": scores}


def _shape(works: list[Any]) -> Any:
    """Return the shape of the stream of all prompts."""
    from ..jobs.report.icicle import StreamShape
    from ..trie import Spool

    shape = StreamShape()
    with Spool() as spool:
        for work in works:
            for request in work.requests:
                spool.add(request)
        for window in spool.windows(max_tokens=1 << 20):
            shape.add(window.tokens, window.offsets, common=window.common)
    return shape


def _show_ranking(items: list[dict[str, Any]], scores: list[list[float]]) -> None:
    from .answers import one_line

    for item, values in zip(items, scores, strict=True):
        click.echo(f"\n{click.style(item['query'], bold=True)}")
        order = sorted(range(len(values)), key=lambda i: -values[i])
        for place, index in enumerate(order, 1):
            line = f"{place:>3}  {values[index]:.3f}  {one_line(item['documents'][index], 86)}"
            click.echo(line if place <= 3 else click.style(line, dim=True))


def _show_trie(shape: Any) -> None:
    from ..jobs.report.icicle import trie_picture

    click.echo("\nThe prompts as a trie. Across: prompts. Down: tokens; the darker, the more prompts share them.\n")
    for line in trie_picture(shape):
        click.echo(f"  {click.style(line, fg='blue')}")


def _show_saving(full: dict[str, Any], off: dict[str, Any]) -> None:
    stats, seconds = full["stats"], full["seconds"]
    pairs = zip(chain(*full["scores"]), chain(*off["scores"]), strict=True)
    difference = max(abs(shared - unshared) for shared, unshared in pairs)
    saved = click.style(f"{stats.saved:.0%} saved", bold=True)
    faster = click.style(f"{off['seconds'] / seconds:.1f} times as fast", bold=True)
    rows = f"{stats.rows_computed:,} rows computed, one per unique token"
    click.echo(f"\n{stats.tokens:,} tokens in prompts, {rows}: {saved}.")
    click.echo(f"{seconds:.2f} s, against {off['seconds']:.2f} s without sharing: {faster}.")
    click.echo(f"No score differs by more than {difference:.2g}.")
