"""The process around a command: standard streams that are closed or full, signals, and what the machine refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

__all__ = ["guarded", "say"]


@contextmanager
def guarded() -> Iterator[None]:
    """Run a command so that what the machine refuses is one message and status 1, and signals end it in order."""
    _open_missing()
    with _ending_on_signals():
        try:
            yield
        except BrokenPipeError:  # whoever read our output has gone: nothing to tell
            sys.exit(1)
        except OSError as error:
            say(f"prefold: {_describe(error)}")
            sys.exit(1)
        finally:
            _settle()


def say(text: str) -> None:
    """Write a line to standard error, if it takes one."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def _describe(error: OSError) -> str:
    what = error.strerror or str(error)
    return f"cannot use {error.filename}: {what}" if error.filename else f"the system says: {what}"


def _open_missing() -> None:
    """Give a process that was started without standard streams something in their place.

    Their numbers would else be those of the next files that are opened, which then got what is printed.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _Closed()  # type: ignore[assignment]


class _Closed:
    """A standard output that was closed before the process began."""

    closed = True
    encoding, errors = "utf-8", "strict"

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "standard output is closed")

    def flush(self) -> None:
        pass


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process by SystemExit, so that temporary folders go. What is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, end) for number in numbers if signal.getsignal(number) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settle() -> None:
    """Flush what is still held; where that cannot be, drop it, before the interpreter stumbles over it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
