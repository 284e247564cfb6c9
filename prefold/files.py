"""Writes files so that a full or read-only disk leaves no torn file and gives one error that says what to do. And tells
files apart by their content."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import JobError

_BLOCK = 1 << 16


@contextmanager
def writing(subject: Path | str, state: str = "", remedy: str = "") -> Iterator[None]:
    """Returns a context that turns an OSError into a JobError that says what could not be written.

    state   what is true all the same ("what is written is kept")
    remedy  what to do when there is room, or whatever else it was is mended

    A BrokenPipeError passes: the reader of a pipe has gone, which is no failure of this machine.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"cannot write {subject}: {error.strerror or error}"
        if state:
            message += f"; {state}"
        if remedy:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            message += f": {'make room' if full else 'mend that'} and {remedy}"
        raise JobError(message) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Returns a context with a name beside `path` to write to. At its end the new file takes the place of `path`; after
    an exception it is removed."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sampled_digest(path: Path, size: int, blocks: int, whole: int) -> str:
    """Returns BLAKE2b, in hex, of the first `size` bytes of a file: of all of them where they are at most `whole`, else
    of so many blocks of 64 KiB at equal distances from the first to the last."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= whole:
            remaining = size
            while block := file.read(min(remaining, 1 << 20)):
                digest.update(block)
                remaining -= len(block)
        else:
            for i in range(blocks):
                file.seek((size - _BLOCK) * i // (blocks - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
