"""The thread of an engine: runs functions for other threads, and then lets the engine work."""

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

# Pause after an error outside of a step, in seconds.
FAILED_SECONDS = 0.1
CLOSED = "the engine was closed"
# Limit on the time that `close` waits for the current step.
CLOSING_SECONDS = 10.0


class EngineThread:
    """Runs functions for other threads, and lets its engine work after them.

    The thread starts with the first function. It ends with `close`, or when the engine is garbage-collected, because it
    holds only a weak reference.
    """

    def __init__(self, engine: Any):
        """Prepare the thread. `engine` has `work()`, which makes steps while requests are open, and `end_all`."""
        self.is_closed = False
        self._engine = weakref.ref(engine)
        self._inbox: SimpleQueue[_PostedCall | None] = SimpleQueue()  # functions to call; None only wakes the thread
        self._process = os.getpid()
        self._thread: threading.Thread | None = None  # set by the thread itself, once it runs
        self._lock = threading.Lock()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread. Return its result, or raise its error."""
        if self.is_closed or self.is_current:
            return function()
        call = _PostedCall(function)
        self._send(call)
        result: T = call.result()
        return result

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Queue a function for the thread, and return at once."""
        if self.is_closed:
            function(*arguments)
        else:
            self._send(_PostedCall(partial(function, *arguments)))

    def wake(self) -> None:
        """Make the engine look for work."""
        self._send(None)

    def close(self) -> None:
        """End the thread after the current step."""
        self.is_closed = True
        self._inbox.put(None)
        if self._thread is not None and not self.is_current:
            self._thread.join(CLOSING_SECONDS)

    @property
    def is_current(self) -> bool:
        """True if the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def take_in(self, seconds: float = 0.0) -> None:
        """Run the queued functions; if there are none, wait at most `seconds` for one. Only this thread may call it."""
        if seconds:
            with suppress(Empty):
                if (call := self._inbox.get(timeout=seconds)) is not None:
                    call.call()
        while not self._inbox.empty():  # no other thread reads this queue
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
        """Return True if the caller is the engine's only thread. Two may start if an interrupt hits `_send`."""
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
            except BaseException as error:  # if the thread ended here, all requests would wait forever
                engine.end_all(error if isinstance(error, Exception) else PrefoldError(f"a step raised {error!r}"))
                time.sleep(FAILED_SECONDS)
                self.wake()  # so that running batches continue
            del engine, call
        if (engine := self._engine()) is not None:
            engine.end_all(PrefoldError(CLOSED))
        self._end_queued()

    def _end_queued(self) -> None:
        """Answer the queued calls with an error, after the thread has ended."""
        with suppress(Empty):
            while True:
                if (call := self._inbox.get(block=False)) is not None:
                    call.end(PrefoldError(CLOSED))


# The running EngineThreads. If the last reference to an engine disappears while its thread works, the engine is freed
# in that thread. A thread that frees NumPy memory during the interpreter's exit crashes the process, so the exit waits.
_RUNNING: set[EngineThread] = set()


@atexit.register
def _close_all() -> None:
    for thread in list(_RUNNING):
        thread.close()


class _PostedCall:
    """A function queued by another thread, and later its result or error."""

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
