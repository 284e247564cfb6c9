"""The events of a simulated fleet: replicas load, run steps and end requests; feeders give them work."""

from __future__ import annotations

import heapq
import itertools
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from prefold.cluster.online import Dispatcher, Limits
from prefold.cluster.router import Policy, Prompt, Router, Speed
from prefold.engine.cache import CacheEvents

from .costs import StepCost
from .engines import Hits, Stretch
from .requests import SimRequest, shared_rows

Idle = Literal["load", "input", "border", "tail"]
IDLE_CAUSES: tuple[Idle, ...] = ("load", "input", "border", "tail")
_BINS = 200


class Feeder:
    """Base of feeders, which give work to replicas. `now` is the time in seconds.

    Attributes:
        in_flight: {replica: number of its requests that have not ended}.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, int] = {}

    def joined(self, replica: int, engine: Any, now: float) -> None:
        """Record that a replica has loaded its model."""
        self.in_flight[replica] = 0

    def arrived(self, request: SimRequest, now: float) -> None:
        """Accept a request that has arrived."""
        raise TypeError("this feeder needs all requests at the start")

    def worked(self, replica: int, stretch: Stretch, events: CacheEvents | None, now: float) -> None:
        """Record the steps of a replica, and the events of its cache."""
        self.in_flight[replica] -= len(stretch.ended_requests)

    def give(self, now: float) -> Iterable[tuple[int, Sequence[SimRequest]]]:
        """Return (replica, requests) for each replica that gets work now."""
        raise NotImplementedError

    def idle_cause(self, replica: int) -> Idle:
        """Return the reason why a replica is idle."""
        return "border"

    def next_time(self) -> float | None:
        """Return a time at which to call `give` even if no event happens, or None."""
        return None


@dataclass(frozen=True, slots=True)
class Replica:
    """A machine with a model."""

    engine: Callable[[], Any]
    load: float = 0.0  # seconds to load the model
    slow: float = 1.0  # factor on the times of its steps


@dataclass(slots=True)
class FleetOutcome:
    """The outcome of a simulation."""

    replicas: int
    seconds: float = 0.0  # until the last request ended
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    busy: float = 0.0  # replica-seconds of steps
    hits: Hits = field(default_factory=Hits)
    idle: dict[Idle, float] = field(default_factory=lambda: dict.fromkeys(IDLE_CAUSES, 0.0))  # replica-seconds
    ended_at: list[float] = field(default_factory=list)  # time at which each replica ended its last request
    use: list[float] = field(default_factory=list)  # share of working replicas in each of `_BINS` equal time intervals
    waits: array[float] = field(default_factory=lambda: array("d"))  # seconds from arrival to end, by request

    def idle_share(self, *causes: Idle) -> float:
        """Return the share of the replicas' time that was idle for these causes (default: all causes)."""
        total = self.replicas * self.seconds
        return sum(self.idle[cause] for cause in causes or IDLE_CAUSES) / total if total else 0.0

    def dollars_per_million(self, dollars_per_hour: float) -> float:
        """Return the price of a million prompt and output tokens, from the price of a replica."""
        tokens = self.prompt_tokens + self.output_tokens
        return self.replicas * self.seconds / 3600 * dollars_per_hour / max(1, tokens) * 1e6


@dataclass(slots=True)
class _State:
    engine: Any
    is_busy: bool = False
    idle_since: float = 0.0
    cause: Idle = "load"
    ended: float = 0.0


def run_fleet(replicas: Sequence[Replica], feeder: Feeder, arrivals: Iterable[SimRequest] = ()) -> FleetOutcome:
    """Return the outcome of a `Simulation`."""
    return Simulation(replicas, feeder, arrivals).run()


class Simulation:
    """Runs a fleet until no events are left. Replicas get work whenever a request has ended.

    Args:
        arrivals: Requests by ascending arrival time, without the requests that the feeder has from the start.
    """

    def __init__(self, replicas: Sequence[Replica], feeder: Feeder, arrivals: Iterable[SimRequest]):
        self.feeder = feeder
        self.result = FleetOutcome(len(replicas))
        self._states: list[_State | None] = [None] * len(replicas)
        self._replicas = replicas
        self._arrivals = iter(arrivals)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._stretches: list[tuple[float, float]] = []
        self._wake: float | None = None
        self._last_work = 0.0  # time of the last `give` with work; later idle time is the tail

    def run(self) -> FleetOutcome:
        for number, replica in enumerate(self._replicas):
            self.push(replica.load, "join", number)
        self._next_arrival()
        now = 0.0
        while self._events:
            now = self._events[0][0]
            touched: set[int] = set()
            is_news = False
            while self._events and self._events[0][0] == now:  # handle all events of this time before giving work
                _, _, kind, subject = heapq.heappop(self._events)
                is_news |= self.handle(kind, subject, now, touched)
            if is_news:
                self._give(now, touched)
            for number in sorted(touched):
                self._step(number, now)
        self._finish(now)
        return self.result

    def push(self, time: float, kind: str, subject: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, subject))

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self.push(request.arrival, "arrive", request)

    def handle(self, kind: str, subject: object, now: float, touched: set[int]) -> bool:
        """Handle an event, and add its replica to `touched`. Return whether replicas may get work because of it."""
        if kind == "join":
            assert isinstance(subject, int)
            replica = self._replicas[subject]
            state = self._states[subject] = _State(replica.engine(), idle_since=now)
            self.result.idle["load"] += now
            self.feeder.joined(subject, state.engine, now)
            touched.add(subject)
        elif kind == "arrive":
            assert isinstance(subject, SimRequest)
            self.feeder.arrived(subject, now)
            self._next_arrival()
        elif kind == "step":
            assert isinstance(subject, tuple)
            number, stretch = subject
            events = self._stepped(number, stretch, now)
            touched.add(number)
            return self.worked(number, stretch, events, now)
        else:
            self._wake = None
        return True

    def worked(self, number: int, stretch: Stretch, events: CacheEvents | None, now: float) -> bool:
        """Pass a replica's stretch to the feeder. Return whether replicas may get work because of it."""
        self.feeder.worked(number, stretch, events, now)
        return bool(stretch.ended_requests)

    def _stepped(self, number: int, stretch: Stretch, now: float) -> CacheEvents | None:
        """Count a replica's stretch, and return the events of its cache."""
        state, result = self._states[number], self.result
        assert state is not None
        state.is_busy = False
        events = state.engine.events()
        result.steps += stretch.steps
        if not stretch.ended_requests:
            return events
        state.ended = result.seconds = now
        result.requests += len(stretch.ended_requests)
        for request, _ in stretch.ended_requests:
            result.prompt_tokens += request.rows
            result.output_tokens += request.output
            result.waits.append(now - request.arrival)
        return events

    def _give(self, now: float, touched: set[int]) -> None:
        for number, requests in self.assignments(now):
            self._last_work = now
            self.submit(number, requests)
            touched.add(number)
        time = self.feeder.next_time()
        # A time in the past needs no wake-up, because the next event calls `give`.
        if time is not None and time > now and (self._wake is None or time < self._wake):
            self._wake = time
            self.push(time, "wake", None)

    def assignments(self, now: float) -> Iterable[tuple[int, Sequence[SimRequest]]]:
        """Return (replica, requests) for each replica that gets work now."""
        return self.feeder.give(now)

    def submit(self, number: int, requests: Sequence[SimRequest]) -> None:
        state = self._states[number]
        assert state is not None
        for request in requests:
            state.engine.submit(request)

    def _step(self, number: int, now: float) -> None:
        state = self._states[number]
        assert state is not None
        if state.is_busy:
            return
        stretch = state.engine.step()
        if stretch is None:
            if state.idle_since < 0:
                state.idle_since, state.cause = now, self.feeder.idle_cause(number)
            elif now == state.idle_since:
                state.cause = self.feeder.idle_cause(number)
            return
        if state.idle_since >= 0:
            self.result.idle[state.cause] += now - state.idle_since
        state.idle_since, state.is_busy = -1.0, True
        if (times := self.slowness(number)) != 1:
            stretch = stretch._replace(seconds=stretch.seconds * times)
        seconds = stretch.seconds
        self.result.busy += seconds
        self._stretches.append((now, now + seconds))
        self.push(now + seconds, "step", (number, stretch))

    def slowness(self, number: int) -> float:
        """Return the factor on the times of a replica's steps."""
        return self._replicas[number].slow

    def _finish(self, now: float) -> None:
        result = self.result
        for state in self._states:
            assert state is not None
            result.ended_at.append(state.ended)
            if 0 <= state.idle_since < result.seconds:
                tail = min(max(state.idle_since, self._last_work), result.seconds)
                result.idle[state.cause] += tail - state.idle_since
                result.idle["tail"] += result.seconds - tail
        kinds = [state.engine.hits for state in self._states if state is not None]
        result.hits = type(kinds[0])()
        for hits in kinds:
            result.hits.add(hits)
        result.use = _use(self._stretches, result.seconds, result.replicas)


def _use(stretches: list[tuple[float, float]], seconds: float, replicas: int) -> list[float]:
    """Return the share of working replicas in each of `_BINS` equal time intervals."""
    if not seconds:
        return []
    starts, stops = np.array(stretches).T
    before = [np.clip(edge - starts, 0, stops - starts).sum() for edge in np.linspace(0, seconds, _BINS + 1)]
    return (np.diff(before) / (seconds / _BINS) / replicas).tolist()


class ListFeeder(Feeder):
    """Gives each replica its own list of requests, in order.

    Args:
        in_flight: Maximum number of requests that a replica has at a time; None: all.
        steal: Whether a replica with an empty list takes the second half of the longest list.
    """

    def __init__(self, parts: Sequence[Sequence[SimRequest]], *, in_flight: int | None = None, steal: bool = False):
        super().__init__()
        self._parts = [deque(part) for part in parts]
        self._most, self._steal = in_flight, steal
        self.steals = 0

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        orders: list[tuple[int, list[SimRequest]]] = []
        for replica, count in self.in_flight.items():
            part = self._parts[replica]
            if self._most is not None and count >= self._most:
                continue
            if not part and self._steal and not count:
                self._steal_for(replica)
            room = len(part) if self._most is None else min(len(part), self._most - count)
            if room:
                orders.append((replica, [part.popleft() for _ in range(room)]))
                self.in_flight[replica] = count + room
        return orders

    def _steal_for(self, replica: int) -> None:
        richest = max(range(len(self._parts)), key=lambda other: len(self._parts[other]))
        count = len(self._parts[richest]) // 2
        if count:
            self.steals += 1
            self._parts[replica].extendleft(self._parts[richest].pop() for _ in range(count))

    def idle_cause(self, replica: int) -> Idle:
        return "input" if any(self._parts) and not self.in_flight[replica] else "border"


def contiguous(requests: Sequence[SimRequest], parts: int) -> list[list[SimRequest]]:
    """Return segments of requests with about equal cost.

    The cost of a request is the number of prompt rows that it does not share with the request before it, plus four
    times the number of output rows.
    """
    sums, total = [], 0.0
    before: tuple[tuple[int, int], ...] = ()
    for request in requests:
        total += request.rows - shared_rows(request.path, before) + 4 * request.output
        sums.append(total)
        before = request.path
    cuts = [bisect_left(sums, total * part / parts) for part in range(parts)] + [len(requests)]
    return [list(requests[cuts[i] : cuts[i + 1]]) for i in range(parts)]


class _RouterFeeder(Feeder):
    """Base of feeders with the real router. With `reports`, replicas report their cached rows."""

    def __init__(
        self,
        policy: Policy | None,
        cost: StepCost,
        *,
        reports: bool = True,
        requests: Sequence[SimRequest] = (),
    ):
        super().__init__()
        self.router = Router(policy)
        self._slots, self._cost, self._reports = cost.kv_rows, cost, reports
        self._new = deque(requests)

    def joined(self, replica: int, engine: Any, now: float) -> None:
        super().joined(replica, engine, now)
        speed = Speed(self._cost.prefill_seconds, self._cost.decode_seconds(32))
        self.router.join(replica, speed=speed, capacity=self._slots, reports=self._reports)

    def arrived(self, request: SimRequest, now: float) -> None:
        self._new.append(request)

    def worked(self, replica: int, stretch: Stretch, events: CacheEvents | None, now: float) -> None:
        super().worked(replica, stretch, events, now)
        self.router.worked(replica, stretch.prefill, stretch.decode, stretch.seconds)
        if events is not None:
            self.router.take(replica, events)
        for ended in stretch.ended_requests:
            self.router.end(ended.request.key, output_rows=ended.request.output, cached_rows=ended.cached_tokens)


class RoutedFeeder(_RouterFeeder):
    """Routes each request by a policy when it arrives."""

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        orders = []
        while self._new and self.in_flight:
            request = self._new.popleft()
            prompt = Prompt(request.tokens(), request.limit)
            replica = self.router.choose(prompt)
            assert isinstance(replica, int)
            self.router.send(request.key, prompt, replica)
            self.in_flight[replica] += 1
            orders.append((replica, [request]))
        return orders

    def idle_cause(self, replica: int) -> Idle:
        return "input"


class StreamFeeder(_RouterFeeder):
    """Puts requests into the live window when they arrive, and sends them with a `Dispatcher`.

    Args:
        count: Number of requests, after which the input ends.
        backlog: Maximum rows of requests that a replica has at a time, as a multiple of its KV store.
        reserves: Whether replicas reserve slots for the maximum output of a request.
        window: Options of `LiveWindow`.
        options: Options of `_RouterFeeder`.
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        count: int,
        policy: Policy | None = None,
        backlog: float = 1.25,
        reserves: bool = True,
        window: Mapping[str, Any] = {"max_tokens": 1 << 23},  # never changed
        **options: Any,
    ):
        super().__init__(policy, cost, **options)
        self.dispatcher = Dispatcher(self.router, limit_of=lambda request: request.limit, **window)
        self._to_come = count
        self.limits = Limits(int(backlog * self._slots), reserves=reserves)

    def joined(self, replica: int, engine: Any, now: float) -> None:
        super().joined(replica, engine, now)
        self.dispatcher.join(replica, self.limits)

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        assigned: list[tuple[int, list[SimRequest]]] = []
        window = self.dispatcher.window
        while True:
            while self._new and not window.is_full:
                request = self._new.popleft()
                window.put(request.key, request.tokens(), now=now, payload=request)
                self._to_come -= 1
                if not self._to_come:
                    window.close()
            orders = self.dispatcher.dispatch(now)
            for order in orders:
                assert isinstance(order.replica, int)
                self.in_flight[order.replica] += len(order.requests)
                assigned.append((order.replica, [waiting.payload for waiting in order.requests]))
            if not orders or not self._new:
                return assigned

    def idle_cause(self, replica: int) -> Idle:
        return "border" if len(self.dispatcher.window) or self._new else "input"

    def next_time(self) -> float | None:
        return self.dispatcher.window.next_deadline()
