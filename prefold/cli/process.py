"""The process of a command: closed or full standard streams, signals, and system errors."""

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
    """Exit after a signal, with the status 128 plus the signal's number."""


ENDING_SECONDS = 1.0  # after a signal or the end of a command, further signals are ignored for this long
_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

_status: int | None = None  # exit status of the process


def _leave() -> None:
    """End the process at once if other threads still run, such as a thread that loads a model.

    If a thread returns from C++ after the interpreter has shut down, C++ would abort the process.
    """
    if _status is None:
        return
    if threading.active_count() > 1:
        os._exit(_status)
    for number in _NUMBERS:  # Python next restores the default handlers, which exit with another status
        signal.signal(number, signal.SIG_IGN)


atexit.register(_leave)  # registered early, so that it runs after functions that are registered later


@contextmanager
def guarded(*, ends_process: bool = False) -> Iterator[None]:
    """Run a command. A system error becomes one message and exit status 1; a signal ends the command cleanly.

    Args:
        ends_process: Whether the process ends with the command.
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
    """Print a line to standard error, or drop it if the stream is closed or full."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def notice(line: str) -> None:
    """Print a line to standard error, for example that a model is being downloaded."""
    click.echo(line, err=True)


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"cannot use {error.filename}: {reason}" if error.filename else f"system error: {reason}"


def _open_missing() -> None:
    """Open replacements for missing standard streams.

    Otherwise the next opened files would get the streams' descriptors, and the printed text.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _ClosedStream()


class _ClosedStream:
    """A replacement for standard output that was closed before the process started."""

    closed = True
    encoding, errors = "utf-8", "strict"

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "standard output is closed")

    def flush(self) -> None:
        pass


def ending(status: int) -> None:
    """Note that the command ends with this status because of a signal; ignore signals right after it."""
    if _Signals.current is not None:
        _Signals.current.begin(status)


class _Signals:
    """Signal handlers that end the process by SystemExit on Ctrl-C, SIGTERM and SIGHUP, after its cleanup.

    A second signal is often an echo of the first: the terminal sends the signal to prefold and to its parent, which
    forwards it. It is ignored for a second, because its exception would interrupt the cleanup. Signals that were
    ignored before stay ignored. The handlers are installed before click runs, because click would turn a
    KeyboardInterrupt into status 1.
    """

    current: _Signals | None = None

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._outer: _Signals | None = None
        self._status: int | None = None  # exit status, once a signal ends the command
        self._since = 0.0
        self._is_over = False  # whether the command has ended and the process is exiting

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
        """Ignore signals for a second, because the command is ending with this status."""
        self._status, self._since = status, time.monotonic()

    def stay(self, status: int) -> None:
        """Keep the handlers while the process exits with this status."""
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
    """Flush the standard streams. Drop output that cannot be written, so that the interpreter's own flush succeeds."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
