"""The part of the native worker that runs a window layer by layer, with the weights of one layer in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ...engine.schedule.steps import MakeStore, StepResult, StreamStep
from ...engine.worker import CompletedTicket, Ticket
from ...errors import InputError, OutOfMemoryError
from ...model.machine import available_memory
from ...worker.native.arrays import NumpyArrays
from ...worker.native.load import window_rows
from ...worker.native.memory import Workspace
from ...worker.native.model import NativeModel, PartLoader
from ...worker.native.program import NativeProgram, Part, StreamMemory, Visit, visits_of
from ...worker.native.steps import NativePath, StreamBatch
from ...worker.native.worker import NO_PATH, NativeWorker
from ...worker.parts import CallFields, LayerCarry, WorkerPart
from ...worker.readouts import read_stream
from .engine import LayerwiseFacts, LayerwiseResult, LayerwiseStep

# Read-outs that need the LM head.
WITH_HEAD = ("logits", "logprobs")


@dataclass(frozen=True, slots=True)
class LayerPaths:
    """The rows above the next window of a stream: what the worker stores between two windows."""

    planes: tuple[NativePath, ...]  # the path in each plane, with K/V alone
    hidden: np.ndarray | None = None  # hidden states of the path for mean pooling, as in NativePath


def layerwise_part(model: NativeModel, loader: PartLoader) -> WorkerPart:
    """Return the worker part for a model with weights that `loader` reads layer by layer."""
    paths: dict[int, LayerPaths] = {}

    def run(worker: NativeWorker, message: LayerwiseStep) -> Ticket:
        window = LayerwiseWindow(worker, loader, message.steps, paths)
        return CompletedTicket(window.run())

    def run_step(worker: NativeWorker, step: StreamStep) -> Ticket:
        return run(worker, LayerwiseStep((step,)))

    def run_batch(worker: NativeWorker, batch: StreamBatch) -> Ticket:
        return run_step(worker, batch.step)

    handlers: dict[type, Callable[[Any, Any], Ticket]] = {
        LayerwiseStep: run,
        StreamStep: run_step,
        StreamBatch: run_batch,
        MakeStore: lambda worker, message: refuse(loader),
    }
    return WorkerPart(
        handlers,
        LayerwiseFacts(window_rows(model.config, model.dtype.itemsize, loader.needed)),
        forget=lambda stream: paths.pop(stream, None),
        passes="weights are read layer by layer, once for all rows of a window",
    )


def refuse(loader: PartLoader) -> NoReturn:
    """Refuse a step over slots: raise InputError, or OutOfMemoryError if the weights do not fit in free memory."""
    message = "layer by layer (--layerwise), a model computes only embeddings, scores, labels and decisions of jobs;"
    message += " text generation, servers and cache_prefill need all weights in memory"
    if (free := available_memory()) < loader.total:
        size = f"{loader.total / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free"
        raise OutOfMemoryError(f"{message}: {size}; use a smaller model, or more memory")
    raise InputError(message, field="layerwise", remedy="use --layerwise off")


class LayerwiseWindow:
    """One pass of neighbouring steps of a row stream through the model, layer by layer.

    The stored path and states change only after all layers have run, so a failed pass can be repeated.

    Args:
        paths: What is stored for each stream that has not ended, by stream number.
    """

    def __init__(
        self,
        worker: NativeWorker,
        loader: PartLoader,
        steps: Sequence[StreamStep],
        paths: dict[int, LayerPaths],
    ):
        self._model, self._loader, self._paths = worker.model, loader, paths
        self._workspace = Workspace()
        self._adapters = list(worker.adapters.values())
        self._stream, self._readout = steps[0].stream, steps[0].read_out.readout
        self._batches = [batch for step in steps if (batch := worker.prepare(step)) is not None]
        self._carries: list[LayerCarry] = [carry(self._stream) for carry in worker.carries]
        planes = (NO_PATH,) * len(self._model.config.planes)
        self._before = paths.get(self._stream, LayerPaths(planes))

    def run(self) -> LayerwiseResult:
        """Run all layers and return the values that the steps read."""
        before = self._loader.bytes_read
        try:
            planes, hidden = self._through_layers(self._embedded())
            self._workspace = Workspace()  # frees the layers' buffers, so that the heads can use the memory
            result, above = self._read(hidden)
        finally:
            self._model.drop_weights()
        self._paths[self._stream] = LayerPaths(planes, above)
        for carry in self._carries:
            carry.commit()
        return LayerwiseResult(result.values, result.greedy, self._loader.bytes_read - before)

    def _program(self, part: Part) -> NativeProgram:
        return NativeProgram(self._model, self._adapters, part, self._workspace)

    def _embedded(self) -> list[np.ndarray]:
        """Return the embeddings of the rows of each step, [rows, hidden]."""
        self._loader.load_embedding()
        self._loader.read_ahead(0)
        program = self._program(Part(embeds=True))
        return [
            program.through(None, batch, StreamMemory(self._model, batch, NO_PATH, planes=()))
            for batch in self._batches
        ]

    def _through_layers(self, states: list[np.ndarray]) -> tuple[tuple[NativePath, ...], list[np.ndarray]]:
        """Return (the path above the next step in each plane, the hidden states that each step reads).

        Args:
            states: The residual stream of each step; overwritten.
        """
        config = self._model.config
        visits, planes, reading = visits_of(config), list(self._before.planes), config.reading_layer
        # Layers after `reading` compute only the rows that are read, and have no plane of their own.
        parts = [*((visit,) for visit in visits[:reading]), tuple(visits[reading:])]
        for part in parts:
            number, plane, like = part[0]
            stop = number + len(part)
            self._loader.load_layers(number, stop)
            self._loader.read_ahead(stop)
            visit = (number, min(plane, 0), like)
            above = planes[plane] if plane >= 0 else NO_PATH
            states, path = self._through_layers_of((visit, *part[1:]), stop == config.layers, above, states)
            if plane >= 0:
                planes[plane] = path
        return tuple(planes), states

    def _through_layers_of(
        self, visits: tuple[Visit, ...], is_last: bool, path: NativePath, states: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], NativePath]:
        """Run layers. Only the first of them may have a plane or states.

        Return (each step's residual stream, or after the last layer its hidden states that are read; the path above the
        next step in the plane).
        """
        program, after = self._program(Part(visits, is_last=is_last, ends=is_last)), list[np.ndarray]()
        visit = visits[0]
        has_plane = visit[1] >= 0
        for batch, x in zip(self._batches, states, strict=True):
            above = path.truncate(batch.step.path) if has_plane else NO_PATH
            with self._carried(visit[0], batch.step) as fields:
                if is_last:
                    x, kv = program.over_rows(batch, above, x, fields)
                else:
                    memory = StreamMemory(self._model, batch, above, planes=[visit[2]] if has_plane else ())
                    x, kv = program.through(x, batch, memory, fields=fields), memory.kv
            after.append(x)
            path = NativePath(len(batch.keep_path) + len(batch.keep_new), kv) if has_plane else NO_PATH
        return after, path

    @contextmanager
    def _carried(self, layer: int, step: StreamStep) -> Iterator[CallFields]:
        """Yield the extra fields of the kernel call for a layer and a step, such as recurrent states."""
        with ExitStack() as stack:
            fields: dict[str, Any] = {}
            for carry in self._carries:
                fields |= stack.enter_context(carry.run(layer, step))
            yield fields

    def _read(self, hidden: Sequence[np.ndarray]) -> tuple[StepResult, np.ndarray | None]:
        """Return (the values of all steps, for mean pooling the hidden states of the path above the next step)."""
        self._loader.load_heads(lm_head=self._readout.kind in WITH_HEAD)
        arrays, above, results = NumpyArrays(self._model.kernels), self._before.hidden, list[StepResult]()
        for batch, states in zip(self._batches, hidden, strict=True):
            above = None if above is None else above[: batch.step.path]
            ticket, above = read_stream(arrays, self._model, batch, above, states)
            values = ticket.result()
            # The next step overwrites the memory of these values.
            results.append(StepResult(values.values.copy(), values.greedy))
        greedy = [one.greedy for one in results if one.greedy is not None]
        return StepResult(
            np.concatenate([one.values for one in results]), np.concatenate(greedy) if greedy else None
        ), above
