"""The thread of an engine: it calls functions for other threads, and then lets the engine work."""

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
from typing import Any, TypeVar

from ..errors import ForkedError, PrefoldError

T = TypeVar("T")

# The thread waits this long after an error outside of a step, before it tries again.
FAILED_SECONDS = 0.1
CLOSED = "the engine was closed"
# `close` waits at most this long for the step that is being made.
CLOSING_SECONDS = 10.0


class EngineThread:
    """An EngineThread calls functions for other threads, and lets its engine work after them. It begins with the first
    function. It ends with `close`, or when the engine is collected: it holds only a weak reference."""

    def __init__(self, engine: Any):
        """engine: has `work()`, which makes steps until no request is open, and `end_all(error)`, which answers all."""
        self.is_closed = False
        self._engine = weakref.ref(engine)
        self._inbox: SimpleQueue[_PostedCall | None] = SimpleQueue()  # functions to call; None only wakes the thread
        self._process = os.getpid()
        self._thread: threading.Thread | None = None  # set by the thread itself, once it runs
        self._lock = threading.Lock()

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the thread, and returns what it returns, or raises its error."""
        if self.is_closed or self.is_current:
            return function()
        call = _PostedCall(function)
        self._send(call)
        result: T = call.result()
        return result

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Queues a function for the thread, and returns at once."""
        if self.is_closed:
            function(*arguments)
        else:
            self._send(_PostedCall(partial(function, *arguments)))

    def wake(self) -> None:
        """Makes the engine look for work."""
        self._send(None)

    def close(self) -> None:
        """Ends the thread, after the step that is being made."""
        self.is_closed = True
        self._inbox.put(None)
        if self._thread is not None and not self.is_current:
            self._thread.join(CLOSING_SECONDS)

    @property
    def is_current(self) -> bool:
        """Returns whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def take_in(self, seconds: float = 0.0) -> None:
        """Calls the queued functions; with an empty queue it waits at most `seconds`. Only the thread itself calls
        it."""
        if seconds:
            with suppress(Empty):
                if (call := self._inbox.get(timeout=seconds)) is not None:
                    call.call()
        while not self._inbox.empty():  # no other thread takes from it
            if (call := self._inbox.get()) is not None:
                call.call()

    def _send(self, call: _PostedCall | None) -> None:
        if self._process != os.getpid():
            raise ForkedError(f"this process was forked from process {self._process}, which has the engine's thread")
        self._inbox.put(call)
        if self.is_closed:  # the thread may have emptied its inbox for the last time
            self._end_queued()
        elif self._thread is None:
            threading.Thread(target=self._run, name="prefold-engine", daemon=True).start()

    def _enter(self) -> bool:
        """Returns whether the caller is the engine's only thread: two may begin when an interrupt falls into
        `_send`."""
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
        while not self.is_closed:  # `work` may have taken the None with which `close` wakes the thread
            call = self._inbox.get()
            engine = self._engine()
            if engine is None:
                return
            if call is not None and self.is_closed:
                call.end(PrefoldError(CLOSED))
            elif call is not None:
                call.call()
            try:
                engine.work()
            except BaseException as error:  # if the thread ended here, every request would wait for ever
                engine.end_all(error if isinstance(error, Exception) else PrefoldError(f"a step raised {error!r}"))
                time.sleep(FAILED_SECONDS)
                self.wake()  # batches that run go on
            del engine, call
        if (engine := self._engine()) is not None:
            engine.end_all(PrefoldError(CLOSED))
        self._end_queued()

    def _end_queued(self) -> None:
        """Answers the queued calls with an error, after the thread has ended."""
        with suppress(Empty):
            while True:
                if (call := self._inbox.get(block=False)) is not None:
                    call.end(PrefoldError(CLOSED))


# The EngineThreads that run. An engine whose last reference goes while its thread works is freed in that thread, and a
# thread that frees memory of NumPy while the interpreter ends crashes the process: so the interpreter waits for it.
_RUNNING: set[EngineThread] = set()


@atexit.register
def _close_all() -> None:
    for thread in list(_RUNNING):
        thread.close()


class _PostedCall:
    """A _PostedCall is a function that another thread queued, and later its result or its error."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def call(self) -> None:
        try:
            self._outcome.put((self._function(), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def end(self, error: Exception) -> None:
        self._outcome.put((None, error))

    def result(self) -> Any:
        value, error = self._outcome.get()
        if error is not None:
            raise error
        return value
