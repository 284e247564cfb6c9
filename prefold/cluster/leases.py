"""The lease book of a run on a fleet: which replica has which requests, and where the requests of a lost replica go.

The book does no I/O, and the caller passes the time:

    book.join(replica, facts, now)
    for lease in book.send(now): ...                    leases to send now; they are booked as sent
    fresh = book.commit(replica, number, answers, now)  the first answer of each request
    tags = book.lose(replica)                           its requests go out again; tags: those that replicas died of

Requests come from sources: `offline.py` divides a sorted job into segments, `online.py` serves a live window. A source
decides which replica takes which requests, and how many; the book decides everything else. A replica runs requests of
one call (see `RunCall`) at a time, so sources of different calls take turns. Only the first answer to a request counts:
an answer to a lease that is over, or a second answer, is dropped.

Requests that a lost replica may have begun are suspects. They go out again in groups, to replicas without other work,
and nothing runs beside a group; if all replicas have work, one of them takes no more until it is free for a group. A
group with which another replica is lost is divided, until a prompt is alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

from ..trie import Window
from .replicas import ReplicaFacts, RunCall

# A group of suspects is divided into this many parts: the search runs as many groups as with halves, and loses half as
# many replicas.
_PARTS = 4
_TURN = 1.0  # seconds after which the requests of a call make room for those of another

T = TypeVar("T")
# A request's tag, the tokens of its prompt (0 if another read of the prompt counts them), and its answer.
Answered = tuple[bytes, int, Any]
Places = tuple[int, ...]  # the places of all reads of one prompt, which are sent and given up together


class Lease(NamedTuple):
    """A Lease is a number of requests of a source that a replica has.

    places      the places of the requests in the source
    is_suspect  whether a replica was lost while it worked on these requests
    """

    number: int
    replica: str
    source: Source
    places: Sequence[int]
    is_suspect: bool = False


class OpenLease(NamedTuple):
    """An OpenLease is a lease that a replica has not answered in full. unanswered: the places without an answer."""

    lease: Lease
    unanswered: set[int]


class Source(Protocol):
    """A Source holds requests that no replica has; a place is the number of a request in it. The lease book calls
    it. call: how all of its requests run; None where one book has sources of one call only"""

    book: LeaseBook
    call: RunCall | None

    @property
    def has_waiting(self) -> bool:
        """Returns whether it has requests to send."""

    @property
    def num_unanswered(self) -> int:
        """Returns how many requests have no answer."""

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        """Records that a replica can take requests."""

    def leave(self, replica: str) -> None:
        """Records that a replica is gone, or will not come; requests kept for it are for other replicas."""

    def take(self, now: float) -> Iterator[tuple[str, Sequence[int]]]:
        """Yields (replica, places) of requests to send now; the book has each lease before it asks for the next."""

    def windows(self, lease: Lease) -> list[Window]:
        """Returns the windows that a replica is sent for a lease."""

    def answered(self, replica: str, answers: Mapping[int, Any], now: float) -> list[Answered]:
        """Takes the first answers of requests from a replica, by place."""

    def prompts(self, places: Sequence[int]) -> list[Places]:
        """Returns the places grouped by prompt."""

    def num_begun(self, facts: ReplicaFacts, prompts: Sequence[Places]) -> int:
        """Returns how many of the prompts, in the order of sending, a replica may have begun."""

    def put_back(self, prompts: Sequence[Places]) -> None:
        """Takes back prompts that had been sent."""

    def give_up(self, places: Places) -> list[bytes]:
        """Forgets requests; returns their tags."""

    def resend(self, replica: str, prompts: Sequence[Places]) -> None:
        """Records that a replica is sent prompts again."""


@dataclass(slots=True)
class _Replica:
    facts: ReplicaFacts
    progress_at: float  # when it last made progress
    open: dict[int, OpenLease] = field(default_factory=dict)
    is_paused: bool = False  # takes only suspects
    call: RunCall | None = None  # of its last lease


class LeaseBook:
    """A LeaseBook holds the leases of one run.

    numbers   gives the numbers of leases
    patience  a replica that has work, and makes no progress for so many seconds, is given up
    """

    def __init__(self, *sources: Source, numbers: Iterator[int], patience: float = 300.0):
        self.sources: list[Source] = []
        self.num_moved = 0  # requests that were sent again because a replica was lost
        self._numbers, self._patience = numbers, patience
        self.replicas: dict[str, _Replica] = {}
        self.suspects: deque[tuple[Source, Sequence[Places]]] = deque()  # groups, none of them empty
        self._turn: RunCall | None = None  # whose requests are sent
        self._turn_began = 0.0
        for source in sources:
            self.add(source)

    def add(self, source: Source, now: float = 0.0) -> None:
        """Adds a source; all replicas take requests from it."""
        source.book = self
        if not self.sources:
            self._turn, self._turn_began = source.call, now
        self.sources.append(source)
        for name, replica in self.replicas.items():
            source.join(name, replica.facts, now)

    def remove(self, source: Source) -> None:
        """Removes a source that has no requests."""
        assert not source.num_unanswered
        self.sources.remove(source)

    def free_replicas(self, source: Source) -> dict[str, ReplicaFacts]:
        """Returns the replicas that take ordinary requests of a source now, in the order in which they joined: those
        that take not only suspects, and have no requests of another call."""
        return {
            name: replica.facts
            for name, replica in self.replicas.items()
            if not replica.is_paused and (not replica.open or replica.call == source.call)
        }

    def is_idle(self, source: Source) -> bool:
        """Returns whether a source has no requests, and requests of another call are sent."""
        return not source.num_unanswered and source.call != self._turn

    @property
    def num_unanswered(self) -> int:
        """Returns how many requests have no answer."""
        return sum(source.num_unanswered for source in self.sources)

    def open_leases(self, replica: str, source: Source) -> list[OpenLease]:
        """Returns the open leases of a replica from a source; none for an unknown replica."""
        entry = self.replicas.get(replica)
        return (
            []
            if entry is None
            else [open_lease for open_lease in entry.open.values() if open_lease.lease.source is source]
        )

    # --------------------------------------------------------------------------------------------- replicas

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        """Records that a replica can take leases; leases that it had before go out again."""
        if replica in self.replicas:
            self.lose(replica, died=False)
        self.replicas[replica] = _Replica(facts, now)
        for source in self.sources:
            source.join(replica, facts, now)

    def note_progress(self, replica: str, now: float) -> None:
        """Records that a replica makes progress."""
        if replica in self.replicas:
            self.replicas[replica].progress_at = now

    def hung(self, now: float) -> list[str]:
        """Returns the replicas that have work and made no progress within the patience."""
        late = now - self._patience
        return [name for name, replica in self.replicas.items() if replica.open and replica.progress_at < late]

    def lose(self, replica: str, *, died: bool = True) -> list[bytes]:
        """Takes back the leases of a lost replica; returns the tags of the requests that are given up.

        Given up are the reads of a suspect prompt that ran alone: another replica was lost with it before. A group of
        several suspects is divided. If the replica ran no suspects, the requests that it may have begun become
        suspects. If it did not die, no request becomes a suspect. An unknown replica has no leases.
        """
        entry = self.replicas.pop(replica, None)
        open_leases = [] if entry is None else list(entry.open.values())
        were_suspects = any(open_lease.lease.is_suspect for open_lease in open_leases)
        tags: list[bytes] = []
        for source in self.sources:
            source.leave(replica)
            unanswered = [open_lease.unanswered for open_lease in open_leases if open_lease.lease.source is source]
            if entry is None or not unanswered:
                continue
            prompts = source.prompts([place for places in unanswered for place in sorted(places)])
            if were_suspects and died and len(prompts) == 1:
                tags += source.give_up(prompts.pop())
            self.num_moved += sum(map(len, prompts))
            num_begun = len(prompts)
            if not were_suspects:
                num_begun = source.num_begun(entry.facts, prompts) if died and entry.facts.dies_of_requests else 0
            suspects = sorted(prompts[:num_begun])
            self.suspects += [(source, group) for group in (divided(suspects) if died else [suspects]) if group]
            source.put_back(prompts[num_begun:])
        return tags

    def refuse(self, replica: str, now: float) -> list[bytes]:
        """Gives up the requests of a replica that cannot run them; returns their tags. The replica takes others."""
        entry = self.replicas.pop(replica)
        for source in self.sources:
            source.leave(replica)
        tags: list[bytes] = []
        for open_lease in entry.open.values():
            source = open_lease.lease.source
            tags += [tag for places in source.prompts(sorted(open_lease.unanswered)) for tag in source.give_up(places)]
        self.join(replica, entry.facts, now)
        return tags

    # ----------------------------------------------------------------------------------------------- leases

    def send(self, now: float) -> Iterator[Lease]:
        """Yields the leases to send now, which are booked as sent."""
        yield from self._send_suspects(now)
        self._take_turns(now)
        for source in self.sources:
            if source.call == self._turn:
                for replica, places in source.take(now):
                    yield self._begin(source, replica, places, now)

    def _take_turns(self, now: float) -> None:
        """Chooses the call whose requests are sent: the present one, until it has had its turn, or has nothing to send,
        and others wait. Then it comes after them."""
        waiting = {source.call for source in self.sources if source.has_waiting}
        if not waiting - {self._turn} or (self._turn in waiting and now - self._turn_began <= _TURN):
            return
        self.sources.sort(key=lambda source: source.call == self._turn)
        self._turn = next(source.call for source in self.sources if source.has_waiting)
        self._turn_began = now

    def _send_suspects(self, now: float) -> Iterator[Lease]:
        for name, replica in list(self.replicas.items()):
            if replica.open:
                continue
            if self.suspects:
                source, group = self.suspects.popleft()
                replica.is_paused = True
                source.resend(name, group)
                yield self._begin(source, name, [place for places in group for place in places], now, is_suspect=True)
            else:
                replica.is_paused = False
        replicas = self.replicas.values()
        if self.suspects and replicas and not any(replica.is_paused for replica in replicas):
            min(replicas, key=lambda replica: len(replica.open)).is_paused = True

    def _begin(
        self, source: Source, name: str, places: Sequence[int], now: float, *, is_suspect: bool = False
    ) -> Lease:
        replica = self.replicas[name]
        lease = Lease(next(self._numbers), name, source, places, is_suspect)
        if not replica.open:
            replica.progress_at = now
        replica.open[lease.number] = OpenLease(lease, set(places))
        replica.call = source.call
        return lease

    def commit(self, replica: str, number: int, answers: Mapping[int, Any], now: float) -> list[Answered]:
        """Takes answers to a lease, by place; returns the answers that are the first of their requests."""
        entry = self.replicas.get(replica)
        open_lease = None if entry is None else entry.open.get(number)
        if entry is None or open_lease is None:
            return []
        fresh = {place: answer for place, answer in answers.items() if place in open_lease.unanswered}
        open_lease.unanswered.difference_update(fresh)
        if not open_lease.unanswered:
            del entry.open[number]
        entry.progress_at = now
        return open_lease.lease.source.answered(replica, fresh, now)


def divided(group: Sequence[T]) -> list[Sequence[T]]:
    """Returns the parts of a group of suspects, none of them empty, with sizes that differ by 1 at most."""
    bounds = [len(group) * part // _PARTS for part in range(_PARTS + 1)]
    return [group[start:stop] for start, stop in pairwise(bounds) if start < stop]
