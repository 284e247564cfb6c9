"""Running a job from the shell: open, run, say what was done."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from ..errors import JobError
from .build import LazyTasks, fingerprint, load_llm, make_adapter, open_model

__all__ = ["FAILED_RECORDS", "run_command"]

FAILED_RECORDS = 3


def run_command(task: str | None, name: str, o: dict[str, Any]) -> None:
    """Run the job that the options describe; ends the process with the status the help promises."""
    from ..job import Interrupted, open_progress, open_source, run_job

    source = open_source(name, o["input_format"])
    checkpoint, tokenizer = open_model(o)
    adapter, names = make_adapter(task, o, source, tokenizer)
    tasks = LazyTasks(names, o, checkpoint, tokenizer)
    if task is not None:
        tasks[task]  # bad options are refused before the input is read
    job = make_job(task, o, source, checkpoint, adapter, tasks)
    if getattr(job.output, "resumed", 0) and not job.output.ended and not o["quiet"]:
        click.echo(f"prefold: resuming {o['output']}: {job.output.resumed:,} records are done", err=True)
    try:
        summary = run_job(job, open_progress(False if o["quiet"] else None))
    except Interrupted as error:
        _say_how_to_resume(o)
        sys.exit(130 if error.signal == signal.SIGINT else 128 + error.signal)
    if not o["quiet"]:
        click.echo("\n".join(summary_lines(summary, o, adapter)), err=True)
    if o["report"]:
        report(summary, task, source, checkpoint, tokenizer, o)
    if summary.errors:
        sys.exit(FAILED_RECORDS)


def make_job(task: str | None, o: dict[str, Any], source: Any, checkpoint: Any, adapter: Any, tasks: LazyTasks) -> Any:
    from ..job import Job, OutputOptions, open_output
    from ..job.items import calibrated

    path = None if o["output"] in (None, "-") else Path(o["output"])
    _check_paths(path, source.name, o)

    def load() -> Any:
        llm = load_llm(o, checkpoint)
        if "classify" in tasks:
            tasks.replace("classify", calibrated(llm.engine, tasks["classify"]))
        return llm

    output = open_output(
        OutputOptions(
            path, keep_order=o["keep_order"], overwrite=o["overwrite"], only_resume=o["resume"], limit=o["limit"]
        ),
        fingerprint(task, o, source, checkpoint),
    )
    return Job(
        source, adapter, tasks, load, output,
        limit=o["limit"], window=o["window"], streaming=o["stream"], collect=bool(o["report"]),
    )  # fmt: skip


def _check_paths(path: Path | None, source: str, o: dict[str, Any]) -> None:
    if path is None and (o["resume"] or o["overwrite"]):
        raise click.UsageError("--resume and --overwrite need an output file: add -o FILE")
    if o["resume"] and o["overwrite"]:
        raise click.UsageError("--resume and --overwrite exclude each other")
    used = {Path(source).resolve(): "input"} if source != "-" else {}
    for name, what in ((path, "output"), (o["report"], "report")):
        if name is not None and used.setdefault(Path(name).resolve(), what) != what:
            raise JobError(f"the {what} {name} would replace the {used[Path(name).resolve()]}; give another name")
    for name in (o["output"], o["report"]):
        if name not in (None, "-") and not Path(name).absolute().parent.is_dir():
            raise JobError(f"there is no folder {Path(name).parent} for {name}; make it first")


def _say_how_to_resume(o: dict[str, Any]) -> None:
    if o["output"] in (None, "-"):
        click.echo("\nprefold: interrupted; output to a file (-o FILE) could be resumed", err=True)
        return
    context = click.get_current_context()
    arguments = [a for a in context.find_root().meta.get("prefold.arguments", []) if a != "--overwrite"]
    command = f"prefold {shlex.join(arguments)}"
    click.echo(f"\nprefold: interrupted; what is done is written. To go on:\n  {command}", err=True)


def summary_lines(summary: Any, o: dict[str, Any], adapter: Any) -> list[str]:
    """The end of a job in a few lines: what was done, what it took, what was saved."""
    from ..job.progress import format_seconds

    stats, where = summary.stats, o["output"] or "standard output"
    if summary.resumed == summary.records and not summary.streams:
        lines = [f"prefold: nothing left to do, {where} has all {summary.records:,} records"]
    else:
        lines = [f"prefold: {summary.records:,} records written to {where}"]
        lines[0] += f", {summary.resumed:,} of them before" if summary.resumed else ""
    if summary.errors:
        lines.append(f"  errors    {summary.errors:,} records failed; their lines say why")
    if stats.tokens:
        lines.append(f"  tokens    {stats.tokens:,} in {stats.requests:,} prompts")
        rows = f"  rows      {stats.rows_computed:,} computed ({stats.saved:.1%} saved), sharing {summary.sharing}"
        lines.append(rows + f"; {stats.unique_tokens:,} unique tokens")
        if summary.excess:
            lines[-1] += f", {summary.excess:,} rows more than those"
        if summary.streams > 1:
            lines.append(f"  streams   {summary.streams:,}, each sorted for itself: what they share was computed again")
        computing = summary.seconds - summary.load_seconds
        lines.append(
            f"  seconds   {format_seconds(summary.seconds)}, {summary.load_seconds:.1f} s of them loading the model; "
            f"{(summary.records - summary.resumed) / max(computing, 1e-9):,.1f} records/s, "
            f"{stats.rows_computed / max(computing, 1e-9):,.0f} rows/s"
        )
    for model, count in getattr(adapter, "other_models", {}).items():
        lines.append(f"  model     {count:,} requests asked for {model!r}; {o['model']} answered them")
    return lines


def report(summary: Any, task: str | None, source: Any, checkpoint: Any, tokenizer: Any, o: dict[str, Any]) -> None:
    """Write the --report page."""
    from ..job import Report, write_report
    from ..job.progress import format_seconds

    stats = summary.stats
    cards = [
        ("records", f"{summary.records:,}"),
        ("tokens asked for", f"{stats.tokens:,}"),
        ("rows computed", f"{stats.rows_computed:,}"),
        ("of the tokens saved", f"{stats.saved:.1%}"),
        ("errors", f"{summary.errors:,}"),
        ("seconds", format_seconds(summary.seconds)),
    ]
    shown = {k: v for k, v in o.items() if v not in (None, False, ()) and k not in ("input", "report", "quiet")}
    parts = {f"seconds, {part}": f"{seconds:.2f}" for part, seconds in stats.seconds.items()}
    settings = {"input": source.name, "task": task or "OpenAI batch lines", "model path": str(checkpoint.path)}
    settings |= {name.replace("_", "-"): str(value) for name, value in shown.items()}
    settings |= {"sharing used": str(summary.sharing), "steps": f"{stats.steps:,}"}
    settings |= {"most path rows held between steps": f"{stats.path_rows_peak:,}"} | parts
    note = "" if summary.sharing == "full" else (
        f"With sharing {summary.sharing} every prompt went through attention by itself; this is what could be shared."
    )  # fmt: skip
    page = Report(
        title=f"{task or 'batch'}: {Path(source.name).name} with {checkpoint.name}",
        when=time.strftime("finished %Y-%m-%d %H:%M"),
        tokens=stats.tokens,
        rows=stats.rows_computed,
        seconds=stats.seconds.get("model", 0.0),
        cards=cards,
        settings=list(settings.items()),
        shape=summary.shape,
        trie_note=note,
        steps=summary.steps,
        decode=None if tokenizer is None else tokenizer.decode,
    )
    write_report(page, Path(o["report"]))
    if not o["quiet"]:
        click.echo(f"  report    {o['report']}", err=True)
