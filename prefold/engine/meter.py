"""The counters of an engine, its listeners, and the row budget of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import OutOfMemoryError
from ..spec.requests import Stats
from .schedule.steps import Message
from .worker import Ticket, Worker


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step, as progress and the report see it."""

    rows: int  # rows computed
    path_rows: int  # rows of earlier steps that these attend to
    requests_done: int  # requests that ended with the step
    tokens_done: int  # total tokens of these requests' sequences
    started_at: float  # time.perf_counter() at the start
    seconds: float  # time of the forward pass with its read-outs
    running: int = 0  # decode rows: the last token of a sequence


Listener = Callable[[StepInfo], None]


class Meter:
    """The Stats of an engine, to which several threads add; counted since creation or since `reset`."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def add(self, *, seconds: dict[str, float] | None = None, **counts: int) -> None:
        """Add to the Stats.

        Args:
            seconds: {part: seconds to add}.
            counts: Counts to add, by field of Stats. Fields that end with `_peak` get the maximum instead.
        """
        with self._lock:
            stats = self.stats
            for name, count in counts.items():
                before = getattr(stats, name)
                setattr(stats, name, max(before, count) if name.endswith("_peak") else before + count)
            for part, spent in (seconds or {}).items():
                if spent or part != "compile":
                    stats.add_seconds(part, spent)

    def add_step(self, rows: int, unique: int, tokens: int, seconds: dict[str, float]) -> None:
        """Add a step to the Stats; faster than `add` by field names.

        `unique` of its `rows` are unique tokens. `tokens` are the tokens of the requests that end with it. For
        `seconds`, see `add`.
        """
        with self._lock:
            stats = self.stats
            stats.steps += 1
            stats.rows_computed += rows
            stats.unique_tokens += unique
            stats.tokens += tokens
        self.add(seconds=seconds)

    def reset(self) -> Stats:
        """Set the Stats to zero, and return their old values."""
        with self._lock:
            self.stats, before = Stats(), self.stats
        return before

    def notify(self, step: StepInfo) -> None:
        """Call all listeners with a step."""
        for listener in tuple(self._listeners):
            listener(step)

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def tell(self, listener: Listener, wants: bool) -> None:
        """Start to call a listener with every step if `wants`, else stop to call it."""
        if wants != (listener in self._listeners):
            (self._listeners.append if wants else self._listeners.remove)(listener)

    @contextmanager
    def listening(self, listener: Listener | None) -> Iterator[None]:
        """Return a context in which the listener, unless it is None, is called with every step."""
        if listener is None:
            yield
            return
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


# After this many steps that fit into memory, the budget doubles again.
STEPS_UNTIL_LARGER = 256


class StepBudget:
    """The limit on the rows of a step.

    The limit halves when memory is too small for a step, and doubles again after STEPS_UNTIL_LARGER steps that fit. It
    never falls below `least` rows.
    """

    def __init__(self, rows: int, *, least: int = 1):
        self.rows, self.least = rows, least
        self._most, self._steps = rows, 0

    def start(self, worker: Worker, message: Message, rows: int, prepared: Any = None) -> Ticket | None:
        """Start a step of `rows` rows and return its ticket.

        Return None if memory is too small for the step; the budget is then at most half of the step's rows. Raise
        OutOfMemoryError if memory is too small even for a step of `least` rows.
        """
        try:
            ticket = worker.start(message, prepared)
        except OutOfMemoryError:
            if rows <= self.least:
                raise
            self.rows, self._steps = max(self.least, min(self.rows, rows // 2)), 0
            return None
        if self.rows < self._most:
            self._steps += 1
            if self._steps == STEPS_UNTIL_LARGER:
                self.rows, self._steps = min(2 * self.rows, self._most), 0
        return ticket
