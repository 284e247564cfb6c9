"""Says which input a file is, so that two of them can be told apart without reading all of a large one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..files import sampled_digest

# The digest of a file is made of all of it up to so many bytes; of a larger file, of so many blocks of so many bytes,
# evenly spread, and of when it was last modified, as an edit may lie between the blocks. All of a file of 100 GB would
# take minutes before anything is done, also for a try with --limit.
_WHOLE_DIGEST = 256 << 20
_DIGEST_BLOCKS = 512


def file_identity(path: Path, size: int | None = None) -> dict[str, Any]:
    """Returns what tells a file, or its first `size` bytes, from another by its content: {"bytes": size, "digest":
    BLAKE2b in hex}."""
    size = path.stat().st_size if size is None else size
    return {"bytes": size, "digest": sampled_digest(path, size, _DIGEST_BLOCKS, _WHOLE_DIGEST)}


def input_identity(path: Path) -> dict[str, Any]:
    """Returns what tells an input from another: its content, and of a file too large to be digested as a whole when it
    was last modified, {"modified": the time as a text}."""
    facts = path.stat()
    found = file_identity(path, facts.st_size)
    if facts.st_size > _WHOLE_DIGEST:
        found["modified"] = datetime.fromtimestamp(facts.st_mtime, UTC).isoformat()
    return found


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
