"""The router: which replica gets a request.

It keeps one trie of who holds which rows, fed by numbered events of the replicas' caches, and of each replica how fast
it is, and what it was sent and has not done. It computes nothing, waits for nothing and knows no clock; its driver
passes on what happens: replicas `join` and `leave`, their events are `take`n, requests are `send` and `end`, steps
are `worked`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..cache.events import CacheEvent, CacheEvents, Cleared, Cut, Removed, RowsStored
from ..errors import InputError
from .prefixes import EstimatedCache, Place, PrefixIndex, token_bytes

_FEW = 16  # outputs that have ended, before their mean is believed
# What a Standing has of each replica, beside what this holds of the prompt.
_COLUMNS = ("waits", "starts", "prefill_seconds", "requests", "total", "held", "capacity")
_FORGET = 0.98  # of what was measured, at each measurement: the last 50 count


@dataclass(frozen=True, eq=False, slots=True)
class Standing:
    """What there is to decide upon for one prompt; arrays have an entry for each of R replicas.

    rows            of the prompt
    prefix          the bytes of the leading tokens that it shares with others of its bucket
    allowed         bool [R]; at least one is True
    matched         int64 [R]: leading rows that the replica holds, or will hold when it has done what it was sent
    waits           float64 [R]: seconds until the replica has done what it was sent
    starts          float64 [R]: seconds until it begins with what it is sent next
    prefill_seconds float64 [R]: seconds for one row of a prompt
    requests        float64 [R]: requests that it was sent and that have not ended
    total           float64 [R]: requests that it was ever sent
    held            float64 [R]: rows in its cache
    capacity        float64 [R]: rows that fit; infinite where unknown
    """

    rows: int
    prefix: bytes
    allowed: np.ndarray
    matched: np.ndarray
    waits: np.ndarray
    starts: np.ndarray
    prefill_seconds: np.ndarray
    requests: np.ndarray
    total: np.ndarray
    held: np.ndarray
    capacity: np.ndarray

    def least(self, values: np.ndarray, among: np.ndarray | None = None) -> int:
        """Returns the first of the allowed replicas, or of those `among`, with the least value."""
        return int(np.argmin(np.where(self.allowed if among is None else among, values, np.inf)))


class Policy(Protocol):
    def choose(self, standing: Standing) -> int:
        """Returns the number of the replica that should get the prompt; changes nothing."""
        ...

    def sent(self, standing: Standing, replica: int) -> None:
        """The prompt was given to that replica."""
        ...


class Forgetful:
    def sent(self, standing: Standing, replica: int) -> None:
        """Nothing needs to be remembered."""


class BestStart(Forgetful):
    """The prompt goes where its prefill would be done first: after the prompts that the replica was sent before, when
    it has room, and after the rows that it does not hold. So a prefix is computed a second time where waiting for who
    holds it takes longer than that.

    dear    what a row that is computed again counts: it also keeps those waiting that come after it
    beside  share of its time that what generates counts with: it makes steps longer, and keeps no request waiting
    """

    dear, beside = 3.0, 0.05

    def choose(self, standing: Standing) -> int:
        s = standing
        again = (s.rows - s.matched) * s.prefill_seconds
        return s.least(s.starts + self.beside * s.waits + self.dear * again)


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, standing: Standing) -> int:
        count = len(standing.allowed)
        return next(r % count for r in range(self._next, self._next + count) if standing.allowed[r % count])

    def sent(self, standing: Standing, replica: int) -> None:
        self._next = replica + 1


class LeastLoaded(Forgetful):
    """The replica with the fewest requests that have not ended."""

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
    """How long a replica takes for a row: seconds = prefill * (rows of prompts) + decode * (rows of outputs).

    Both are fitted to what is measured, by least squares in which older steps count ever less; before anything was
    measured they are what was given.
    """

    prefill: float = 1e-4
    decode: float = 1e-3
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def is_measured(self) -> bool:
        """Returns whether anything was measured."""
        return self._sums[3] + self._sums[4] > 0

    def measure(self, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """Take in that a step, or several, computed these rows in so many seconds."""
        p, d = float(prefill_rows), float(decode_rows)
        new = (p * p, p * d, d * d, p * seconds, d * seconds)
        self._sums = [_FORGET * old + one for old, one in zip(self._sums, new, strict=True)]
        pp, pd, dd, ps, ds = self._sums
        determinant = pp * dd - pd * pd
        if determinant > 1e-6 * pp * dd:
            prefill, decode = (ps * dd - ds * pd) / determinant, (ds * pp - ps * pd) / determinant
            if prefill > 0 and decode > 0:
                self.prefill, self.decode = prefill, decode
                return
        # The two cannot be told apart: both are scaled, so that together they explain what was measured.
        expected = self.prefill * self.prefill * pp + 2 * self.prefill * self.decode * pd + self.decode**2 * dd
        if expected > 0:
            scale = (self.prefill * ps + self.decode * ds) / expected
            self.prefill, self.decode = self.prefill * scale, self.decode * scale


@dataclass(slots=True)
class Outputs:
    """How long outputs are: their share of their limits, of those that have ended. It is the same for all replicas."""

    ended: int = 0
    shares: float = 0.0  # the sum

    def end(self, rows: int, limit: int) -> None:
        """An output of so many tokens has ended, which might have had `limit`."""
        self.ended += 1
        self.shares += min(1.0, rows / limit)

    def expected(self, limit: int) -> int:
        """Returns how many tokens outputs are expected to have, which together may have `limit`."""
        share = (self.shares + _FEW) / (self.ended + _FEW)  # as if a few had ended at their limits
        return max(1, round(share * limit)) if limit else 0


@dataclass(slots=True)
class ReplicaLoad:
    """The work that a replica was sent and has not done.

    requests      that have not ended
    prefill_rows  rows of their prompts that it did not hold when they were sent
    limits        rows of outputs that they may have
    total         requests that it was ever sent
    """

    speed: Speed = field(default_factory=Speed)
    outputs: Outputs = field(default_factory=Outputs)
    requests: int = 0
    prefill_rows: int = 0
    limits: int = 0
    total: int = 0
    # Rows that were reported as done beyond those of the requests that have ended: they are part of the rows above.
    _prefill_done: int = 0
    _decode_done: int = 0

    @property
    def decode_rows(self) -> int:
        """Returns the rows of outputs that are expected of them now."""
        return self.outputs.expected(self.limits)

    def send(self, prefill_rows: int, limit: int) -> None:
        """It is sent a request."""
        self.requests += 1
        self.total += 1
        self.prefill_rows += prefill_rows
        self.limits += limit

    def work(self, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """It reports of a step, or of several."""
        self.speed.measure(prefill_rows, decode_rows, seconds)
        self._prefill_done += prefill_rows
        self._decode_done += decode_rows

    def end(self, sent: tuple[int, int], actual: tuple[int, int]) -> None:
        """A request has ended; (prefill rows, limit of its output) as it was sent, (prefill rows, decode
        rows) as they came."""
        self.requests -= 1
        self.prefill_rows -= sent[0]
        self.limits -= sent[1]
        # Where steps are not reported there is nothing to take away.
        self._prefill_done = max(0, self._prefill_done - actual[0])
        self._decode_done = max(0, self._decode_done - actual[1])
        if not self.requests:
            self._prefill_done = self._decode_done = 0

    @property
    def left(self) -> tuple[int, int]:
        """Returns (prefill rows, decode rows) that are still to be done."""
        return max(0, self.prefill_rows - self._prefill_done), max(0, self.decode_rows - self._decode_done)

    def seconds_to_start(self, capacity: float) -> float:
        """Returns how long what comes next waits: for the prompts before it, and for room among `capacity` rows, which
        comes as requests end."""
        booked = self.prefill_rows + self.decode_rows
        over = max(0.0, booked - capacity)
        return self.left[0] * self.speed.prefill + (self.seconds * over / booked if over else 0.0)

    @property
    def seconds(self) -> float:
        """Returns how long it will take for what is still to be done."""
        return self.seconds_at(self.speed)

    def seconds_at(self, speed: Speed) -> float:
        """Returns how long that would take at another speed."""
        prefill, decode = self.left
        return prefill * speed.prefill + decode * speed.decode


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """What the router looks at of a request.

    tokens     int32 [n], n >= 1
    limit      tokens of its output at most; 0 where rows are only read
    namespace  prompts of two namespaces share nothing
    prefix     how many leading tokens it shares with others of its bucket; None: all
    """

    tokens: np.ndarray
    limit: int = 0
    namespace: Hashable = ()
    prefix: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Sent:
    """A request that a replica has.

    matched  leading rows that it was thought to hold, or to have been sent, then
    held     those that it was thought to hold; where it tells of its cache this is not needed, and it is 0
    """

    replica: Hashable
    prompt: Prompt
    matched: int
    place: Place
    held: int = 0


@dataclass(eq=False, slots=True)
class _Member:
    """A replica, the events that were taken of it, and its runs as (where it ends, the position where it starts)."""

    name: Hashable
    number: int
    load: ReplicaLoad
    capacity: float
    estimate: EstimatedCache | None
    epoch: int = -1
    next_event: int = 0
    is_whole: bool = False
    held: int = 0
    runs: dict[Hashable, tuple[Place, int]] = field(default_factory=dict)


class Router:
    """Decides by a policy, one of `POLICIES`. A policy reads; what it must remember of its own decisions it is told by
    `sent`."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy: Policy = BestStart() if policy is None else policy
        self.index = PrefixIndex()
        self.in_flight: dict[Hashable, Sent] = {}
        self._members: dict[Hashable, _Member] = {}
        self._numbers: list[_Member | None] = []
        self._outputs = Outputs()

    # -------------------------------------------------------------------------------------------------- replicas

    @property
    def replicas(self) -> list[Hashable]:
        return list(self._members)

    def join(
        self, name: Hashable, *, speed: Speed | None = None, capacity: int | None = None, reports: bool = True
    ) -> None:
        """A replica is there.

        speed     before it was measured
        capacity  rows that its cache holds; None: unknown
        reports   whether it sends events; else what it holds is an estimate
        """
        if name in self._members:
            raise InputError(f"there is a replica {name!r} already", field="replica", remedy="give it another name")
        number = next((i for i, one in enumerate(self._numbers) if one is None), len(self._numbers))
        if number == len(self._numbers):
            self._numbers.append(None)
        estimate = None if reports else EstimatedCache(*(() if capacity is None else (capacity,)))
        room = np.inf if capacity is None else float(capacity)
        member = _Member(name, number, ReplicaLoad(speed or Speed(), self._outputs), room, estimate)
        self._numbers[number] = self._members[name] = member

    def leave(self, name: Hashable) -> list[Hashable]:
        """A replica is there no more; returns the keys of the requests that it was sent and that have not ended."""
        member = self._members.pop(name)
        lost = [key for key, sent in self.in_flight.items() if sent.replica == name]
        for key in lost:
            self.index.unsend(self.in_flight.pop(key).place, member.number)
        self._forget(member)
        self._numbers[member.number] = None
        return lost

    def load(self, name: Hashable) -> ReplicaLoad:
        return self._members[name].load

    # ------------------------------------------------------------------------------------------ what they hold

    def take(self, name: Hashable, events: CacheEvents) -> bool:
        """Takes in what a replica reports. Returns False where events are missing or contradict what was reported
        before: then what it holds stays as it was until a snapshot comes (`CacheReporter.snapshot`)."""
        member = self._members[name]
        if events.epoch < member.epoch:
            return member.is_whole
        new = events.events
        if events.epoch == member.epoch:
            new = new[max(0, member.next_event - events.first) :]
            if not new:
                return member.is_whole
        start = max((i for i, event in enumerate(new) if isinstance(event, Cleared)), default=None)
        follows = member.is_whole and events.epoch == member.epoch and events.first <= member.next_event
        if start is None and not follows:
            member.is_whole = False
            return False
        member.epoch, member.next_event = events.epoch, events.first + len(events.events)
        try:
            for event in new[start or 0 :]:
                self._apply(member, event)
            member.is_whole = True
        except KeyError:  # it follows something that was not told
            member.is_whole = False
        return member.is_whole

    def _apply(self, member: _Member, event: CacheEvent) -> None:
        index, runs, bit = self.index, member.runs, 1 << member.number
        if isinstance(event, RowsStored):
            if event.run in runs and event.after != event.run:
                return  # it was told before
            above = index.root(event.namespace) if event.after is None else runs[event.after][0]
            place = index.enter(above, token_bytes(event.tokens))
            index.hold(place, above.stop, bit)
            start = above.stop
            if event.after == event.run:
                old, start = runs[event.run]
                index.leave(old)
            runs[event.run] = (place, start)
            member.held += len(event.tokens)
        elif isinstance(event, Cut):
            place, start = runs[event.run]
            runs[event.upper] = (index.cut_at(place, start + event.size), start)
            runs[event.run] = (place, start + event.size)
        elif isinstance(event, Removed):
            place, start = runs.pop(event.run)
            member.held -= place.stop - start
            index.release(place, start, bit)
        else:
            self._forget(member)

    def _forget(self, member: _Member) -> None:
        for place, start in member.runs.values():
            self.index.release(place, start, 1 << member.number)
        member.runs, member.held = {}, 0

    def matched(self, prompt: Prompt, *, with_coming: bool = True) -> dict[Hashable, int]:
        """Returns how many leading rows of a prompt each replica holds, or will hold when it has done what it was
        sent; replicas without any are left out."""
        rows = self._matched(prompt.namespace, token_bytes(prompt.tokens), with_coming)
        return {self._numbers[i].name: int(rows[i]) for i in np.flatnonzero(rows).tolist()}  # type: ignore[union-attr]

    def holders(self, namespace: Hashable, prefix: np.ndarray, *, least: float = 0.3) -> list[Hashable]:
        """Returns the replicas that hold, or will hold, at least the share `least` of a prefix."""
        rows = self._matched(namespace, token_bytes(prefix))
        return [self._numbers[i].name for i in np.flatnonzero(rows >= max(1, least * len(prefix))).tolist()]  # type: ignore[union-attr]

    def seconds_to_wait(self, replica: Hashable) -> float:
        """Returns how long a replica needs for what it was sent and has not done."""
        return self._members[replica].load.seconds

    def _matched(self, namespace: Hashable, tokens: bytes, with_coming: bool = True) -> np.ndarray:
        rows = np.zeros(len(self._numbers), np.int64)
        before, last = 0, 0
        for at, held, coming in self.index.match(namespace, tokens):
            now = coming if with_coming else held
            for number in _bits(before & ~now):
                rows[number] = last
            before, last = now, at
        for number in _bits(before):
            rows[number] = last
        return rows

    # ------------------------------------------------------------------------------------------------ requests

    def choose(self, prompt: Prompt, among: Collection[Hashable] | None = None) -> Hashable | None:
        """Returns the replica that should get a prompt, None where there is none; changes nothing.

        among  those that may get it; None: all
        """
        standing = self._standing(prompt, self._members if among is None else among)
        if not standing.allowed.any():
            return None
        member = self._numbers[self.policy.choose(standing)]
        assert member is not None
        return member.name

    def send(self, key: Hashable, prompt: Prompt, replica: Hashable) -> Sent:
        """Books that a replica was given a request. Raises InputError where a request of this key is under way."""
        if key in self.in_flight:
            raise InputError(f"the request {key!r} was sent already", field="key", remedy="give each its own key")
        member = self._members[replica]
        if not isinstance(self.policy, Forgetful):
            self.policy.sent(self._standing(prompt, self._members), member.number)
        tokens, held = token_bytes(prompt.tokens), 0
        matched = int(self._matched(prompt.namespace, tokens)[member.number])
        if member.estimate is not None:
            held = int(self._matched(prompt.namespace, tokens, with_coming=False)[member.number])
        place = self.index.enter(self.index.root(prompt.namespace), tokens)
        self.index.send(place, member.number)
        sent = Sent(replica, prompt, matched, place, held)
        self.in_flight[key] = sent
        member.load.send(len(prompt.tokens) - matched, prompt.limit)
        return sent

    def worked(self, replica: Hashable, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """A replica has computed these rows, in so many seconds. Where that is not told, load falls as requests end."""
        self._members[replica].load.work(prefill_rows, decode_rows, seconds)

    def end(self, key: Hashable, *, output_rows: int | None = None, cached_rows: int | None = None) -> Sent:
        """A request has ended.

        output_rows  tokens that it made; None: it failed, or was taken back
        cached_rows  of its prompt, that were not computed; None: not known
        """
        sent = self.in_flight.pop(key)
        member, prompt = self._members[sent.replica], sent.prompt
        rows = len(prompt.tokens)
        if output_rows is not None and prompt.limit:
            self._outputs.end(output_rows, prompt.limit)
        if member.estimate is not None and output_rows is not None:
            member.estimate.answered(
                prompt.namespace, prompt.tokens, held=sent.held, believed=sent.matched, cached=cached_rows
            )
            if (events := member.estimate.events()) is not None:
                self.take(member.name, events)
        self.index.unsend(sent.place, member.number)
        computed = 0 if output_rows is None else rows - (sent.matched if cached_rows is None else cached_rows)
        member.load.end((rows - sent.matched, prompt.limit), (computed, output_rows or 0))
        return sent

    def expected_output(self, limit: int) -> int:
        """Returns how many tokens a request of this limit is expected to make: its share of the limit is that of those
        that have ended."""
        return self._outputs.expected(limit)

    def _standing(self, prompt: Prompt, among: Collection[Hashable]) -> Standing:
        tokens, members = token_bytes(prompt.tokens), self._numbers
        rows = np.zeros((len(members), len(_COLUMNS)))
        for member in filter(None, members):
            load = member.load
            starts = load.seconds_to_start(member.capacity)
            totals = load.requests, load.total, member.held, member.capacity
            rows[member.number] = load.seconds, starts, load.speed.prefill, *totals
        return Standing(
            rows=len(prompt.tokens),
            prefix=tokens if prompt.prefix is None else tokens[: 4 * prompt.prefix],
            allowed=np.array([member is not None and member.name in among for member in members], bool),
            matched=self._matched(prompt.namespace, tokens),
            **dict(zip(_COLUMNS, rows.T, strict=True)),
        )


def _bits(mask: int) -> list[int]:
    """Returns the numbers of the bits that are set, ascending."""
    numbers = []
    while mask > 0:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
