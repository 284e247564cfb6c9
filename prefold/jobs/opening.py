"""Open a job by its spec: its output, with the journal that tells it from others, and the engine that it loads."""

from __future__ import annotations

import errno
import fnmatch
import glob
import hashlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.identity import folder_digest, model_identity
from ..errors import JobError
from ..spec.files import read_bytes, same_file
from .columns import TableForm
from .inputs import Input
from .journal import journal_path, recorded_job
from .models import Notify, load_fleet
from .output import OutputOptions, open_output, partial_path
from .reader import Job
from .source import check_grown


def open_job(input: Input, notify: Notify) -> Job:
    """Return the job of an input. notify: called with lines about replicas"""
    from ..tasks.run import calibrated

    spec, tasks = input.spec, input.tasks
    path = spec.output.file
    _check_paths(path, input)
    seed = _seed(path, input) if "generate" in tasks else None

    def load() -> Any:
        if input.is_fleet:
            llm: Any = load_fleet(spec, input.backend, input.checkpoint, input.tokenizer, notify, tasks.media)
        else:
            llm = input.load()
        if "classify" in tasks:
            tasks.replace("classify", calibrated(llm.engine, tasks["classify"]))
        return llm

    output = open_output(
        OutputOptions(
            path,
            keep_order=spec.output.keep_order,
            overwrite=spec.output.overwrite,
            only_resume=spec.output.resume,
            limit=spec.input.limit,
            grown=partial(check_grown, input.source) if spec.output.grown else None,
            form=TableForm.of(input.adapter, input.source, tasks[spec.task].example if spec.task is not None else None),
        ),
        fingerprint(input, seed),
    )
    return Job(
        input.source, input.adapter, tasks, load, output, limit=spec.input.limit, window=spec.input.window,
        streaming=spec.input.stream, early=input.is_fleet, collect=bool(spec.output.report), seed=seed or 0,
    )  # fmt: skip


def _seed(path: Path | None, input: Input) -> int:
    """Return the job's seed: from the options, else from the journal, else a new seed."""
    from ..tasks.run import draw_seed

    if input.spec.seed is not None:
        return input.spec.seed
    recorded = recorded_job(path).get("seed") if path is not None and not input.spec.output.overwrite else None
    return recorded if isinstance(recorded, int) else draw_seed()


def fingerprint(input: Input, seed: int | None) -> dict[str, Any]:
    """Return the fingerprint of a job: its input, its model, its task, and the options that change a result. seed: the
    seed of sampling; None without sampling"""
    spec = input.spec
    options = spec.identity()
    if "examples" in options:
        options["examples"] = _digest(json.dumps(options["examples"]).encode())
    if "cache_reuse_shifted" in options:
        options["cache_reuse_shifted"] = _digest(read_bytes(options["cache_reuse_shifted"]))
    if spec.model.adapters:
        options["adapter"] = {name: folder_digest(Path(folder)) for name, folder in spec.model.adapters.items()}
    parts = {
        "input": input.source.identity,
        "format": input.source.format,
        "task": spec.task or "openai batch",
        "model": model_identity(input.checkpoint),
        "dtype": spec.model.dtype,
        "options": options,
        **({} if seed is None else {"seed": seed}),
    }
    return json.loads(json.dumps(parts))  # with lists in place of tuples, as the journal gives it back


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _check_paths(path: Path | None, input: Input) -> None:
    """Raise JobError if a file of the job would replace another one, or cannot be written."""
    spec, report = input.spec, input.spec.output.report
    for folder in (Path(os.path.realpath(name)) for name in spec.input.names if os.path.isdir(name)):
        if path is not None and Path(os.path.realpath(path)).is_relative_to(folder):
            raise JobError(f"the output {path} would become part of the input {folder.name}; write it elsewhere")
    for name in spec.input.names:
        if path is not None and glob.has_magic(name) and not os.path.exists(name) and _matches(path, name):
            raise JobError(f"the output {path} would become part of the input {name}; write it elsewhere")
    used: list[tuple[Path | str, str]] = [(path, "input") for path in input.source.paths]
    used += [(name, f"file of {flag}") for flag, name in spec.side_files]
    made: list[tuple[Path | str, str]] = []
    if path is not None:
        made = [(path, "output"), (partial_path(path), "partial output"), (journal_path(path), "journal")]
    made += [(report, "report")] if report else []
    for place, (file, role) in enumerate(made):
        for other, other_role in (*used, *made[:place]):
            if same_file(file, other):
                raise JobError(f"the {role} {file} would replace the {other_role} {other}; give another name")
    for written in (path, report):
        if written is not None and written != "-":
            _check_place(Path(written))


def _matches(path: Path, pattern: str) -> bool:
    """Return whether a pattern would match the file of this path."""

    def match(parts: Sequence[str], parts_of_pattern: Sequence[str]) -> bool:
        if not parts_of_pattern:
            return not parts
        if parts_of_pattern[0] == "**":
            return any(match(parts[at:], parts_of_pattern[1:]) for at in range(len(parts) + 1))
        return bool(parts) and fnmatch.fnmatch(parts[0], parts_of_pattern[0]) and match(parts[1:], parts_of_pattern[1:])

    return match(*(Path(os.path.abspath(name)).parts for name in (path, pattern)))


def _check_place(path: Path) -> None:
    """Raise JobError if a file could not be written, before anything is computed for it."""
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
