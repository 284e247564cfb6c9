"""Runs a job from the shell: opens it, runs it, and says what was done."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..checkpoint.identity import folder_digest, model_identity, stored_as
from ..errors import FleetError, JobError, RankError
from ..model_options import model_fields
from ..options import OPTIONS, cli_names, kind_of
from .input import COLUMN_OPTIONS, Input, open_input
from .model import Options, adapter_folders, backend_of, has_fleet, load_fleet, load_llm
from .process import say
from .settings import read_bytes
from .summary import report, summary_lines

FAILED_RECORDS = 3


def run_command(
    task: str | None, names: Sequence[str], o: dict[str, Any], *, stdin: Iterable[bytes] | None = None
) -> None:
    """Runs the job that the options describe, and ends the process with the exit status that the help documents.

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
        notes = [f"  note      {note}" for note in job.output.notes]
        stored = "" if backend_of(o).where else stored_as(input.checkpoint)  # else the weights are elsewhere
        say("\n".join([*summary_lines(summary, o, input.adapter, stored), *notes]))
    if o["report"] and not was_ended:
        report(summary, task, input, o)
    elif o["report"] and not o["quiet"]:
        state = "{} stays what it is" if Path(o["report"]).exists() else "there is no {}"
        say(f"  report    not written, as nothing was computed; {state.format(o['report'])}")
    if summary.errors:
        sys.exit(FAILED_RECORDS)


def make_job(task: str | None, o: dict[str, Any], input: Input) -> Any:
    from ..job import Job, OutputOptions, TableForm, open_output
    from ..records.identity import check_grown
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
    """Returns the job's seed: the one given, else the one drawn when the job was started, else one drawn now."""
    from ..job.journal import recorded_job
    from ..tasks.run import draw_seed

    if o["seed"] is not None:
        return o["seed"]
    recorded = recorded_job(path).get("seed") if path is not None and not o["overwrite"] else None
    return recorded if isinstance(recorded, int) else draw_seed()


def _check_paths(path: Path | None, input: Input, o: dict[str, Any]) -> None:
    if path is None and (o["resume"] or o["overwrite"] or o["grown"]):
        raise click.UsageError("--resume, --overwrite and --grown need an output file: add -o FILE")
    if o["resume"] and o["overwrite"]:
        raise click.UsageError("--resume and --overwrite exclude each other")
    used = {path.resolve(): "input" for path in input.source.paths}
    for folder in (Path(name).resolve() for name in input.names if Path(name).is_dir()):
        if path is not None and path.resolve().is_relative_to(folder):
            raise JobError(f"the output {path} would become part of the input {folder.name}; write it elsewhere")
    for name in input.names:
        if path is not None and glob.has_magic(name) and not os.path.exists(name) and _matches(path, name):
            raise JobError(f"the output {path} would become part of the input {name}; write it elsewhere")
    for name, role in ((path, "output"), (o["report"], "report")):
        if name is not None and used.setdefault(Path(name).resolve(), role) != role:
            raise JobError(f"the {role} {name} would replace the {used[Path(name).resolve()]}; give another name")
    for name in (o["output"], o["report"]):
        if name not in (None, "-"):
            _check_place(Path(name))


def _matches(path: Path, pattern: str) -> bool:
    """Returns whether the file of this path would be one of those that a pattern stands for."""

    def match(parts: Sequence[str], wanted: Sequence[str]) -> bool:
        if not wanted:
            return not parts
        if wanted[0] == "**":
            return any(match(parts[at:], wanted[1:]) for at in range(len(parts) + 1))
        return bool(parts) and fnmatch.fnmatch(parts[0], wanted[0]) and match(parts[1:], wanted[1:])

    return match(*(Path(os.path.abspath(name)).parts for name in (path, pattern)))


def _check_place(path: Path) -> None:
    """Raises JobError where a file could not be written, before anything is computed for it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise JobError(f"there is no folder {path.parent} for {path}; make it first")
    if path.is_dir():
        raise JobError(f"{path} is a folder; name a file in it")
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
    say(f"\nprefold: {end}; what is done is written. To go on:\n  {command}")


def fingerprint(task: str | None, o: Options, input: Input, seed: int | None) -> dict[str, Any]:
    """Returns the fingerprint of a job: its input, its model, its task, and the options that change a result.

    seed: the seed of sampling; None where nothing is sampled.
    """
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
    """Returns the parameters, but for adapters, with which a job of a task is another job when they differ."""
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
    "delimiter",
    "max_cell_lines",
    "media_folder",
    "media_bytes",
    "media_pixels",
    "backend",
    "backend_option",
)
