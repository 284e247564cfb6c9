"""One replica in this process: what a host does, told to a fleet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ..errors import PrefoldError
from ..stream import Window
from .replicas import (
    LONGEST_WAIT,
    RESTARTS,
    ReplicaEvent,
    ReplicaFacts,
    ReplicaLost,
    ReplicaReady,
    ReplicaReport,
    Replicas,
    RunCall,
)

__all__ = ["Host", "LocalReplicas"]


class Host(Protocol):
    """A replica from the inside, as `ReplicaHost` is one."""

    facts: ReplicaFacts

    def begin(self, call: RunCall) -> None: ...
    def give(self, windows: list[Window]) -> None: ...
    def end(self) -> None: ...
    def retell(self) -> None: ...
    def report(self, wait: float) -> ReplicaReport: ...
    def close(self) -> None: ...


class LocalReplicas(Replicas):
    """A single replica. make: makes its host, in a thread of its own; again where it was killed."""

    def __init__(self, make: Callable[[], Host], *, name: str = "this machine"):
        self.names = (name,)
        self._make = make
        self._host: Host | None = None
        self._restarts = RESTARTS
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[str, ReplicaEvent], None]) -> None:
        self._tell = tell
        self._thread = threading.Thread(target=self._serve, name="prefold-local", daemon=True)
        self._thread.start()

    def begin(self, name: str, call: RunCall) -> None:
        if (host := self._host) is not None:
            host.begin(call)

    def give(self, name: str, windows: list[Window]) -> None:
        if (host := self._host) is not None:
            host.give(windows)

    def end(self, name: str) -> None:
        if (host := self._host) is not None:
            host.end()

    def retell(self, name: str) -> None:
        if (host := self._host) is not None:
            host.retell()

    def kill(self, name: str) -> None:
        with self._lock:
            self._host = None  # the thread that serves it sees that, and ends it

    def close(self) -> None:
        with self._lock:
            self._is_closed, self._host = True, None
        if self._thread is not None:
            self._thread.join(30)

    def _serve(self) -> None:
        """Makes a host and passes on its reports; makes another where it was killed, or has failed."""
        while not self._is_closed:
            try:
                host = self._make()
            except Exception as error:
                self._tell(self.names[0], ReplicaLost(f"it cannot start: {_in_words(error)}"))
                return
            with self._lock:
                if not self._is_closed:
                    self._host = host
            reason = "it was killed"
            try:
                self._pass_on(host)
            except Exception as error:
                reason = f"it cannot report: {_in_words(error)}"
            self._host = None
            try:
                host.close()
            except Exception as error:
                reason += f", and did not end as it should: {_in_words(error)}"
            if not self._is_closed:
                self._restarts -= 1
                self._tell(self.names[0], ReplicaLost(reason, returns=self._restarts >= 0))
                if self._restarts < 0:
                    return

    def _pass_on(self, host: Host) -> None:
        """Tells that a host is ready, and of its reports until it is killed."""
        if not self._is_closed:
            self._tell(self.names[0], ReplicaReady(host.facts))
        while self._host is host:
            report = host.report(LONGEST_WAIT)
            if self._host is not host:
                break
            if report.answers:
                self._restarts = RESTARTS
            self._tell(self.names[0], report)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, PrefoldError) else f"{type(error).__name__}: {error!s:.400}"
