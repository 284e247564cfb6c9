"""Checks that an input has only grown: that it begins with all it was, and is longer or has further files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ..errors import JobError
from .identity import as_noted, content_of, file_identity
from .record import Source
from .source import is_gzip


def check_grown(source: Source, before: dict[str, Any]) -> None:
    """Raises JobError unless the input begins with all it was when it had the identity `before`.

    What was its last file may be longer now, where its records are lines, and further files may follow it. So the
    records that were there before keep their numbers.
    """
    if not source.paths:
        raise JobError("nobody can tell whether standard input has only grown; give --grown with files")
    then, now = (identity.get("files", [identity]) for identity in (before, as_noted(source.identity, before)))
    for place, old in enumerate(then):
        if place < len(now) and now[place] == old:
            continue
        if place < len(now) and content_of(now[place]) == content_of(old):
            raise _modified(source.paths[place], old, now[place])
        if place == len(then) - 1 and place < len(now) and source.format != "parquet":
            _check_longer(source.paths[place], old, now[place])
            continue
        raise _other(source.name)


def _other(name: Path | str) -> JobError:
    return JobError(
        f"{name} does not begin with what it was when the job was run, so --grown cannot go on with it; "
        "--overwrite starts the job again, -o NAME writes to another file"
    )


def _modified(path: Path, old: dict[str, Any], now: dict[str, Any]) -> JobError:
    return JobError(
        f"{path} was modified since the job was run (it was of {old['modified']}, now it is of {now['modified']}). "
        "Its size and the blocks of it that are digested are what they were, but it may be another between them, so "
        "--grown cannot go on with it; where you know that it is not, give it its time again "
        f"(touch -d {old['modified']} {shlex.quote(str(path))}), else --overwrite starts the job again, -o NAME writes "
        "to another file"
    )


def _check_longer(path: Path, old: dict[str, Any], now: dict[str, Any]) -> None:
    size, digest = old.get("bytes"), old.get("digest")
    if not isinstance(size, int) or size >= now["bytes"] or file_identity(path, size)["digest"] != digest:
        raise _other(path)
    with path.open("rb") as file:
        file.seek(max(0, size - 1))
        last, new = file.read(1), file.read(2)
    if size and not (new == b"\x1f\x8b" if is_gzip(path) else last == b"\n" or new[:1] in b"\r\n"):
        raise JobError(
            f"the last record of {path} has become longer: it had no line end when the job was run; "
            "--overwrite starts the job again"
        )
