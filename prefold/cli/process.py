"""How a command ends: exit status, signals, system errors, and standard streams that are closed or full."""

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
    """The SystemExit that a signal raises. The exit status is 128 plus the signal's number."""


ENDING_SECONDS = 1.0  # after a signal or the end of a command, further signals are ignored for this long
_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

_status: int | None = None  # exit status of the process, once its command has ended


def _leave() -> None:
    """End the process immediately if other threads still run, for example a thread that loads a model.

    Such a thread would abort the process if it returned from C++ after the interpreter has shut down.
    """
    if _status is None:
        return
    if threading.active_count() > 1:
        os._exit(_status)
    for number in _NUMBERS:  # after this, Python restores the default handlers, which would change the exit status
        signal.signal(number, signal.SIG_IGN)


atexit.register(_leave)  # at import, because functions that are registered earlier run later


@contextmanager
def guarded(*, ends_process: bool = False) -> Iterator[None]:
    """Return the context in which a command runs.

    A system error becomes a message and exit status 1. A signal raises StoppedBySignal, so that cleanup runs.

    Args:
        ends_process: Whether the process exits after the command. Signals then have no effect while it exits.
    """
    global _status
    _open_missing()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal's encoding lacks
    with _Signals() as signals:
        try:
            yield
        except BrokenPipeError:  # the reader of our output has exited, so a message would be lost
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
    """Print a line to standard error. Ignore a stream that is closed or full."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def notice(line: str) -> None:
    """Print a line to standard error, for example that a download has started. Raise OSError if that is impossible."""
    click.echo(line, err=True)


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"cannot use {error.filename}: {reason}" if error.filename else f"system error: {reason}"


def _open_missing() -> None:
    """Open replacements for standard streams that were closed before the process started.

    Otherwise the next opened files would get the descriptors of the missing streams, and printed text would go to them.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _ClosedStream()


class _ClosedStream:
    """The replacement for a closed standard output. Writing to it raises OSError."""

    closed = True
    encoding, errors = "utf-8", "strict"

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "standard output is closed")

    def flush(self) -> None:
        pass


def ending(status: int) -> None:
    """Set the exit status of a command that ends because of a signal. Ignore signals for ENDING_SECONDS."""
    if _Signals.current is not None:
        _Signals.current.begin(status)


class _Signals:
    """Signal handlers that raise StoppedBySignal on Ctrl-C, SIGTERM and SIGHUP, so that cleanup runs.

    A second signal within ENDING_SECONDS is ignored, because its exception would interrupt the cleanup. Such a signal
    is often a copy of the first: the terminal signals prefold and its parent process, and the parent forwards the
    signal. Signals that were ignored before stay ignored. The handlers are installed before click runs, because click
    would convert a KeyboardInterrupt to exit status 1.
    """

    current: _Signals | None = None

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._outer: _Signals | None = None
        self._status: int | None = None  # exit status; None: no signal has arrived and the command still runs
        self._since = 0.0  # when `_status` was set, by time.monotonic()
        self._is_over = False  # True if the command has ended and the process is exiting

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
        """Set the exit status, and ignore signals for ENDING_SECONDS."""
        self._status, self._since = status, time.monotonic()

    def stay(self, status: int) -> None:
        """Set the exit status, and keep the handlers until the process has exited."""
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
    """Flush the standard streams. If a stream cannot be written, send it to the null device.

    Otherwise the interpreter would flush the stream when it exits, and fail.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
