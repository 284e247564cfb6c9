"""Handles the environment of a command: closed or full standard streams, signals, and errors of the system."""

from __future__ import annotations

import atexit
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


class StoppedBySignal(SystemExit):
    """A StoppedBySignal ends the process after a signal; its code is 128 plus the signal's number."""


_status: int | None = None  # with which the process ends


def _leave() -> None:
    """End the process at once if other threads still run, such as one that loads a model.

    Python ends a thread that comes back from C++ after the interpreter has gone, and C++ aborts the process then.
    """
    if _status is not None and threading.active_count() > 1:
        os._exit(_status)


atexit.register(_leave)  # as early as possible: what is registered later runs before


@contextmanager
def guarded(*, ends_process: bool = False) -> Iterator[None]:
    """Runs a command so that an error of the system is one message and status 1, and signals end it in order.

    ends_process: whether the process ends with the command
    """
    global _status
    _open_missing()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # letters that a terminal's encoding lacks
    with _ending_on_signals():
        try:
            yield
        except BrokenPipeError:  # the reader of our output has gone, so no message would be read
            sys.exit(1)
        except OSError as error:
            say(f"prefold: {_describe(error)}")
            sys.exit(1)
        finally:
            stop = sys.exc_info()[1]
            if ends_process and (stop is None or isinstance(stop, SystemExit)):
                code = None if stop is None else stop.code
                _status = code if isinstance(code, int) else int(code is not None)
            _settle()


def say(text: str) -> None:
    """Writes a line to standard error, or drops it if that is closed or full."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def notice(line: str) -> None:
    """Writes a line to standard error, such as that a model is downloaded."""
    click.echo(line, err=True)


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"cannot use {error.filename}: {reason}" if error.filename else f"the system says: {reason}"


def _open_missing() -> None:
    """Opens replacements for standard streams that are missing.

    Otherwise the next files that are opened would get the descriptors of the streams, and whatever is printed.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _ClosedStream()


class _ClosedStream:
    """Stands for a standard output that was closed before the process began."""

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
    """Lets Ctrl-C, SIGTERM and SIGHUP end the process by SystemExit, so that temporary folders are removed.

    A signal that is ignored stays ignored. Of a KeyboardInterrupt that comes before a command runs, click would make
    status 1.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise StoppedBySignal(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.signal(number, end) for number in numbers if signal.getsignal(number) in usual}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settle() -> None:
    """Flushes the standard streams. What cannot be written is dropped, so that the interpreter's own flush succeeds."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
