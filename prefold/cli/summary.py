"""Says what a job did: in a few lines, and on the page of --report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ..checkpoint.identity import stored_as
from .input import Input
from .process import say


def summary_lines(summary: Any, o: dict[str, Any], adapter: Any, stored: str = "") -> list[str]:
    """Returns the summary of a job in a few lines: what was done, what it took, what was saved."""
    from ..report.progress import format_seconds

    stats, where = summary.stats, o["output"] or "standard output"
    stored_in = f"stored as {stored}, " if stored else ""
    if not summary.records:
        lines = [f"prefold: the input holds no records; {where} has none"]
    elif summary.resumed == summary.records and not summary.streams:
        lines = [f"prefold: nothing left to do, {where} has all {summary.records:,} records"]
    else:
        lines = [f"prefold: {summary.records:,} records written to {where}"]
        lines[0] += f", {summary.resumed:,} of them before" if summary.resumed else ""
    if summary.errors:
        lines.append(f"  errors    {summary.errors:,} records failed; their lines say why")
        if summary.first_error:
            lines.append(f"            the first: {_failure(json.loads(summary.first_error)):.300}")
    if stats.tokens:
        outputs = " and what was generated" if stats.generation and stats.generation.generated_tokens else ""
        of = f", of the {summary.computed:,} records of this run" if summary.resumed else ""
        lines.append(f"  tokens    {stats.tokens:,} in {stats.requests:,} prompts{outputs}{of}")
        rows = f"  rows      {stats.rows_computed:,} computed ({stats.saved:.1%} saved), sharing {summary.sharing}"
        if stats.unique_tokens:  # servers and vLLM do not count them
            rows += f"; {stats.unique_tokens:,} unique tokens"
            rows += f", {summary.excess:,} rows more than those" if summary.excess else ""
        lines.append(rows)
        if stats.tower_runs:
            lines.append(f"  images    {stats.tower_runs:,} images encoded")
        if stats.generation is not None:
            lines += _generation_lines(stats.generation, summary)
        if summary.streams > 1:
            lines.append(f"  streams   {summary.streams:,}, each sorted for itself: what they share was computed again")
        computing = summary.seconds - summary.load_seconds
        parts = f"{summary.load_seconds:.1f} s of them loading the model"
        if compiling := stats.seconds.get("compile"):
            parts += f", {compiling:.1f} s compiling kernels for the GPU (they are kept)"
        lines.append(
            f"  seconds   {format_seconds(summary.seconds)}, {parts}; "
            f"{summary.computed / max(computing, 1e-9):,.1f} records/s, "
            f"{stats.rows_computed / max(computing, 1e-9):,.0f} rows/s"
        )
        if summary.replicas:
            lines.append(f"  replicas  {summary.replicas}")
        if summary.dtype:
            lines.append(f"  model     {stored_in}computed in {summary.dtype}")
    for model, count in getattr(adapter, "other_models", {}).items():
        lines.append(f"  model     {count:,} requests asked for {model!r}; {o['model']} answered them")
    return lines


def _generation_lines(generation: Any, summary: Any) -> list[str]:
    from ..report.progress import format_bytes

    seconds = max(summary.seconds - summary.load_seconds, 1e-9)
    rate = f"{generation.generated_tokens / seconds:,.0f} a second"
    lines = [f"  generated {generation.generated_tokens:,} tokens, {rate}"]
    if generation.steps:  # servers and vLLM do not tell of theirs, nor of K/V
        lines[0] += f", in {generation.steps:,} steps of up to {generation.running_peak:,} sequences"
    if not generation.generated_tokens:  # the K/V held prompts that were only read
        lines = []
    if generation.kv_bytes_peak:
        held, unshared = format_bytes(generation.kv_bytes_peak), format_bytes(generation.kv_bytes_unshared_peak)
        lines.append(f"  K/V       {held} at peak, {unshared} were nothing shared")
    if generation.copied_rows:
        lines.append(
            f"  copied    {generation.copied_rows:,} rows of prompts, from other positions: approximate answers"
        )
    if generation.preemptions:
        again = f"{generation.recomputed_rows:,} rows were computed again"
        lines.append(f"  memory    was short {generation.preemptions:,} times: {again} (--kv-memory gives more)")
    return lines


def _failure(line: dict[str, Any]) -> str:
    """Returns the error in a failed record's line, in words. line: of a table, or of a batch."""
    error = line.get("error") or line["response"]["body"]["error"]
    name = f"record {line['record']}" if "record" in line else line["custom_id"]
    return (f"{name}: " if name else "") + f"{error['message']}" + (f"; {error['remedy']}" if "remedy" in error else "")


def report(summary: Any, task: str | None, input: Input, o: dict[str, Any]) -> None:
    """Writes the page of --report."""
    from ..report import Report, write_report
    from ..report.progress import format_seconds
    from ..text.prompts import readable

    stats, source, checkpoint, tokenizer = summary.stats, input.source, input.checkpoint, input.tokenizer
    generation = stats.generation
    generated = [] if generation is None else [("tokens generated", f"{generation.generated_tokens:,}")]
    this_run, when = [], time.strftime("finished %Y-%m-%d %H:%M")
    if summary.resumed:
        this_run = [("of them in this run", f"{summary.computed:,}")]
        when += f"; resumed: {summary.resumed:,} records were written before this run"
        when += ", and their tokens, rows and seconds are not counted on this page"
    cards = [
        ("records", f"{summary.records:,}"),
        *this_run,
        ("tokens asked for", f"{stats.tokens:,}"),
        ("rows computed", f"{stats.rows_computed:,}"),
        ("of the tokens saved", f"{stats.saved:.1%}"),
        *generated,
        ("errors", f"{summary.errors:,}"),
        ("seconds", format_seconds(summary.seconds)),
    ]
    shown = {k: v for k, v in o.items() if v not in (None, False, ()) and k not in ("input", "report", "quiet")}
    parts = {f"seconds, {part}": f"{seconds:.2f}" for part, seconds in stats.seconds.items()}
    settings = {"input": source.name, "task": task or "OpenAI batch lines", "model path": str(checkpoint.path)}
    settings |= {name.replace("_", "-"): str(value) for name, value in shown.items()}
    settings |= {"weights stored as": stored_as(checkpoint), "computed in": str(summary.dtype)}
    settings |= {"sharing used": str(summary.sharing), "steps": f"{stats.steps:,}"}
    settings |= {"most path rows held between steps": f"{stats.path_rows_peak:,}"} | parts
    note = "" if summary.sharing == "full" else (
        f"With sharing {summary.sharing} every prompt went through attention by itself; this is what could be shared."
    )  # fmt: skip
    page = Report(
        title=f"{task or 'batch'}: {Path(source.name).name} with {checkpoint.name}",
        when=when,
        tokens=stats.tokens,
        rows=stats.rows_computed,
        seconds=stats.seconds.get("model", 0.0),
        cards=cards,
        settings=list(settings.items()),
        shape=summary.shape,
        trie_note=note,
        steps=summary.steps,
        generation=[] if generation is None else _generation_table(generation),
        decode=None if tokenizer is None else readable(tokenizer.decode),
    )
    write_report(page, Path(o["report"]))
    if not o["quiet"]:
        say(f"  report    {o['report']}")


def _generation_table(generation: Any) -> list[tuple[str, str]]:
    """Returns everything that was counted while generating, as rows of the report."""
    from ..report.progress import format_bytes

    numbers = [
        ("tokens generated", generation.generated_tokens),
        ("rows of prompts", generation.prefill_rows),
        ("rows of running sequences", generation.decode_rows),
        ("rows computed again after a preemption", generation.recomputed_rows),
        ("rows of sequences that had ended before", generation.discarded_rows),
        ("rows of prompts copied from other positions", generation.copied_rows),
        ("tokens of prompts that were there on admission", generation.first_admission_hits),
        ("tokens of prompts shared within a step", generation.in_step_hits),
        ("tokens of prompts found from earlier windows", generation.cross_window_hits),
        ("preemptions", generation.preemptions),
        ("steps", generation.steps),
        ("most sequences in a step", generation.running_peak),
    ]
    kv = [
        ("K/V held now", generation.kv_bytes_now),
        ("K/V held at peak", generation.kv_bytes_peak),
        ("K/V at peak, were nothing shared", generation.kv_bytes_unshared_peak),
    ]
    return [(name, f"{n:,}") for name, n in numbers] + [(name, format_bytes(n)) for name, n in kv]
