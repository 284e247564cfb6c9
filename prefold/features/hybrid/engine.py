"""What hybrids add to an engine: schedulers that say which states rows start from, and what is refused. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from ...engine.meter import Meter
from ...engine.options import EngineOptions
from ...engine.schedule.generate_step import HoldsRows
from ...engine.schedule.parts import EnginePart, over_store
from ...engine.worker import Worker
from ...errors import InputError
from .scheduler import StateScheduler
from .steps import MakeStates, StateFacts
from .stream import StateStreams

# Where nobody says how many bytes states may take: this share of what K/V may take, and so many states for each
# sequence that may run at once, at most.
SHARE, MOST_PER_SEQUENCE = 0.25, 4


class States(EnginePart):
    """A States is the EnginePart for a hybrid."""

    def __init__(self, worker: Worker, options: EngineOptions, facts: StateFacts, meter: Meter):
        self._worker, self._options, self._facts, self._meter = worker, options.generation, facts, meter

    def stream_scheduler(self) -> StateStreams:
        return StateStreams(self._note)

    def scheduler(self, max_batch_rows: int, holds_rows: HoldsRows | None) -> StateScheduler:
        worker, options = self._worker, self._options
        size, running = self._facts.state_bytes, options.max_running
        if options.state_memory is None:
            slots = int(worker.kv_slots(options.kv_memory, size) * SHARE)
            slots = min(max(slots, 2), MOST_PER_SEQUENCE * running)
        else:
            slots = worker.kv_slots(options.state_memory, size)
        if slots < 2:
            raise InputError(
                f"state_memory is {options.state_memory} bytes, and one state takes {size}",
                field="state_memory",
                remedy=f"give {3 * size} or more",
            )
        worker.start(MakeStates(slots + 1)).result()
        kind: Any = partial(StateScheduler, state_slots=slots)
        scheduler: StateScheduler = over_store(kind, worker, options, max_batch_rows, holds_rows)
        scheduler.max_running = min(scheduler.max_running, slots)
        return scheduler

    def before_plan(self, scheduler: StateScheduler, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        self._note(len(scheduler.states))
        return {}

    def _note(self, states: int) -> None:
        """Counts the states that are kept now."""
        self._meter.add(state_bytes_peak=states * self._facts.state_bytes)


def engine_part(worker: Worker, options: EngineOptions, meter: Meter) -> States | None:
    """Returns the EnginePart for a worker's model; None where it is no hybrid."""
    facts = worker.facts.of(StateFacts)
    return None if facts is None else States(worker, options, facts, meter)
