"""What an engine has done: its Stats, whom it tells of each step, and how large a step may be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import OutOfMemoryError
from ..schedule.steps import Message
from ..types import Stats
from ..worker.protocol import Ticket, Worker


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A StepInfo is what one step did, for progress and the report.

    rows           how many rows went through the model; where a step is a visit, those that made their first
    path_rows      how many rows of earlier steps these attended to
    requests_done  how many requests ended with it
    tokens_done    how many tokens the sequences of these requests had
    started        time.perf_counter() when it began
    seconds        of the forward pass with its read-outs
    running        how many running sequences had a row each
    """

    rows: int
    path_rows: int
    requests_done: int
    tokens_done: int
    started: float
    seconds: float
    running: int = 0


Listener = Callable[[StepInfo], None]


class Meter:
    """A Meter owns the Stats of an engine: threads that run at once add to them here."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def add(self, *, seconds: dict[str, float] | None = None, **counts: int) -> None:
        """Adds to the Stats.

        seconds  by part
        counts   by field of Stats; they add up, but `path_rows_peak` is the largest that was given
        """
        with self._lock:
            stats = self.stats
            stats.path_rows_peak = max(stats.path_rows_peak, counts.pop("path_rows_peak", 0))
            for name, count in counts.items():
                setattr(stats, name, getattr(stats, name) + count)
            for part, spent in (seconds or {}).items():
                if spent or part != "compile":
                    stats.add_seconds(part, spent)

    def reset(self) -> Stats:
        """Begins again from nothing, and returns what was counted until now."""
        with self._lock:
            self.stats, before = Stats(), self.stats
        return before

    def tell(self, step: StepInfo) -> None:
        """Tells all who listen of a step."""
        for listener in tuple(self._listeners):
            listener(step)

    @property
    def is_heard(self) -> bool:
        """Returns whether anybody listens."""
        return bool(self._listeners)

    @contextmanager
    def heard_by(self, listener: Listener | None) -> Iterator[None]:
        """Returns a context within which the listener, if there is one, is told of every step."""
        if listener is None:
            yield
            return
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


# After so many steps for which memory was large enough, they may be twice as large again.
STEPS_UNTIL_LARGER = 256


class StepBudget:
    """A StepBudget is the most rows that a step may have: as many as were asked for, fewer after memory was too small,
    and more again once it has been large enough for long.

    rows   the most rows of the next step
    least  it never falls below that
    """

    def __init__(self, rows: int, *, least: int = 1):
        self.rows, self.least = rows, least
        self._most, self._steps = rows, 0

    def start(self, worker: Worker, message: Message, rows: int, prepared: Any = None) -> Ticket | None:
        """Starts a step of `rows` rows and returns its ticket.

        Returns None where memory is too small for the step; `rows` is then at most half of the step's.

        Raises OutOfMemoryError where memory is too small for the least of steps.
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
