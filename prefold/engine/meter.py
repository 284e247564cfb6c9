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

__all__ = ["Meter", "StepBudget", "StepInfo"]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What one step did, for progress and the report.

    rows went through the model; tokens_done is what the prompts that ended here held; path_rows were
    carried in; started is time.perf_counter(); seconds is the forward pass with its read-outs;
    running sequences got a token each.
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
    """The one owner of an engine's Stats: threads that run at once add to them here."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def add(self, *, seconds: dict[str, float] | None = None, **counts: int) -> None:
        """counts: fields of Stats; of `path_rows_peak` the largest counts, others add up. seconds: by part."""
        with self._lock:
            stats = self.stats
            stats.path_rows_peak = max(stats.path_rows_peak, counts.pop("path_rows_peak", 0))
            for name, count in counts.items():
                setattr(stats, name, getattr(stats, name) + count)
            for part, spent in (seconds or {}).items():
                if spent or part != "compile":
                    stats.add_seconds(part, spent)

    def reset(self) -> Stats:
        """Begin again from nothing; returns what was counted until now."""
        with self._lock:
            self.stats, before = Stats(), self.stats
        return before

    def tell(self, step: StepInfo) -> None:
        for listener in tuple(self._listeners):
            listener(step)

    @property
    def is_heard(self) -> bool:
        return bool(self._listeners)

    @contextmanager
    def heard_by(self, listener: Listener | None) -> Iterator[None]:
        """Within the context the listener is told of every step."""
        if listener is None:
            yield
            return
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


class StepBudget:
    """The most rows a step may have: what was asked for, until memory turns out to be too small for it."""

    def __init__(self, rows: int):
        self.rows = rows

    def start(self, worker: Worker, message: Message, rows: int, prepared: Any = None) -> Ticket | None:
        """Start a step of so many rows. None: memory is too small for it, and later steps have at most half of them.

        Raises OutOfMemoryError for one row.
        """
        try:
            return worker.start(message, prepared)
        except OutOfMemoryError:
            if rows < 2:
                raise
            self.rows = max(1, min(self.rows, rows // 2))
            return None
