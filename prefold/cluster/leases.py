"""Who computes which requests of a stream whose order is known: segments, leases, stealing, and what becomes of what
a lost replica had. Plain Python: no I/O, and the clock is handed in.

    leases.admit(now)                   work goes to replicas that run out of it
    lease = leases.plan()               reads the books, changes nothing; None: nobody can take more now
    leases.begin(lease, now)            it has been sent
    fresh = leases.commit(number, places, now)
    blamed = leases.lose(replica, now)  its work goes out again, but for those that replicas died of

A request is named by its place in the order. Each replica has a segment of it and takes small leases off its front, so
that only requests that have not begun are moved when others run out of work. Every request is fresh once: an answer
to a lease that is over, or a second answer, is dropped.

What a lost replica may have begun is under suspicion. It goes out again in groups, when a replica has nothing else to
do, and nothing runs beside a group. One that another replica is lost with is divided, until a request is alone.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ..prefix import Segment, StreamCost

__all__ = ["Lease", "LeaseOptions", "Leases", "divided", "ranges_of"]

_SPEED_SECONDS = 20.0  # what was measured longer ago counts for less than 1/e
_PARTS = 4  # of a group under suspicion: the search runs as many groups as with halves, and loses half as many replicas

T = TypeVar("T")


class Lease(NamedTuple):
    """A lease is the requests at some places, given to a replica under a number.

    places: ascending. suspect: a replica was lost while it worked on these requests.
    """

    number: int
    replica: Hashable
    places: Sequence[int]
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """Says how large leases are, and when a replica is given up.

    seconds     what a lease takes about
    least       cost below which work is not divided any further
    most        cost of a lease, at most
    waiting     requests that a replica shall have at least, beside two leases
    begun       requests, and cost, that a replica may have begun at once: these are under suspicion when it is lost
    patience    seconds without any progress after which a replica that has work is given up
    """

    seconds: float = 2.0
    least: float = 1.0
    most: float = math.inf
    waiting: int = 0
    begun: tuple[int, float] = (1 << 30, math.inf)
    patience: float = 300.0


@dataclass(slots=True)
class _OpenLease:
    lease: Lease
    left: set[int]


@dataclass(slots=True)
class _Replica:
    """What a replica has to do. is_ready: it can take leases; before that its segment waits for it."""

    segment: list[Segment] = field(default_factory=list)
    open: dict[int, _OpenLease] = field(default_factory=dict)
    is_ready: bool = False
    done: float = 0.0  # cost and seconds of work, of late
    seconds: float = 0.0
    measured: float = 0.0  # when they were added up last
    heard: float = 0.0

    @property
    def has_suspects(self) -> bool:
        """Returns whether what it has is under suspicion; it then has nothing else."""
        return any(entry.lease.suspect for entry in self.open.values())


class Leases:
    """Holds the books of one job on a fleet.

    cost      of the job's requests, in their order
    replicas  those that are there or shall come; the stream is cut into a segment for each
    numbers   where the leases' numbers come from
    """

    def __init__(
        self,
        cost: StreamCost,
        replicas: Iterable[Hashable],
        options: LeaseOptions = LeaseOptions(),
        *,
        numbers: Iterator[int] | None = None,
    ):
        self.cost, self.options = cost, options
        self.num_left = cost.num_prompts
        self.steals = 0
        self.moved = 0  # requests that were sent again because a replica was lost
        self._numbers = itertools.count() if numbers is None else numbers
        self._next = next(self._numbers)
        self._replicas = {replica: _Replica() for replica in replicas}
        self._free: list[Segment] = []  # of nobody
        self._suspects: deque[Sequence[int]] = deque()  # groups of requests, none of them empty
        if self._replicas:
            segments = cost.cut(0, cost.num_prompts, [1.0] * len(self._replicas))
            for replica, segment in zip(self._replicas.values(), segments, strict=True):
                replica.segment = [segment] if segment.start < segment.stop else []
        elif cost.num_prompts:
            self._free = [Segment(0, cost.num_prompts)]

    @property
    def replicas(self) -> tuple[Hashable, ...]:
        """Returns the replicas that are there or shall come."""
        return tuple(self._replicas)

    def open_leases(self, replica: Hashable) -> tuple[Lease, ...]:
        """Returns what a replica was given and has not answered in full."""
        return tuple(entry.lease for entry in self._replicas[replica].open.values())

    # ------------------------------------------------------------------------------------------ who is there

    def join(self, replica: Hashable, now: float) -> None:
        """Notes that a replica can take leases; also one that was not expected."""
        entry = self._replicas.setdefault(replica, _Replica())
        entry.is_ready, entry.heard, entry.measured = True, now, now

    def expect(self, replica: Hashable) -> None:
        """Notes that a replica shall come."""
        self._replicas.setdefault(replica, _Replica())

    def heard(self, replica: Hashable, now: float) -> None:
        """Notes that a replica makes progress."""
        if replica in self._replicas:
            self._replicas[replica].heard = now

    def hung(self, now: float) -> list[Hashable]:
        """Returns the replicas that have work and have made no progress for longer than is waited for."""
        late = now - self.options.patience
        return [name for name, replica in self._replicas.items() if replica.open and replica.heard < late]

    def lose(self, replica: Hashable, now: float, *, died: bool = True) -> list[int]:
        """Takes back what a replica has, which is gone; returns the requests that are given up.

        That is a request that ran under suspicion alone: another replica was lost with it before. Where several ran
        under suspicion, their group is divided; where none did, what the replica may have begun is under suspicion
        from now on. Where it has not died, nothing is held against any request. A replica that is not known has
        nothing.
        """
        entry = self._replicas.pop(replica, None)
        if entry is None:
            return []
        self._free += entry.segment
        blamed: list[int] = []
        left = sorted(place for open_ in entry.open.values() for place in open_.left)
        if entry.has_suspects:
            blamed = left if died and len(left) == 1 else []
            self._suspects += [] if blamed else divided(left) if died else [left]
        else:
            begun = self._begun(entry) if died else []
            self._suspects += divided(begun)
            self._free += ranges_of(sorted(set(left).difference(begun)))
        self.moved += len(left) - len(blamed)
        self.num_left -= len(blamed)
        return blamed

    def _begun(self, replica: _Replica) -> list[int]:
        """Returns what a replica may have begun, in the order of the places."""
        count, cost = self.options.begun
        begun = []
        for place in itertools.chain.from_iterable(sorted(entry.left) for entry in replica.open.values()):
            if len(begun) == count or cost <= 0:
                break
            begun.append(place)
            cost -= self.cost.of(place, place + 1)
        return sorted(begun)

    # ------------------------------------------------------------------------------------------------- work

    def admit(self, now: float) -> None:
        """Gives work to replicas that run out of it: what is nobody's, or a part of what another has not begun."""
        if not self._replicas:
            return
        mean = self._mean_speed()
        for name, replica in self._replicas.items():
            if not replica.is_ready or replica.segment or not self._wants(replica):
                continue
            if self._free:
                self._free.sort(key=lambda segment: self.cost.of(*segment))
                replica.segment = [self._free.pop()]
            else:
                self._steal(name, mean)

    def _steal(self, thief: Hashable, mean: float) -> None:
        """Cuts what the slowest has not begun in two, so that both end at the same time."""
        mine = self._replicas[thief]
        others = [r for name, r in self._replicas.items() if name != thief and r.segment]
        if not others:
            return
        victim = max(others, key=lambda r: self._left(r) / self._speed(r, mean))
        *before, last = victim.segment
        busy = [self._open_cost(victim) + sum(self.cost.of(*s) for s in before), self._open_cost(mine)]
        kept, stolen = self.cost.cut(*last, [self._speed(victim, mean), self._speed(mine, mean)], busy=busy)
        if stolen.start == stolen.stop or self.cost.of(*stolen) < self.options.least:
            if victim.is_ready or mine.open:
                return
            kept, stolen = Segment(last.start, last.start), last  # nobody knows when its owner comes
        victim.segment = [*before, kept] if kept.start < kept.stop else before
        mine.segment = [stolen]
        self.steals += 1

    def plan(self) -> Lease | None:
        """Returns the next lease to be sent, None where no replica can take more."""
        mean = self._mean_speed()
        for name, replica in self._replicas.items():
            if not replica.is_ready:
                continue
            if self._suspects and not replica.open and not replica.segment:
                return Lease(self._next, name, self._suspects[0], suspect=True)
            if replica.segment and self._wants(replica):
                start, stop = replica.segment[0]
                return Lease(self._next, name, range(start, self.cost.reach(start, stop, self._size(replica, mean))))
        return None

    def begin(self, lease: Lease, now: float) -> None:
        """Enters a lease that `plan` returned as sent."""
        replica = self._replicas[lease.replica]
        assert lease.number == self._next
        self._next = next(self._numbers)
        if lease.suspect:
            assert self._suspects.popleft() is lease.places
        else:
            (start, stop), end = replica.segment[0], lease.places[-1] + 1
            assert start == lease.places[0] < end <= stop
            replica.segment[:1] = [Segment(end, stop)] if end < stop else []
        if not replica.open:
            replica.heard = replica.measured = now
        replica.open[lease.number] = _OpenLease(lease, set(lease.places))

    def commit(self, replica: Hashable, number: int, places: Iterable[int], now: float) -> list[int]:
        """Takes answers to a lease, and returns the places whose answers are the first and the only ones."""
        entry = self._replicas.get(replica)
        open_ = None if entry is None else entry.open.get(number)
        if entry is None or open_ is None:
            return []
        fresh = []
        for place in places:
            if place in open_.left:
                open_.left.discard(place)
                fresh.append(place)
        decay = math.exp((entry.measured - now) / _SPEED_SECONDS)
        entry.done = entry.done * decay + sum(self.cost.own(place) for place in fresh)
        entry.seconds = entry.seconds * decay + (now - entry.measured)
        entry.heard = entry.measured = now
        if not open_.left:
            del entry.open[number]
        self.num_left -= len(fresh)
        return fresh

    # ------------------------------------------------------------------------------------------------ sums

    def _wants(self, replica: _Replica) -> bool:
        if replica.has_suspects:
            return False
        num_open = sum(len(entry.left) for entry in replica.open.values())
        return len(replica.open) < 2 or num_open < self.options.waiting

    def _speed(self, replica: _Replica, mean: float) -> float:
        """Returns the cost that a replica does in a second; of one that has not been measured, what others do."""
        return replica.done / replica.seconds if replica.done > 0 and replica.seconds > 0 else mean

    def _mean_speed(self) -> float:
        known = [r.done / r.seconds for r in self._replicas.values() if r.done > 0 and r.seconds > 0]
        return sum(known) / len(known) if known else 1.0

    def _open_cost(self, replica: _Replica) -> float:
        return sum(self.cost.own(place) for entry in replica.open.values() for place in entry.left)

    def _left(self, replica: _Replica) -> float:
        return self._open_cost(replica) + sum(self.cost.of(*segment) for segment in replica.segment)

    def _size(self, replica: _Replica, mean: float) -> float:
        """Returns the cost of a replica's next lease: small before anything is measured, and near the end."""
        o = self.options
        if not (replica.done > 0 and replica.seconds > 0):
            return o.least
        left = sum(self.cost.of(*segment) for segment in replica.segment)
        return max(o.least, min(o.most, self._speed(replica, mean) * o.seconds, left / 4))

    def check(self) -> None:
        """Raises AssertionError where a request is in two places, or in none."""
        assert all(self._suspects)
        found: list[int] = [place for group in self._suspects for place in group]
        segments = list(self._free)
        for replica in self._replicas.values():
            segments += replica.segment
            found += [place for entry in replica.open.values() for place in entry.left]
            assert not replica.has_suspects or len(replica.open) == 1
            assert all(entry.left for entry in replica.open.values())
        for start, stop in segments:
            assert 0 <= start < stop <= self.cost.num_prompts
            found += range(start, stop)
        assert len(found) == len(set(found)) == self.num_left, (len(found), len(set(found)), self.num_left)


def divided(group: Sequence[T]) -> list[Sequence[T]]:
    """Returns a group under suspicion in parts, none of them empty, of sizes that differ by 1 at most."""
    bounds = [len(group) * part // _PARTS for part in range(_PARTS + 1)]
    return [group[start:stop] for start, stop in itertools.pairwise(bounds) if start < stop]


def ranges_of(places: Sequence[int]) -> list[Segment]:
    """Returns ascending places as ranges."""
    if isinstance(places, range):
        return [Segment(places.start, places.stop)]
    out: list[Segment] = []
    for place in places:
        if out and out[-1].stop == place:
            out[-1] = Segment(out[-1].start, place + 1)
        else:
            out.append(Segment(place, place + 1))
    return out
