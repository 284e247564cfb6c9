"""What stands for a replica's engine in the simulator: it takes requests, and says what each of its steps does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..cache import CacheEvents
from ..cache.events import CacheEvent, Cleared
from ..engine.step_size import StepSize
from .costs import StepCost
from .requests import SimRequest

__all__ = ["MOST_ROWS", "Ended", "EventLog", "Hits", "SimEngine", "SlotEngine", "Stretch"]

# Rows of a step where nobody says, at most: vLLM's own choice for offline use.
MOST_ROWS = 8192


@dataclass(slots=True)
class Hits:
    """Counts tokens of prompts, each where it was found.

    asked            of all requests, each once
    first_admission  there when the request was first admitted
    in_step          shared with a request that was admitted in the same step
    recompute        found again by a request that had been preempted
    tier             brought back from another tier than the KV store; no engine here has one
    computed         rows of prompts that were computed, again ones included
    queries, found   as vLLM counts: each look-up, also those of requests that were preempted or did not fit yet
    preemptions      sequences taken out because memory was full
    """

    asked: int = 0
    first_admission: int = 0
    in_step: int = 0
    recompute: int = 0
    tier: int = 0
    computed: int = 0
    queries: int = 0
    found: int = 0
    preemptions: int = 0

    def add(self, other: Hits) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def rates(self) -> dict[str, float]:
        """Returns the four counters as shares of the tokens asked for, and the rate that vLLM would print."""
        asked = max(1, self.asked)
        names = ("first_admission", "in_step", "recompute", "tier")
        return {name: getattr(self, name) / asked for name in names} | {"vllm": self.found / max(1, self.queries)}


class Ended(NamedTuple):
    """A request that has ended; cached: tokens of its prompt that were not computed for it."""

    request: SimRequest
    cached: int


class Stretch(NamedTuple):
    """One step, or several alike. `running` sequences took part."""

    seconds: float
    prefill: int
    decode: int
    steps: int
    running: int
    ended: Sequence[Ended] = ()


class EventLog:
    """An EventLog numbers what the cache of a simulated engine reports, which begins with an empty cache."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = [Cleared()]
        self._first = 0  # number of the first of these events

    def add(self, event: CacheEvent) -> None:
        self._events.append(event)

    def drain(self) -> CacheEvents | None:
        """Returns what came since the last call; None where nothing did."""
        if not self._events:
            return None
        found = CacheEvents(0, self._first, tuple(self._events))
        self._first += len(self._events)
        self._events = []
        return found


class SlotEngine:
    """A SlotEngine is what both grains of our engine begin with.

    cost                         of its steps
    max_batch_rows, max_running  of a step; None: as many rows as it finds to be fast, as a real engine does
    slots                        rows that its KV store holds; None: what memory holds
    reports                      whether events are kept for a router
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        max_batch_rows: int | None = 2048,
        max_running: int = 256,
        slots: int | None = None,
        reports: bool = False,
    ):
        self.cost, self.reports = cost, reports
        self.size = StepSize() if max_batch_rows is None else None
        self.max_batch_rows = self._most = MOST_ROWS if max_batch_rows is None else max_batch_rows
        self.max_running = min(max_running, self._most)
        self.slots = cost.kv_rows if slots is None else slots
        self.hits = Hits()
        self.open()

    def open(self) -> None:
        """Begins with an empty KV store."""
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        """Returns how many sequences were not admitted yet."""
        raise NotImplementedError

    @property
    def num_running(self) -> int:
        """Returns how many sequences were."""
        raise NotImplementedError

    def step(self) -> Stretch | None:
        """Runs the next step, or several alike; returns None when nobody waits or runs."""
        size = self.size
        if size is None:
            return self._step()
        if not self.num_running and not self.num_waiting:
            size.reset()
        self.max_batch_rows = size.rows(self._most, self.num_waiting, self.num_running)
        stretch = self._step()
        if stretch is not None:
            steps = stretch.steps
            decode = stretch.decode // steps
            size.note(
                stretch.prefill // steps, decode, stretch.seconds / steps, most=self._most, waiting=self.num_waiting,
                began=stretch.running - decode, ended=len(stretch.ended),
                tokens=sum(one.request.output for one in stretch.ended), steps=steps,
            )  # fmt: skip
        return stretch

    def _step(self) -> Stretch | None:
        raise NotImplementedError


class SimEngine(Protocol):
    hits: Hits

    def submit(self, request: SimRequest) -> None:
        """Take a request."""
        ...

    def step(self) -> Stretch | None:
        """Run the next step, or several of which nothing comes but tokens; None when nobody waits or runs."""
        ...

    def events(self) -> CacheEvents | None:
        """What its cache has to report since the last call."""
        ...
