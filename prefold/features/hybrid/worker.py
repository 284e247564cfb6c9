"""The states of a hybrid in the PyTorch worker: one table per row stream, and one for the slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...engine.worker import DONE, Ticket
from ...worker.parts import WorkerPart
from ...worker.torch.model import CausalLM
from ...worker.torch.rows import Batch
from ...worker.torch.worker import TorchWorker
from .carry import Carry, tensor_table
from .states import StateTable
from .steps import MakeStates, StateFacts, StateSlotStep, StateStreamStep


def state_part(model: CausalLM) -> WorkerPart:
    """Return the worker part that stores states."""
    config, dtype, device = model.config, model.dtype, model.device
    paths: dict[int, StateTable] = {}
    table: StateTable | None = None

    def run_stream(worker: TorchWorker, step: StateStreamStep) -> Ticket:
        batch = worker.prepare(step)
        assert batch is not None
        return run_batch(worker, batch)

    def run_batch(worker: TorchWorker, batch: Batch) -> Ticket:
        step = batch.step
        assert isinstance(step, StateStreamStep)
        if (path := paths.get(step.stream)) is None:
            path = paths[step.stream] = tensor_table(config, 1, dtype, device)
        placed = path.place(step.runs)
        carry = Carry(path, placed, len(step.end) - step.path, device, batch.scatter, batch.gather)
        ticket = worker.run_batch(batch, {"states": carry})
        path.store(step.runs, placed)
        path.keep(np.append(step.kept_states, step.runs.slots))
        return ticket

    def run_slots(worker: TorchWorker, step: StateSlotStep) -> Ticket:
        assert table is not None
        placed = table.place(step.runs)
        ticket = worker.run_slots(step, {"states": Carry(table, placed, step.num_rows, device)})
        table.store(step.runs, placed)
        return ticket

    def make_states(worker: TorchWorker, message: MakeStates) -> Ticket:
        nonlocal table
        table = tensor_table(config, message.slots, dtype, device)
        return DONE

    handlers: dict[type, Callable[[Any, Any], Ticket]] = {
        StateStreamStep: run_stream,
        Batch: run_batch,
        StateSlotStep: run_slots,
        MakeStates: make_states,
    }
    state_bytes = sum(part.nbytes for parts in tensor_table(config, 1, dtype, device).tensors for part in parts)
    return WorkerPart(handlers, StateFacts(state_bytes), forget=lambda stream: paths.pop(stream, None))
