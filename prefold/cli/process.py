"""Handles the environment of a command: closed or full standard streams, signals, and errors of the system."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


class StoppedBySignal(SystemExit):
    """A StoppedBySignal ends the process after a signal; its code is 128 plus the signal's number."""


ENDING_SECONDS = 1.0  # so long after a signal, or after a command, another signal changes nothing
_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

_status: int | None = None  # with which the process ends


def _leave() -> None:
    """End the process at once if other threads still run, such as one that loads a model.

    Python ends a thread that comes back from C++ after the interpreter has gone, and C++ aborts the process then.
    """
    if _status is None:
        return
    if threading.active_count() > 1:
        os._exit(_status)
    for number in _NUMBERS:  # Python puts the system's handlers back next, and they end a process with other statuses
        signal.signal(number, signal.SIG_IGN)


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
    with _Signals() as signals:
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
                signals.stay(_status)
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


def ending(status: int) -> None:
    """Say that the command ends with this status because of a signal, so that signals right after it change nothing."""
    if _Signals.current is not None:
        _Signals.current.begin(status)


class _Signals:
    """Lets Ctrl-C, SIGTERM and SIGHUP end the process by SystemExit, so that temporary folders are removed.

    A second signal is often an echo of the first one: a terminal sends it, and a program between passes it on. Within a
    second of the first signal it changes nothing, because its exception would interrupt the cleanup. A signal that is
    ignored stays ignored. A KeyboardInterrupt before a command runs would become status 1 in click.
    """

    current: _Signals | None = None

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._outer: _Signals | None = None
        self._status: int | None = None  # of a command that ends because of a signal
        self._since = 0.0
        self._is_over = False  # whether the command has ended, and the process is leaving

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            usual = (signal.SIG_DFL, signal.default_int_handler)
            numbers = [number for number in _NUMBERS if signal.getsignal(number) in usual]
            self._outer, _Signals.current = _Signals.current, self
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        if _Signals.current is self and not self._is_over:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            _Signals.current = self._outer

    def begin(self, status: int) -> None:
        """Ignore signals for a second, as the command ends with this status."""
        self._status, self._since = status, time.monotonic()

    def stay(self, status: int) -> None:
        """Keep the handlers while the process leaves with this status."""
        self.begin(status)
        self._is_over = True

    def _handle(self, number: int, frame: Any) -> None:
        if self._status is None:
            self.begin(128 + number)
        elif time.monotonic() - self._since < ENDING_SECONDS:
            return
        elif self._is_over:
            os._exit(self._status)
        raise StoppedBySignal(self._status)


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
