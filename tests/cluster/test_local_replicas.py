"""One replica in this process: whatever happens to its host, the fleet hears of it."""

from __future__ import annotations

from contextlib import closing
from queue import SimpleQueue

import pytest

from prefold.cluster.local_replicas import LocalReplicas
from prefold.cluster.replicas import RESTARTS, ReplicaFacts, ReplicaLost, ReplicaReady, ReplicaReport


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
    while not isinstance(event := replicas.events.get(timeout=10), kind):
        pass
    return event


@pytest.mark.parametrize("fails, reason", [("report", "cannot report: OSError: the socket is closed"),
                                           ("report close", "did not end as it should: TimeoutError: the loop hangs"),
                                           ("close", "it was killed, and did not end as it should")])  # fmt: skip
def test_a_host_that_fails_as_it_reports_or_ends_is_lost_and_made_anew(fails, reason):
    made = []

    def make():
        made.append(Host("" if made else fails))
        return made[-1]

    replicas = LocalReplicas(make)
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
    replicas = LocalReplicas(lambda: made.append(1) or Host("report close"))
    replicas.events = SimpleQueue()
    with closing(replicas):
        replicas.start(lambda name, event: replicas.events.put(event))
        while told(replicas, ReplicaLost).returns:
            pass
    assert len(made) == RESTARTS + 1
