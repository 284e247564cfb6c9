"""The counters of an engine, its listeners, and the budget of a step's rows."""

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
    """A StepInfo describes one step, for progress and the report.

    rows           how many rows went through the model
    path_rows      how many rows of earlier steps these attended to
    requests_done  how many requests ended with the step
    tokens_done    how many tokens the sequences of these requests had
    started_at     time.perf_counter() when the step began
    seconds        the time of the forward pass with its read-outs
    running        how many rows were the last token of a sequence
    """

    rows: int
    path_rows: int
    requests_done: int
    tokens_done: int
    started_at: float
    seconds: float
    running: int = 0


Listener = Callable[[StepInfo], None]


class Meter:
    """A Meter owns the Stats of an engine, to which several threads add.

    stats  the counters since the meter was made, or since `reset`
    """

    def __init__(self) -> None:
        self.stats = Stats()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def add(self, *, seconds: dict[str, float] | None = None, **counts: int) -> None:
        """Adds to the Stats.

        seconds  seconds to add, by part
        counts   counts to add, by field of Stats; of those that end with `_peak` the largest value stays
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
        """Adds a step to the Stats: its rows, and those of them that are unique tokens; the tokens of the requests that
        end with it; and seconds, as `add` does. A step takes less time so than by names."""
        with self._lock:
            stats = self.stats
            stats.steps += 1
            stats.rows_computed += rows
            stats.unique_tokens += unique
            stats.tokens += tokens
        self.add(seconds=seconds)

    def reset(self) -> Stats:
        """Sets the Stats to zero, and returns what they were."""
        with self._lock:
            self.stats, before = Stats(), self.stats
        return before

    def notify(self, step: StepInfo) -> None:
        """Calls all listeners with a step."""
        for listener in tuple(self._listeners):
            listener(step)

    @property
    def has_listeners(self) -> bool:
        """Returns whether there is a listener."""
        return bool(self._listeners)

    def tell(self, listener: Listener, wants: bool) -> None:
        """Calls a listener with every step from now on, or no more."""
        if wants != (listener in self._listeners):
            (self._listeners.append if wants else self._listeners.remove)(listener)

    @contextmanager
    def listening(self, listener: Listener | None) -> Iterator[None]:
        """Returns a context in which the listener, unless it is None, is called with every step."""
        if listener is None:
            yield
            return
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


# After this many steps that fitted into memory, the budget doubles again.
STEPS_UNTIL_LARGER = 256


class StepBudget:
    """A StepBudget is the most rows that a step may have. It halves when memory is too small for a step, and doubles
    again after STEPS_UNTIL_LARGER steps that fitted.

    rows   the most rows of the next step
    least  the budget never falls below this many rows
    """

    def __init__(self, rows: int, *, least: int = 1):
        self.rows, self.least = rows, least
        self._most, self._steps = rows, 0

    def start(self, worker: Worker, message: Message, rows: int, prepared: Any = None) -> Ticket | None:
        """Starts a step of `rows` rows and returns its ticket.

        Returns None if memory is too small for the step; the budget is then at most half of the step's rows.

        Raises OutOfMemoryError if memory is too small even for a step of `least` rows.
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
