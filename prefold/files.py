"""Writing files where a disk may be full or read-only: one error that says what to do, and nothing torn."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import JobError

__all__ = ["replacing", "writing"]


@contextmanager
def writing(what: Path | str, state: str = "", remedy: str = "") -> Iterator[None]:
    """Turn an OSError into a JobError that says what could not be written.

    state   what is true all the same ("what is written is kept")
    remedy  what to do when there is room, or whatever else it was is mended

    A BrokenPipeError passes: whoever read has gone, which is no failure of this machine.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"cannot write {what}: {error.strerror or error}"
        if state:
            message += f"; {state}"
        if remedy:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            message += f": {'make room' if full else 'mend that'} and {remedy}"
        raise JobError(message) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; the file takes its place at the end, and is gone when that is not reached."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
