"""The thread of an engine. Functions come to it from any thread; whenever something comes, it lets the engine work."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from ..errors import ForkedError, PrefoldError

T = TypeVar("T")

# After an error of its own the thread tries again so much later.
FAILED_SECONDS = 0.1
CLOSED = "the engine was closed"
# The longest that closing waits for a step that is being made.
CLOSING_SECONDS = 10.0


class Working(Protocol):
    """What a thread works for."""

    def work(self) -> None:
        """Works until there is nothing to do."""

    def end_all(self, error: Exception) -> None:
        """Answers all that wait with an error of the thread."""


class EngineThread:
    """An EngineThread calls functions for other threads, and lets its engine work after them. It begins with the first
    function, and ends with `close`, or with the engine, which it does not keep."""

    def __init__(self, engine: Working):
        self.is_closed = False
        self._engine = weakref.ref(engine)
        self._came: SimpleQueue[_Called | None] = SimpleQueue()  # functions to call, or None to look
        self._process = os.getpid()
        self._thread: threading.Thread | None = None  # entered by the thread itself, once it runs
        self._lock = threading.Lock()

    def call(self, function: Callable[[], T]) -> T:
        """Returns what a function returns, or raises what it raises. The thread calls it."""
        if self.is_closed or self.is_current:
            return function()
        called = _Called(function)
        self._send(called)
        result: T = called.result()
        return result

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Lets the thread call a function after those it was given before; does not wait for it."""
        if self.is_closed:
            function(*arguments)
        else:
            self._send(_Called(partial(function, *arguments)))

    def wake(self) -> None:
        """Lets the engine look whether there is something to do."""
        self._send(None)

    def close(self) -> None:
        """Ends the thread, after the step that is being made."""
        self.is_closed = True
        self._came.put(None)
        if self._thread is not None and not self.is_current:
            self._thread.join(CLOSING_SECONDS)

    @property
    def is_current(self) -> bool:
        """Returns whether this is the thread that asks."""
        return threading.current_thread() is self._thread

    def take_in(self, seconds: float = 0.0) -> None:
        """Calls the functions that have come, and waits at most so long where nothing has. For the thread itself."""
        with suppress(Empty):
            if seconds and (came := self._came.get(timeout=seconds)) is not None:
                came.call()
        while not self._came.empty():  # nobody else takes from it
            if (came := self._came.get()) is not None:
                came.call()

    def _send(self, what: _Called | None) -> None:
        if self._process != os.getpid():
            raise ForkedError(f"this process was forked from process {self._process}, which has the engine's thread")
        self._came.put(what)
        if self.is_closed:  # perhaps the thread has looked for the last time
            self._end_called()
        elif self._thread is None:
            threading.Thread(target=self._run, name="prefold-engine", daemon=True).start()

    def _enter(self) -> bool:
        """Returns whether the thread that asks is the only one: an interrupt may leave another just begun."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.current_thread()
            return self.is_current

    def _run(self) -> None:
        if not self._enter():
            return
        _RUNNING.add(self)
        try:
            self._work()
        finally:
            _RUNNING.discard(self)

    def _work(self) -> None:
        while not self.is_closed:  # else what woke the thread at its end was taken while it worked
            came = self._came.get()
            engine = self._engine()
            if engine is None:
                return
            if came is not None and self.is_closed:
                came.end(PrefoldError(CLOSED))
            elif came is not None:
                came.call()
            try:
                engine.work()
            except BaseException as error:  # without this thread every request would wait for ever
                engine.end_all(error if isinstance(error, Exception) else PrefoldError(f"a step raised {error!r}"))
                time.sleep(FAILED_SECONDS)
                self.wake()  # batches that run go on
            del engine, came
        if (engine := self._engine()) is not None:
            engine.end_all(PrefoldError(CLOSED))
        self._end_called()

    def _end_called(self) -> None:
        """Ends the functions that wait to be called, after the thread has ended."""
        with suppress(Empty):
            while True:
                if (came := self._came.get(block=False)) is not None:
                    came.end(PrefoldError(CLOSED))


# Those whose thread runs. An engine that is let go of while its thread holds it goes in that thread, and a thread that
# frees memory of NumPy while the interpreter ends ends the process with an error: the interpreter waits for it.
_RUNNING: set[EngineThread] = set()


@atexit.register
def _close_all() -> None:
    for thread in list(_RUNNING):
        thread.close()


class _Called:
    """A function that another thread wants called, and what came of it."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._came: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def call(self) -> None:
        try:
            self._came.put((self._function(), None))
        except BaseException as error:
            self._came.put((None, error))

    def end(self, error: Exception) -> None:
        self._came.put((None, error))

    def result(self) -> Any:
        value, error = self._came.get()
        if error is not None:
            raise error
        return value
