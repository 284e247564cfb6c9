"""The router chooses the replica of a request.

It has one trie of which replica has which rows, fed by numbered events of the replicas' caches. It also has the speed
and the open work of each replica. It computes nothing, waits for nothing and has no clock. The driver reports replicas
(`join`, `leave`), their events (`take`), steps (`worked`), and requests (`send`, `end`).
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

_FEW = 16  # prior for the mean length of outputs: this many outputs that ended at their limits
# The fields of a Standing with one number per replica, in the order of `Router._standing`.
_COLUMNS = ("waits", "starts", "prefill_seconds", "requests", "total", "cached_rows", "capacity")
_LARGE_PART = 0.3  # a replica with this share of a prefix counts as a holder of the prefix
_DECAY = 0.98  # the weight of a measurement relative to the next one; about the last 50 count


@dataclass(frozen=True, eq=False, slots=True)
class Standing:
    """The facts by which a policy chooses a prompt's replica. Arrays have one entry for each of R replicas."""

    rows: int  # rows of the prompt
    prefix: bytes  # the leading tokens that it shares with its bucket
    allowed: np.ndarray  # bool [R]: whether the replica may be chosen; at least one may
    matched_rows: np.ndarray  # int64 [R]: leading rows that the replica has, or will have after its open work
    waits: np.ndarray  # float64 [R]: seconds until the replica has finished its open work
    starts: np.ndarray  # float64 [R]: seconds until it starts the next request that it is sent
    prefill_seconds: np.ndarray  # float64 [R]: seconds per row of a prompt
    requests: np.ndarray  # float64 [R]: open requests
    total: np.ndarray  # float64 [R]: requests that it was ever sent
    cached_rows: np.ndarray  # float64 [R]: rows in its cache
    capacity: np.ndarray  # float64 [R]: rows that fit in its cache; infinite if unknown

    def least(self, values: np.ndarray, among: np.ndarray | None = None) -> int:
        """Return the number of the replica with the least value, among the allowed ones or `among` these (bool [R])."""
        return int(np.argmin(np.where(self.allowed if among is None else among, values, np.inf)))


class Policy(Protocol):
    def choose(self, standing: Standing) -> int:
        """Return the number of the replica that should get the prompt. Change nothing."""
        ...

    def sent(self, standing: Standing, replica: int) -> None:
        """Record that the prompt was sent to a replica."""
        ...


class Forgetful:
    def sent(self, standing: Standing, replica: int) -> None:
        """Do nothing: the policy does not depend on earlier choices."""


class BestStart(Forgetful):
    """The policy that chooses the replica which would have computed the prompt first.

    The estimate counts the replica's open prompts, the wait for free slots, and the rows of this prompt that it lacks.
    A prefix is therefore computed a second time only if waiting for its holder takes longer.

    Attributes:
        recompute_weight: weight of a row that is computed again, because it delays later requests too
        output_weight: weight of the time of outputs; they lengthen steps but do not block requests
    """

    recompute_weight, output_weight = 3.0, 0.05

    def choose(self, standing: Standing) -> int:
        s = standing
        recompute_seconds = (s.rows - s.matched_rows) * s.prefill_seconds
        return s.least(s.starts + self.output_weight * s.waits + self.recompute_weight * recompute_seconds)


class RoundRobin:
    """The policy that chooses the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, standing: Standing) -> int:
        count = len(standing.allowed)
        return next(r % count for r in range(self._next, self._next + count) if standing.allowed[r % count])

    def sent(self, standing: Standing, replica: int) -> None:
        self._next = replica + 1


class LeastLoaded(Forgetful):
    """The policy that chooses the replica with the fewest open requests."""

    def choose(self, standing: Standing) -> int:
        return standing.least(standing.requests)


POLICIES: dict[str, type[Policy]] = {
    "prefix": BestStart,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


def policy_named(name: str) -> Policy:
    """Return a new policy. Raise InputError for an unknown name."""
    if name not in POLICIES:
        raise InputError(f"there is no policy {name!r}", field="policy", remedy=f"use {', '.join(POLICIES)}")
    return POLICIES[name]()


@dataclass(slots=True)
class Speed:
    """An estimate of a replica's time for rows: seconds = prefill * (rows of prompts) + decode * (rows of outputs).

    Both factors are fitted to measured steps by least squares. Older steps have less weight. Before the first
    measurement the factors are the arguments of the constructor.
    """

    prefill: float = 1e-4
    decode: float = 1e-3
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def is_measured(self) -> bool:
        """Return whether anything was measured."""
        return self._sums[3] + self._sums[4] > 0

    def measure(self, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """Record that one or more steps computed these rows in `seconds`."""
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
        # The two factors cannot be separated. Scale both so that together they explain the measured seconds.
        expected = self.prefill * self.prefill * pp + 2 * self.prefill * self.decode * pd + self.decode**2 * dd
        if expected > 0:
            scale = (self.prefill * ps + self.decode * ds) / expected
            self.prefill, self.decode = self.prefill * scale, self.decode * scale


@dataclass(slots=True)
class Outputs:
    """An estimate of the length of outputs, over all replicas: the mean of length / limit."""

    num_ended: int = 0
    shares: float = 0.0  # sum of (length / limit)

    def end(self, rows: int, limit: int) -> None:
        """Record that an output with this limit ended after `rows` tokens."""
        self.num_ended += 1
        self.shares += min(1.0, rows / limit)

    def expected(self, limit: int) -> int:
        """Return the expected number of tokens of outputs whose limits add up to `limit`."""
        share = (self.shares + _FEW) / (self.num_ended + _FEW)
        return max(1, round(share * limit)) if limit else 0


@dataclass(slots=True)
class ReplicaLoad:
    """The open work of a replica."""

    speed: Speed = field(default_factory=Speed)
    outputs: Outputs = field(default_factory=Outputs)
    requests: int = 0  # open requests
    prefill_rows: int = 0  # rows of their prompts that the replica lacked when they were sent
    limits: int = 0  # maximum number of rows of their outputs
    total: int = 0  # requests that the replica was ever sent
    # Rows that steps have computed for open requests. The rows above include them.
    _prefill_done: int = 0
    _decode_done: int = 0

    @property
    def decode_rows(self) -> int:
        """Return the expected rows of the outputs of open requests."""
        return self.outputs.expected(self.limits)

    def send(self, prefill_rows: int, limit: int) -> None:
        """Record that the replica is sent a request."""
        self.requests += 1
        self.total += 1
        self.prefill_rows += prefill_rows
        self.limits += limit

    def work(self, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """Record one or more steps of the replica."""
        self.speed.measure(prefill_rows, decode_rows, seconds)
        self._prefill_done += prefill_rows
        self._decode_done += decode_rows

    def end(self, booked: tuple[int, int], actual: tuple[int, int]) -> None:
        """Record the end of a request.

        Args:
            booked: (prefill rows, limit of the output) of the request, as passed to `send`
            actual: (prefill rows, decode rows) that were computed
        """
        self.requests -= 1
        self.prefill_rows -= booked[0]
        self.limits -= booked[1]
        # These are 0 for a replica that does not report its steps.
        self._prefill_done = max(0, self._prefill_done - actual[0])
        self._decode_done = max(0, self._decode_done - actual[1])
        if not self.requests:
            self._prefill_done = self._decode_done = 0

    @property
    def remaining_rows(self) -> tuple[int, int]:
        """Return (prefill rows, decode rows) that remain to be computed."""
        return max(0, self.prefill_rows - self._prefill_done), max(0, self.decode_rows - self._decode_done)

    def seconds_to_start(self, capacity: float) -> float:
        """Return the seconds until the next request starts: it waits for the prompts before it and for free slots.

        Slots become free as requests end. `capacity` is the number of rows that fit in the cache.
        """
        booked = self.prefill_rows + self.decode_rows
        over = max(0.0, booked - capacity)
        return self.remaining_rows[0] * self.speed.prefill + (self.seconds * over / booked if over else 0.0)

    @property
    def seconds(self) -> float:
        """Return the seconds that the remaining work takes."""
        return self.seconds_at(self.speed)

    def seconds_at(self, speed: Speed) -> float:
        """Return the seconds that the remaining work takes at another speed."""
        prefill, decode = self.remaining_rows
        return prefill * speed.prefill + decode * speed.decode


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """The part of a request that the router needs."""

    tokens: np.ndarray  # int32 [n], n >= 1
    limit: int = 0  # maximum number of tokens of its output; 0 for numeric read-outs
    namespace: Hashable = NO_NAMESPACE  # prompts of different namespaces share nothing
    prefix: int | None = None  # number of leading tokens shared with the prompt's bucket; None: all


@dataclass(frozen=True, eq=False, slots=True)
class SentRequest:
    """A request that a replica has."""

    replica: Hashable
    prompt: Prompt
    matched_rows: int  # leading rows that the replica had, or was about to compute, when the request was sent
    place: Place
    estimated_rows: int = 0  # leading rows that its estimated cache had then; 0 if the replica reports its cache


@dataclass(eq=False, slots=True)
class _Member:
    """A replica, with its position in its stream of cache events and its cached runs."""

    name: Hashable
    number: int
    load: ReplicaLoad
    capacity: float
    estimate: EstimatedCache | None
    epoch: int = -1
    next_event: int = 0
    is_whole: bool = False
    cached_rows: int = 0
    runs: dict[Hashable, tuple[Place, int]] = field(
        default_factory=dict
    )  # {run: (its end in the trie, first position)}


class Router:
    """The router with one of the `POLICIES`.

    Attributes:
        in_flight: {key: request} of the open requests
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
        """Add a replica.

        Args:
            speed: its speed before it is measured; None: a guess
            capacity: rows that fit in its cache; None: unknown
            reports: whether it reports the events of its cache; if not, its cache is estimated
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
        """Remove a replica. Return the keys of its open requests."""
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
        """Record events of a replica's cache.

        Return False if events are missing or contradict earlier ones. The router then keeps its present state until a
        snapshot arrives (`CacheReporter.snapshot`).
        """
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
                return  # the run is already known
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
        """Return {replica: how many leading rows of a prompt it has, or will have after its open work}.

        Replicas without such rows are left out.
        """
        rows = self._matched_rows(prompt.namespace, token_bytes(prompt.tokens))
        return {self._numbers[i].name: int(rows[i]) for i in np.flatnonzero(rows).tolist()}  # type: ignore[union-attr]

    def holders(self, namespace: Hashable, prefix: np.ndarray) -> list[Hashable]:
        """Return the replicas that have, or will have, a large part of a prefix."""
        rows = self._matched_rows(namespace, token_bytes(prefix))
        return [self._numbers[i].name for i in np.flatnonzero(rows >= max(1, _LARGE_PART * len(prefix))).tolist()]  # type: ignore[union-attr]

    def seconds_to_wait(self, replica: Hashable) -> float:
        """Return the seconds that a replica needs for its remaining work."""
        return self.members[replica].load.seconds

    def _matched_rows(self, namespace: Hashable, tokens: bytes, with_coming: bool = True) -> np.ndarray:
        rows = np.zeros(len(self._numbers), np.int64)
        before, stop = -1, 0  # bits of the replicas that have all places so far (-1: all replicas), and their rows
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
        """Return the replica that should get a prompt; None if there is none. Change nothing.

        Args:
            among: the replicas that may get it; None: all
        """
        standing = self._standing(prompt, self.members if among is None else among)
        if not standing.allowed.any():
            return None
        member = self._numbers[self.policy.choose(standing)]
        assert member is not None
        return member.name

    def send(self, key: Hashable, prompt: Prompt, replica: Hashable) -> SentRequest:
        """Record that a replica is sent a request. Raise InputError if a request with this key is open."""
        if key in self.in_flight:
            raise InputError(
                f"the request {key!r} was already sent", field="key", remedy="use a unique key per request"
            )
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
        """Record that a replica has computed these rows in `seconds`.

        Without such calls its load falls only when requests end.
        """
        self.members[replica].load.work(prefill_rows, decode_rows, seconds)

    def end(self, key: Hashable, *, output_rows: int | None = None, cached_rows: int | None = None) -> SentRequest:
        """Record the end of a request.

        Args:
            output_rows: how many tokens it generated; None: it failed, or was taken back
            cached_rows: how many rows of its prompt were cached; None: unknown
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
        """Return the expected number of output tokens of a request with this limit.

        The estimate uses the lengths of the outputs that have ended.
        """
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
    """Return the numbers of the set bits, ascending; [] for a negative mask, which has no highest bit."""
    numbers = []
    while mask > 0:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
