"""Who computes which requests of a stream that comes: the live window, the router, leases, and what becomes of what a
lost replica had. No I/O, and the clock is handed in.

    live.put(reads, now)                a prompt has come, with all its reads
    leases = live.dispatch(now)         what leaves the window now, booked as sent
    fresh = live.commit(replica, number, answers, now)
    blamed = live.lose(replica)         its work goes out again, but for those that replicas died of

A request is named by its number of arrival, a prompt by that of the first of its reads that have no answer when it is
sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..stream.order import SpooledRequest
from ..types import Generated
from .dispatch import Dispatcher, Limits
from .leases import divided
from .policies import Policy
from .replicas import ReplicaFacts, RunCall, expected_limit
from .router import Prompt, Router

__all__ = ["LiveLease", "LiveLeases"]

_PATIENCE = 300.0

Reads = Sequence[SpooledRequest]  # of one prompt


class LiveLease(NamedTuple):
    """Requests, sorted, given to a replica under a number. suspect: a replica was lost while it worked on them."""

    number: int
    replica: Hashable
    requests: list[SpooledRequest]
    suspect: bool = False


@dataclass(slots=True)
class _OpenLive:
    """A lease: the number of each request that has no answer, with its prompt."""

    replica: Hashable
    left: dict[int, Hashable]
    suspect: bool = False


@dataclass(slots=True)
class _LiveReplica:
    limits: Limits
    facts: ReplicaFacts
    heard: float
    open: dict[int, _OpenLive] = field(default_factory=dict)
    is_paused: bool = False  # takes nothing but what is under suspicion


class LiveLeases:
    """Holds the books of one stream on a fleet.

    call        what is asked of every request
    max_tokens  of requests that wait
    numbers     where the leases' numbers come from
    patience    seconds without any progress after which a replica that has work is given up
    early       whether the stream is the beginning of a job that is divided later: replicas look ahead less
    """

    def __init__(
        self,
        call: RunCall,
        *,
        max_tokens: int,
        numbers: Iterator[int],
        patience: float = _PATIENCE,
        early: bool = False,
        policy: Policy | None = None,
        **window: Any,
    ):
        self.router = Router(policy)
        self.dispatcher = Dispatcher(self.router, limit_of=_limit_of, max_tokens=max_tokens, **window)
        self.window = self.dispatcher.window
        self.moved = 0  # requests that were sent again because a replica was lost
        self._call, self._numbers, self._patience, self._early = call, numbers, patience, early
        self._replicas: dict[Hashable, _LiveReplica] = {}
        self._is_closed = False
        self._late: deque[Reads] = deque()  # the window was full when they came, or they come back
        self._suspects: deque[Sequence[Reads]] = deque()  # groups of prompts, none of them empty (see `leases.py`)
        self._reads: dict[Hashable, dict[int, SpooledRequest]] = {}  # of each prompt, those that have no answer

    # ------------------------------------------------------------------------------------------ who is there

    def join(self, replica: Hashable, facts: ReplicaFacts, now: float) -> None:
        """A replica takes work."""
        reports = facts.reports_cache or not self._call.in_slots
        # What reads bucket by bucket holds nothing afterwards, and reports that.
        self.router.join(replica, capacity=facts.cache_rows or None, reports=reports)
        limits = limits_of(facts, self._call, early=self._early)
        self._replicas[replica] = _LiveReplica(limits, facts, now)
        self.dispatcher.join(replica, limits)

    def heard(self, replica: Hashable, now: float) -> None:
        """A replica makes progress."""
        if replica in self._replicas:
            self._replicas[replica].heard = now

    def hung(self, now: float) -> list[Hashable]:
        """Returns the replicas that have work and have made no progress for longer than is waited for."""
        late = now - self._patience
        return [name for name, replica in self._replicas.items() if replica.open and replica.heard < late]

    def lose(self, replica: Hashable, *, died: bool = True) -> list[SpooledRequest]:
        """Takes back what a replica has, which is gone; returns the requests that are given up.

        Those are the reads of a prompt that ran under suspicion alone: another replica was lost with it before. Where
        several prompts ran under suspicion, their group is divided; where none did, what the replica may have begun is
        under suspicion from now on. Where it has not died, nothing is held against any request. A replica that is not
        known has nothing.
        """
        entry = self._replicas.pop(replica, None)
        if entry is None:
            return []
        self.router.leave(replica)
        self.dispatcher.leave(replica)
        left: list[Reads] = []
        for prompt in dict.fromkeys(prompt for open_ in entry.open.values() for prompt in open_.left.values()):
            left.append(tuple(self._reads.pop(prompt).values()))
            self._reads[left[-1][0].number] = {one.number: one for one in left[-1]}
        blamed: list[SpooledRequest] = []
        if any(open_.suspect for open_ in entry.open.values()):  # nothing else runs beside what is under suspicion
            if died and len(left) == 1:
                blamed += left.pop()
                del self._reads[blamed[0].number]
            self._suspects += divided(left) if died else [left]
        else:
            count = _may_have_begun(entry.facts, self._call) if died and entry.facts.dies_of_requests else 0
            self._suspects += divided(left[:count])
            self._late += left[count:]
        self.moved += sum(map(len, left))
        return blamed

    # ------------------------------------------------------------------------------------------------- work

    def put(self, reads: Reads, now: float) -> None:
        """Takes the reads of a prompt that has come."""
        self._reads[reads[0].number] = {one.number: one for one in reads}
        self._late.append(reads)
        self._fill_window(now)

    def close(self) -> None:
        """Nothing comes any more but what lost replicas had: nothing waits for others any longer."""
        self._is_closed = True
        self.window.close()

    @property
    def is_full(self) -> bool:
        """Returns whether no more should be put."""
        return self.window.is_full or len(self._late) > 0

    @property
    def num_left(self) -> int:
        """Returns how many prompts have no answer."""
        return len(self._reads)

    @property
    def num_unsent(self) -> int:
        """Returns how many prompts nobody has."""
        return len(self.window) + len(self._late) + sum(map(len, self._suspects))

    def room(self) -> int:
        """Returns how many rows replicas could be sent now beyond what waits, a step of each at most."""
        free = [
            min(max(0, self.dispatcher.room(name)), one.facts.max_rows)
            for name, one in self._replicas.items()
            if not one.is_paused
        ]
        return max(0, sum(free) - self.window.num_tokens)

    def dispatch(self, now: float) -> list[LiveLease]:
        """Returns what leaves now. It is booked as sent; whoever calls gives it away."""
        leases = self._dispatch_suspects(now)
        while True:
            self._fill_window(now)
            some = self.dispatcher.dispatch(now)
            for one in some:
                leases.append(self._lease(one.replica, [waiting.what for waiting in one.requests], now))
            if not some or not self._late:
                return leases

    def _fill_window(self, now: float) -> None:
        while self._late and not self.window.is_full:
            reads = self._late.popleft()
            first, how = reads[0], {"now": now, "what": reads, "returns": self._is_closed}
            self.window.put(first.number, first.tokens, namespace=_namespace(first), **how)

    def _dispatch_suspects(self, now: float) -> list[LiveLease]:
        leases = []
        for name, replica in self._replicas.items():
            if replica.is_paused and not replica.open and not self._suspects:
                replica.is_paused = False
                self.dispatcher.join(name, replica.limits)
            if self._suspects and not replica.open:
                leases.append(self._suspect_lease(name, self._suspects.popleft(), now))
        if self._suspects and not any(one.is_paused for one in self._replicas.values()):
            self._pause_one()
        return leases

    def _pause_one(self) -> None:
        """Lets the replica that has least to do come to its end, so that a group under suspicion can run there."""
        name = min(self._replicas, key=lambda one: len(self._replicas[one].open), default=None)
        if name is not None:
            self._replicas[name].is_paused = True
            self.dispatcher.leave(name)

    def _suspect_lease(self, name: Hashable, group: Sequence[Reads], now: float) -> LiveLease:
        for first, *_ in group:
            limit = expected_limit(first)
            self.router.send(first.number, Prompt(first.tokens, limit, _namespace(first)), name)
        self._replicas[name].is_paused = True
        self.dispatcher.leave(name)
        return self._lease(name, group, now, suspect=True)

    def _lease(self, name: Hashable, prompts: Sequence[Reads], now: float, *, suspect: bool = False) -> LiveLease:
        replica, number = self._replicas[name], next(self._numbers)
        left = {read.number: reads[0].number for reads in prompts for read in reads}
        if not replica.open:
            replica.heard = now
        replica.open[number] = _OpenLive(name, left, suspect)
        requests = sorted((read for reads in prompts for read in reads), key=lambda read: read[:4])
        return LiveLease(number, name, requests, suspect)

    def commit(
        self, replica: Hashable, number: int, answers: Mapping[int, Any], now: float
    ) -> list[tuple[SpooledRequest, int]]:
        """Takes answers to a lease by the requests' numbers; returns the requests whose answers are the first, each
        with the tokens of its prompt, or 0 where the prompt has reads that are not answered."""
        entry = self._replicas.get(replica)
        open_ = None if entry is None else entry.open.get(number)
        if entry is None or open_ is None:
            return []
        entry.heard = now
        fresh = []
        for place, answer in answers.items():
            if place not in open_.left:
                continue
            prompt = open_.left.pop(place)
            request = self._reads[prompt].pop(place)
            fresh.append((request, 0 if self._reads[prompt] else request.num_tokens))
            if not self._reads[prompt]:
                del self._reads[prompt]
                self.router.end(prompt, **_said(answer))
        if not open_.left:
            del entry.open[number]
        return fresh

    def check(self) -> None:
        """Raises AssertionError where a request is in two places, or in none."""
        self.router.check()
        self.window.check()
        found: list[int] = []
        for waiting in self.window.waiting():
            found += [read.number for read in waiting.what]
        assert all(self._suspects)
        for some in (self._late, *self._suspects):
            found += [read.number for reads in some for read in reads]
        sent = []
        for replica in self._replicas.values():
            for open_ in replica.open.values():
                assert open_.left
                found += open_.left
                sent += open_.left.values()
            assert len(replica.open) <= 1 or not any(open_.suspect for open_ in replica.open.values())
        assert set(sent) == set(self.router.in_flight)
        assert len(found) == len(set(found))
        assert set(found) == {number for left in self._reads.values() for number in left}


def _limit_of(reads: Reads) -> int:
    return expected_limit(reads[0])


def limits_of(facts: ReplicaFacts, call: RunCall, *, early: bool = False) -> Limits:
    """Returns how much a replica may be sent: what keeps it at work until the next of its answers is taken."""
    if facts.is_server and call.readout.kind != "tokens":
        return Limits(1 << 62, 2 * facts.at_once, facts.at_once, facts.at_once)
    if not call.in_slots:
        return Limits((2 if early else 3) * facts.max_rows, busy=1)
    running = facts.max_running
    rows = max(4 * facts.max_rows, facts.cache_rows + facts.cache_rows // 4) if facts.cache_rows else 1 << 62
    if call.readout.kind != "tokens":
        return Limits(min(rows, 3 * facts.max_rows), busy=1)
    requests = running if early else running + running // 2
    return Limits(rows, requests, max(1, running // 8), max(1, running // 2), facts.reserves_output)


def _may_have_begun(facts: ReplicaFacts, call: RunCall) -> int:
    return 2 * facts.max_running if call.readout.kind == "tokens" else 1 << 30


def _namespace(request: SpooledRequest) -> tuple[str | None, str]:
    return (request.adapter or None, request.salt)


def _said(answer: Any) -> dict[str, int | None]:
    """Returns what an answer says of the rows that it took, for `Router.end`."""
    if isinstance(answer, list) and answer and isinstance(answer[0], Generated):
        return {"output_rows": sum(len(one.tokens) for one in answer), "cached_rows": answer[0].cached_tokens}
    if isinstance(answer, Exception):
        return {"output_rows": None}
    return {"output_rows": 0}
