"""The worker of the torch executor: a device, the model on it and its K/V. It runs steps with PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...engine.schedule.steps import EndStream, MakeStore, Message, SlotResult, SlotStep, StreamStep
from ...engine.worker import DONE, CompletedTicket, Facts, Ticket, Worker
from ...errors import InputError, OutOfMemoryError
from ...model.machine import GivesBack, give_back, keep_freed
from ...model.shard import Shard
from ..parts import WorkerPart, in_vocabulary, parts_of
from ..readouts import SlotTicket, greedy, read_stream
from .arrays import TorchArrays
from .attention.store import KVStore
from .device import available_memory, compile_seconds, free_cached, on, runs_triton, send
from .lora import Adapter
from .model import CausalLM
from .rows import Batch, Path, forward_stream, heads_of, prepare, row_attention_of
from .slots import SlotBatch, forward, make_store, prepare_slots

# Default maximum rows of a step on a CPU. Larger steps are hardly faster, and need memory for their intermediates.
ROWS_ON_CPU = 4096
# On a GPU, speed peaks at some thousand rows. Above that, only sharing "off" and "mlp" gain: they share within a step.
MOST_ROWS, LEAST_ROWS = 65_536, 1024
# Share of free memory for the intermediates of a step; the rest is for K/V and fragmentation.
SHARE = 0.25
# Default share of free memory for K/V, and the maximum in bytes on a CPU.
KV_SHARE = 0.5
KV_MOST_ON_CPU = 4 << 30


def batch_rows(model: CausalLM) -> int:
    """Return the default maximum rows of a step, from the memory that the device has free now."""
    if model.device.type == "cpu":
        return ROWS_ON_CPU
    local = model.local
    # Memory peaks in the MLP: the residual stream, its norm, gate and up, and their product.
    row = model.dtype.itemsize * (2 * local.hidden + 3 * local.intermediate + local.q_size + 2 * local.kv_size)
    rows = int(available_memory(model.device) * SHARE) // row
    return max(LEAST_ROWS, min(MOST_ROWS, rows // 1024 * 1024))


def slot_bytes(model: CausalLM) -> int:
    """Return the bytes of one slot in all planes, summed over all ranks."""
    config, size = model.config, model.ranks.size
    parts = [Shard.of(config, rank, size).local(config) for rank in range(size)]
    return sum(KVStore.bytes_per_slot(heads_of(part, model.dtype), model.device) for part in parts)


def kv_bytes(size: int | None, device: torch.device, ranks: int = 1) -> int:
    """Return the bytes available for K/V, summed over all ranks.

    On a CPU, ranks share one memory; each GPU has its own.

    Raise InputError if `size` exceeds the free memory.

    Args:
        size: Bytes; None: a default share of free memory.
    """
    free = available_memory(device) * (1 if device.type == "cpu" else ranks)
    if size is None:
        share = int(free * KV_SHARE)
        return min(share, KV_MOST_ON_CPU) if device.type == "cpu" else share
    if size > free:
        raise InputError(
            f"kv_memory is {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free", field="kv_memory", remedy="give less"
        )
    return size


NO_PATH = Path()


class TorchWorker(Worker):
    """The worker of one model.

    In a split model, every rank has a worker. All receive the same messages in the same order; only rank 0's results
    are used.

    Args:
        adapters: LoRA adapters by name.
        depth: `depth` of `Facts`. None: 2 on a GPU, which then always has a step to run while the host reads results.
        parts: The parts of features. None: the parts that need no checkpoint.

    Attributes:
        paths: The path of each stream that has not ended, by the stream's number.
    """

    def __init__(
        self,
        model: CausalLM,
        adapters: Mapping[str, Adapter] | None = None,
        *,
        depth: int | None = None,
        parts: Sequence[WorkerPart] | None = None,
    ):
        parts = parts_of(model) if parts is None else parts
        self.model, self._device = model, model.device
        self._arrays = TorchArrays(model.device)
        self._compiles = runs_triton(model.device)
        self._handlers = {**_HANDLERS, **{kind: do for part in parts for kind, do in part.handlers.items()}}
        self._media = next((part.media for part in parts if part.media is not None), None)
        self._forgets = [part.forget for part in parts if part.forget is not None]
        self.adapters = dict(adapters or {})
        depth = depth or (2 if model.device.type == "cuda" else 1)
        self.facts = Facts(
            depth=depth,
            slot_depth=depth if model.ranks.size == 1 else 1,
            max_rows=batch_rows(model),
            max_positions=model.config.max_positions,
            vocab_size=model.config.vocab_size,
            has_logits=model.config.lm_head,
            adapters=tuple(self.adapters),
            slot_bytes=slot_bytes(model),
            span_rows=model.config.span_rows,
            features=tuple(part.facts for part in parts if part.facts is not None),
        )
        # True if no result is still on its way from a device when `start` returns.
        self._is_direct = model.device.type == "cpu" and self.facts.slot_depth == 1
        self.store: KVStore | None = None
        self._last_ids: Tensor | None = None  # tokens of the last SlotStep, if the next step may have placeholders
        self._states: Tensor | None = None  # hidden states of rows in slots, once a step stores any
        self.paths: dict[int, Path] = {}
        self._lock = threading.Lock()
        self.compile_seconds()  # resets the count, so that later seconds belong to this worker
        give_back()  # memory that only loading needed
        if model.device.type == "cpu":
            keep_freed()
        self._attention = row_attention_of(model.local, model.dtype, model.device)
        self._last = GivesBack()  # must stay the last attribute: destroyed after the model, it trims the heap

    def prepare(self, message: Message) -> Batch | None:
        if not isinstance(message, StreamStep):
            return None
        step = (
            message
            if self._media is None
            else replace(message, tokens=in_vocabulary(message.tokens, self.model.config.media_token))
        )
        batch = prepare(step, self.model.config, self._attention, tuple(self.adapters.values()))
        return batch if step is message else replace(batch, step=message)  # the original step has the media ids

    def start(self, message: Message, prepared: Batch | None = None) -> Ticket:
        with self._lock:
            try:
                work = message if prepared is None else prepared
                handler = self._handlers.get(type(work))
                if handler is None:
                    raise TypeError(f"{type(message).__name__} is no message to this worker")
                with on(self._device), torch.inference_mode():
                    return handler(self, work)
            except torch.OutOfMemoryError as error:
                reason = str(error)
            # After the except block: the exception refers to the tensors of the failed step.
            free_cached(self.model.device)
        raise OutOfMemoryError(f"memory is too small for a step of the model: {reason}")

    def forget(self, stream: int) -> None:
        # No lock here: the garbage collector may call this inside `start`, for another stream.
        self.paths.pop(stream, None)
        for forget in self._forgets:
            forget(stream)

    def kv_slots(self, kv_memory: int | None, slot_bytes: int) -> int:
        return max(1, kv_bytes(kv_memory, self.model.device, self.model.ranks.size) // slot_bytes - 1)

    def compile_seconds(self) -> float:
        return compile_seconds() if self._compiles else 0.0

    @property
    def passes(self) -> str:
        """Describe for people the code that computes a forward pass."""
        if self.model.computed_by:
            return f"forward passes run through {self.model.computed_by}"
        return "PyTorch runs each operation of a forward pass"

    def _run_stream(self, step: StreamStep) -> Ticket:
        batch = self.prepare(step)
        assert batch is not None
        return self.run_batch(batch)

    def run_batch(self, batch: Batch, call_arguments: Mapping[str, Any] = MappingProxyType({})) -> Ticket:
        """Run a prepared step of a row stream.

        Args:
            call_arguments: Extra arguments of the model call.
        """
        step = batch.step
        path = self.paths.get(step.stream, NO_PATH)
        if (rows := path.rows) < step.path:
            raise ValueError(f"the step needs a path of {step.path} rows, but its stream has {rows}")
        path = path if rows == step.path else path.truncate(step.path)
        arguments = {**self.model.arguments(step), **call_arguments}
        if self._media is not None and (media := self._media(step.tokens)) is not None:
            arguments["media"] = media
        hidden, kv = forward_stream(self.model, batch, path, arguments)
        ticket, states = read_stream(self._arrays, self.model, batch, path.hidden, hidden)
        self.paths[step.stream] = Path(kv, states)
        return ticket

    def _end_stream(self, message: EndStream) -> Ticket:
        self.forget(message.stream)
        return DONE

    def _make_store(self, message: MakeStore) -> Ticket:
        self.store, self._states = make_store(self.model, message.slots), None
        return DONE

    def _is_greedy(self, step: SlotStep) -> bool:
        """Return True if the step reads only the most likely token of each read, and results are ready at once."""
        return self._is_direct and step.drawing is None and not step.read_outs and not len(step.state_reads)

    def prepare_slots(self, step: SlotStep) -> SlotBatch:
        """Return a step over slots as tensors."""
        assert self.store is not None
        return prepare_slots(step, self.store, self.model.config, self.adapters, self._last_ids)

    def run_slots(self, step: SlotStep, call_arguments: Mapping[str, Any] = MappingProxyType({})) -> Ticket:
        """Run a step over slots.

        Args:
            call_arguments: Extra arguments of the model call.
        """
        assert self.store is not None
        arguments = dict(call_arguments)
        if self._media is not None and (media := self._media(step.tokens)) is not None:
            arguments["media"] = media
            step = replace(step, tokens=in_vocabulary(step.tokens, self.model.config.media_token))
        return self.read_slots(step, forward(self.model, self.store, self.prepare_slots(step), arguments))

    def read_slots(self, step: SlotStep, hidden: Tensor) -> Ticket:
        """Return the ticket of a slot step's read-outs.

        Args:
            hidden: [read rows, hidden].
        """
        if len(step.state_reads):
            self._keep(step, hidden)
        if self._is_greedy(step) and self.model.ranks.size == 1:
            return CompletedTicket(SlotResult(greedy(self._arrays, self.model, hidden)[step.reads]))
        ticket = SlotTicket(self._arrays, self.model, hidden, step, self._states)
        self._last_ids = ticket.ids if self.facts.slot_depth > 1 else None
        return ticket

    def _keep(self, step: SlotStep, hidden: Tensor) -> None:
        """Store hidden states of a step's rows in their slots."""
        if self._states is None:
            assert self.store is not None
            self._states = hidden.new_empty(self.store.slots, hidden.shape[1])
        slots = send(step.slots[step.read_rows[step.state_reads]], hidden.device)
        self._states.index_copy_(0, slots, hidden.index_select(0, send(step.state_reads, hidden.device)))


# Handlers by the type of a message, or of a prepared message. Features add more. Plain functions: they hold no worker.
_HANDLERS: Mapping[type, Callable[[Any, Any], Ticket]] = {
    StreamStep: TorchWorker._run_stream,
    Batch: TorchWorker.run_batch,
    SlotStep: TorchWorker.run_slots,
    MakeStore: TorchWorker._make_store,
    EndStream: TorchWorker._end_stream,
}
