"""Runs `prefold demo`, which reranks a few passages and shows what sharing saved."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import Any

import click

from .options import DEFAULT_MODEL, engine_options, model_options

# A small general model judges better when asked in its own chat format than by Qwen3-Reranker's prompt.
SMALL_MODEL = {
    "template": (
        "<|im_start|>system\nYou judge whether a text answers a question. Answer only Yes or No.<|im_end|>\n"
        "<|im_start|>user\nQuestion: {query}\n\nText: {document}\n\nDoes the text answer the question?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "words": ("Yes", "No"),
}


def demo_items() -> list[dict[str, Any]]:
    """Returns the demo's data: queries, each with its documents."""
    text = resources.files(__package__).joinpath("demo.jsonl").read_text(encoding="utf-8")
    return [{name: record[name] for name in ("query", "documents")} for record in map(json.loads, text.splitlines())]


@click.command(short_help="See reranking, what is shared and what that saves.")
@model_options
@engine_options
@click.option("--write", metavar="FILE", help="Only write the demo's data to FILE (JSONL), to try a job on.")
def demo(**o: Any) -> None:
    """Rerank a few passages, and show what was shared and what it saved."""
    if o["write"]:
        text = resources.files(__package__).joinpath("demo.jsonl").read_text(encoding="utf-8")
        Path(o["write"]).write_text(text, encoding="utf-8")
        click.echo(f"wrote {o['write']}: try  prefold run {o['write']} --task rerank --id id -o scores.jsonl")
        return
    from ..tasks import make_task
    from .build import load_llm, open_model

    started = time.perf_counter()
    items = demo_items()
    count = sum(len(item["documents"]) for item in items)
    click.echo(f"{len(items)} queries, {len(items[0]['documents'])} passages each: {count} prompts for {o['model']}.")
    checkpoint, tokenizer = open_model(o)
    task = make_task("rerank", checkpoint, tokenizer, **(SMALL_MODEL if o["model"] == DEFAULT_MODEL else {}))
    works = task.prepare(items)
    llm = load_llm({**o, "sharing": "full"}, checkpoint, tokenizer)
    loaded = time.perf_counter() - started
    full, off, scores, shape = _run(llm.engine, task, works)
    _show_ranking(items, scores)
    _show_trie(shape)
    _show_saving(full, off)
    click.echo(f"\n{loaded:.1f} s to start, {time.perf_counter() - started:.1f} s in all. To go on:\n")
    for command, what in _NEXT:
        click.echo(f"  {click.style(command, bold=True):<66}{what}")


_NEXT = (
    ('prefold rerank "a query" "a text" "another text"', "your own texts"),
    ("prefold demo --write demo.jsonl", "these passages as a file"),
    ("prefold plan demo.jsonl --task rerank", "what a job would share"),
    ("prefold run demo.jsonl --task rerank -o out.jsonl", "the job (--report page.html draws it)"),
)


def _run(engine: Any, task: Any, works: list[Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any], Any]:
    """Returns (numbers with sharing full, numbers with sharing off, scores of each query, shape of the stream)."""
    from ..report.icicle import StreamShape
    from ..stream import Spool
    from ..tasks.run import finish_items, run_works

    shape = StreamShape()
    with Spool() as spool:
        for work in works:
            for request in work.requests:
                spool.add(request)
        for window in spool.windows(max_tokens=1 << 20):
            shape.add(window.tokens, window.offsets, common=window.common)
    run_works(engine, task, works[:1])  # the first forward pass warms up
    numbers, scores = {}, {}
    for mode in ("full", "off"):
        engine.reset_stats()
        started = time.perf_counter()
        results = run_works(engine, task, works, sharing=mode)
        numbers[mode] = {"seconds": time.perf_counter() - started, "stats": engine.stats}
        scores[mode] = [result["scores"] for result in finish_items(task, works, results)]
    one, two = ([score for scores_ in scores[mode] for score in scores_] for mode in ("full", "off"))
    numbers["full"]["difference"] = max(abs(a - b) for a, b in zip(one, two, strict=True))
    return numbers["full"], numbers["off"], scores["full"], shape


def _show_ranking(items: list[dict[str, Any]], scores: list[list[float]]) -> None:
    from .direct import one_line

    for item, values in zip(items, scores, strict=True):
        click.echo(f"\n{click.style(item['query'], bold=True)}")
        order = sorted(range(len(values)), key=lambda i: -values[i])
        for place, index in enumerate(order, 1):
            line = f"{place:>3}  {values[index]:.3f}  {one_line(item['documents'][index], 86)}"
            click.echo(line if place <= 3 else click.style(line, dim=True))


def _show_trie(shape: Any) -> None:
    from ..report.icicle import trie_picture

    click.echo("\nThe prompts as a trie. Across: prompts. Down: tokens; the darker, the more prompts share them.\n")
    for line in trie_picture(shape):
        click.echo(f"  {click.style(line, fg='blue')}")


def _show_saving(full: dict[str, Any], off: dict[str, Any]) -> None:
    stats, seconds = full["stats"], full["seconds"]
    saved = click.style(f"{stats.saved:.0%} saved", bold=True)
    faster = click.style(f"{off['seconds'] / seconds:.1f} times as fast", bold=True)
    rows = f"{stats.rows_computed:,} rows computed, each unique token once"
    click.echo(f"\n{stats.tokens:,} tokens asked for, {rows}: {saved}.")
    click.echo(f"{seconds:.2f} s, against {off['seconds']:.2f} s without sharing: {faster}.")
    click.echo(f"No score differs by more than {full['difference']:.2g}.")
