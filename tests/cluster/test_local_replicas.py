"""One replica in this process: whatever happens to its host, the fleet hears of it."""

from __future__ import annotations

import time
from contextlib import closing
from queue import SimpleQueue

import numpy as np
import pytest

from prefold.cluster.fleet import Fleet
from prefold.cluster.replicas import (
    RESTARTS,
    ReplicaFacts,
    ReplicaLost,
    ReplicaReady,
    ReplicaReport,
    Replicas,
    place_of,
)
from prefold.engine.cache import CacheEvents
from prefold.engine.cache.events import CacheCleared
from prefold.spec.requests import Generated, Readout, Request, Sampling
from prefold.trie import Spool


class Host:
    """Fails where it is told to."""

    facts = ReplicaFacts()

    def __init__(self, fails):
        self.fails = fails

    def report(self, wait):
        if "report" in self.fails:
            raise OSError("the socket is closed")
        return ReplicaReport()

    def close(self):
        if "close" in self.fails:
            raise TimeoutError("the loop hangs")


def told(replicas, kind):
    """The next event of a kind."""
    while not isinstance(event := replicas.events.get(timeout=60), kind):
        pass
    return event


@pytest.mark.parametrize("fails, reason", [("report", "cannot report: OSError: the socket is closed"),
                                           ("report close", "did not end cleanly: TimeoutError: the loop hangs"),
                                           ("close", "it was killed, and did not end cleanly")])  # fmt: skip
def test_a_host_that_fails_as_it_reports_or_ends_is_lost_and_made_anew(fails, reason):
    made = []

    def make():
        made.append(Host("" if made else fails))
        return made[-1]

    replicas = Replicas({"this machine": make})
    replicas.events = SimpleQueue()
    with closing(replicas):
        replicas.start(lambda name, event: replicas.events.put(event))
        told(replicas, ReplicaReady)
        if fails == "close":
            replicas.kill("this machine")
        lost = told(replicas, ReplicaLost)
        assert reason in lost.reason and lost.returns and lost.died
        told(replicas, ReplicaReady)
    assert len(made) == 2


def test_a_host_that_fails_each_time_is_given_up():
    made = []
    replicas = Replicas({"this machine": lambda: made.append(1) or Host("report close")})
    replicas.events = SimpleQueue()
    with closing(replicas):
        replicas.start(lambda name, event: replicas.events.put(event))
        while told(replicas, ReplicaLost).returns:
            pass
    assert len(made) == RESTARTS + 1


class Clock:
    """A clock that goes on by a third of a second with each report of a host, once the fleet has taken the report
    before."""

    def __init__(self):
        self.now, self.fleet = 0.0, None

    def __call__(self):
        return self.now

    def tick(self):
        while self.fleet is None or not self.fleet._events.empty():
            time.sleep(0.001)
        self.now += 0.3


@pytest.mark.parametrize("changes", [True, False])
def test_a_host_whose_cache_changes_is_at_work_though_nothing_ends(changes):
    """So does vLLM's, every few tokens of an output that is long."""
    clock = Clock()

    class Slow(Host):
        def begin(self, call):
            self.left, self.tags = 8, []  # reports until it answers: in 2.4 s, and the patience is 1 s

        def give(self, windows):
            self.tags += [place_of(tag) for window in windows for tag in window.tags]

        def end(self):
            pass

        def report(self, wait):
            if not getattr(self, "tags", None):
                time.sleep(0.001)
                return ReplicaReport()
            clock.tick()
            self.left -= 1
            if self.left > 0:
                return ReplicaReport(events=CacheEvents(1, 0, (CacheCleared(),)) if changes else None)
            given, self.tags = self.tags, []
            answer = [Generated((1,), "a", "length")]
            return ReplicaReport(answers=[(number, place, answer) for number, place in given])

    notes = []
    with (
        closing(
            Fleet(Replicas({"this machine": lambda: Slow("")}), patience=1.0, notify=notes.append, clock=clock)
        ) as fleet,
        Spool() as spool,
    ):
        clock.fleet = fleet
        spool.add(Request(np.array([1], np.int32), sampling=Sampling()), b"one")
        (answer,) = dict(fleet.run(spool.windows(max_tokens=9), Readout("tokens"))).values()
    if changes:
        assert answer[0].text == "a" and not notes
    else:
        assert answer.code == "replicas_lost" and "made no progress" in notes[0]
