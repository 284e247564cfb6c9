"""What hybrids add to a worker: the states of the paths of row streams, and of slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..device import send
from ..worker.local import LocalWorker
from ..worker.protocol import DONE, Ticket, WorkerPart
from ..worker.rows import Batch
from .carry import Carry, StateTable
from .model import HybridLM
from .steps import ZERO, MakeStates, StateFacts, StateSlotStep, StateStreamStep


class PathStates:
    """A PathStates holds the states of one path of a stream.

    depths  int64, ascending: how many rows are above each state; the first is that of no rows
    table   the states, in this order
    """

    def __init__(self, depths: np.ndarray, table: StateTable):
        self.depths, self.table = depths, table

    def places(self, depths: np.ndarray) -> np.ndarray:
        """Returns where in the table the states of these depths are. Raises ValueError where one is not there."""
        places = np.searchsorted(self.depths, depths)
        if (places >= len(self.depths)).any() or not np.array_equal(self.depths[places], depths):
            raise ValueError(f"the step goes on from states behind {depths} rows, its stream left {self.depths}")
        return places


def state_part(model: HybridLM) -> WorkerPart:
    """Returns the part of a worker that holds states."""
    config, dtype, device = model.config, model.dtype, model.device
    none = StateTable.of(config, 1, dtype, device)
    paths: dict[int, PathStates] = {}
    table: StateTable | None = None

    def run_stream(worker: LocalWorker, step: StateStreamStep) -> Ticket:
        batch = worker.prepare(step)
        assert batch is not None
        return run_batch(worker, batch)

    def run_batch(worker: LocalWorker, batch: Batch) -> Ticket:
        step = batch.step
        assert isinstance(step, StateStreamStep)
        path = paths.get(step.stream) or PathStates(np.zeros(1, np.int64), none)
        runs = step.runs
        source = runs.source.copy()
        in_slots = source >= 0
        source[in_slots] = path.places(source[in_slots])
        kept = path.places(np.append(ZERO, step.kept_states))
        carry = Carry(
            path.table,
            replace(runs, source=source),
            len(step.end) - step.path,
            device,
            batch.scatter,
            batch.gather,
        )
        ticket = worker.run_batch(batch, {"states": carry})
        paths[step.stream] = PathStates(
            np.concatenate((path.depths[kept], runs.slots)), path.table.pick(send(kept, device), carry.ends)
        )
        return ticket

    def run_slots(worker: LocalWorker, step: StateSlotStep) -> Ticket:
        assert table is not None
        carry = Carry(table, step.runs, step.num_rows, device)
        ticket = worker.run_slots(step, {"states": carry})
        table.put(send(step.runs.slots, device), carry.ends)
        return ticket

    def make_states(worker: LocalWorker, message: MakeStates) -> Ticket:
        nonlocal table
        table = StateTable.of(config, message.slots, dtype, device)
        return DONE

    handlers: dict[type, Callable[[Any, Any], Ticket]] = {
        StateStreamStep: run_stream,
        Batch: run_batch,
        StateSlotStep: run_slots,
        MakeStates: make_states,
    }
    state_bytes = sum(part.nbytes for parts in none.tensors for part in parts)
    return WorkerPart(handlers, StateFacts(state_bytes), forget=lambda stream: paths.pop(stream, None))
