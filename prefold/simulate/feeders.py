"""Ways in which a fleet is given its work: ours, and those that it is compared with."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from ..cluster.dispatch import Dispatcher
from ..cluster.policies import Daft, Policy
from ..cluster.replica import Speed
from ..cluster.router import Prompt, Router
from ..stream.live import Bucket, LiveWindow
from .costs import StepCost
from .engines import SimEngine, Stretch
from .fleet import Idle
from .requests import SimRequest

__all__ = ["DaftBuckets", "Lists", "Routed", "SharedQueue", "Streamed", "contiguous"]


class _Feeder:
    """Knows what each replica has been given and has not ended."""

    def __init__(self) -> None:
        self.in_flight: dict[int, int] = {}

    def joined(self, replica: int, engine: SimEngine, now: float) -> None:
        self.in_flight[replica] = 0

    def arrived(self, request: SimRequest, now: float) -> None:
        raise TypeError("all requests are there from the start")

    def worked(self, replica: int, engine: SimEngine, stretch: Stretch, now: float) -> None:
        self.in_flight[replica] -= len(stretch.ended)

    def idle_cause(self, replica: int) -> Idle:
        return "border"

    def next_time(self) -> float | None:
        return None


class SharedQueue(_Feeder):
    """One queue: a replica takes the next `batch` requests whenever so many fit into its `in_flight`. With both alike
    it is naive batching: the next batch begins when the last one is done."""

    def __init__(self, requests: Sequence[SimRequest], *, batch: int, in_flight: int):
        super().__init__()
        self._left = deque(requests)
        self._batch, self._most = batch, in_flight

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given = []
        for replica, count in self.in_flight.items():
            while self._left and count + self._batch <= self._most:
                batch = [self._left.popleft() for _ in range(min(self._batch, len(self._left)))]
                count += len(batch)
                given.append((replica, batch))
            self.in_flight[replica] = count
        return given


class Lists(_Feeder):
    """A list of requests for each replica, given in order. Nothing is given before `start`.

    in_flight  requests that a replica may have at a time; None: all at once
    steal      a replica that has none left takes the later half of what the replica with most left has not begun
    """

    def __init__(
        self,
        parts: Sequence[Sequence[SimRequest]],
        *,
        in_flight: int | None = None,
        steal: bool = False,
        start: float = 0.0,
    ):
        super().__init__()
        self._parts = [deque(part) for part in parts]
        self._most, self._steal, self._start = in_flight, steal, start
        self.steals = 0

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given: list[tuple[int, list[SimRequest]]] = []
        if now < self._start:
            return given
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

    def next_time(self) -> float | None:
        return self._start or None


def contiguous(requests: Sequence[SimRequest], parts: int) -> list[list[SimRequest]]:
    """Returns segments of about equal cost of requests in order: rows of prompts that the one before does not have,
    and rows of outputs, which count four times."""
    sums, total, before = [], 0.0, ()
    for request in requests:
        shared = 0
        for (number, rows), (other, _) in zip(request.path, before, strict=False):
            if number != other:
                break
            shared += rows
        total += request.rows - shared + 4 * request.output
        sums.append(total)
        before = request.path
    cuts = [bisect_left(sums, total * part / parts) for part in range(parts)] + [len(requests)]
    return [list(requests[cuts[i] : cuts[i + 1]]) for i in range(parts)]


class DaftBuckets(_Feeder):
    """Daft's prefix-caching provider: on each node a buffer of 5,000 prompts, of which the largest bucket goes first,
    all of it to one replica by Daft's rule; a bucket of fewer than 16 prompts goes as if nobody had its prefix.

    Its buckets are those of our window, with its threshold; what it puts in and takes out takes turns.
    per_node  replicas of one node; the input is dealt to nodes in equal parts
    """

    buffered, threshold, least = 5000, 1 / 3, 16

    def __init__(self, requests: Sequence[SimRequest], replicas: int, *, per_node: int = 4):
        super().__init__()
        nodes = max(1, replicas // per_node)
        size = -(-len(requests) // nodes)
        self._inputs = [deque(requests[i * size : (i + 1) * size]) for i in range(nodes)]
        self._buffers = [LiveWindow(max_tokens=1 << 62, threshold=self.threshold, grown_tokens=0) for _ in range(nodes)]
        self._router = Router(Daft())
        self._replicas = replicas

    def joined(self, replica: int, engine: SimEngine, now: float) -> None:
        super().joined(replica, engine, now)
        self._router.join(replica)

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given: list[tuple[int, list[SimRequest]]] = []
        if len(self.in_flight) < self._replicas:
            return given  # the provider waits for all of its actors
        while any(self._inputs) or any(len(buffer) for buffer in self._buffers):
            for buffer, source in zip(self._buffers, self._inputs, strict=True):
                while source and len(buffer) < self.buffered:
                    request = source.popleft()
                    buffer.put(request.key, request.tokens(), now=now, what=request)
                bucket = buffer.largest()
                if bucket is not None:
                    given.append(self._route(bucket, [waiting.what for waiting in buffer.take(bucket)]))
        return given

    def _route(self, bucket: Bucket, requests: list[SimRequest]) -> tuple[int, list[SimRequest]]:
        shared = len(bucket.prefix) if len(requests) >= self.least else 0
        prompt = Prompt(bucket.prefix, prefix=shared)
        replica = self._router.choose(prompt)
        assert isinstance(replica, int)
        for request in requests:
            self._router.send(request.key, prompt, replica)
            self._router.end(request.key)  # it counts what was sent, for ever
        self.in_flight[replica] += len(requests)
        return replica, requests


class Routed(_Feeder):
    """Each request is given to a replica as it comes, by a policy on the real router."""

    def __init__(self, policy: Policy, cost: StepCost, *, requests: Sequence[SimRequest] = ()):
        super().__init__()
        self.router = Router(policy)
        self._cost = cost
        self._new = deque(requests)

    def joined(self, replica: int, engine: SimEngine, now: float) -> None:
        super().joined(replica, engine, now)
        _join(self.router, replica, self._cost)

    def arrived(self, request: SimRequest, now: float) -> None:
        self._new.append(request)

    def worked(self, replica: int, engine: SimEngine, stretch: Stretch, now: float) -> None:
        super().worked(replica, engine, stretch, now)
        _tell(self.router, replica, engine, stretch)

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


class Streamed(_Feeder):
    """Ours: requests go into the live window as they come, and leave by `Dispatcher`.

    count    of the requests that will come, after which the input has ended
    window   options of `LiveWindow`
    backlog  rows that a replica may have been sent, as a multiple of its KV store
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        count: int,
        slots: int | None = None,
        policy: Policy | None = None,
        backlog: float = 1.25,
        requests: Sequence[SimRequest] = (),
        **window: Any,
    ):
        super().__init__()
        self.router = Router(policy)
        limits = {"max_tokens": 1 << 23} | window
        self.dispatcher = Dispatcher(self.router, limit_of=lambda request: request.limit, **limits)
        self._cost, self._left = cost, count
        self._backlog = int(backlog * (cost.kv_rows if slots is None else slots))
        self._late: deque[SimRequest] = deque(requests)

    def joined(self, replica: int, engine: SimEngine, now: float) -> None:
        super().joined(replica, engine, now)
        _join(self.router, replica, self._cost)
        self.dispatcher.join(replica, self._backlog)

    def arrived(self, request: SimRequest, now: float) -> None:
        self._late.append(request)

    def worked(self, replica: int, engine: SimEngine, stretch: Stretch, now: float) -> None:
        super().worked(replica, engine, stretch, now)
        _tell(self.router, replica, engine, stretch)

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given: list[tuple[int, list[SimRequest]]] = []
        window = self.dispatcher.window
        while True:
            while self._late and not window.is_full:
                request = self._late.popleft()
                window.put(request.key, request.tokens(), now=now, what=request)
                self._left -= 1
                if not self._left:
                    window.close()
            orders = self.dispatcher.dispatch(now)
            for order in orders:
                assert isinstance(order.replica, int)
                self.in_flight[order.replica] += len(order.requests)
                given.append((order.replica, [waiting.what for waiting in order.requests]))
            if not orders or not self._late:
                return given

    def idle_cause(self, replica: int) -> Idle:
        return "border" if len(self.dispatcher.window) or self._late else "input"

    def next_time(self) -> float | None:
        return self.dispatcher.window.next_pressed()


def _join(router: Router, replica: Hashable, cost: StepCost) -> None:
    speed = Speed(cost.prefill_seconds, cost.decode_seconds(32))
    router.join(replica, speed=speed, capacity=cost.kv_rows)


def _tell(router: Router, replica: Hashable, engine: SimEngine, stretch: Stretch) -> None:
    router.worked(replica, stretch.prefill, stretch.decode, stretch.seconds)
    events = engine.events()
    if events is not None:
        router.take(replica, events)
    for ended in stretch.ended:
        router.end(ended.request.key, output_rows=ended.request.output, cached_rows=ended.cached)
