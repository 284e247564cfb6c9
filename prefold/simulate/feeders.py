"""Ways in which a fleet is given its work."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..cache import CacheEvents
from ..cluster.dispatch import Dispatcher, Limits
from ..cluster.policies import Policy
from ..cluster.replica import Speed
from ..cluster.router import Prompt, Router
from .costs import StepCost
from .engines import Stretch
from .fleet import Feeder, Idle
from .requests import SimRequest, shared_rows


class Lists(Feeder):
    """A list of requests for each replica, given in order.

    in_flight  requests that a replica may have at a time; None: all at once
    steal      a replica that has none left takes the later half of what the replica with most left has not begun
    """

    def __init__(self, parts: Sequence[Sequence[SimRequest]], *, in_flight: int | None = None, steal: bool = False):
        super().__init__()
        self._parts = [deque(part) for part in parts]
        self._most, self._steal = in_flight, steal
        self.steals = 0

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given: list[tuple[int, list[SimRequest]]] = []
        for replica, count in self.in_flight.items():
            part = self._parts[replica]
            if self._most is not None and count >= self._most:
                continue
            if not part and self._steal and not count:
                self._steal_for(replica)
            room = len(part) if self._most is None else min(len(part), self._most - count)
            if room:
                given.append((replica, [part.popleft() for _ in range(room)]))
                self.in_flight[replica] = count + room
        return given

    def _steal_for(self, replica: int) -> None:
        richest = max(range(len(self._parts)), key=lambda other: len(self._parts[other]))
        count = len(self._parts[richest]) // 2
        if count:
            self.steals += 1
            self._parts[replica].extendleft(self._parts[richest].pop() for _ in range(count))

    def idle_cause(self, replica: int) -> Idle:
        return "input" if any(self._parts) and not self.in_flight[replica] else "border"


def contiguous(requests: Sequence[SimRequest], parts: int) -> list[list[SimRequest]]:
    """Returns segments of about equal cost of requests in order: rows of prompts that the one before does not have,
    and rows of outputs, which count four times."""
    sums, total = [], 0.0
    before: tuple[tuple[int, int], ...] = ()
    for request in requests:
        total += request.rows - shared_rows(request.path, before) + 4 * request.output
        sums.append(total)
        before = request.path
    cuts = [bisect_left(sums, total * part / parts) for part in range(parts)] + [len(requests)]
    return [list(requests[cuts[i] : cuts[i + 1]]) for i in range(parts)]


class _OnRouter(Feeder):
    """A feeder with the real router, which is told of what replicas do.

    reports  whether replicas tell what their caches hold
    learns   whether it learns from steps how fast replicas are, as a real fleet does; else it knows that from the start
    slots    rows that a replica's KV store holds; None: what memory holds
    """

    def __init__(
        self,
        policy: Policy | None,
        cost: StepCost,
        *,
        reports: bool = True,
        learns: bool = False,
        slots: int | None = None,
        requests: Sequence[SimRequest] = (),
    ):
        super().__init__()
        self.router = Router(policy)
        self._slots = cost.kv_rows if slots is None else slots
        self._cost, self._reports, self._learns = cost, reports, learns
        self._new = deque(requests)

    def joined(self, replica: int, engine: Any, now: float) -> None:
        super().joined(replica, engine, now)
        speed = Speed() if self._learns else Speed(self._cost.prefill_seconds, self._cost.decode_seconds(32))
        self.router.join(replica, speed=speed, capacity=self._slots, reports=self._reports)

    def arrived(self, request: SimRequest, now: float) -> None:
        self._new.append(request)

    def worked(self, replica: int, stretch: Stretch, events: CacheEvents | None, now: float) -> None:
        super().worked(replica, stretch, events, now)
        self.router.worked(replica, stretch.prefill, stretch.decode, stretch.seconds)
        if events is not None:
            self.router.take(replica, events)
        for ended in stretch.ended:
            self.router.end(ended.request.key, output_rows=ended.request.output, cached_rows=ended.cached)


class Routed(_OnRouter):
    """Each request is given to a replica as it comes, by a policy."""

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given = []
        while self._new and self.in_flight:
            request = self._new.popleft()
            prompt = Prompt(request.tokens(), request.limit)
            replica = self.router.choose(prompt)
            assert isinstance(replica, int)
            self.router.send(request.key, prompt, replica)
            self.in_flight[replica] += 1
            given.append((replica, [request]))
        return given

    def idle_cause(self, replica: int) -> Idle:
        return "input"


class Streamed(_OnRouter):
    """Ours: requests go into the live window as they come, and leave by `Dispatcher`.

    count    of the requests that will come, after which the input has ended
    kind     of the dispatcher
    backlog  rows that a replica may have been sent, as a multiple of its KV store
    reserves whether replicas set room aside for the longest output that a request may have
    window   options of `LiveWindow`
    known    options of `_OnRouter`
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        count: int,
        kind: type[Dispatcher] = Dispatcher,
        policy: Policy | None = None,
        backlog: float = 1.25,
        reserves: bool = True,
        window: Mapping[str, Any] = {"max_tokens": 1 << 23},  # it is only read
        **known: Any,
    ):
        super().__init__(policy, cost, **known)
        self.dispatcher = kind(self.router, limit_of=lambda request: request.limit, **window)
        self._left = count
        self.limits = Limits(int(backlog * self._slots), reserves=reserves)

    def joined(self, replica: int, engine: Any, now: float) -> None:
        super().joined(replica, engine, now)
        self.dispatcher.join(replica, self.limits)

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given: list[tuple[int, list[SimRequest]]] = []
        window = self.dispatcher.window
        while True:
            while self._new and not window.is_full:
                request = self._new.popleft()
                window.put(request.key, request.tokens(), now=now, what=request)
                self._left -= 1
                if not self._left:
                    window.close()
            orders = self.dispatcher.dispatch(now)
            for order in orders:
                assert isinstance(order.replica, int)
                self.in_flight[order.replica] += len(order.requests)
                given.append((order.replica, [waiting.what for waiting in order.requests]))
            if not orders or not self._new:
                return given

    def idle_cause(self, replica: int) -> Idle:
        return "border" if len(self.dispatcher.window) or self._new else "input"

    def next_time(self) -> float | None:
        return self.dispatcher.window.next_pressed()
