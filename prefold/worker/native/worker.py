"""The worker of the native executor: it runs steps with the compiled kernels over NumPy memory, on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...engine.schedule.steps import EndStream, MakeStore, Message, SlotResult, SlotStep, StreamStep
from ...engine.worker import DONE, CompletedTicket, Facts, Ticket, Worker
from ...errors import InputError, OutOfMemoryError, not_invariant
from ...model.adapters import AdapterArrays
from ...model.machine import GivesBack, available_memory, give_back, keep_freed
from ...model.shard import Shard
from ..parts import WorkerPart, in_vocabulary
from ..readouts import SlotTicket, greedy, read_stream
from .arrays import NumpyArrays
from .model import NativeModel
from .program import NO_FIELDS, NativeProgram
from .steps import NativePath, PathKV, SlotBatch, StreamBatch, prepare_slots, prepare_stream
from .store import NativeStore, layouts_of, slot_bytes

# Default maximum rows of a step. Larger steps are hardly faster, and need memory for their intermediates.
ROWS = 4096
# Default share of free memory for K/V, and the maximum in bytes.
KV_SHARE, KV_MOST = 0.5, 4 << 30
NO_PATH = NativePath()


def bytes_of_slot(model: NativeModel) -> int:
    """Return the bytes of one slot in all planes, summed over all ranks."""
    config, size = model.config, model.ranks.size
    parts = (Shard.of(config, rank, size).local(config) for rank in range(size))
    return sum(slot_bytes(layouts_of(model.kernels, part, model.dtype)) for part in parts)


class NativeWorker(Worker):
    """The worker of one model.

    In a split model, every rank has a worker. All receive the same messages in the same order; only rank 0's results
    are used.

    Attributes:
        adapters: LoRA adapters by name.
        carries: The `WorkerPart.carry` functions of features.
        paths: The path of each stream that has not ended, by the stream's number.
        store: The KV store of generation, set by a `MakeStore` message.
    """

    def __init__(
        self,
        model: NativeModel,
        adapters: Mapping[str, AdapterArrays] | None = None,
        *,
        parts: Sequence[WorkerPart] = (),
    ):
        self.model, self.adapters = model, dict(adapters or {})
        config = model.config
        if config.invariant:
            for part in parts:
                if part.varies:
                    raise not_invariant(part.varies)
        self._handlers = {**_HANDLERS, **{kind: do for part in parts for kind, do in part.handlers.items()}}
        self._passes = next((part.passes for part in parts if part.passes), "")
        self._media = next((part.media for part in parts if part.media is not None), None)
        self._forgets = [part.forget for part in parts if part.forget is not None]
        self.carries = [part.carry for part in parts if part.carry is not None]
        self.layouts = layouts_of(model.kernels, model.local, model.dtype)
        self.facts = Facts(
            max_rows=ROWS,
            max_positions=config.max_positions,
            vocab_size=config.vocab_size,
            has_logits=config.lm_head,
            adapters=tuple(self.adapters),
            slot_bytes=bytes_of_slot(model),
            span_rows=config.span_rows,
            features=tuple(part.facts for part in parts if part.facts is not None),
        )
        self.store: NativeStore | None = None
        self._program: NativeProgram | None = None
        self.last_run: NativeProgram | None = None  # the program that ran the last SlotStep and holds its call
        self._states: np.ndarray | None = None  # hidden states of rows in slots, once a step stores any
        self.paths: dict[int, NativePath] = {}
        self._arrays = NumpyArrays(model.kernels)
        self._lock = threading.Lock()
        give_back()  # memory that only loading needed
        if model.loader is None:  # a loader of weights reuses the memory that steps free
            keep_freed()
        self._last = GivesBack()  # must stay the last attribute: destroyed after the model, it trims the heap

    @property
    def program(self) -> NativeProgram:
        """Return the program of whole passes, compiled on first use because a feature may run its own programs."""
        if self._program is None:
            self._program = NativeProgram(self.model, list(self.adapters.values()))
        return self._program

    def prepare(self, message: Message) -> StreamBatch | None:
        if not isinstance(message, StreamStep):
            return None
        step = (
            message
            if self._media is None
            else replace(message, tokens=in_vocabulary(message.tokens, self.model.config.media_token))
        )
        batch = prepare_stream(step, self.model.config)
        return batch if step is message else replace(batch, step=message)  # the original step has the media ids

    def start(self, message: Message, prepared: StreamBatch | None = None) -> Ticket:
        with self._lock:
            if (ticket := self._go_on(message)) is not None:
                return ticket
            work = message if prepared is None else prepared
            handler = self._handlers.get(type(work))
            if handler is None:
                raise TypeError(f"{type(message).__name__} is no message to this worker")
            try:
                return handler(self, work)
            except MemoryError as error:
                reason = str(error)
        raise OutOfMemoryError(f"memory is too small for a step of the model: {reason}")

    def forget(self, stream: int) -> None:
        # No lock here: the garbage collector may call this inside `start`, for another stream.
        self.paths.pop(stream, None)
        for forget in self._forgets:
            forget(stream)

    def kv_slots(self, kv_memory: int | None, slot_bytes: int) -> int:
        free = available_memory()
        if kv_memory is not None and kv_memory > free:
            message = f"kv_memory is {kv_memory / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            raise InputError(message, field="kv_memory", remedy="give less")
        size = min(int(free * KV_SHARE), KV_MOST) if kv_memory is None else kv_memory
        return max(1, size // slot_bytes - 1)

    @property
    def passes(self) -> str:
        """Describe for people the code that computes a forward pass."""
        return self._passes or "each forward pass is one compiled call"

    def run_stream(self, step: StreamStep) -> Ticket:
        """Run a step of a row stream."""
        batch = self.prepare(step)
        assert batch is not None
        return self.run_batch(batch)

    def run_batch(self, batch: StreamBatch, fields: Mapping[str, Any] = NO_FIELDS) -> Ticket:
        """Run a prepared step of a row stream.

        Args:
            fields: Extra fields of the kernel call.
        """
        media = None if self._media is None else self._media(batch.step.tokens)
        x = None if media is None else self.program.embedded(batch, media)
        return self.run_rows(batch, partial(self.program.over_rows, x=x, fields=fields))

    def run_rows(
        self, batch: StreamBatch, over_rows: Callable[[StreamBatch, NativePath], tuple[np.ndarray, PathKV]]
    ) -> Ticket:
        """Run a prepared step of a row stream with `over_rows`, a function like `NativeProgram.over_rows`."""
        step = batch.step
        path = self.paths.get(step.stream, NO_PATH).truncate(step.path)
        hidden, kv = over_rows(batch, path)
        ticket, states = read_stream(self._arrays, self.model, batch, path.hidden, hidden)
        self.paths[step.stream] = NativePath(len(batch.keep_path) + len(batch.keep_new), kv, states)
        return ticket

    def _end_stream(self, message: EndStream) -> Ticket:
        self.forget(message.stream)
        return DONE

    def _make_store(self, message: MakeStore) -> Ticket:
        self.store = NativeStore(self.layouts, message.slots, self.model.kernels)
        self._states = self.last_run = None
        return DONE

    def _is_greedy(self, step: SlotStep) -> bool:
        """Return True if the step reads only the most likely token of each read."""
        return step.drawing is None and not step.read_outs and not len(step.state_reads)

    def _go_on(self, step: Message) -> Ticket | None:
        """Run a greedy step that follows a greedy step. None: the step is of another kind."""
        program = self.last_run
        if program is None or type(step) is not SlotStep or not step.follows or not self._is_greedy(step):
            return None
        ids = program.greedy_again(step)
        return None if ids is None else CompletedTicket(SlotResult(ids))  # such a step reads every row, in order

    def run_slots(self, step: SlotStep, fields: Mapping[str, Any] = NO_FIELDS) -> Ticket:
        """Run a step over slots.

        Args:
            fields: Extra fields of the kernel call.
        """
        assert self.store is not None
        program, last = self.program, self.last_run
        self.last_run = None
        media = None if self._media is None else self._media(step.tokens)
        if media is not None:
            step = replace(step, tokens=in_vocabulary(step.tokens, self.model.config.media_token))
        # The scheduler says if the step follows the last one. Only the program knows if the last call is still valid.
        batch = None if last is None or media is not None or not step.follows else last.follow(step, fields)
        if batch is None:
            batch = self.prepare_slots(step)
        x = None if media is None else program.embedded(batch, media)
        ids = program.greedy(batch, self.store, x, fields) if self._is_greedy(step) else None
        if ids is not None:
            ticket: Ticket = CompletedTicket(SlotResult(ids[step.reads]))
        else:
            ticket = self.read_slots(step, program.over_slots(batch, self.store, x, fields))
        self.last_run = None if media is not None else program
        return ticket

    def prepare_slots(self, step: SlotStep) -> SlotBatch:
        """Convert a step over slots to arrays. Raise ValueError for slots outside the store."""
        assert self.store is not None
        config = self.model.local
        batch = prepare_slots(step, config)
        needed = max((plan.slots_needed for plan in batch.plans.values()), default=0)
        if needed > self.store.slots:
            raise ValueError(f"the step needs {needed} slots, the store has {self.store.slots}")
        return batch

    def read_slots(self, step: SlotStep, hidden: np.ndarray) -> Ticket:
        """Return the ticket of a slot step's read-outs.

        Args:
            hidden: [read rows, hidden].
        """
        if len(step.state_reads):
            self._keep(step, hidden)
        if self._is_greedy(step) and self.model.ranks.size == 1:
            return CompletedTicket(SlotResult(greedy(self._arrays, self.model, hidden)[step.reads]))
        return SlotTicket(self._arrays, self.model, hidden, step, self._states)

    def _keep(self, step: SlotStep, hidden: np.ndarray) -> None:
        """Store hidden states of a step's rows in their slots."""
        if self._states is None:
            assert self.store is not None
            self._states = np.empty((self.store.slots, hidden.shape[1]), hidden.dtype)
        self._states[step.slots[step.read_rows[step.state_reads]]] = hidden[step.state_reads]


# Handlers by the type of a message, or of a prepared message. Features add more. Plain functions: they hold no worker.
_HANDLERS: Mapping[type, Callable[[Any, Any], Ticket]] = {
    StreamStep: NativeWorker.run_stream,
    StreamBatch: NativeWorker.run_batch,
    SlotStep: NativeWorker.run_slots,
    MakeStore: NativeWorker._make_store,
    EndStream: NativeWorker._end_stream,
}
