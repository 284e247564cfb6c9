"""The router: it chooses the replica of a request.

It keeps one trie of which replica holds which rows, fed by numbered events of the replicas' caches, and for each
replica its speed and the work that it was sent and has not done. It computes nothing, waits for nothing and has no
clock. Its driver tells it of replicas (`join`, `leave`), of their events (`take`) and steps (`worked`), and of requests
(`send`, `end`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..engine.cache.events import CacheCleared, CacheEvent, CacheEvents, Cut, RowsRemoved, RowsStored
from ..errors import InputError
from ..spec.requests import NO_NAMESPACE
from ..trie import token_bytes
from .prefixes import EstimatedCache, Place, PrefixIndex

_FEW = 16  # the mean length of outputs counts as if so many more outputs had ended at their limits
# The fields of a Standing with a number for each replica, in the order of `Router._standing`.
_COLUMNS = ("waits", "starts", "prefill_seconds", "requests", "total", "cached_rows", "capacity")
_LARGE_PART = 0.3  # of a prefix
_DECAY = 0.98  # the weight of a measurement as a share of the next one's: about the last 50 count


@dataclass(frozen=True, eq=False, slots=True)
class Standing:
    """A Standing holds the numbers by which a policy chooses a prompt's replica; arrays have an entry for each of R.

    rows             rows of the prompt
    prefix           the bytes of the leading tokens that it shares with its bucket
    allowed          bool [R]: whether the replica may be chosen; at least one may
    matched_rows     int64 [R]: leading rows that the replica holds, or will hold after the work that it was sent
    waits            float64 [R]: seconds until the replica has done the work that it was sent
    starts           float64 [R]: seconds until it begins with the next request that it is sent
    prefill_seconds  float64 [R]: seconds for one row of a prompt
    requests         float64 [R]: requests that it was sent and that have not ended
    total            float64 [R]: requests that it was ever sent
    cached_rows      float64 [R]: rows in its cache
    capacity         float64 [R]: rows that fit into its cache; infinite if unknown
    """

    rows: int
    prefix: bytes
    allowed: np.ndarray
    matched_rows: np.ndarray
    waits: np.ndarray
    starts: np.ndarray
    prefill_seconds: np.ndarray
    requests: np.ndarray
    total: np.ndarray
    cached_rows: np.ndarray
    capacity: np.ndarray

    def least(self, values: np.ndarray, among: np.ndarray | None = None) -> int:
        """Returns the number of the allowed replica, or of the one `among` these (bool [R]), with the least value."""
        return int(np.argmin(np.where(self.allowed if among is None else among, values, np.inf)))


class Policy(Protocol):
    def choose(self, standing: Standing) -> int:
        """Returns the number of the replica that should get the prompt; changes nothing."""
        ...

    def sent(self, standing: Standing, replica: int) -> None:
        """Books that the prompt was sent to that replica."""
        ...


class Forgetful:
    def sent(self, standing: Standing, replica: int) -> None:
        """Does nothing: the policy keeps no memory of its choices."""


class BestStart(Forgetful):
    """A BestStart chooses the replica that would have computed the prompt first: after the prompts that it was sent
    before, when it has room, and after the rows of this prompt that it does not hold. So a prefix is computed a second
    time only if waiting for its holder takes longer.

    recompute_weight  the weight of a row that is computed again, since it delays later requests too
    output_weight     the weight of the time of outputs: they make steps longer, but keep no request waiting
    """

    recompute_weight, output_weight = 3.0, 0.05

    def choose(self, standing: Standing) -> int:
        s = standing
        recompute_seconds = (s.rows - s.matched_rows) * s.prefill_seconds
        return s.least(s.starts + self.output_weight * s.waits + self.recompute_weight * recompute_seconds)


class RoundRobin:
    """A RoundRobin chooses the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, standing: Standing) -> int:
        count = len(standing.allowed)
        return next(r % count for r in range(self._next, self._next + count) if standing.allowed[r % count])

    def sent(self, standing: Standing, replica: int) -> None:
        self._next = replica + 1


class LeastLoaded(Forgetful):
    """A LeastLoaded chooses the replica with the fewest requests that have not ended."""

    def choose(self, standing: Standing) -> int:
        return standing.least(standing.requests)


POLICIES: dict[str, type[Policy]] = {
    "prefix": BestStart,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


def policy_named(name: str) -> Policy:
    """Returns a new policy. Raises InputError for an unknown name."""
    if name not in POLICIES:
        raise InputError(f"there is no policy {name!r}", field="policy", remedy=f"use {', '.join(POLICIES)}")
    return POLICIES[name]()


@dataclass(slots=True)
class Speed:
    """A Speed estimates a replica's time for rows: seconds = prefill * (rows of prompts) + decode * (rows of outputs).

    Both factors are fitted to measured steps by least squares, in which older steps count for less. Before the first
    measurement they have the values of the constructor.
    """

    prefill: float = 1e-4
    decode: float = 1e-3
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def is_measured(self) -> bool:
        """Returns whether anything was measured."""
        return self._sums[3] + self._sums[4] > 0

    def measure(self, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """Records that one or several steps computed these rows in so many seconds."""
        p, d = float(prefill_rows), float(decode_rows)
        new = (p * p, p * d, d * d, p * seconds, d * seconds)
        self._sums = [_DECAY * old + value for old, value in zip(self._sums, new, strict=True)]
        pp, pd, dd, ps, ds = self._sums
        determinant = pp * dd - pd * pd
        if determinant > 1e-6 * pp * dd:
            prefill, decode = (ps * dd - ds * pd) / determinant, (ds * pp - ps * pd) / determinant
            if prefill > 0 and decode > 0:
                self.prefill, self.decode = prefill, decode
                return
        # The two cannot be told apart: both are scaled, so that together they explain the measured seconds.
        expected = self.prefill * self.prefill * pp + 2 * self.prefill * self.decode * pd + self.decode**2 * dd
        if expected > 0:
            scale = (self.prefill * ps + self.decode * ds) / expected
            self.prefill, self.decode = self.prefill * scale, self.decode * scale


@dataclass(slots=True)
class Outputs:
    """An Outputs estimates the length of outputs, as their mean share of their limits; all replicas have the same."""

    num_ended: int = 0
    shares: float = 0.0  # the sum

    def end(self, rows: int, limit: int) -> None:
        """Records that an output with this limit has ended after so many tokens."""
        self.num_ended += 1
        self.shares += min(1.0, rows / limit)

    def expected(self, limit: int) -> int:
        """Returns the expected number of tokens of outputs whose limits add up to `limit`."""
        share = (self.shares + _FEW) / (self.num_ended + _FEW)
        return max(1, round(share * limit)) if limit else 0


@dataclass(slots=True)
class ReplicaLoad:
    """A ReplicaLoad counts the work that a replica was sent and has not done.

    requests      requests that have not ended
    prefill_rows  rows of their prompts that the replica did not hold when they were sent
    limits        the most rows that their outputs may have
    total         requests that the replica was ever sent
    """

    speed: Speed = field(default_factory=Speed)
    outputs: Outputs = field(default_factory=Outputs)
    requests: int = 0
    prefill_rows: int = 0
    limits: int = 0
    total: int = 0
    # Rows that steps have computed for requests that have not ended; the rows above include them.
    _prefill_done: int = 0
    _decode_done: int = 0

    @property
    def decode_rows(self) -> int:
        """Returns the expected rows of the outputs of open requests."""
        return self.outputs.expected(self.limits)

    def send(self, prefill_rows: int, limit: int) -> None:
        """Books that the replica is sent a request."""
        self.requests += 1
        self.total += 1
        self.prefill_rows += prefill_rows
        self.limits += limit

    def work(self, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """Books one or several steps of the replica."""
        self.speed.measure(prefill_rows, decode_rows, seconds)
        self._prefill_done += prefill_rows
        self._decode_done += decode_rows

    def end(self, booked: tuple[int, int], actual: tuple[int, int]) -> None:
        """Books the end of a request.

        booked  its (prefill rows, limit of its output) as of `send`
        actual  its (prefill rows, decode rows) that were computed
        """
        self.requests -= 1
        self.prefill_rows -= booked[0]
        self.limits -= booked[1]
        # A replica that does not report its steps has no such rows.
        self._prefill_done = max(0, self._prefill_done - actual[0])
        self._decode_done = max(0, self._decode_done - actual[1])
        if not self.requests:
            self._prefill_done = self._decode_done = 0

    @property
    def remaining_rows(self) -> tuple[int, int]:
        """Returns (prefill rows, decode rows) that are still to be computed."""
        return max(0, self.prefill_rows - self._prefill_done), max(0, self.decode_rows - self._decode_done)

    def seconds_to_start(self, capacity: float) -> float:
        """Returns how long the next request waits: for the prompts before it, and for room among `capacity` rows, which
        becomes free as requests end."""
        booked = self.prefill_rows + self.decode_rows
        over = max(0.0, booked - capacity)
        return self.remaining_rows[0] * self.speed.prefill + (self.seconds * over / booked if over else 0.0)

    @property
    def seconds(self) -> float:
        """Returns how long the remaining work takes."""
        return self.seconds_at(self.speed)

    def seconds_at(self, speed: Speed) -> float:
        """Returns how long the remaining work takes at another speed."""
        prefill, decode = self.remaining_rows
        return prefill * speed.prefill + decode * speed.decode


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A Prompt is the part of a request that the router needs.

    tokens     int32 [n], n >= 1
    limit      the most tokens of its output; 0 if only numbers are read
    namespace  prompts of two namespaces share nothing
    prefix     how many leading tokens it shares with its bucket; None: all
    """

    tokens: np.ndarray
    limit: int = 0
    namespace: Hashable = NO_NAMESPACE
    prefix: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class SentRequest:
    """A SentRequest is a request that a replica has.

    matched_rows    leading rows that the replica held, or was about to compute, when the request was sent
    estimated_rows  leading rows that it held then, of a replica that does not report its cache; 0 of others
    """

    replica: Hashable
    prompt: Prompt
    matched_rows: int
    place: Place
    estimated_rows: int = 0


@dataclass(eq=False, slots=True)
class _Member:
    """A _Member is a replica, with its place in its stream of events, and its runs as (end in the trie, first
    position).
    """

    name: Hashable
    number: int
    load: ReplicaLoad
    capacity: float
    estimate: EstimatedCache | None
    epoch: int = -1
    next_event: int = 0
    is_whole: bool = False
    cached_rows: int = 0
    runs: dict[Hashable, tuple[Place, int]] = field(default_factory=dict)


class Router:
    """A Router chooses replicas by a policy, one of `POLICIES`.

    in_flight  the requests that replicas have, by key
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy: Policy = BestStart() if policy is None else policy
        self.index = PrefixIndex()
        self.in_flight: dict[Hashable, SentRequest] = {}
        self.members: dict[Hashable, _Member] = {}
        self._numbers: list[_Member | None] = []
        self._outputs = Outputs()

    # -------------------------------------------------------------------------------------------------- replicas

    @property
    def replicas(self) -> list[Hashable]:
        return list(self.members)

    def join(
        self, name: Hashable, *, speed: Speed | None = None, capacity: int | None = None, reports: bool = True
    ) -> None:
        """Adds a replica.

        speed     its speed before it is measured; None: a guess
        capacity  how many rows its cache holds; None: unknown
        reports   whether it reports the events of its cache; otherwise its cache is estimated
        """
        if name in self.members:
            raise InputError(f"there is a replica {name!r} already", field="replica", remedy="give it another name")
        number = next((i for i, member in enumerate(self._numbers) if member is None), len(self._numbers))
        if number == len(self._numbers):
            self._numbers.append(None)
        estimate = None if reports else EstimatedCache(*(() if capacity is None else (capacity,)))
        room = np.inf if capacity is None else float(capacity)
        member = _Member(name, number, ReplicaLoad(speed or Speed(), self._outputs), room, estimate)
        self._numbers[number] = self.members[name] = member

    def leave(self, name: Hashable) -> list[Hashable]:
        """Removes a replica; returns the keys of its requests that have not ended."""
        member = self.members.pop(name)
        keys = [key for key, request in self.in_flight.items() if request.replica == name]
        for key in keys:
            self.index.unsend(self.in_flight.pop(key).place, member.number)
        self._forget(member)
        self._numbers[member.number] = None
        return keys

    def load(self, name: Hashable) -> ReplicaLoad:
        return self.members[name].load

    # ----------------------------------------------------------------------------------------------- held rows

    def take(self, name: Hashable, events: CacheEvents) -> bool:
        """Takes events of a replica's cache. Returns False if events are missing or contradict earlier ones: the router
        then keeps its knowledge until a snapshot comes (`CacheReporter.snapshot`)."""
        member = self.members[name]
        if events.epoch < member.epoch:
            return member.is_whole
        new = events.events
        if events.epoch == member.epoch:
            new = new[max(0, member.next_event - events.first) :]
            if not new:
                return member.is_whole
        start = max((i for i, event in enumerate(new) if isinstance(event, CacheCleared)), default=None)
        follows = member.is_whole and events.epoch == member.epoch and events.first <= member.next_event
        if start is None and not follows:
            member.is_whole = False
            return False
        member.epoch, member.next_event = events.epoch, events.first + len(events.events)
        try:
            for event in new[start or 0 :]:
                self._apply(member, event)
            member.is_whole = True
        except KeyError:  # the event names an unknown run
            member.is_whole = False
        return member.is_whole

    def _apply(self, member: _Member, event: CacheEvent) -> None:
        index, runs, bit = self.index, member.runs, 1 << member.number
        if isinstance(event, RowsStored):
            if event.run in runs and event.after != event.run:
                return  # the run is known already
            above = None if event.after is None else runs[event.after][0]
            start = 0 if above is None else above.stop
            place = index.enter(event.namespace, token_bytes(event.tokens), above)
            index.hold(place, start, bit)
            if event.after == event.run:
                old, start = runs[event.run]
                index.leave(old)
            runs[event.run] = (place, start)
            member.cached_rows += len(event.tokens)
        elif isinstance(event, Cut):
            place, start = runs[event.run]
            runs[event.upper] = (index.cut_at(place, start + event.size), start)
            runs[event.run] = (place, start + event.size)
        elif isinstance(event, RowsRemoved):
            place, start = runs.pop(event.run)
            member.cached_rows -= place.stop - start
            index.release(place, start, bit)
        else:
            self._forget(member)

    def _forget(self, member: _Member) -> None:
        for place, start in member.runs.values():
            self.index.release(place, start, 1 << member.number)
        member.runs, member.cached_rows = {}, 0

    def matched_rows(self, prompt: Prompt) -> dict[Hashable, int]:
        """Returns {replica: how many leading rows of a prompt it holds, or will hold after the work that it was sent};
        replicas without such rows are left out."""
        rows = self._matched_rows(prompt.namespace, token_bytes(prompt.tokens))
        return {self._numbers[i].name: int(rows[i]) for i in np.flatnonzero(rows).tolist()}  # type: ignore[union-attr]

    def holders(self, namespace: Hashable, prefix: np.ndarray) -> list[Hashable]:
        """Returns the replicas that hold, or will hold, a large part of a prefix."""
        rows = self._matched_rows(namespace, token_bytes(prefix))
        return [self._numbers[i].name for i in np.flatnonzero(rows >= max(1, _LARGE_PART * len(prefix))).tolist()]  # type: ignore[union-attr]

    def seconds_to_wait(self, replica: Hashable) -> float:
        """Returns how long a replica needs for its remaining work."""
        return self.members[replica].load.seconds

    def _matched_rows(self, namespace: Hashable, tokens: bytes, with_coming: bool = True) -> np.ndarray:
        rows = np.zeros(len(self._numbers), np.int64)
        before, stop = -1, 0  # the bits of the replicas that have all places so far, at first of any; and their rows
        for place, same in self.index.match(namespace, tokens):
            now = before & (place.holders | place.coming_holders if with_coming else place.holders)
            if now != before:
                for number in _bits(before & ~now):
                    rows[number] = stop
            if not now:
                return rows
            before, stop = now, stop + same
        for number in _bits(before):
            rows[number] = stop
        return rows

    # ------------------------------------------------------------------------------------------------ requests

    def choose(self, prompt: Prompt, among: Collection[Hashable] | None = None) -> Hashable | None:
        """Returns the replica that should get a prompt, None if there is none; changes nothing.

        among  the replicas that may get it; None: all
        """
        standing = self._standing(prompt, self.members if among is None else among)
        if not standing.allowed.any():
            return None
        member = self._numbers[self.policy.choose(standing)]
        assert member is not None
        return member.name

    def send(self, key: Hashable, prompt: Prompt, replica: Hashable) -> SentRequest:
        """Books that a replica is sent a request. Raises InputError if a request with this key is in flight."""
        if key in self.in_flight:
            raise InputError(f"the request {key!r} was sent already", field="key", remedy="give each its own key")
        member = self.members[replica]
        if not isinstance(self.policy, Forgetful):
            self.policy.sent(self._standing(prompt, self.members), member.number)
        tokens, estimated_rows = token_bytes(prompt.tokens), 0
        matched_rows = int(self._matched_rows(prompt.namespace, tokens)[member.number])
        if member.estimate is not None:
            estimated_rows = int(self._matched_rows(prompt.namespace, tokens, with_coming=False)[member.number])
        place = self.index.enter(prompt.namespace, tokens)
        self.index.send(place, member.number)
        request = SentRequest(replica, prompt, matched_rows, place, estimated_rows)
        self.in_flight[key] = request
        member.load.send(len(prompt.tokens) - matched_rows, prompt.limit)
        return request

    def worked(self, replica: Hashable, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """Books that a replica has computed these rows in so many seconds. Without such calls its load falls only as
        requests end."""
        self.members[replica].load.work(prefill_rows, decode_rows, seconds)

    def end(self, key: Hashable, *, output_rows: int | None = None, cached_rows: int | None = None) -> SentRequest:
        """Books the end of a request.

        output_rows  how many tokens it made; None: it failed, or was taken back
        cached_rows  how many rows of its prompt were cached; None: unknown
        """
        request = self.in_flight.pop(key)
        member, prompt = self.members[request.replica], request.prompt
        rows = len(prompt.tokens)
        if output_rows is not None and prompt.limit:
            self._outputs.end(output_rows, prompt.limit)
        if member.estimate is not None and output_rows is not None:
            counts = request.estimated_rows, request.matched_rows, cached_rows
            member.estimate.answered(prompt.namespace, prompt.tokens, *counts)
            if (events := member.estimate.events()) is not None:
                self.take(member.name, events)
        self.index.unsend(request.place, member.number)
        computed = 0 if output_rows is None else rows - (request.matched_rows if cached_rows is None else cached_rows)
        member.load.end((rows - request.matched_rows, prompt.limit), (computed, output_rows or 0))
        return request

    def expected_output(self, limit: int) -> int:
        """Returns how many tokens a request with this limit is expected to make, by the outputs that have ended."""
        return self._outputs.expected(limit)

    def _standing(self, prompt: Prompt, among: Collection[Hashable]) -> Standing:
        tokens, members = token_bytes(prompt.tokens), self._numbers
        rows = np.zeros((len(members), len(_COLUMNS)))
        for member in filter(None, members):
            load = member.load
            starts = load.seconds_to_start(member.capacity)
            totals = load.requests, load.total, member.cached_rows, member.capacity
            rows[member.number] = load.seconds, starts, load.speed.prefill, *totals
        return Standing(
            rows=len(prompt.tokens),
            prefix=tokens if prompt.prefix is None else tokens[: 4 * prompt.prefix],
            allowed=np.array([member is not None and member.name in among for member in members], bool),
            matched_rows=self._matched_rows(prompt.namespace, tokens),
            **dict(zip(_COLUMNS, rows.T, strict=True)),
        )


def _bits(mask: int) -> list[int]:
    """Return the numbers of the bits that are set, ascending; none for a negative mask, which has no highest bit."""
    numbers = []
    while mask > 0:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
