"""The offline source: the requests of a job that has been read, in sorted order, divided into segments.

Each replica has a segment of the order, and gets small leases from its front. A replica without work steals the end of
the slowest replica's segment, so only requests that have not started move. The requests reserved for all replicas that
have not joined yet are one segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from ..trie import Order, RowCost, Segment, StreamCost, Window, Windows
from ..trie.window import cut_into_windows
from .leases import Answered, Lease, OpenLease, Places, Source
from .replicas import ReplicaFacts, RunCall, expected_limit, tag_of

_SAMPLED = 256  # number of requests whose limits determine the expected length of an output
_SPEED_SECONDS = 20.0  # a measurement this long ago has the weight 1/e


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """How much work a lease and a replica get."""

    seconds: float = 2.0  # approximate duration of a lease
    least_cost: float = 1.0  # work of a lower cost is not divided
    most_cost: float = math.inf  # maximum cost of a lease
    requests: int = 0  # a replica gets leases until it has at least two leases and this many requests
    # Maximum (number, cost) of started requests of a replica. If the replica is lost, one of these may be the reason.
    begun_most: tuple[int, float] = (1 << 30, math.inf)


@dataclass(slots=True)
class _Replica:
    """A replica's segment, and the cost and seconds of its work. Older work has less weight."""

    segment: Segment | None = None
    cost_done: float = 0.0
    seconds: float = 0.0
    measured_at: float = 0.0  # when cost and seconds were updated last


class OfflineSource(Source):
    """The requests of a sorted order. A place is a request's number in the order.

    Args:
        cost: the cost of the requests, in order
        expected: the replicas that have joined or will join; each gets an equal share of the order when it joins
        options: returns the sizes of leases for the facts of the first replica
        call: how the requests run (see `Source`)
        order: reads the requests; None: no windows are sent
        num_rows: the number of rows of the requests in one stream
        max_tokens: maximum number of tokens of a window
    """

    def __init__(
        self,
        cost: StreamCost,
        expected: Iterable[str],
        options: Callable[[ReplicaFacts], LeaseOptions],
        *,
        call: RunCall | None = None,
        order: Order | None = None,
        num_rows: int = 0,
        max_tokens: int = 1 << 20,
    ):
        self.call, self.cost, self.order, self.num_rows, self.steals = call, cost, order, num_rows, 0
        self._num_unanswered = cost.num_prompts
        self._options_by, self._options = options, LeaseOptions()
        self._max_tokens = max_tokens
        self._absent = set(expected)
        # The entry "" has the segment of the replicas that have not joined yet.
        self.replicas = {"": _Replica(_or_none(Segment(0, cost.num_prompts)))}
        self.free: list[Segment] = []  # segments without a replica
        self._sent: dict[int, tuple[bytes, int]] = {}  # {place: (tag, counted tokens)} of the requests that were sent

    @property
    def num_unanswered(self) -> int:
        return self._num_unanswered

    @property
    def has_waiting(self) -> bool:
        return bool(self.free) or any(replica.segment is not None for replica in self.replicas.values())

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        if len(self.replicas) == 1:
            self._options = self._options_by(facts)
        self.replicas[replica] = entry = _Replica(measured_at=now)
        absent = self.replicas[""]
        if replica in self._absent and absent.segment is not None:
            shares = [1.0, len(self._absent) - 1.0]
            entry.segment, absent.segment = map(_or_none, self.cost.cut(*absent.segment, shares))
        self._absent.discard(replica)

    def leave(self, replica: str) -> None:
        self._absent.discard(replica)
        entry = self.replicas.pop(replica, None)
        if entry is not None and entry.segment is not None:
            self.free.append(entry.segment)

    # ----------------------------------------------------------------------------------------------- sending

    def take(self, now: float) -> Iterator[tuple[str, range]]:
        free = self.book.free_replicas(self)
        ready = {name: replica for name, replica in self.replicas.items() if name in free}
        mean = self._mean_speed()
        for name, replica in ready.items():
            if replica.segment is not None or not self._wants(name):
                continue
            if self.free:
                self.free.sort(key=lambda segment: self.cost.of(*segment))
                replica.segment = self.free.pop()
            else:
                self._steal(name, mean)
        for name, replica in ready.items():
            while replica.segment is not None and self._wants(name):
                start, stop = replica.segment
                end = self.cost.reach(start, stop, self._size(replica, mean))
                replica.segment = _or_none(Segment(end, stop))
                if not self._open(name):
                    replica.measured_at = now
                yield name, range(start, end)

    def _steal(self, thief: str, mean: float) -> None:
        """Cut the segment of the slowest replica in two and give the thief its end, so that both finish together."""
        own, seconds = self.replicas[thief], {}
        for name, replica in self.replicas.items():
            if name != thief and replica.segment is not None:
                cost = self._open_cost(name) + self.cost.of(*replica.segment)
                seconds[name] = cost / self._speed(replica, mean)
        if not seconds:
            return
        slowest = max(seconds, key=lambda name: seconds[name])
        victim = self.replicas[slowest]
        assert victim.segment is not None
        speeds = [self._speed(victim, mean), self._speed(own, mean)]
        busy = [self._open_cost(slowest), self._open_cost(thief)]
        rest, stolen = self.cost.cut(*victim.segment, speeds, busy=busy)
        if stolen.start == stolen.stop or self.cost.of(*stolen) < self._options.least_cost:
            if slowest or self._open(thief):
                return
            # The victim is the segment of absent replicas, which may join late. Take all of it.
            rest, stolen = Segment(0, 0), victim.segment
        victim.segment, own.segment = _or_none(rest), stolen
        self.steals += 1

    def windows(self, lease: Lease) -> list[Window]:
        assert self.order is not None
        requests = chain.from_iterable(self.order.read(start, stop) for start, stop in _ranges_of(lease.places))
        tagged, at = [], 0
        for window in cut_into_windows(requests, max_tokens=self._max_tokens, is_sorted=True):
            places = lease.places[at : (at := at + window.num_requests)]
            lengths = np.where(window.twins, 0, np.diff(window.offsets)).tolist()
            self._sent.update(zip(places, zip(window.tags, lengths, strict=True), strict=True))
            tagged.append(replace(window, tags=[tag_of(lease.number, place) for place in places]))
        return tagged

    # ---------------------------------------------------------------------------------------------- answers

    def answered(self, replica: str, answers: Mapping[int, Any], now: float) -> list[Answered]:
        entry = self.replicas[replica]
        decay = math.exp((entry.measured_at - now) / _SPEED_SECONDS)
        entry.cost_done = entry.cost_done * decay + sum(self.cost.own(place) for place in answers)
        entry.seconds = entry.seconds * decay + (now - entry.measured_at)
        entry.measured_at = now
        self._num_unanswered -= len(answers)
        return [(*self._sent.pop(place), answer) for place, answer in answers.items()]

    def prompts(self, places: Sequence[int]) -> list[Places]:
        return [(place,) for place in places]

    def num_begun(self, facts: ReplicaFacts, prompts: Sequence[Places]) -> int:
        count, cost = self._options.begun_most
        for number, (place,) in enumerate(prompts):
            if number == count or cost <= 0:
                return number
            cost -= self.cost.of(place, place + 1)
        return len(prompts)

    def put_back(self, prompts: Sequence[Places]) -> None:
        self.free += _ranges_of(sorted(place for (place,) in prompts))

    def give_up(self, places: Places) -> list[bytes]:
        self._num_unanswered -= len(places)
        return [self._sent.pop(place)[0] for place in places]

    # ------------------------------------------------------------------------------------------------ sums

    def _open(self, name: str) -> list[OpenLease]:
        return self.book.open_leases(name, self)

    def _wants(self, name: str) -> bool:
        open_leases = self._open(name)
        return len(open_leases) < 2 or sum(len(lease.unanswered) for lease in open_leases) < self._options.requests

    def _speed(self, replica: _Replica, mean: float) -> float:
        """Return the cost that a replica computes per second, or `mean` if it has not been measured."""
        return replica.cost_done / replica.seconds if replica.cost_done > 0 and replica.seconds > 0 else mean

    def _mean_speed(self) -> float:
        speeds = [r.cost_done / r.seconds for r in self.replicas.values() if r.cost_done > 0 and r.seconds > 0]
        return sum(speeds) / len(speeds) if speeds else 1.0

    def _open_cost(self, name: str) -> float:
        return sum(self.cost.own(place) for lease in self._open(name) for place in lease.unanswered)

    def _size(self, replica: _Replica, mean: float) -> float:
        """Return the cost of a replica's next lease. It is small before anything is measured, and near the end."""
        o = self._options
        if not (replica.cost_done > 0 and replica.seconds > 0):
            return o.least_cost
        assert replica.segment is not None
        return max(
            o.least_cost, min(o.most_cost, self._speed(replica, mean) * o.seconds, self.cost.of(*replica.segment) / 4)
        )


def offline_source(windows: Windows, call: RunCall, row_cost: RowCost, expected: Iterable[str]) -> OfflineSource:
    """Return the source of a spool's requests.

    Args:
        windows: their order, and the maximum number of tokens of a window
        call: the run's read-out and options
        row_cost: the cost of a row, for dividing work
        expected: the replicas that have joined or will join
    """
    order = windows.order()
    rows = int((order.lengths - order.shared).sum(dtype=np.int64))
    outputs = _expected_outputs(order) if call.readout.kind == "tokens" and len(order) else None
    cost = StreamCost(order.lengths, order.shared, row_cost, outputs=outputs)

    def options(facts: ReplicaFacts) -> LeaseOptions:
        row = cost.total / max(1, rows)
        most = row * windows.max_tokens
        if call.readout.kind == "tokens":
            running = facts.max_running
            least, waiting = 4 * cost.total / max(1, len(order)), running + running // 2
            return LeaseOptions(least_cost=least, most_cost=most, requests=waiting, begun_most=(2 * running, math.inf))
        step = row * (call.max_batch_rows or facts.max_rows)
        return LeaseOptions(least_cost=step / 4, most_cost=most, requests=facts.at_once, begun_most=(1 << 30, 2 * step))

    sizes = {"num_rows": rows, "max_tokens": windows.max_tokens}
    return OfflineSource(cost, expected, options, call=call, order=order, **sizes)


def _or_none(segment: Segment) -> Segment | None:
    return segment if segment.start < segment.stop else None


def _expected_outputs(order: Order) -> np.ndarray:
    """Return how many tokens each request is expected to generate, int64 [n]: the mean limit of a sample."""
    limits = []
    for place in np.linspace(0, len(order) - 1, min(_SAMPLED, len(order))).astype(int).tolist():
        (request,) = order.read(place, place + 1)
        limits.append(expected_limit(request))
    return np.full(len(order), round(float(np.mean(limits))), np.int64)


def _ranges_of(places: Sequence[int]) -> list[Segment]:
    """Join ascending places into ranges of consecutive places."""
    if isinstance(places, range):
        return [Segment(places.start, places.stop)]
    ranges: list[Segment] = []
    for place in places:
        if ranges and ranges[-1].stop == place:
            ranges[-1] = Segment(ranges[-1].start, place + 1)
        else:
            ranges.append(Segment(place, place + 1))
    return ranges
