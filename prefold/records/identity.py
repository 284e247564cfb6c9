"""Identifies input files by size and digest, without reading all of a large one, and checks that an input only grew."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import JobError
from ..files import sampled_digest
from .record import Source

# The digest of a file is made of all of it up to so many bytes; of a larger file, of so many blocks of so many bytes,
# evenly spread, and of when it was last modified, as an edit may lie between the blocks. All of a file of 100 GB would
# take minutes before anything is done, also for a try with --limit.
_WHOLE_DIGEST = 256 << 20
_DIGEST_BLOCKS = 512


def file_identity(path: Path, size: int | None = None) -> dict[str, Any]:
    """Returns the identity of a file, or of its first `size` bytes, by its content: {"bytes": size, "digest":
    BLAKE2b in hex}."""
    size = path.stat().st_size if size is None else size
    return {"bytes": size, "digest": sampled_digest(path, size, _DIGEST_BLOCKS, _WHOLE_DIGEST)}


def input_identity(path: Path) -> dict[str, Any]:
    """Returns the identity of an input file: that of its content. A file too large to be digested as a whole also has
    the time when it was last modified, {"modified": the time as a text}."""
    facts = path.stat()
    identity = file_identity(path, facts.st_size)
    if facts.st_size > _WHOLE_DIGEST:
        identity["modified"] = datetime.fromtimestamp(facts.st_mtime, UTC).isoformat()
    return identity


def content_of(identity: dict[str, Any]) -> dict[str, Any]:
    """Returns the identity of one file without when it was last modified."""
    return {what: value for what, value in identity.items() if what != "modified"}


def as_noted(identity: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Returns an input's identity in the words of `before`, another identity, from a journal: where that does not say
    when a file was last modified, as journals of earlier versions do not, nothing is said of it here either. A file
    whose content is another keeps what is known of it."""
    if "files" in identity:
        then, now = before.get("files", [before]), identity["files"]
        return {"files": [as_noted(*both) for both in zip(now, then, strict=False)] + now[len(then) :]}
    content = content_of(identity)
    return content if content == before else identity


def is_gzip(path: Path) -> bool:
    """Returns whether a file begins as gzip files do."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def check_grown(source: Source, before: dict[str, Any]) -> None:
    """Raises JobError unless the input begins with all it was when it had the identity `before`.

    What was its last file may be longer now, where its records are lines, and further files may follow it. So the
    records that were there before keep their numbers.
    """
    if not source.paths:
        raise JobError("of standard input it is not known whether it has only grown; give --grown with files")
    then, now = (identity.get("files", [identity]) for identity in (before, as_noted(source.identity, before)))
    for place, old in enumerate(then):
        if place < len(now) and now[place] == old:
            continue
        if place < len(now) and content_of(now[place]) == content_of(old):
            path, was = source.paths[place], old["modified"]
            raise JobError(
                f"{path} was modified since the job was run (it was of {was}, now it is of {now[place]['modified']}). "
                "Its size and the blocks of it that are digested are what they were, but it may be another between "
                "them, so --grown cannot go on with it; where you know that it is not, give it its time again "
                f"(touch -d {was} {shlex.quote(str(path))}), else --overwrite starts the job again, -o NAME writes to "
                "another file"
            )
        if place == len(then) - 1 and place < len(now) and source.format != "parquet":
            _check_longer(source.paths[place], old, now[place])
            continue
        raise _other(source.name)


def _other(name: Path | str) -> JobError:
    return JobError(
        f"{name} does not begin with what it was when the job was run, so --grown cannot go on with it; "
        "--overwrite starts the job again, -o NAME writes to another file"
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
