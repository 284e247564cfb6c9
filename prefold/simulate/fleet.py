"""Discrete events: replicas that load, step and end requests; a feeder that gives them work; where the time goes."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..cache import CacheEvents
from .engines import Hits, SimEngine, Stretch
from .requests import SimRequest

__all__ = ["IDLE_CAUSES", "Driver", "Feeder", "FleetOutcome", "Idle", "Replica", "run_fleet"]

Idle = Literal["load", "input", "border", "tail"]
IDLE_CAUSES: tuple[Idle, ...] = ("load", "input", "border", "tail")
_BINS = 200


class Feeder(Protocol):
    """Gives replicas their work. All is called at the time `now`, in seconds."""

    def joined(self, replica: int, engine: SimEngine, now: float) -> None:
        """A replica has loaded its model."""
        ...

    def arrived(self, request: SimRequest, now: float) -> None:
        """A request has come."""
        ...

    def worked(self, replica: int, stretch: Stretch, events: CacheEvents | None, now: float) -> None:
        """A replica has done some steps, and ended some requests. events: what its cache reports of them."""
        ...

    def give(self, now: float) -> Iterable[tuple[int, Sequence[SimRequest]]]:
        """Returns what replicas get now."""
        ...

    def idle_cause(self, replica: int) -> Idle:
        """Returns why a replica has nothing to do: no request has come, others are waited for, or all are given out."""
        ...

    def next_time(self) -> float | None:
        """Returns when `give` should be called though nothing happens."""
        ...


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica. load: seconds until its model is there; slow: its steps take so many times as long."""

    engine: Callable[[], SimEngine]
    load: float = 0.0
    slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Driver:
    """The process that gives a real fleet its work, beside the replicas: it looks what may be given after every step.

    delay  seconds from the end of a step until its replica has what it is given because of it; replicas go on meanwhile
           with what they have
    each   seconds from one lease of several that leave together to the next: what is idle begins with the first
    """

    delay: float
    each: float = 0.0


@dataclass(slots=True)
class FleetOutcome:
    """What came of a run.

    seconds      until the last request ended
    idle         replica-seconds by cause, sum over replicas
    busy         replica-seconds of steps
    ended_at     when each replica ended its last request
    use          share of the replicas at work, in each of equal parts of the time
    waits        seconds from the arrival of each request to its end
    """

    replicas: int
    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    busy: float = 0.0
    hits: Hits = field(default_factory=Hits)
    idle: dict[Idle, float] = field(default_factory=lambda: dict.fromkeys(IDLE_CAUSES, 0.0))
    ended_at: list[float] = field(default_factory=list)
    use: list[float] = field(default_factory=list)
    waits: array[float] = field(default_factory=lambda: array("d"))

    def idle_share(self, *causes: Idle) -> float:
        """Returns the share of all replicas' time that was idle, by these causes; all where none is given."""
        total = self.replicas * self.seconds
        return sum(self.idle[cause] for cause in causes or IDLE_CAUSES) / total if total else 0.0

    def dollars_per_million(self, dollars_per_hour: float) -> float:
        """Returns what a million tokens of prompts and outputs cost, at so much a replica and hour."""
        tokens = self.prompt_tokens + self.output_tokens
        return self.replicas * self.seconds / 3600 * dollars_per_hour / max(1, tokens) * 1e6


@dataclass(slots=True)
class _State:
    engine: SimEngine
    slow: float
    is_busy: bool = False
    idle_since: float = 0.0
    cause: Idle = "load"
    ended: float = 0.0


def run_fleet(
    replicas: Sequence[Replica],
    feeder: Feeder,
    arrivals: Iterable[SimRequest] = (),
    *,
    driver: Driver | None = None,
    alone: float = 1.0,
) -> FleetOutcome:
    """Runs until nothing happens any more.

    arrivals  requests that come at their times, ascending; what a feeder has from the start needs none
    driver    of a real fleet; None: work is given at once, whenever a request has ended
    alone     times the seconds that a step takes while no other replica has work: those on one machine share its caches
              and its memory
    """
    return _Simulation(replicas, feeder, iter(arrivals), driver, alone).run()


class _Simulation:
    def __init__(
        self,
        replicas: Sequence[Replica],
        feeder: Feeder,
        arrivals: Iterable[SimRequest],
        driver: Driver | None,
        alone: float,
    ):
        self.feeder, self._driver, self._alone = feeder, driver, alone
        self._open = [0] * len(replicas)  # requests that each was given, and that have not ended
        self.result = FleetOutcome(len(replicas))
        self._states: list[_State | None] = [None] * len(replicas)
        self._replicas = replicas
        self._arrivals = iter(arrivals)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._stretches: list[tuple[float, float]] = []
        self._wake: float | None = None
        self._given = 0.0  # when something was given last: all idle time after it is the tail

    def run(self) -> FleetOutcome:
        for number, replica in enumerate(self._replicas):
            self._push(replica.load, "join", number)
        self._next_arrival()
        now = 0.0
        while self._events:
            now = self._events[0][0]
            touched: set[int] = set()
            is_news = False
            while self._events and self._events[0][0] == now:  # what happens at one time is known before work is given
                _, _, kind, what = heapq.heappop(self._events)
                is_news |= self._handle(kind, what, now, touched)
            if is_news:
                self._give(now, touched)
            for number in sorted(touched):
                self._step(number, now)
        self._finish(now)
        return self.result

    def _push(self, time: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, what))

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._push(request.arrival, "arrive", request)

    def _handle(self, kind: str, what: object, now: float, touched: set[int]) -> bool:
        """Returns whether work may be given because of it; adds the replica that it is about to `touched`."""
        if kind == "join":
            assert isinstance(what, int)
            replica = self._replicas[what]
            state = self._states[what] = _State(replica.engine(), replica.slow, idle_since=now)
            self.result.idle["load"] += now
            self.feeder.joined(what, state.engine, now)
            touched.add(what)
        elif kind == "arrive":
            assert isinstance(what, SimRequest)
            self.feeder.arrived(what, now)
            self._next_arrival()
        elif kind == "step":
            assert isinstance(what, tuple)
            number, stretch = what
            events = self._stepped(number, stretch, now)
            touched.add(number)
            if self._driver is not None:
                self._push(now + self._driver.delay, "heard", (number, stretch, events))
                return False
            self.feeder.worked(number, stretch, events, now)
            return bool(stretch.ended)
        elif kind == "heard":
            assert isinstance(what, tuple)
            self.feeder.worked(*what, now)
        elif kind == "given":
            assert isinstance(what, tuple)
            self._submit(*what)
            touched.add(what[0])
            return False
        else:
            self._wake = None
        return True

    def _stepped(self, number: int, stretch: Stretch, now: float) -> CacheEvents | None:
        """Counts what a replica has done, and returns what its cache reports."""
        state, result = self._states[number], self.result
        assert state is not None
        state.is_busy = False
        events = state.engine.events()
        result.steps += stretch.steps
        if not stretch.ended:
            return events
        state.ended = result.seconds = now
        result.requests += len(stretch.ended)
        self._open[number] -= len(stretch.ended)
        for request, _ in stretch.ended:
            result.prompt_tokens += request.rows
            result.output_tokens += request.output
            result.waits.append(now - request.arrival)
        return events

    def _give(self, now: float, touched: set[int]) -> None:
        driver, late = self._driver, 0.0
        for number, requests in self.feeder.give(now):
            self._given = now + late
            self._open[number] += len(requests)
            if late:
                self._push(now + late, "given", (number, requests))
            else:
                self._submit(number, requests)
                touched.add(number)
            late += 0.0 if driver is None else driver.each
        time = self.feeder.next_time()
        # A time that has passed needs no call: whatever happens next brings one.
        if time is not None and time > now and (self._wake is None or time < self._wake):
            self._wake = time
            self._push(time, "wake", None)

    def _submit(self, number: int, requests: Sequence[SimRequest]) -> None:
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
        is_alone = self._alone != 1 and sum(map(bool, self._open)) == 1
        if (times := state.slow * (self._alone if is_alone else 1.0)) != 1:
            stretch = stretch._replace(seconds=stretch.seconds * times)
        seconds = stretch.seconds
        self.result.busy += seconds
        self._stretches.append((now, now + seconds))
        self._push(now + seconds, "step", (number, stretch))

    def _finish(self, now: float) -> None:
        result = self.result
        for state in self._states:
            assert state is not None
            result.ended_at.append(state.ended)
            if 0 <= state.idle_since < result.seconds:
                tail = min(max(state.idle_since, self._given), result.seconds)
                result.idle[state.cause] += tail - state.idle_since
                result.idle["tail"] += result.seconds - tail
            result.hits.add(state.engine.hits)
        result.use = _use(self._stretches, result.seconds, result.replicas)


def _use(stretches: list[tuple[float, float]], seconds: float, replicas: int) -> list[float]:
    """Returns the share of the replicas that are at work in each of `_BINS` parts of the time."""
    if not seconds:
        return []
    import numpy as np

    edges = np.linspace(0, seconds, _BINS + 1)
    starts, stops = np.array(stretches).T
    # Work done before each edge: of every stretch what lies before it.
    starts, stops = np.sort(starts), np.sort(stops)
    before = _area(starts, edges) - _area(stops, edges)
    return (np.diff(before) / (seconds / _BINS) / replicas).tolist()


def _area(times, edges):
    """Returns the sum over `times` (ascending) of how far each lies before each edge, 0 where it lies behind."""
    import numpy as np

    count = np.searchsorted(times, edges)
    sums = np.concatenate(([0.0], np.cumsum(times)))
    return count * edges - sums[count]
