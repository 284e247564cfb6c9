"""Runs a job from the shell, and prints its summary."""

from __future__ import annotations

import errno
import fnmatch
import glob
import hashlib
import json
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..checkpoint.identity import folder_digest, model_identity, stored_as
from ..errors import FleetError, JobError, RankError
from ..files import read_bytes, same_file
from ..model_options import model_fields
from ..options import OPTIONS, cli_names, kind_of
from .input import COLUMN_OPTIONS, Input, open_input
from .model import Options, adapter_folders, backend_of, has_fleet, load_fleet, load_llm
from .process import say

FAILED_RECORDS = 3


def run_command(
    task: str | None, names: Sequence[str], o: dict[str, Any], *, stdin: Iterable[bytes] | None = None
) -> None:
    """Runs the job of these options, and ends the process with the exit status that the help documents.

    names   files, patterns and folders
    stdin   the lines of standard input, where they have been read already
    """
    from ..job import Interrupted, run_job
    from ..report import open_progress

    has_fleet(o)
    input = open_input(task, names, o, stdin=stdin)
    if task is not None:
        input.tasks[task]  # makes the task, so that bad options are refused before the input is read
    job = make_job(task, o, input)
    was_ended = job.output.ended
    if job.output.resumed and not was_ended and not o["quiet"]:
        say(f"prefold: resuming {o['output']}: {job.output.resumed:,} records are done")
    try:
        summary = run_job(job, open_progress(False if o["quiet"] else None))
    except Interrupted as error:
        _say_how_to_resume("interrupted", o, job)
        sys.exit(130 if error.signal == signal.SIGINT else 128 + error.signal)
    except (RankError, FleetError):
        _say_how_to_resume("ended by a failure", o, job)
        raise
    if not o["quiet"]:
        from ..cluster.http_bodies import is_of_bytes

        notes = [f"  note      {note}" for note in job.output.notes]
        is_remote = bool(backend_of(o).where)  # the weights are elsewhere
        stored, in_bytes = "" if is_remote else stored_as(input.checkpoint), is_remote and is_of_bytes(input.tokenizer)
        say("\n".join([*summary_lines(summary, o, input.adapter, stored, in_bytes=in_bytes), *notes]))
    if o["report"] and not was_ended:
        report(summary, task, input, o)
    elif o["report"] and not o["quiet"]:
        state = "{} stays what it is" if Path(o["report"]).exists() else "there is no {}"
        say(f"  report    not written, as nothing was computed; {state.format(o['report'])}")
    if summary.errors:
        sys.exit(FAILED_RECORDS)


def make_job(task: str | None, o: dict[str, Any], input: Input) -> Any:
    from ..job import Job, OutputOptions, TableForm, open_output
    from ..records.source import check_grown
    from ..tasks.run import calibrated

    path = None if o["output"] in (None, "-") else Path(o["output"])
    _check_paths(path, input, o)
    tasks = input.tasks
    seed = _seed(o, path) if "generate" in tasks else None

    def load() -> Any:
        model = o, input.checkpoint, input.tokenizer
        llm = load_fleet(*model, media=tasks.media) if has_fleet(o) else load_llm(*model, media=tasks.media)
        if "classify" in tasks:
            tasks.replace("classify", calibrated(llm.engine, tasks["classify"]))
        return llm

    output = open_output(
        OutputOptions(
            path,
            keep_order=o["keep_order"],
            overwrite=o["overwrite"],
            only_resume=o["resume"],
            limit=o["limit"],
            grown=partial(check_grown, input.source) if o["grown"] else None,
            form=TableForm.of(input.adapter, input.source, tasks[task].example if task is not None else None),
        ),
        fingerprint(task, o, input, seed),
    )
    return Job(
        input.source, input.adapter, tasks, load, output, limit=o["limit"], window=o["window"],
        streaming=o["stream"], early=has_fleet(o), collect=bool(o["report"]), seed=seed or 0,
    )  # fmt: skip


def _seed(o: dict[str, Any], path: Path | None) -> int:
    """Returns the job's seed: that of the options, else the one in the journal, else a new one."""
    from ..job.journal import recorded_job
    from ..tasks.run import draw_seed

    if o["seed"] is not None:
        return o["seed"]
    recorded = recorded_job(path).get("seed") if path is not None and not o["overwrite"] else None
    return recorded if isinstance(recorded, int) else draw_seed()


def _check_paths(path: Path | None, input: Input, o: dict[str, Any]) -> None:
    from ..job.journal import journal_path
    from ..job.output import partial_path

    if path is None and (o["resume"] or o["overwrite"] or o["grown"]):
        raise click.UsageError("--resume, --overwrite and --grown need an output file: add -o FILE")
    if o["resume"] and o["overwrite"]:
        raise click.UsageError("--resume and --overwrite exclude each other")
    for folder in (Path(os.path.realpath(name)) for name in input.names if os.path.isdir(name)):
        if path is not None and Path(os.path.realpath(path)).is_relative_to(folder):
            raise JobError(f"the output {path} would become part of the input {folder.name}; write it elsewhere")
    for name in input.names:
        if path is not None and glob.has_magic(name) and not os.path.exists(name) and _matches(path, name):
            raise JobError(f"the output {path} would become part of the input {name}; write it elsewhere")
    used: list[tuple[Path | str, str]] = [(path, "input") for path in input.source.paths]
    used += [(name, f"file of --{option}") for option, name in _side_files(o)]
    made: list[tuple[Path | str, str]] = []
    if path is not None:
        made = [(path, "output"), (partial_path(path), "partial output"), (journal_path(path), "journal")]
    made += [(o["report"], "report")] if o["report"] else []
    for place, (file, role) in enumerate(made):
        for other, other_role in (*used, *made[:place]):
            if same_file(file, other):
                raise JobError(f"the {role} {file} would replace the {other_role} {other}; give another name")
    for name in (o["output"], o["report"]):
        if name not in (None, "-"):
            _check_place(Path(name))


def _side_files(o: Options) -> list[tuple[str, str]]:
    """Return (flag, path) of each option that names a side file."""
    out = []
    for name in (*FILES, "json_schema", *TEXTS):
        value = o.get(name)
        is_text = name in TEXTS or (name == "json_schema" and str(value).lstrip()[:1] == "{")
        if isinstance(value, str) and (value.startswith("@") or not is_text):
            out.append((name.replace("_", "-"), value.removeprefix("@")))
    return out


def _matches(path: Path, pattern: str) -> bool:
    """Returns whether a pattern would match the file of this path."""

    def match(parts: Sequence[str], parts_of_pattern: Sequence[str]) -> bool:
        if not parts_of_pattern:
            return not parts
        if parts_of_pattern[0] == "**":
            return any(match(parts[at:], parts_of_pattern[1:]) for at in range(len(parts) + 1))
        return bool(parts) and fnmatch.fnmatch(parts[0], parts_of_pattern[0]) and match(parts[1:], parts_of_pattern[1:])

    return match(*(Path(os.path.abspath(name)).parts for name in (path, pattern)))


def _check_place(path: Path) -> None:
    """Raises JobError if a file could not be written, before anything is computed for it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise JobError(f"there is no folder {path.parent} for {path}; make it first")
    if path.is_dir():
        raise JobError(f"{path} is a folder; name a file in it")
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise JobError(f"{path} is a loop of symbolic links; give another name") from None
    if not os.access(folder, os.W_OK):
        raise JobError(f"nothing can be written to the folder {path.parent}; give {path.name} another place")


def _say_how_to_resume(end: str, o: dict[str, Any], job: Any) -> None:
    if o["output"] in (None, "-"):
        say(f"\nprefold: {end}; output to a file (-o FILE) could be resumed")
        return
    context = click.get_current_context()
    arguments = context.find_root().meta.get("prefold.arguments", [])
    if job.output.begun:  # the old output has been replaced, so --overwrite must not be given again
        arguments = [a for a in arguments if a != "--overwrite"]
    command = f"prefold {shlex.join(arguments)}"
    if job.source.name == "-":
        command = f"... | {command}     (standard input once more, from its beginning)"
    elif not job.source.paths:
        command += f"     ({job.source.name} once more, from its beginning)"
    say(f"\nprefold: {end}; what is done is written. To go on:\n  {command}")


def fingerprint(task: str | None, o: Options, input: Input, seed: int | None) -> dict[str, Any]:
    """Returns the fingerprint of a job: its input, its model, its task, and the options that change a result. seed: the
    seed of sampling; None without sampling"""
    from ..records.fields import read_argument

    options: dict[str, Any] = {}
    for name in (*COLUMN_OPTIONS, *RESULT_OPTIONS):
        value = o.get(name)
        if value is None or value == () or (value is False and name not in ("normalize", "chat")):
            continue
        if name in FILES or (name == "json_schema" and value.lstrip()[:1] != "{"):
            value = hashlib.blake2b(read_bytes(value.removeprefix("@")), digest_size=8).hexdigest()
        options[name] = read_argument(value) if name in TEXTS else value
    if o.get("adapter"):
        options["adapter"] = {name: folder_digest(Path(folder)) for name, folder in adapter_folders(o).items()}
    parts = {
        "input": input.source.identity,
        "format": input.source.format,
        "task": task or "openai batch",
        "model": model_identity(input.checkpoint),
        "dtype": o["dtype"],
        "options": options,
        **({} if seed is None else {"seed": seed}),
    }
    return json.loads(json.dumps(parts))  # with lists in place of tuples, as the journal gives it back


# Options that are a text or, as @FILE, a file with it; of the others some may begin with an @ and mean it.
TEXTS = {"prompt", "query", "document", "continuation", "tools", "regex", "grammar"}
TEXTS |= {option.name for kind in OPTIONS.values() for option in fields(kind) if kind_of(option) is str}
# Options that name a file, of which a digest is kept.
FILES = ("examples", "labels_file", "cache_reuse_shifted")


def _journal_names() -> tuple[str, ...]:
    """Returns the parameters, except adapters, whose values distinguish jobs of a task."""
    names = [
        name
        for task, kind in OPTIONS.items()
        for option in fields(kind)
        if option.metadata["journal"] and option.name != "adapter"
        for name in cli_names(task)[option.name]
    ]
    names += [name for name, option in model_fields().items() if option.metadata["journal"]]
    return tuple(dict.fromkeys(names))


# What the options of the tasks are made of, and what chooses between them; then how the input is read. Of adapters
# a digest is kept, and the seed has a place of its own.
RESULT_OPTIONS = (
    *_journal_names(),
    "chat",
    "recommended",
    "tokenizer",
    "json_columns",
    "scores",
    "delimiter",
    "max_cell_lines",
    "media_folder",
    "media_bytes",
    "media_pixels",
    "backend",
    "backend_option",
)


def summary_lines(summary: Any, o: dict[str, Any], adapter: Any, stored: str = "", in_bytes: bool = False) -> list[str]:
    """Returns the summary of a job in a few lines: its counts, its costs, and what sharing saved. Where prompts are
    counted in bytes, and rows in tokens, it does not say what was saved."""
    from ..report.progress import format_bytes, format_seconds

    stats, output = summary.stats, o["output"] or "standard output"
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
        outputs = " and what was generated" if stats.generation and stats.generation.generated_tokens else ""
        of = f", of the {summary.computed:,} records of this run" if summary.resumed else ""
        name = "bytes " if in_bytes else "tokens"
        # If all requests fail, no row is computed, and none is saved.
        saved = f" ({stats.saved:.1%} saved)" if stats.rows_computed and not in_bytes else ""
        lines.append(f"  {name}    {stats.tokens:,} in {_count(stats.requests, 'prompt')}{outputs}{of}")
        lines[-1] += ", as the model's tokenizer is not here (--tokenizer)" if in_bytes else ""
        rows = f"  rows      {stats.rows_computed:,} computed{saved}, sharing {summary.sharing}"
        if stats.unique_tokens:  # servers and vLLM do not count them
            rows += f"; {stats.unique_tokens:,} unique tokens"
            rows += f", {summary.excess:,} rows more than those" if summary.excess else ""
        lines.append(rows)
        if stats.tower_runs:
            lines.append(f"  images    {stats.tower_runs:,} images encoded")
        if stats.state_bytes_peak:
            lines.append(f"  states    {format_bytes(stats.state_bytes_peak)} held at peak")
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
            passes = f"; {summary.passes}" if summary.passes else ""
            lines.append(f"  model     {stored_in}computed in {summary.dtype}{passes}")
    if o.get("labels") or o.get("labels_file"):
        lines += _label_lines(adapter.labels)
    for model, count in getattr(adapter, "other_models", {}).items():
        lines.append(f"  model     {count:,} requests asked for {model!r}; {o['model']} answered them")
    return lines


ONE_LABEL_ROWS, ONE_LABEL_SHARE = 50, 0.95  # from which on one label of nearly all rows is suspicious


def _label_lines(labels: Counter[str]) -> list[str]:
    """Return the warning about a job in which nearly every text got the same label."""
    total = labels.total()
    ((label, count),) = labels.most_common(1) or [("", 0)]
    if total < ONE_LABEL_ROWS or count < ONE_LABEL_SHARE * total:
        return []
    return [
        f"  warning   {count:,} of {total:,} texts got the label {label!r}. If that is wrong: describe the labels"
        " (--labels-file), give --normalization tokens, or --calibrate"
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _generation_lines(generation: Any, summary: Any) -> list[str]:
    from ..report.progress import format_bytes

    seconds = max(summary.seconds - summary.load_seconds, 1e-9)
    generated = generation.generated_tokens
    lines = [f"  generated {generated:,} tokens, {generated / seconds:,.0f} a second"]
    if generation.steps:  # servers and vLLM do not tell of theirs, nor of K/V
        lines[0] += f", in {_count(generation.steps, 'step')} of up to {_count(generation.running_peak, 'sequence')}"
    if not generated:  # the K/V held prompts that were only read
        lines = []
    if generation.kv_bytes_peak:
        held, unshared = format_bytes(generation.kv_bytes_peak), format_bytes(generation.kv_bytes_unshared_peak)
        lines.append(f"  K/V       {held} at peak; without sharing {unshared}")
    if generation.copied_rows:
        copied = f"{generation.copied_rows:,} rows of prompts, from other positions"
        lines.append(f"  copied    {copied}: approximate answers")
    if generation.preemptions:
        again = f"{generation.recomputed_rows:,} rows were computed again"
        lines.append(f"  memory    was short {generation.preemptions:,} times: {again} (--kv-memory gives more)")
    return lines


def _failure(line: dict[str, Any]) -> str:
    """Returns the error in a failed record's line as a message. line: of a table, or of a batch"""
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
    """Returns all counters of generation, as rows of the report."""
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
        ("K/V at peak without sharing", generation.kv_bytes_unshared_peak),
    ]
    return [(name, f"{n:,}") for name, n in numbers] + [(name, format_bytes(n)) for name, n in kv]
