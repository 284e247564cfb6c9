"""The worker of this process: a device, the model on it and the K/V there. It runs steps with torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..attention import KVStore, RowAttention
from ..device import compile_seconds, free_cached, give_back, keep_freed, on, runs_triton
from ..errors import OutOfMemoryError
from ..images.tower import Tower
from ..images.worker import ImageRows, without_images
from ..looped.model import LoopedLM
from ..looped.steps import MakeVisitStore, VisitStep
from ..looped.worker import VisitStore, blocks_alike, visit_options, visit_slot_bytes
from ..model import Adapter, CausalLM
from ..schedule.steps import (
    DropImages,
    Encoded,
    EncodeImage,
    EndStream,
    MakeStore,
    Message,
    MoveRows,
    SlotStep,
    StepResult,
    StreamStep,
)
from ..shifted.worker import move_rows, why_fixed
from .attend import Path, heads_of
from .batch import Batch, prepare
from .budget import batch_rows, kv_bytes, slot_bytes
from .graphs import DecodeGraphs
from .protocol import Facts, Ticket, Worker
from .runner import run
from .slot_reads import SlotReads
from .slots import forward, make_store, prepare_slots

__all__ = ["LocalWorker"]

NO_PATH = Path()


class LocalWorker(Worker):
    """Runs the steps of one model. Of a model that is split over ranks every rank has one, and all are given the same
    messages in the same order; what steps give is rank 0's.

    adapters  LoRA adapters by name
    depth     of `Facts`; None: 2 on a GPU, which has the next step to do while the results of one are taken
    graphs    on a GPU: replay steps that only decode as captured CUDA graphs (experimental)
    tower     makes the rows of images; None: the model takes none
    """

    def __init__(
        self,
        model: CausalLM,
        adapters: Mapping[str, Adapter] | None = None,
        *,
        depth: int | None = None,
        graphs: bool = False,
        tower: Tower | None = None,
    ):
        visits = visit_options(model)
        self.model = model
        self._images = None if tower is None else ImageRows(tower)
        self.adapters = dict(adapters or {})
        depth = depth or (2 if model.device.type == "cuda" else 1)
        self.facts = Facts(
            depth=depth,
            slot_depth=depth if model.ranks.size == 1 else 1,
            # On a GPU layers are only begun here, and other ranks are told of whole steps.
            parts=len(model.config.planes) if model.device.type == "cpu" and model.ranks.size == 1 else 1,
            max_rows=batch_rows(model),
            learns_rows=model.device.type != "cpu",
            max_positions=model.config.max_positions,
            vocab_size=model.config.vocab_size,
            adapters=tuple(self.adapters),
            slot_bytes=slot_bytes(model),
            tower=None if tower is None else tower.config,
            image_row_bytes=1 if tower is None else tower.config.output * tower.dtype.itemsize,
            routes=blocks_alike(model.config),
            gate=model.config.loop is not None and model.config.loop.gate,
            fixed=why_fixed(model.config),
            visits=visits,
            visit_bytes=visit_slot_bytes(model) if isinstance(model, LoopedLM) and visits is not None else 1,
        )
        self.store: KVStore | None = None
        self.visits: VisitStore | None = None
        self._with_graphs, self._graphs = graphs, None
        self._given: Tensor | None = None  # tokens of the last SlotStep, where the next one may not know them
        self._paths: dict[int, Path] = {}
        self._lock = threading.Lock()
        self.compile_seconds()  # from here on they are this worker's
        give_back()  # what loading needed beside the weights
        if model.device.type == "cpu":
            keep_freed()
        self._attention = RowAttention(heads_of(model), model.device)
        self._last = _Last()

    def prepare(self, message: Message) -> Batch | None:
        if not isinstance(message, StreamStep):
            return None
        if self._images is not None:
            message = replace(message, tokens=without_images(message.tokens))
        return prepare(message, self.model.config.planes, self._attention, tuple(self.adapters.values()))

    def start(
        self, message: Message, prepared: Batch | None = None, between: Callable[[], None] | None = None
    ) -> Ticket:
        with self._lock, on(self.model.device), torch.inference_mode():
            try:
                return self._start(message, prepared, between)
            except torch.OutOfMemoryError as error:
                why = str(error)
            # Not while the error is handled: it holds what the failed step made.
            free_cached(self.model.device)
        raise OutOfMemoryError(f"memory is too small for a step of the model: {why}")

    def forget(self, stream: int) -> None:
        # Without the lock: the garbage collector may call this within `start`, whose stream is another one.
        self._paths.pop(stream, None)

    def kv_slots(self, kv_memory: int | None, slot_bytes: int) -> int:
        return max(1, kv_bytes(kv_memory, self.model.device, self.model.ranks.size) // slot_bytes - 1)

    def compile_seconds(self) -> float:
        return compile_seconds() if runs_triton(self.model.device) else 0.0

    def _start(self, message: Message, prepared: Batch | None, between: Callable[[], None] | None) -> Ticket:
        if isinstance(message, StreamStep):
            batch = self.prepare(message) if prepared is None else prepared
            assert batch is not None
            path = self._paths.get(message.stream, NO_PATH)
            if path.rows < message.path:
                raise ValueError(f"the step goes on with {message.path} rows, its stream left {path.rows}")
            media = None if self._images is None else self._images.rows(message.tokens)
            # A step with images holds them until it is over, and others may need their room.
            pause = None if between is None or media is not None else partial(self._pause, between)
            reads, self._paths[message.stream] = run(self.model, batch, path.truncate(message.path), media, pause)
            return reads
        if isinstance(message, SlotStep):
            return self._start_slots(message)
        if isinstance(message, VisitStep):
            assert self.visits is not None
            return self.visits.run(message)
        if isinstance(message, MakeVisitStore):
            assert isinstance(self.model, LoopedLM)
            self.visits = VisitStore(self.model, message.slots, self.adapters)
        elif isinstance(message, MakeStore):
            self.store = make_store(self.model, message.slots)
            alone_on_gpu = self.model.device.type == "cuda" and self.model.ranks.size == 1 and not self.adapters
            self._graphs = DecodeGraphs(self.model, self.store) if self._with_graphs and alone_on_gpu else None
        elif isinstance(message, MoveRows):
            assert self.store is not None
            move_rows(self.model, self.store, message)
        elif isinstance(message, EndStream):
            self.forget(message.stream)
        elif isinstance(message, EncodeImage):
            return self._encode(message)
        elif isinstance(message, DropImages):
            if self._images is not None:
                self._images.drop(message.firsts)
        else:
            raise TypeError(f"{type(message).__name__} is no message to a worker")
        return Nothing()

    def _pause(self, between: Callable[[], None]) -> None:
        self._lock.release()
        try:
            between()
        finally:
            self._lock.acquire()

    def _encode(self, message: EncodeImage) -> Ticket:
        if self._images is None:
            return Told(Encoded(True, "the model takes no images"))
        found = self._images.encode(message)
        if self.model.device.type == "cuda":  # the host reckons with the time that layers take
            torch.cuda.synchronize(self.model.device)
        return Told(found)

    def _start_slots(self, step: SlotStep) -> Ticket:
        assert self.store is not None
        media = None
        if self._images is not None and (media := self._images.rows(step.tokens)) is not None:
            step = replace(step, tokens=without_images(step.tokens))
        if self._graphs is not None and media is None and self._graphs.takes(step):
            hidden = self._graphs.run(step, self._given)
        else:
            batch = prepare_slots(step, self.store, self.model.config.planes, self.adapters, self._given)
            hidden = forward(self.model, self.store, batch, media)
            if step.exits is not None:  # there is a hidden state a read
                step = replace(step, reads=np.arange(len(step.reads)))
        reads = SlotReads(self.model, hidden, step)
        self._given = reads.ids if self.facts.slot_depth > 1 else None
        return reads


class _Last:
    """Gives memory back when it goes: as the last field of a worker it goes when the model has gone."""

    def __del__(self) -> None:
        if give_back is not None:  # as names are when Python ends
            give_back()


class Told:
    """A ticket of a message whose result is known."""

    def __init__(self, what: Encoded):
        self._what = what

    def result(self) -> Encoded:
        return self._what


class Nothing:
    """A ticket of a message that gives nothing to the host."""

    def result(self) -> StepResult | None:
        return None
