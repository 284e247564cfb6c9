"""What hybrids add to an engine: schedulers that say which states rows start from, and what is refused. No torch."""

from __future__ import annotations

from ..engine.options import EngineOptions
from ..schedule.parts import EnginePart
from ..worker.protocol import Worker
from .steps import StateFacts
from .stream import StateStreams


class States(EnginePart):
    """A States is the EnginePart for a hybrid."""

    def __init__(self, worker: Worker, options: EngineOptions, facts: StateFacts):
        self._worker, self._options, self._facts = worker, options.generation, facts

    def stream_scheduler(self) -> StateStreams:
        return StateStreams()


def engine_part(worker: Worker, options: EngineOptions) -> States | None:
    """Returns the EnginePart for a worker's model; None where it is no hybrid."""
    facts = worker.facts.of(StateFacts)
    return None if facts is None else States(worker, options, facts)
