"""Replicas that are threads of this process, around engines that need no model; and the faults they can have."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_jobs import FakeEngine
from fleet_books import places_of

from prefold.cluster.fleet import Fleet
from prefold.cluster.native_host import ReplicaHost
from prefold.cluster.replicas import ReplicaFacts, ReplicaLost, ReplicaReady, ReplicaReport, Replicas
from prefold.cluster.router import Router


class SlowEngine(FakeEngine):
    """`FakeEngine` with the options of a real engine, which can be made to fail, or to hang, at a request."""

    def __init__(self, before: Any = None):
        super().__init__("full", before=before)

    def run(self, windows: Any, readout: Any, tokenizer: Any = None, *, on_step: Any = None, **_: Any) -> Iterator:
        return super().run(windows, readout, on_step=on_step)


class ThreadReplicas(Replicas):
    """Each replica a thread. before(name, tokens): called with every request; loads: seconds, an event that is waited
    for, or why it fails; llms: real ones, by name."""

    def __init__(self, names, *, before=None, loads=None, facts=None, returns=False, llms=None):
        self.names = list(names)
        self.llms = llms or {}
        self.before, self.loads, self.returns = before, loads or {}, returns
        self.facts = facts or {}
        self.hosts: dict[str, ReplicaHost] = {}
        self.killed: list[str] = []
        self.given: dict[str, int] = dict.fromkeys(self.names, 0)
        self.windows: list[tuple[str, Any]] = []
        self.held: list[tuple[str, list[Any], list[int]]] = []  # images that each was sent, and those it may forget
        self.runs: list[tuple[str, list[Any]]] = []  # each that began on a replica, with its windows
        self.closed = False

    def start(self, tell):
        self.tell = tell
        for name in self.names:
            threading.Thread(target=self._serve, args=(name,), daemon=True).start()

    def _serve(self, name):
        load = self.loads.get(name, 0)
        if isinstance(load, str):
            self.tell(name, ReplicaLost(load))
            return
        if isinstance(load, threading.Event):
            load.wait(300)
        else:
            time.sleep(load)
        llm = self.llms.get(name) or SimpleNamespace(engine=SlowEngine())
        facts = self.facts.get(name, ReplicaFacts({"prefold": "1"}, max_rows=64, max_running=4))
        engine = llm.engine
        host = self.hosts[name] = ReplicaHost(llm, facts)
        if self.before is not None:
            engine.run = self._watched(name, engine.run)
        self.tell(name, ReplicaReady(facts))
        while not self.closed and self.hosts.get(name) is host:
            report = host.report(0.02)
            if self.hosts.get(name) is host:
                self.tell(name, report)

    def _watched(self, name, run):
        def watched(windows, *arguments, **options):
            def seen():
                for window in windows:
                    for number in range(0 if window is None else window.num_requests):
                        self.before(name, window.request(number).tokens)
                    yield window

            return run(seen(), *arguments, **options)

        return watched

    def order(self, name, method, *arguments):
        getattr(self, method)(name, *arguments)

    def begin(self, name, call):
        self.runs.append((name, []))
        if (host := self.hosts.get(name)) is not None:  # it may be lost at any time
            host.begin(call)

    def give(self, name, windows):
        self.given[name] += sum(window.num_requests for window in windows)
        self.windows += [(name, window) for window in windows]
        next(own for one, own in reversed(self.runs) if one == name).extend(windows)
        if (host := self.hosts.get(name)) is not None:
            host.give(windows)

    def hold(self, name, pictures, gone):
        self.held.append((name, pictures, gone))
        if name in self.hosts:
            self.hosts[name].hold(pictures, gone)

    def end(self, name):
        if (host := self.hosts.get(name)) is not None:
            host.end()

    def report_anew(self, name):
        if name in self.hosts:
            self.hosts[name].report_anew()

    def kill(self, name):
        self.lose(name, "killed")

    def lose(self, name, reason, *, died=True):
        """died: whether the replica has ended; otherwise it is only out of reach for a while."""
        self.killed.append(name)
        self.hosts.pop(name).close()
        self.tell(name, ReplicaLost(reason, self.returns, died))
        if self.returns:
            threading.Thread(target=self._serve, args=(name,), daemon=True).start()

    def close(self):
        self.closed = True
        for host in self.hosts.values():
            host.close()


def count_patience(monkeypatch, fleet: Fleet, hangs: Callable[[], bool]) -> Callable[[], float]:
    """Returns the clock by which a fleet has patience from now on: it goes on by a second with each report of any
    replica, while `hangs` says that there is something to wait for. So a busy machine tries nobody's patience."""
    reports, next_event = itertools.count(1), fleet.next_event
    seconds = [0]

    def counted(timeout: float) -> Any:
        event = next_event(timeout)
        if event is not None and isinstance(event[1], ReplicaReport) and hangs():
            seconds[0] = next(reports)
        return event

    def now() -> float:
        return seconds[0] + 1e-3 * time.monotonic()

    monkeypatch.setattr(fleet, "next_event", counted)
    fleet.clock = now
    return now


def held_by(router: Router, name) -> set[tuple]:
    """The rows that the router thinks a replica holds."""
    bit = 1 << router.members[name].number
    found = set()
    for place in places_of(router.index):
        if place.holders & bit:
            above, at = [], place
            while at.parent is not None:
                above.append(at)
                at = at.parent
            tokens = tuple(np.frombuffer(b"".join(p.ids for p in reversed(above)), np.int32).tolist())
            found |= {(at.namespace, tokens[: i + 1]) for i in range(place.start, place.stop)}
    return found
