"""How many rows a step of a generator may have, whoever says it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..schedule.generate_step import GenerateStep, Running
from .meter import StepBudget
from .pace import Pace
from .step_size import StepSize


class StepRows:
    """A StepRows tells a scheduler before each step how many rows it may have, and takes note of what the step took.

    A pace says how many, where there is one. Without a pace it is as many as were found to be fast (`learns`), or as
    many as there are. It is never more than the budget.

    budget  the most rows of a step
    learns  whether steps without a pace may be smaller than the budget
    pace    of requests that live readers and batches share an engine for; None: there is none
    """

    def __init__(self, scheduler: Any, budget: StepBudget, *, learns: bool):
        self._scheduler, self._budget = scheduler, budget
        self._size = StepSize() if learns else None
        self.pace: Pace | None = None
        self._is_unpaced = False  # whether the pace says nothing for now

    def reset(self) -> None:
        """Lets steps have as many rows as the budget, until somebody says otherwise."""
        self._scheduler.max_batch_rows = self._budget.rows

    def shrink(self) -> None:
        """Takes note that the budget is smaller than it was."""
        self._scheduler.max_batch_rows = min(self._scheduler.max_batch_rows, self._budget.rows)

    @contextmanager
    def unpaced(self) -> Iterator[None]:
        """Returns a context in which no pace says how many rows steps have, and of whom."""
        if self.pace is not None:
            self.reset()
            self.pace.admission.batch_rows = None
        self._is_unpaced = True
        try:
            yield
        finally:
            self._is_unpaced = False

    @property
    def _speaks(self) -> Pace | None:
        """Returns the pace that says how many rows the next step may have; None: none does."""
        return None if self._is_unpaced else self.pace

    def before_admission(self, *, is_idle: bool) -> None:
        """Says how many rows the next step may have, where no pace does. is_idle: nobody has anything to do."""
        if self._size is None:
            return
        if is_idle:
            self._size.reset()
        if self._speaks is None:
            scheduler, budget = self._scheduler, self._budget
            waiting, running = scheduler.num_waiting, len(scheduler.running)
            scheduler.max_batch_rows = self._size.rows(budget.rows, waiting, running, least=budget.least)

    def before_plan(self) -> None:
        """Says how many rows the next step may have, where a pace does."""
        if (pace := self._speaks) is not None:
            pace.settle(self._scheduler, self._budget.rows)

    def note(self, step: GenerateStep, seconds: float, done: Sequence[Running]) -> None:
        """Takes note of what a step took. done: the sequences that ended with it."""
        if (pace := self._speaks) is not None:
            pace.times.note(step.num_rows, seconds)
        elif self._size is not None:
            self._size.note(
                step.num_rows - step.decode_rows,
                step.decode_rows,
                seconds,
                most=self._budget.rows,
                waiting=self._scheduler.num_waiting,
                began=len(step.takers) - step.decode_rows,
                ended=len(done),
                tokens=sum(sequence.known for sequence in done),
            )
