"""The part of PyTorch's worker that runs the rows of a step through a looped model."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...engine.schedule.steps import SlotStep
from ...engine.worker import Ticket
from ...worker.parts import WorkerPart
from ...worker.torch.device import send
from ...worker.torch.layer import Layer
from ...worker.torch.lora import NO_ADAPTERS, RowAdapters
from ...worker.torch.model import Pass
from ...worker.torch.ops import choose_ops
from ...worker.torch.slots import SlotAttend, SlotBatch, slot_plans
from ...worker.torch.worker import TorchWorker
from .model import LoopedLM
from .passes import StepRows, facts_of, run_slots


def looped_part(model: LoopedLM) -> WorkerPart:
    """Return the worker part for a looped model.

    Raise UnsupportedModelError for a router that steps cannot follow, and InputError for a gate or a router that cannot
    be split over ranks.
    """
    facts = facts_of(model.loop, model.ranks.size)

    def run(worker: TorchWorker, step: SlotStep) -> Ticket:
        return run_slots(TensorRows(worker, model, step), step, worker.read_slots)

    return WorkerPart({SlotStep: run}, facts)


class TensorRows(StepRows[Tensor, SlotBatch]):
    """The rows of a step over slots, in PyTorch."""

    def __init__(self, worker: TorchWorker, model: LoopedLM, step: SlotStep):
        assert worker.store is not None
        super().__init__(model, step.positions, step.read_rows, worker.prepare_slots(step))
        self._lm, self._step, self._store, self._device = model, step, worker.store, model.device
        self._ops = choose_ops(model.dtype, model.device)
        self._angles: dict[int, list[Tensor]] = {}  # {id() of a batch: tables of `cos_sin`}

    def start(self) -> Tensor:
        model, batch = self._lm, self.whole
        x = model.embed(batch.tokens, batch.positions)
        return self.go_through(x, batch, model.prelude, 0, is_last=False)

    def go_through(self, x: Tensor, batch: SlotBatch, layers: range, plane: int, is_last: bool) -> Tensor:
        if not layers:
            return x
        model, config = self._lm, self._lm.config
        tables, likes = self._angles_of(batch), [model.first[layer] for layer in layers]
        planes = {plane + at: config.planes[like] for at, like in enumerate(likes)}
        rows = Pass(
            x, None, {plane + at: tables[like] for at, like in enumerate(likes)},
            SlotAttend(self._store, batch, planes, config.scale), batch.read_rows if is_last else None,
            batch.adapters, self._ops, plane,
        )  # fmt: skip
        model.go_through(rows, layers)
        return rows.stream

    def _angles_of(self, batch: SlotBatch) -> list[Tensor]:
        tables = self._angles.get(id(batch))
        if tables is None:
            tables = self._angles[id(batch)] = self._lm.cos_sin(batch.positions)
        return tables

    def part(self, rows: np.ndarray, of_read: np.ndarray | None) -> SlotBatch:
        step, whole, config = self._step, self.whole, self._lm.config
        windows = {plane.window for plane in config.planes}
        at, plans = send(rows, self._device), slot_plans(step, self._store, config, windows, rows)
        read_plans = plans
        if of_read is not None:
            read_plans = slot_plans(step, self._store, config, config.read_windows, rows[of_read])
        return SlotBatch(
            whole.tokens[at], whole.positions[at], whole.slots[at],
            None if of_read is None else send(of_read, self._device), plans, read_plans,
            self._adapters_of(rows, of_read),
        )  # fmt: skip

    def _adapters_of(self, rows: np.ndarray, of_read: np.ndarray | None = None) -> RowAdapters:
        adapters = self.whole.adapters
        if adapters is NO_ADAPTERS:
            return adapters
        return RowAdapters(adapters.adapters, adapters.numbers[rows], of_read)

    def project(self, x: Tensor, rows: np.ndarray, layer: int) -> tuple[Tensor, Tensor]:
        model, module = self._lm, self._lm.layers[layer]
        cos_sin = model.cos_sin(self.whole.positions[send(rows, self._device)])[model.first[layer]]
        assert isinstance(module, Layer)
        return module.keys_values(x.clone(), cos_sin, self._ops, self._adapters_of(rows))

    def read(self, plane: int, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._store.read(plane, self.whole.slots[send(rows, self._device)])

    def write(self, plane: int, rows: np.ndarray, keys: Tensor, values: Tensor) -> None:
        self._store.write(plane, self.whole.slots[send(rows, self._device)], keys, values)
