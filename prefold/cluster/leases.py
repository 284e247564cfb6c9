"""The lease book of a run on a fleet: which replica has which requests, and what becomes of what a lost one had.

No I/O, and the clock is handed in:

    book.join(replica, facts, now)
    for lease in book.send(now): ...                    leases to be sent now; they are booked as sent
    fresh = book.commit(replica, number, answers, now)  the answers that are the first ones
    tags = book.lose(replica)                           its work goes out again, but for requests that replicas died of

Requests come from sources: `offline.py` divides a sorted job in segments, `online.py` serves a live window. A source
decides which replica takes which requests, and how many; all else is decided here, for both alike. Every request is
fresh once: an answer to a lease that is over, or a second answer, is dropped.

What a lost replica may have begun is under suspicion. It goes out again in groups, to replicas that have nothing else
to do, and nothing runs beside a group; where all are at work, one of them takes nothing more until it has run them.
A group that another replica is lost with is divided, until a prompt is alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

from ..stream import Window
from .replicas import ReplicaFacts

_PARTS = 4  # of a group under suspicion: the search runs as many groups as with halves, and loses half as many replicas

T = TypeVar("T")
# A request's tag, the tokens of its prompt (0 where the prompt is counted with another of its reads), and its answer.
Answered = tuple[bytes, int, Any]
Places = tuple[int, ...]  # the reads of one prompt, which are sent and given up together


class Lease(NamedTuple):
    """A lease is the requests of a source at some places, given to a replica under a number.

    is_suspect  whether a replica was lost while it worked on these requests
    """

    number: int
    replica: str
    source: Source
    places: Sequence[int]
    is_suspect: bool = False


class OpenLease(NamedTuple):
    """A lease that a replica has not answered in full. left: the places without an answer."""

    lease: Lease
    left: set[int]


class Source(Protocol):
    """A source holds requests that no replica has. A place names one of them; the source's book calls its methods."""

    book: LeaseBook

    @property
    def num_left(self) -> int:
        """Returns how many requests have no answer."""

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        """Notes that a replica can take requests."""

    def leave(self, replica: str) -> None:
        """Notes that a replica is gone, or does not come; what the source kept for it is for others."""

    def take(self, now: float) -> Iterator[tuple[str, Sequence[int]]]:
        """Yields (replica, places) of what leaves the source now; each is in the book before the next is asked for."""

    def windows(self, lease: Lease) -> list[Window]:
        """Returns what a replica is sent for a lease."""

    def answered(self, replica: str, answers: Mapping[int, Any], now: float) -> list[Answered]:
        """Takes the first answers to requests, by their places, which a replica gave."""

    def prompts(self, places: Sequence[int]) -> list[Places]:
        """Returns places by prompt."""

    def num_begun(self, facts: ReplicaFacts, prompts: Sequence[Places]) -> int:
        """Returns how many of the prompts that a replica was given it may have begun, in the order of sending."""

    def put_back(self, prompts: Sequence[Places]) -> None:
        """Takes back prompts that had left."""

    def give_up(self, places: Places) -> list[bytes]:
        """Forgets requests; returns their tags."""

    def resend(self, replica: str, prompts: Sequence[Places]) -> None:
        """Notes that a replica is sent prompts which had left."""


@dataclass(slots=True)
class _Replica:
    facts: ReplicaFacts
    heard: float  # when it made progress
    open: dict[int, OpenLease] = field(default_factory=dict)
    is_paused: bool = False  # takes nothing but what is under suspicion


class LeaseBook:
    """Holds the leases of one run.

    numbers   where the leases' numbers come from
    patience  seconds without any progress after which a replica that has work is given up
    """

    def __init__(self, *sources: Source, numbers: Iterator[int], patience: float = 300.0):
        self.sources: list[Source] = []
        self.moved = 0  # requests that were sent again because a replica was lost
        self._numbers, self._patience = numbers, patience
        self._replicas: dict[str, _Replica] = {}
        self._suspects: deque[tuple[Source, Sequence[Places]]] = deque()  # groups, none of them empty
        for source in sources:
            self.add(source)

    def add(self, source: Source, now: float = 0.0) -> None:
        """Takes in a source, from which all replicas take that are there."""
        source.book = self
        self.sources.append(source)
        for name, replica in self._replicas.items():
            source.join(name, replica.facts, now)

    @property
    def takers(self) -> dict[str, ReplicaFacts]:
        """Returns the replicas that take what is not under suspicion, in the order in which they came."""
        return {name: replica.facts for name, replica in self._replicas.items() if not replica.is_paused}

    @property
    def num_left(self) -> int:
        """Returns how many requests have no answer."""
        return sum(source.num_left for source in self.sources)

    def open_leases(self, replica: str, source: Source) -> list[OpenLease]:
        """Returns the leases of a source that a replica, if it is there, has not answered in full."""
        entry = self._replicas.get(replica)
        return [] if entry is None else [open_ for open_ in entry.open.values() if open_.lease.source is source]

    # ------------------------------------------------------------------------------------------ who is there

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        """Notes that a replica can take leases; what it may have had before goes out again."""
        if replica in self._replicas:
            self.lose(replica, died=False)
        self._replicas[replica] = _Replica(facts, now)
        for source in self.sources:
            source.join(replica, facts, now)

    def heard(self, replica: str, now: float) -> None:
        """Notes that a replica makes progress."""
        if replica in self._replicas:
            self._replicas[replica].heard = now

    def hung(self, now: float) -> list[str]:
        """Returns the replicas that have work and have made no progress for longer than is waited for."""
        late = now - self._patience
        return [name for name, replica in self._replicas.items() if replica.open and replica.heard < late]

    def lose(self, replica: str, *, died: bool = True) -> list[bytes]:
        """Takes back what a replica has, which is gone; returns the tags of the requests that are given up.

        Those are the reads of a prompt that ran under suspicion alone: another replica was lost with it before. Where
        several prompts ran under suspicion, their group is divided; where none did, what the replica may have begun is
        under suspicion from now on. Where it has not died, nothing is held against any request. A replica that is not
        known has nothing.
        """
        entry = self._replicas.pop(replica, None)
        open_leases = [] if entry is None else list(entry.open.values())
        were_suspects = any(open_.lease.is_suspect for open_ in open_leases)
        tags: list[bytes] = []
        for source in self.sources:
            source.leave(replica)
            own = [open_.left for open_ in open_leases if open_.lease.source is source]
            if entry is None or not own:
                continue
            prompts = source.prompts([place for left in own for place in sorted(left)])
            if were_suspects and died and len(prompts) == 1:
                tags += source.give_up(prompts.pop())
            self.moved += sum(map(len, prompts))
            begun = len(prompts)
            if not were_suspects:
                begun = source.num_begun(entry.facts, prompts) if died and entry.facts.dies_of_requests else 0
            suspects = sorted(prompts[:begun])
            self._suspects += [(source, group) for group in (divided(suspects) if died else [suspects]) if group]
            source.put_back(prompts[begun:])
        return tags

    # ------------------------------------------------------------------------------------------------- work

    def send(self, now: float) -> Iterator[Lease]:
        """Yields what leaves now, booked as sent."""
        yield from self._send_suspects(now)
        for source in self.sources:
            for replica, places in source.take(now):
                yield self._begin(source, replica, places, now)

    def _send_suspects(self, now: float) -> Iterator[Lease]:
        for name, replica in list(self._replicas.items()):
            if replica.open:
                continue
            if self._suspects:
                source, group = self._suspects.popleft()
                replica.is_paused = True
                source.resend(name, group)
                yield self._begin(source, name, [place for places in group for place in places], now, is_suspect=True)
            else:
                replica.is_paused = False
        replicas = self._replicas.values()
        if self._suspects and replicas and not any(replica.is_paused for replica in replicas):
            min(replicas, key=lambda replica: len(replica.open)).is_paused = True

    def _begin(
        self, source: Source, name: str, places: Sequence[int], now: float, *, is_suspect: bool = False
    ) -> Lease:
        replica = self._replicas[name]
        lease = Lease(next(self._numbers), name, source, places, is_suspect)
        if not replica.open:
            replica.heard = now
        replica.open[lease.number] = OpenLease(lease, set(places))
        return lease

    def commit(self, replica: str, number: int, answers: Mapping[int, Any], now: float) -> list[Answered]:
        """Takes answers to a lease, by the requests' places; returns those that are the first and the only ones."""
        entry = self._replicas.get(replica)
        open_ = None if entry is None else entry.open.get(number)
        if entry is None or open_ is None:
            return []
        fresh = {place: answer for place, answer in answers.items() if place in open_.left}
        open_.left.difference_update(fresh)
        if not open_.left:
            del entry.open[number]
        entry.heard = now
        return open_.lease.source.answered(replica, fresh, now)


def divided(group: Sequence[T]) -> list[Sequence[T]]:
    """Returns a group under suspicion in parts, none of them empty, of sizes that differ by 1 at most."""
    bounds = [len(group) * part // _PARTS for part in range(_PARTS + 1)]
    return [group[start:stop] for start, stop in pairwise(bounds) if start < stop]
