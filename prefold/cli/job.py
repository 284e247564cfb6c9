"""Run a job from the shell, and print its summary."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.identity import stored_as
from ..errors import FleetError, RankError
from ..spec.job import JobSpec
from ..spec.requests import GenerationStats, Stats, shown
from .process import ending, notice, say

if TYPE_CHECKING:
    from ..jobs.opening import Input

FAILED_RECORDS = 3


def run_command(spec: JobSpec, *, stdin: Iterable[bytes] | None = None) -> None:
    """Run a job, and exit with the status that `prefold --help` documents.

    Args:
        stdin: The lines of standard input, if they are already read.
    """
    from ..jobs import Interrupted, run_job
    from ..jobs.opening import open_input, open_job
    from ..jobs.report import open_progress

    quiet, output = spec.output.quiet, spec.output.path
    input = open_input(spec, notice, stdin=stdin)
    job = open_job(input, lambda line: None if quiet else say(f"prefold: {line}"))
    was_ended = job.output.ended
    if job.output.resumed and not was_ended and not quiet:
        say(f"prefold: resuming {output}: {job.output.resumed:,} records are done")
    try:
        summary = run_job(job, open_progress(False if quiet else None))
    except Interrupted as error:
        ending(128 + error.signal)
        _say_how_to_resume("interrupted", spec, job)
        sys.exit(128 + error.signal)
    except (RankError, FleetError):
        _say_how_to_resume("ended by a failure", spec, job)
        raise
    if not quiet:
        from ..cluster.http_bodies import is_of_bytes

        notes = [f"  note      {note}" for note in job.output.notes]
        is_remote = bool(input.backend.where)  # the weights are elsewhere
        stored, in_bytes = "" if is_remote else stored_as(input.checkpoint), is_remote and is_of_bytes(input.tokenizer)
        say("\n".join([*summary_lines(summary, spec, input.adapter, stored, in_bytes=in_bytes), *notes]))
    page = spec.output.report
    if page and not was_ended:
        report(summary, input)
    elif page and not quiet:
        state = "{} is unchanged" if Path(page).exists() else "there is no {}"
        say(f"  report    not written, because nothing was computed; {state.format(page)}")
    if summary.errors:
        sys.exit(FAILED_RECORDS)


def _say_how_to_resume(end: str, spec: JobSpec, job: Any) -> None:
    if spec.output.file is None:
        say(f"\nprefold: {end}; output to a file (-o FILE) could be resumed")
        return
    context = click.get_current_context()
    arguments = context.find_root().meta.get("prefold.arguments", [])
    if job.output.begun:  # the old output is already replaced, and --overwrite would delete the new one
        arguments = [a for a in arguments if a != "--overwrite"]
    command = f"prefold {shlex.join(arguments)}"
    if job.source.name == "-":
        command = f"... | {command}     (standard input once more, from its beginning)"
    elif not job.source.paths:
        command += f"     ({job.source.name} once more, from its beginning)"
    say(f"\nprefold: {end}; finished records are written. To continue:\n  {command}")


def summary_lines(summary: Any, spec: JobSpec, adapter: Any, stored: str = "", in_bytes: bool = False) -> list[str]:
    """Return the lines of a job's summary: its counts, its costs, and the share that was saved.

    Args:
        stored: Format of the weights; "": unknown.
        in_bytes: Whether prompts are counted in bytes. Rows are tokens of the model, so their counts are then left out.
    """
    from ..jobs.report.progress import format_seconds

    stats, output = summary.stats, spec.output.path or "standard output"
    stored_in = f"stored as {stored}, " if stored else ""
    if not summary.records:
        lines = [f"prefold: the input holds no records; {output} has none"]
    elif summary.resumed == summary.records and not summary.streams:
        lines = [f"prefold: nothing left to do, {output} has all {summary.records:,} records"]
    else:
        lines = [f"prefold: {_count(summary.records, 'record')} written to {output}"]
        lines[0] += f", {summary.resumed:,} of them before" if summary.resumed else ""
    if summary.errors:
        lines.append(f"  errors    {_count(summary.errors, 'record')} failed; the output says why")
        if summary.first_error:
            lines.append(f"            the first: {_failure(json.loads(summary.first_error)):.300}")
    if stats.tokens:
        outputs = " and the generated texts" if stats.generation and stats.generation.generated_tokens else ""
        of = f", of the {summary.computed:,} records of this run" if summary.resumed else ""
        name = "bytes " if in_bytes else "tokens"
        # If all requests fail, no row is computed, and nothing is saved.
        saved = f" ({stats.saved:.1%} saved)" if stats.rows_computed else ""
        outputs = " (generated texts count in tokens)" if outputs and in_bytes else outputs
        lines.append(f"  {name}    {stats.tokens:,} in {_count(stats.requests, 'prompt')}{outputs}{of}")
        lines[-1] += ", because the model's tokenizer is not here (--tokenizer)" if in_bytes else ""
        rows = f"  rows      {stats.rows_computed:,} computed{saved}"
        rows += f", sharing {summary.sharing}" if summary.sharing else ""  # else no model was loaded
        if stats.unique_tokens:  # not counted by servers and vLLM
            rows += f"; {stats.unique_tokens:,} unique tokens"
            rows += f", {summary.excess:,} rows more than that" if summary.excess else ""
        lines += [] if in_bytes else [rows]
        lines += _counter_lines(stats)
        if stats.generation is not None:
            lines += _generation_lines(stats.generation, summary)
        if summary.streams > 1:
            lines.append(
                f"  streams   {summary.streams:,}, each sorted separately: prefixes they share were recomputed"
            )
        computing = summary.seconds - summary.load_seconds
        parts = f"{summary.load_seconds:.1f} s of them loading the model"
        if compiling := stats.seconds.get("compile"):
            parts += f", {compiling:.1f} s compiling kernels for the GPU (they are kept)"
        lines.append(
            f"  seconds   {format_seconds(summary.seconds)}, {parts}; "
            f"{summary.computed / max(computing, 1e-9):,.1f} records/s"
        )
        lines[-1] += "" if in_bytes else f", {stats.rows_computed / max(computing, 1e-9):,.0f} rows/s"
        if summary.replicas:
            lines.append(f"  replicas  {summary.replicas}")
        if summary.dtype:
            passes = f"; {summary.passes}" if summary.passes else ""
            lines.append(f"  model     {stored_in}computed in {summary.dtype}{passes}")
    if not spec.given.isdisjoint(("labels", "labels_file")):
        lines += _label_lines(adapter.labels)
    if summary.conclusion is not None:
        lines += summary.conclusion.lines()
    for model, count in getattr(adapter, "other_models", {}).items():
        answered = f"{spec.model_name} answered {'it' if count == 1 else 'them'}"
        lines.append(f"  model     {_count(count, 'request')} asked for {model!r}; {answered}")
    return lines


ONE_LABEL_ROWS, ONE_LABEL_SHARE = 50, 0.95  # at least so many texts, and so large a share of one label: warn


def _label_lines(labels: Counter[str]) -> list[str]:
    """Return a warning if nearly all texts got the same label."""
    total = labels.total()
    ((label, count),) = labels.most_common(1) or [("", 0)]
    if total < ONE_LABEL_ROWS or count < ONE_LABEL_SHARE * total:
        return []
    return [
        f"  warning   {count:,} of {total:,} texts got the label {label!r}. If that is wrong: describe the labels"
        " (--labels-file), give --normalization tokens, or --calibrate"
    ]


def _counter_lines(stats: Stats | GenerationStats) -> list[str]:
    """Return the lines of the features' counters."""
    return [f"  {counter.title:9} {counter.text(count)}" for counter, count in shown(stats) if count]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _generation_lines(generation: Any, summary: Any) -> list[str]:
    from ..jobs.report.progress import format_bytes

    seconds = max(summary.seconds - summary.load_seconds, 1e-9)
    generated = generation.generated_tokens
    lines = [f"  generated {generated:,} tokens, {generated / seconds:,.0f} a second"]
    if generation.steps:  # servers and vLLM report no steps and no K/V
        lines[0] += f", in {_count(generation.steps, 'step')} of up to {_count(generation.running_peak, 'sequence')}"
    if not generated:  # only prompts were read
        lines = []
    if generation.kv_bytes_peak:
        held, unshared = format_bytes(generation.kv_bytes_peak), format_bytes(generation.kv_bytes_unshared_peak)
        lines.append(f"  K/V       {held} at peak; without sharing {unshared}")
    lines += _counter_lines(generation)
    if generation.preemptions:
        again = f"{generation.recomputed_rows:,} rows were recomputed"
        lines.append(f"  memory    was full {generation.preemptions:,} times: {again} (increase --kv-memory)")
    return lines


def _failure(line: dict[str, Any]) -> str:
    """Return the error message in the output line of a failed record, of a table or a batch."""
    error = line.get("error") or line["response"]["body"]["error"]
    name = f"record {line['record']}" if "record" in line else line["custom_id"]
    return (f"{name}: " if name else "") + f"{error['message']}" + (f"; {error['remedy']}" if "remedy" in error else "")


def report(summary: Any, input: Input) -> None:
    """Write the page of --report."""
    from ..jobs.report import Report, write_report
    from ..jobs.report.progress import format_seconds
    from ..text.prompts import readable

    spec, page_path = input.spec, Path(input.spec.output.report or "")
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
    parts = {f"seconds, {part}": f"{seconds:.2f}" for part, seconds in stats.seconds.items()}
    settings = {"input": source.name, "task": spec.task or "OpenAI batch lines", "model path": str(checkpoint.path)}
    settings |= spec.shown()
    settings |= {"weights stored as": stored_as(checkpoint), "computed in": str(summary.dtype)}
    settings |= {"sharing used": str(summary.sharing), "steps": f"{stats.steps:,}"}
    settings |= {"maximum of path rows held between steps": f"{stats.path_rows_peak:,}"} | parts
    note = "" if summary.sharing == "full" else (
        f"With sharing {summary.sharing} every prompt had its own attention; this shows what could be shared."
    )  # fmt: skip
    page = Report(
        title=f"{spec.task or 'batch'}: {Path(source.name).name} with {checkpoint.name}",
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
        calibration=[] if summary.conclusion is None else summary.conclusion.data(),
        decode=None if tokenizer is None else readable(tokenizer.decode),
    )
    write_report(page, page_path)
    if not spec.output.quiet:
        say(f"  report    {page_path}")


def _generation_table(generation: Any) -> list[tuple[str, str]]:
    """Return all counters of generation, as rows of the report."""
    from ..jobs.report.progress import format_bytes

    numbers = [
        ("tokens generated", generation.generated_tokens),
        ("rows of prompts", generation.prefill_rows),
        ("rows of running sequences", generation.decode_rows),
        ("rows recomputed after a preemption", generation.recomputed_rows),
        ("rows of sequences that had already ended", generation.discarded_rows),
        *((counter.row, count) for counter, count in shown(generation) if counter.row),
        ("prompt tokens in the cache on admission", generation.first_admission_hits),
        ("prompt tokens shared within a step", generation.in_step_hits),
        ("prompt tokens found from earlier windows", generation.cross_window_hits),
        ("preemptions", generation.preemptions),
        ("steps", generation.steps),
        ("maximum of sequences in a step", generation.running_peak),
    ]
    kv = [
        ("K/V held now", generation.kv_bytes_now),
        ("K/V held at peak", generation.kv_bytes_peak),
        ("K/V at peak without sharing", generation.kv_bytes_unshared_peak),
    ]
    return [(name, f"{n:,}") for name, n in numbers] + [(name, format_bytes(n)) for name, n in kv]
