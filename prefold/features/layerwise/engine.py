"""The engine side of the layer-by-layer pass: it joins the steps of a window into one message. No torch.

The planner makes the steps and their cuts as it does without this feature, so results are bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.meter import Meter
from ...engine.schedule.parts import EnginePart, MakePlanner
from ...engine.schedule.steps import Message, StepResult, StreamStep
from ...engine.schedule.windows import PlannedStep, StreamPlanner


@dataclass(frozen=True, slots=True)
class LayerwiseFacts:
    """Facts about a model that runs layer by layer."""

    max_rows: int  # the most rows of one message


@dataclass(frozen=True, eq=False, slots=True)
class LayerwiseStep(Message):
    """A request for neighbouring steps of one row stream: each layer runs over all steps before the next layer runs.

    Its result is a LayerwiseResult with the values of all steps, in the order of the steps.
    """

    steps: tuple[StreamStep, ...]

    @property
    def num_rows(self) -> int:
        """Return the number of rows that pass the position-wise layers."""
        return sum(step.num_rows for step in self.steps)

    @property
    def path(self) -> int:
        """Return the number of path rows above the first step."""
        return self.steps[0].path

    @property
    def keep(self) -> np.ndarray:
        """Return the longest list of keys that any of the steps stores. Callers use its length."""
        return max((step.keep for step in self.steps), key=len)

    @property
    def tokens(self) -> np.ndarray:
        """Return the token ids of all rows, int32."""
        return np.concatenate([step.tokens for step in self.steps])


@dataclass(frozen=True, eq=False, slots=True)
class LayerwiseResult(StepResult):
    """The values that the steps of a LayerwiseStep read."""

    bytes_read: int = 0  # bytes of weights read for these steps


@dataclass(frozen=True, eq=False, slots=True)
class PlannedSteps(PlannedStep):
    """A planned LayerwiseStep."""

    steps: tuple[PlannedStep, ...]  # the steps that it joins

    @classmethod
    def of(cls, steps: Sequence[PlannedStep]) -> PlannedSteps:
        """Join neighbouring steps."""
        sizes = [len(step.message.read_out.rows) for step in steps]
        firsts = np.cumsum([0, *sizes[:-1]])
        message: Any = LayerwiseStep(tuple(step.message for step in steps))
        return cls(
            steps[0].start,
            steps[-1].stop,
            message,
            np.concatenate([step.requests for step in steps]),
            np.concatenate([step.request_reads + first for step, first in zip(steps, firsts, strict=True)]),
            np.concatenate([step.targets for step in steps]),
            tuple(steps),
        )


class LayerwisePlanner:
    """A planner that joins steps of another planner, up to `max_rows` rows together, but always at least one step."""

    def __init__(self, inner: StreamPlanner, max_rows: int):
        self._inner, self._max_rows = inner, max_rows

    def plan(self, max_rows: int | None = None) -> PlannedStep | None:
        """Return the next steps as one, or None if every row is planned.

        Args:
            max_rows: The most rows of each single step.
        """
        steps, rows = list[PlannedStep](), 0
        while (step := self._inner.plan(max_rows)) is not None:
            rows += step.message.num_rows
            if steps and rows > self._max_rows:
                break
            self._inner.commit(step)
            steps.append(step)
        return PlannedSteps.of(steps) if steps else None

    def commit(self, step: PlannedStep) -> None:
        """Do nothing, because `plan` has already committed the inner steps."""

    def halves(self, step: PlannedStep) -> tuple[PlannedStep, PlannedStep]:
        """Split a PlannedSteps into two: between its steps, or inside its step if it has only one."""
        assert isinstance(step, PlannedSteps)
        if (middle := len(step.steps) // 2) > 0:
            first, second = step.steps[:middle], step.steps[middle:]
        else:
            first, second = ((half,) for half in self._inner.halves(step.steps[0]))
        return PlannedSteps.of(first), PlannedSteps.of(second)


class LayerwisePart(EnginePart):
    """The engine part for a model that runs layer by layer."""

    def __init__(self, facts: LayerwiseFacts, meter: Meter):
        self.max_rows, self._meter = facts.max_rows, meter

    def stream_scheduler(self, inner: MakePlanner) -> MakePlanner:
        return lambda *arguments, **options: LayerwisePlanner(inner(*arguments, **options), self.max_rows)

    def take_result(self, result: StepResult) -> None:
        if isinstance(result, LayerwiseResult):
            self._meter.add(weight_reads=1, weight_bytes=result.bytes_read)
