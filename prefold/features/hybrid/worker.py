"""A hybrid as a function of rows, and the states that a worker keeps for it: of paths of row streams, and of slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...engine.worker import DONE, Ticket
from ...errors import UnsupportedModelError
from ...model.lora import NO_ADAPTERS, RowAdapters
from ...model.rotary_tables import RotaryTables
from ...model.transformer import Attend, CausalLM, MediaRows
from ...worker.local import LocalWorker
from ...worker.parts import WorkerPart
from ...worker.rows import Batch
from .carry import Carry, tensor_table
from .config import HybridConfig
from .layers import GatedAttention, StateLayer
from .states import StateTable
from .steps import MakeStates, StateFacts, StateSlotStep, StateStreamStep


class HybridLM(CausalLM):
    """A HybridLM is a CausalLM some of whose layers have a state in place of attention."""

    config: HybridConfig

    def new_layer(self, number: int, **place: Any) -> nn.Module:
        config = self.local
        assert isinstance(config, HybridConfig)
        if self.ranks.size > 1:
            raise UnsupportedModelError("a model with layers of states is not split over ranks; use tensor_parallel 1")
        if config.mixer(number) is not None:
            return StateLayer(config, number, self.ranks, **place)
        if config.gated or config.rotated_dim is not None:
            return GatedAttention(config, number, self.ranks, splits_q=True, **place)
        return super().new_layer(number, **place)

    def rotary(self, device: torch.device) -> RotaryTables:
        if self._rotary is None or self._rotary.device != device:
            self._rotary = RotaryTables(self.config.ropes, self.config.rotated_dim or self.config.head_dim, device)
        return self._rotary

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        read_rows: Tensor | None = None,
        adapters: RowAdapters = NO_ADAPTERS,
        media: MediaRows | None = None,
        states: Carry | None = None,
    ) -> Tensor:
        """Returns hidden states as a CausalLM does, from the same arguments. states: those of the rows' paths."""
        if states is None or torch.is_grad_enabled():
            raise UnsupportedModelError("a model with layers of states runs in an engine, and is not trained")
        rows, plane = self.start(tokens, positions, attend, read_rows, adapters, media), 0
        for number, layer in enumerate(self.layers):
            read = read_rows if number == self.config.layers - 1 else None
            options: dict[str, Any] = {"read": read, "adapters": adapters, "ops": rows.ops}
            if isinstance(layer, StateLayer):
                options["states"] = states.of(number)
            else:
                options |= {"cos_sin": rows.cos_sin[plane], "attend": partial(attend, plane)}
                plane += 1
            rows.x, rows.delta = layer(rows.x, rows.delta, **options)
        return self.normed(rows)


def state_part(model: HybridLM) -> WorkerPart:
    """Returns the part of a worker that holds states."""
    config, dtype, device = model.config, model.dtype, model.device
    paths: dict[int, StateTable] = {}
    table: StateTable | None = None

    def run_stream(worker: LocalWorker, step: StateStreamStep) -> Ticket:
        batch = worker.prepare(step)
        assert batch is not None
        return run_batch(worker, batch)

    def run_batch(worker: LocalWorker, batch: Batch) -> Ticket:
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

    def run_slots(worker: LocalWorker, step: StateSlotStep) -> Ticket:
        assert table is not None
        placed = table.place(step.runs)
        ticket = worker.run_slots(step, {"states": Carry(table, placed, step.num_rows, device)})
        table.store(step.runs, placed)
        return ticket

    def make_states(worker: LocalWorker, message: MakeStates) -> Ticket:
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
