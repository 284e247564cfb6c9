"""The states of a hybrid in the native worker: one table per row stream, and one for the slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import addressof
from typing import Any

import numpy as np

from ...engine.schedule.steps import StreamStep
from ...engine.worker import DONE, Ticket
from ...kernels.abi import PlaceLists, RunLists, StatePlane, StateStep
from ...model.config import ModelConfig, StateShape
from ...worker.native.model import NativeModel
from ...worker.native.steps import StreamBatch
from ...worker.native.worker import NativeWorker
from ...worker.parts import CallFields, WorkerPart
from .states import StateFlow, StateTable
from .steps import MakeStates, StateFacts, StateRuns, StateSlotStep, StateStreamStep

LayerTables = dict[int, StateTable]  # the tables of one stream, by layer


class StateCall:
    """The kernels' arguments for the states of one step. `fields` are fields of the kernel call.

    Args:
        runs: The step's runs, by which a repeated step is recognized.
    """

    def __init__(self, flow: StateFlow, runs: StateRuns):
        self.runs = runs
        table, order = flow.table, flow.order
        layers = [parts for parts in table.tensors if parts]
        kept = sorted({parts[0].shape[1] for parts in layers})
        self._places = {number: flow.places(number) for number in kept}
        lists = (PlaceLists * (kept[-1] + 1))()
        for number, places in self._places.items():
            lists[number] = PlaceLists(places.above.ctypes.data, places.below.ctypes.data)
        planes = (StatePlane * len(layers))()
        for plane, parts in enumerate(layers):
            states = parts[1].ctypes.data if len(parts) > 1 else None
            planes[plane] = StatePlane(parts[0].ctypes.data, states)
        self._order = order
        arrays = (order.first, order.stop, order.source, order.to, order.waves)
        ordered = RunLists(*(array.ctypes.data for array in arrays), len(order.waves) - 1, table.rows, order.between)
        self._to = np.ascontiguousarray(flow.runs.slots, np.int64)
        step = StateStep(addressof(lists), self._to.ctypes.data, len(self._to), ordered)
        self._kept: tuple[Any, ...] = (lists, planes, step)
        self.fields = {"states": addressof(planes), "state_step": addressof(step)}


class StateCarry:
    """The states of a stream while each layer runs over several steps before the next layer runs: one table per layer.

    Args:
        tables: The stream's tables before these steps, by layer; `commit` replaces them.
    """

    def __init__(self, config: ModelConfig, zeros: Callable[[int, StateShape], np.ndarray], tables: LayerTables):
        self._config, self._zeros, self._before = config, zeros, tables
        self._tables: LayerTables = {}

    @contextmanager
    def run(self, layer: int, step: StreamStep) -> Iterator[CallFields]:
        assert isinstance(step, StateStreamStep)
        if not self._config.states(layer):
            yield {}
            return
        table = self._table(layer)
        placed = table.place(step.runs)
        call = StateCall(StateFlow(table, placed, len(step.end) - step.path), step.runs)
        yield call.fields
        table.store(step.runs, placed)
        table.keep(np.append(step.kept_states, step.runs.slots))

    def _table(self, layer: int) -> StateTable:
        if (table := self._tables.get(layer)) is None:
            before = self._before.get(layer)
            table = StateTable(self._config, 1, self._zeros, layers=(layer,)) if before is None else before.copy()
            self._tables[layer] = table
        return table

    def commit(self) -> None:
        self._before |= self._tables


def state_part(model: NativeModel) -> WorkerPart:
    """Return the worker part that stores states."""
    config = model.config
    paths: dict[int, StateTable] = {}
    by_layer: dict[int, LayerTables] = {}
    table: StateTable | None = None
    last: StateCall | None = None  # the call of the last slot step, if every state stayed in its row of the table

    def zeros(rows: int, part: StateShape) -> np.ndarray:
        return np.zeros((rows, *part.shape), np.float32 if part.is_wide else model.dtype)

    def run_stream(worker: NativeWorker, step: StateStreamStep) -> Ticket:
        batch = worker.prepare(step)
        assert batch is not None
        return run_batch(worker, batch)

    def run_batch(worker: NativeWorker, batch: StreamBatch) -> Ticket:
        step = batch.step
        assert isinstance(step, StateStreamStep)
        if (path := paths.get(step.stream)) is None:
            path = paths[step.stream] = StateTable(config, 1, zeros)
        placed = path.place(step.runs)
        call = StateCall(StateFlow(path, placed, len(step.end) - step.path), step.runs)
        ticket = worker.run_batch(batch, call.fields)
        path.store(step.runs, placed)
        path.keep(np.append(step.kept_states, step.runs.slots))
        return ticket

    def run_slots(worker: NativeWorker, step: StateSlotStep) -> Ticket:
        nonlocal last
        assert table is not None
        if step.follows and last is not None and last.runs is step.runs:  # the same call works again
            return worker.run_slots(step, last.fields)
        placed = table.place(step.runs)
        last = None
        call = StateCall(StateFlow(table, placed, step.num_rows), step.runs)
        ticket = worker.run_slots(step, call.fields)
        table.store(step.runs, placed)
        last = call if np.array_equal(placed.source, placed.slots) else None
        return ticket

    def make_states(worker: NativeWorker, message: MakeStates) -> Ticket:
        nonlocal table, last
        table, last = StateTable(config, message.slots, zeros), None
        return DONE

    handlers: dict[type, Callable[[Any, Any], Ticket]] = {
        StateStreamStep: run_stream,
        StreamBatch: run_batch,
        StateSlotStep: run_slots,
        MakeStates: make_states,
    }

    def forget(stream: int) -> None:
        paths.pop(stream, None)
        by_layer.pop(stream, None)

    def carry(stream: int) -> StateCarry:
        return StateCarry(config, zeros, by_layer.setdefault(stream, {}))

    state_bytes = sum(part.nbytes for parts in StateTable(config, 1, zeros).tensors for part in parts)
    return WorkerPart(handlers, StateFacts(state_bytes), forget=forget, carry=carry)
