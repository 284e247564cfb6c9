"""The lease book of a run on a fleet: which replica has which requests, and which requests of a lost replica go where.

The book does no I/O. The caller passes the time:

    book.join(replica, facts, now)
    for lease in book.send(now): ...                    leases to send now; they are booked as sent
    fresh = book.commit(replica, number, answers, now)  the first answer to each request
    tags = book.lose(replica)                           its requests are sent again, except the returned ones

Requests come from sources: `offline.py` divides a sorted job into segments, and `online.py` serves a live window. A
source decides which replica gets which requests, and how many. The book decides everything else. A replica runs
requests of one call (see `RunCall`) at a time, so sources of different calls take turns. Only the first answer to a
request counts. A second answer, or an answer to a lease that is over, is dropped.

Requests that a lost replica may have started are suspects. They are sent again in groups, to replicas without other
work, and nothing runs beside a group. If all replicas have work, one of them gets no more until it is free for a group.
If another replica is lost with a group, the group is divided. A prompt that is alone in its group is not sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

from ..trie import Window
from .replicas import ReplicaFacts, RunCall

# A group of suspects is divided into this many parts. With halves, the search would run as many groups and lose twice
# as many replicas.
_PARTS = 4
_TURN = 1.0  # seconds after which the requests of a call give way to another call's requests

T = TypeVar("T")
# A request's tag, the tokens of its prompt (0 if another read of the prompt counts them), and its answer.
Answered = tuple[bytes, int, Any]
Places = tuple[int, ...]  # the places of all reads of one prompt, which are sent and dropped together


class Lease(NamedTuple):
    """Requests of a source that a replica has."""

    number: int
    replica: str
    source: Source
    places: Sequence[int]  # the places of the requests in the source
    is_suspect: bool = False  # True if a replica was lost while it ran these requests


class OpenLease(NamedTuple):
    """A lease that a replica has not answered completely."""

    lease: Lease
    unanswered: set[int]  # the places without an answer


class Source(Protocol):
    """Requests that no replica has.

    A place is the number of a request in its source. The lease book calls the methods.
    """

    book: LeaseBook
    call: RunCall | None  # the call of all requests in the source; None if all sources of the book have one call

    @property
    def has_waiting(self) -> bool:
        """Return True if the source has requests to send."""

    @property
    def num_unanswered(self) -> int:
        """Return how many requests have no answer."""

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        """Record that a replica accepts requests."""

    def leave(self, replica: str) -> None:
        """Record that a replica is gone or will not come. Requests reserved for it go to other replicas."""

    def take(self, now: float) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield (replica, places) of requests to send now. The book records each lease before it asks for the next."""

    def windows(self, lease: Lease) -> list[Window]:
        """Return the windows that a replica is sent for a lease."""

    def answered(self, replica: str, answers: Mapping[int, Any], now: float) -> list[Answered]:
        """Record a replica's first answers to requests, by place."""

    def prompts(self, places: Sequence[int]) -> list[Places]:
        """Return the places grouped by prompt."""

    def num_begun(self, facts: ReplicaFacts, prompts: Sequence[Places]) -> int:
        """Return how many of the prompts, in the order of sending, a replica may have started."""

    def put_back(self, prompts: Sequence[Places]) -> None:
        """Make prompts that had been sent wait again."""

    def give_up(self, places: Places) -> list[bytes]:
        """Drop requests, and return their tags."""

    def resend(self, replica: str, prompts: Sequence[Places]) -> None:
        """Record that a replica is sent prompts again."""


@dataclass(slots=True)
class _Replica:
    facts: ReplicaFacts
    progress_at: float  # when the replica last made progress
    open: dict[int, OpenLease] = field(default_factory=dict)
    is_paused: bool = False  # gets only suspects
    call: RunCall | None = None  # the call of the last lease


class LeaseBook:
    """The leases of one run.

    Args:
        numbers: yields the numbers of leases
        patience: seconds without progress after which a replica that has work counts as hung
    """

    def __init__(self, *sources: Source, numbers: Iterator[int], patience: float = 300.0):
        self.sources: list[Source] = []
        self.num_moved = 0  # requests that were sent again because a replica was lost
        self._numbers, self._patience = numbers, patience
        self.replicas: dict[str, _Replica] = {}
        self.suspects: deque[tuple[Source, Sequence[Places]]] = deque()  # groups, none of them empty
        self._turn: RunCall | None = None  # requests of this call are sent
        self._turn_began = 0.0
        for source in sources:
            self.add(source)

    def add(self, source: Source, now: float = 0.0) -> None:
        """Add a source. All replicas get requests from it."""
        source.book = self
        if not self.sources:
            self._turn, self._turn_began = source.call, now
        self.sources.append(source)
        for name, replica in self.replicas.items():
            source.join(name, replica.facts, now)

    def remove(self, source: Source) -> None:
        """Remove a source that has no requests."""
        assert not source.num_unanswered
        self.sources.remove(source)

    def free_replicas(self, source: Source) -> dict[str, ReplicaFacts]:
        """Return the replicas that can get ordinary requests of a source now, in the order of joining.

        Left out are replicas that get only suspects, and replicas with requests of another call.
        """
        return {
            name: replica.facts
            for name, replica in self.replicas.items()
            if not replica.is_paused and (not replica.open or replica.call == source.call)
        }

    def is_idle(self, source: Source) -> bool:
        """Return whether a source has no requests while requests of another call are sent."""
        return not source.num_unanswered and source.call != self._turn

    @property
    def num_unanswered(self) -> int:
        """Return how many requests have no answer."""
        return sum(source.num_unanswered for source in self.sources)

    def open_leases(self, replica: str, source: Source) -> list[OpenLease]:
        """Return the open leases of a replica from a source; [] for an unknown replica."""
        entry = self.replicas.get(replica)
        return (
            []
            if entry is None
            else [open_lease for open_lease in entry.open.values() if open_lease.lease.source is source]
        )

    # --------------------------------------------------------------------------------------------- replicas

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        """Record that a replica accepts leases. Leases that it had before are sent again."""
        if replica in self.replicas:
            self.lose(replica, died=False)
        self.replicas[replica] = _Replica(facts, now)
        for source in self.sources:
            source.join(replica, facts, now)

    def note_progress(self, replica: str, now: float) -> None:
        """Record that a replica makes progress."""
        if replica in self.replicas:
            self.replicas[replica].progress_at = now

    def hung(self, now: float) -> list[str]:
        """Return the replicas that have work and made no progress within the patience."""
        late = now - self._patience
        return [name for name, replica in self.replicas.items() if replica.open and replica.progress_at < late]

    def lose(self, replica: str, *, died: bool = True) -> list[bytes]:
        """Take back the leases of a lost replica. Return the tags of the requests that are not sent again.

        A suspect prompt that ran alone is not sent again, because another replica was lost with it before. A group of
        several suspects is divided. If the replica ran no suspects, the requests that it may have started become
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
        """Drop the requests of a replica that cannot run them, and return their tags.

        The replica can get other requests.
        """
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
        """Yield the leases to send now. They are booked as sent."""
        yield from self._send_suspects(now)
        self._take_turns(now)
        for source in self.sources:
            if source.call == self._turn:
                for replica, places in source.take(now):
                    yield self._begin(source, replica, places, now)

    def _take_turns(self, now: float) -> None:
        """Choose the call whose requests are sent.

        The present call keeps its turn until other calls wait and either its time is over or it has nothing to send.
        Then it goes to the end of the queue.
        """
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
        """Record answers to a lease, by place. Return the answers that are the first to their requests."""
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
    """Return the parts of a group of suspects. No part is empty, and sizes differ by at most 1."""
    bounds = [len(group) * part // _PARTS for part in range(_PARTS + 1)]
    return [group[start:stop] for start, stop in pairwise(bounds) if start < stop]
