"""The part of the native worker that runs the rows of a step through a looped model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...engine.schedule.steps import SlotStep, StreamStep
from ...engine.worker import Ticket
from ...model.program import Norm
from ...spec.requests import Exits
from ...worker.arrays import Rank
from ...worker.native.arrays import NumpyArrays
from ...worker.native.memory import Workspace
from ...worker.native.model import NativeModel
from ...worker.native.program import NativeProgram, Part, StreamMemory
from ...worker.native.steps import NativePath, PathKV, SlotBatch, StreamBatch, slot_plans
from ...worker.native.store import NativeStore
from ...worker.native.worker import NativeWorker
from ...worker.parts import WorkerPart
from .config import LoopedConfig
from .gates import VARIES
from .passes import LoopedPass, StepRows, facts_of, reading_rules, run_slots
from .steps import Passage, exits_row


def looped_part(model: NativeModel) -> WorkerPart:
    """Return the worker part for a looped model.

    Raise UnsupportedModelError for a router that steps cannot follow, and InputError for a gate or a router that cannot
    be split over ranks.
    """
    looped = NativeLooped(model)
    loop = looped.config.loop
    facts = facts_of(loop, model.ranks.size)

    def over_slots(worker: NativeWorker, step: SlotStep) -> Ticket:
        assert worker.store is not None
        rows = SlotRows(looped, programs_of(worker), worker.prepare_slots(step), worker.store, step)
        return run_slots(rows, step, worker.read_slots)

    def over_stream(worker: NativeWorker, step: StreamStep) -> Ticket:
        batch = worker.prepare(step)
        assert batch is not None
        return over_batch(worker, batch)

    def over_batch(worker: NativeWorker, batch: StreamBatch) -> Ticket:
        return worker.run_rows(batch, lambda batch, path: run_stream(looped, programs_of(worker), batch, path))

    programs: Programs | None = None

    def programs_of(worker: NativeWorker) -> Programs:
        nonlocal programs
        programs = programs or Programs(model, worker)
        return programs

    handlers: dict[type, Callable[[Any, Any], Ticket]] = {
        SlotStep: over_slots,
        StreamStep: over_stream,
        StreamBatch: over_batch,
    }
    varies = VARIES if loop.gate or loop.router is not None else ""
    return WorkerPart(handlers, facts, varies=varies, passes="each visit to a block is one compiled call")


class NativeLooped:
    """A looped model in the form of `gates.LoopedModel`."""

    def __init__(self, model: NativeModel):
        assert isinstance(model.config, LoopedConfig)
        self.native, self.arrays = model, NumpyArrays(model.kernels)
        self._config = model.config
        self._weights = {weight.parts[0][0]: weight for weight in model.program.beside}
        memory = model.memory
        for name, weight in self._weights.items():
            if name.endswith(".weight") and weight not in memory.matrices:  # another worker may have packed it already
                memory.matrices[weight] = model.kernels.pack_words(memory.arrays.pop(weight))

    @property
    def config(self) -> LoopedConfig:
        return self._config

    @property
    def ranks(self) -> Rank:
        return self.native.ranks

    def logits(self, hidden: np.ndarray, ids: Sequence[int] | None = None) -> np.ndarray:
        return self.native.logits(hidden, ids)

    def head(self, hidden: np.ndarray) -> np.ndarray:
        return self.native.head(hidden)

    def multiply(self, name: str, x: np.ndarray) -> np.ndarray:
        memory, weight = self.native.memory, self._weights[f"{name}.weight"]
        bias = self._weights.get(f"{name}.bias")
        added = None if bias is None else memory.arrays[bias]
        return self.native.kernels.linear(x, memory.matrices[weight], weight.rows, added)

    def weight(self, name: str) -> np.ndarray:
        return self.native.memory.arrays[self._weights[name]]

    def norm_rows(self, x: np.ndarray) -> np.ndarray:
        (norm,) = self.native.program.end
        assert isinstance(norm, Norm) and norm.kind != "layer"
        factor, eps = norm.plain
        weight = np.ones(norm.size, x.dtype) if norm.weight is None else self.native.memory.arrays[norm.weight]
        weight = weight if factor == 1 else weight.astype(np.float32) * np.float32(factor)
        return self.native.kernels.add_rms_norm(x, None, weight, eps)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self.native.dtype, copy=False)


class Programs:
    """The compiled programs of a looped model's parts, each compiled at its first use."""

    def __init__(self, model: NativeModel, worker: NativeWorker):
        assert isinstance(model.config, LoopedConfig)
        self._model, self._adapters = model, list(worker.adapters.values())
        self._made: dict[Part, NativeProgram] = {}
        self._workspace = Workspace()
        self._likes = model.config.first_planes

    def of(self, layers: range, *, embeds: bool = False, is_last: bool = False, keys: bool = False) -> NativeProgram:
        """Return the program of some layers. Other arguments are the fields of `Part`."""
        visits = tuple((layer, place, self._likes[layer]) for place, layer in enumerate(layers))
        part = Part(visits, embeds, is_last, keys)
        if (found := self._made.get(part)) is None:
            found = self._made[part] = NativeProgram(self._model, self._adapters, part, self._workspace)
        return found


class SlotRows(StepRows[np.ndarray, SlotBatch]):
    """The rows of a step over slots."""

    def __init__(self, model: NativeLooped, programs: Programs, whole: SlotBatch, store: NativeStore, step: SlotStep):
        super().__init__(model, whole.positions, step.read_rows, whole)
        self._programs, self._store, self._step = programs, store, step

    def start(self) -> np.ndarray:
        prelude = range(self.model.config.loop.prelude)
        return self._programs.of(prelude, embeds=True).through(None, self.whole, self._store)

    def go_through(self, x: np.ndarray, batch: SlotBatch, layers: range, plane: int, is_last: bool) -> np.ndarray:
        return self._programs.of(layers, is_last=is_last).through(x, batch, self._store, plane)

    def part(self, rows: np.ndarray, of_read: np.ndarray | None) -> SlotBatch:
        step, whole, config = self._step, self.whole, self.model.config
        plans = read_plans = slot_plans(step, config, {plane.window for plane in config.planes}, rows)
        if of_read is not None:
            read_plans = slot_plans(step, config, config.read_windows, rows[of_read])
        return SlotBatch(whole.numbers.take(rows, 1), of_read, plans, read_plans, self._adapters_of(rows))

    def _adapters_of(self, rows: np.ndarray) -> np.ndarray | None:
        return None if self.whole.adapters is None else self.whole.adapters[rows]

    def project(self, x: np.ndarray, rows: np.ndarray, layer: int) -> tuple[np.ndarray, np.ndarray]:
        batch = SlotBatch(self.whole.numbers.take(rows, 1), None, {}, {}, self._adapters_of(rows))
        return self._programs.of(range(layer, layer + 1), keys=True).keys_values(x.copy(), batch)

    def read(self, plane: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._store.read(plane, self.whole.slots[rows])

    def write(self, plane: int, rows: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        self._store.write(plane, self.whole.slots[rows], keys, values)


class StreamRows(StepRows[np.ndarray, StreamBatch]):
    """The rows of a row stream's step. All of them make all visits of one route."""

    def __init__(self, model: NativeLooped, programs: Programs, whole: StreamBatch, path: NativePath):
        read_rows = np.arange(len(whole.tokens)) if whole.read_rows is None else whole.read_rows
        super().__init__(model, whole.positions, read_rows, whole)
        self._programs, self.memory = programs, StreamMemory(model.native, whole, path)

    def start(self) -> np.ndarray:
        prelude = range(self.model.config.loop.prelude)
        return self._programs.of(prelude, embeds=True).through(None, self.whole, self.memory)

    def go_through(self, x: np.ndarray, batch: StreamBatch, layers: range, plane: int, is_last: bool) -> np.ndarray:
        return self._programs.of(layers, is_last=is_last).through(x, batch, self.memory, plane)


def run_stream(
    model: NativeLooped, programs: Programs, batch: StreamBatch, path: NativePath
) -> tuple[np.ndarray, PathKV]:
    """Return the same as `NativeProgram.over_rows`."""
    rows, loop = StreamRows(model, programs, batch, path), model.config.loop
    exits = batch.step.read_out.readout.exits or Exits()
    passage, limits = Passage((exits.route or loop.order,)), exits_row(exits)
    reading = None
    if loop.threshold < 1 or limits != exits_row(None):
        limits_of_rows = np.full((len(rows.read_rows), 3), np.array(limits, np.float64))
        reading = reading_rules(model, rows.read_rows, limits_of_rows)
    return LoopedPass(rows, passage, reading).run(), rows.memory.kv
