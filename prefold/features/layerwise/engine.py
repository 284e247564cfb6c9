"""The host's part of passes layer by layer: it joins the steps of a window into one message. No torch.

The steps and their cuts are those of the planner without this feature, so that results are the same, bit for bit.
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
    """What the host knows of a model whose weights are read layer by layer. max_rows: the most rows of a message"""

    max_rows: int


@dataclass(frozen=True, eq=False, slots=True)
class LayerwiseStep(Message):
    """A LayerwiseStep asks for neighbouring steps of one row stream, layer by layer: a layer runs over all of them
    before the next layer does.

    Its result is a LayerwiseResult, with the values of the first step, then those of the second, and so on.
    """

    steps: tuple[StreamStep, ...]

    @property
    def num_rows(self) -> int:
        """Return how many rows go through the model's position-wise layers."""
        return sum(step.num_rows for step in self.steps)

    @property
    def path(self) -> int:
        """Return how many rows are above the first step."""
        return self.steps[0].path

    @property
    def keep(self) -> np.ndarray:
        """Return the keys that are kept after one of the steps: the most that are."""
        return max((step.keep for step in self.steps), key=len)

    @property
    def tokens(self) -> np.ndarray:
        """Return the tokens of all rows, int32."""
        return np.concatenate([step.tokens for step in self.steps])


@dataclass(frozen=True, eq=False, slots=True)
class LayerwiseResult(StepResult):
    """The values that the steps of a LayerwiseStep read. bytes_read: bytes of weights that were read for them"""

    bytes_read: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class PlannedSteps(PlannedStep):
    """A PlannedSteps is a planned LayerwiseStep. steps: those that it joins"""

    steps: tuple[PlannedStep, ...]

    @classmethod
    def of(cls, steps: Sequence[PlannedStep]) -> PlannedSteps:
        """Return the steps as one."""
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
    """A LayerwisePlanner joins steps of another planner, as many as have `max_rows` rows together, but one at least."""

    def __init__(self, inner: StreamPlanner, max_rows: int):
        self._inner, self._max_rows = inner, max_rows

    def plan(self, max_rows: int | None = None) -> PlannedStep | None:
        """Return the next steps as one; None: every row has been planned. max_rows: the most rows of each step"""
        steps, rows = list[PlannedStep](), 0
        while (step := self._inner.plan(max_rows)) is not None:
            rows += step.message.num_rows
            if steps and rows > self._max_rows:
                break
            self._inner.commit(step)
            steps.append(step)
        return PlannedSteps.of(steps) if steps else None

    def commit(self, step: PlannedStep) -> None:
        """Do nothing: `plan` has advanced to the rows behind its steps."""

    def halves(self, step: PlannedStep) -> tuple[PlannedStep, PlannedStep]:
        """Return the steps of a PlannedSteps as two of them; of a single step its halves."""
        assert isinstance(step, PlannedSteps)
        if (middle := len(step.steps) // 2) > 0:
            first, second = step.steps[:middle], step.steps[middle:]
        else:
            first, second = ((half,) for half in self._inner.halves(step.steps[0]))
        return PlannedSteps.of(first), PlannedSteps.of(second)


class LayerwisePart(EnginePart):
    """The EnginePart for a model whose weights are read layer by layer. max_rows: as of LayerwiseFacts"""

    def __init__(self, facts: LayerwiseFacts, meter: Meter):
        self.max_rows, self._meter = facts.max_rows, meter

    def stream_scheduler(self, inner: MakePlanner) -> MakePlanner:
        return lambda *arguments, **options: LayerwisePlanner(inner(*arguments, **options), self.max_rows)

    def take_result(self, result: StepResult) -> None:
        if isinstance(result, LayerwiseResult):
            self._meter.add(weight_reads=1, weight_bytes=result.bytes_read)
