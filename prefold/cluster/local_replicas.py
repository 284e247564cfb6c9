"""Replicas in this process: what their hosts do, told to a fleet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from .hosts import Host
from .replicas import LONGEST_WAIT, RESTARTS, ReplicaDown, ReplicaEvent, ReplicaLost, ReplicaReady, Replicas, in_words


class LocalReplicas(Replicas):
    """Replicas with a thread each.

    makes   makes the host of each, in its thread; again where it was killed
    killed  why a host is lost that was killed
    """

    def __init__(self, makes: Mapping[str, Callable[[], Host]], *, killed: str = "it was killed"):
        self.names = tuple(makes)
        self.is_closed = False
        self._makes, self._killed = makes, killed
        self._hosts: dict[str, Host] = {}
        self._restarts = dict.fromkeys(makes, RESTARTS)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, tell: Callable[[str, ReplicaEvent], None]) -> None:
        self._tell = tell
        for name in self.names:
            self._threads.append(threading.Thread(target=self._serve, args=(name,), name="prefold-local", daemon=True))
            self._threads[-1].start()

    def order(self, name: str, method: str, *arguments: Any) -> None:
        if (host := self._hosts.get(name)) is not None:
            getattr(host, method)(*arguments)

    def kill(self, name: str) -> None:
        with self._lock:
            self._hosts.pop(name, None)  # the thread that serves it sees that, and ends it

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._hosts.clear()
        for thread in self._threads:
            thread.join(30)

    def _serve(self, name: str) -> None:
        """Makes a host and passes on its reports; makes another where it was killed, or has failed."""
        while not self.is_closed:
            try:
                host = self._makes[name]()
            except Exception as error:
                self._tell(name, ReplicaLost(_after("it cannot start: ", error)))
                return
            with self._lock:
                if not self.is_closed:
                    self._hosts[name] = host
            reason = self._killed
            try:
                self._pass_on(name, host)
            except Exception as error:
                reason = _after("it cannot report: ", error)
            self._hosts.pop(name, None)
            try:
                host.close()
            except Exception as error:
                reason += f", and did not end as it should: {in_words(error)}"
            if not self.is_closed:
                self._restarts[name] -= 1
                self._tell(name, ReplicaLost(reason, returns=self._restarts[name] >= 0))
                if self._restarts[name] < 0:
                    return

    def _pass_on(self, name: str, host: Host) -> None:
        """Tells that a host is ready, and of its reports until it is killed."""
        if not self.is_closed:
            self._tell(name, ReplicaReady(host.facts))
        while self._hosts.get(name) is host:
            report = host.report(LONGEST_WAIT)
            if self._hosts.get(name) is not host:
                break
            if report.answers:
                self._restarts[name] = RESTARTS
            down = report.failure if isinstance(report.failure, ReplicaDown) else None
            report.failure = None if down is not None else report.failure
            self._tell(name, report)
            if down is not None:
                raise down


def _after(words: str, error: Exception) -> str:
    return in_words(error) if isinstance(error, ReplicaDown) else words + in_words(error)
