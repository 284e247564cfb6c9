"""A step over slots: its tensors, `attend` over the KV store, and what is read of it: tokens and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import KeyRuns, KVStore, SlotPlan
from ..device import send
from ..model import NO_ADAPTERS, Adapter, CausalLM, RowAdapters
from ..model.config import Plane
from ..schedule.steps import NOTHING, Numbers, SlotResult, SlotStep
from ..types import TokenLogprobs
from .pool import mean_of_rows
from .rows import HEAD_ROWS, Reads, head_blocks, heads_of, logprobs_of
from .sampler import choose, likeliest


def make_store(model: CausalLM, slots: int) -> KVStore:
    """Returns room for the K/V of `slots` rows, of the heads that this rank has."""
    return KVStore(len(model.config.planes), heads_of(model), slots, model.device)


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """A batch is what the forward pass of a step over slots needs, on the device.

    tokens, positions, slots  int64 [rows]
    read_rows                 int64: rows whose hidden state is wanted; None: all of them, in order
    plans                     by sliding window, every row queries
    read_plans                by sliding window, only the read rows query: for the last layer
    adapters                  which rows have a LoRA adapter
    numbers                   tokens, positions and slots as they lie in the memory of a CPU, int64 [3, rows]
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    read_rows: Tensor | None
    plans: dict[int | None, SlotPlan]
    read_plans: dict[int | None, SlotPlan]
    adapters: RowAdapters
    numbers: np.ndarray | None = None


def prepare_slots(
    step: SlotStep,
    store: KVStore,
    planes: Sequence[Plane],
    adapters: Mapping[str, Adapter],
    last_ids: Tensor | None = None,
) -> SlotBatch:
    """Returns a step as tensors on the store's device. adapters: in the order of their numbers; last_ids: as for
    `fill_in`."""
    plans = slot_plans(step, store, {plane.window for plane in planes})
    read_rows, read_plans = None, plans
    if len(step.read_rows) < step.num_rows:
        read_rows, read_plans = step.read_rows, slot_plans(step, store, {planes[-1].window}, step.read_rows)
    row_adapters = NO_ADAPTERS
    if step.adapters is not None and step.adapters.max(initial=-1) >= 0:
        row_adapters = RowAdapters(list(adapters.values()), step.adapters, read_rows)
    arrays, numbers = (step.tokens, step.positions, step.slots), None
    if store.compiled is None or last_ids is not None:
        tokens, positions, slots = (send(array, store.device) for array in arrays)
    else:
        numbers = np.stack(arrays, dtype=np.int64)
        tokens, positions, slots = torch.from_numpy(numbers)
    read = None if read_rows is None else send(read_rows, store.device)
    return SlotBatch(fill_in(tokens, last_ids), positions, slots, read, plans, read_plans, row_adapters, numbers)


def slot_plans(
    step: SlotStep, store: KVStore, windows: Iterable[int | None], queries: np.ndarray | None = None
) -> dict[int | None, SlotPlan]:
    """Returns the plan of attention of a step for each of these sliding windows.

    queries: the rows that query, ascending; None: all.
    """
    first, last, positions = step.run_first, step.run_last, step.positions.astype(np.int64)
    reads: slice | np.ndarray = slice(None)
    if queries is not None:
        first, last, positions = np.searchsorted(queries, first), np.searchsorted(queries, last), positions[queries]
        reads = last > first
    runs = KeyRuns(*(array[reads] for array in (step.run_start, step.run_count, step.run_position, first, last)))
    return {window: store.plan(runs, len(positions), positions, window) for window in windows}


def fill_in(tokens: Tensor, last_ids: Tensor | None) -> Tensor:
    """Returns the tokens of a step, int64 [rows], with those of the step before put in: -1 - i is the i-th of
    `last_ids`, int64 [reads]; None: all are known."""
    if last_ids is None or not len(last_ids):
        return tokens
    # Whoever gets no token ends, and what comes of its row is not looked at.
    return torch.where(tokens < 0, last_ids[(-1 - tokens).clamp(min=0)].clamp(min=0), tokens)


@dataclass(frozen=True, slots=True)
class SlotAttend:
    """`attend` of one step: its rows' K/V go into the store, then each row sees what its plan says."""

    store: KVStore
    batch: SlotBatch
    planes: Sequence[Plane] | Mapping[int, Plane]
    scale: float

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Returns attention of q [rows or read rows, heads, dim], shaped as q; stores k, v [rows, kv_heads, dim]."""
        self.store.write(plane, self.batch.slots, k, v)
        plans = self.batch.read_plans if len(q) < len(k) else self.batch.plans
        return self.store.attend(plane, q, plans[self.planes[plane].window], self.scale, sinks)


def forward(
    model: CausalLM, store: KVStore, batch: SlotBatch, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Tensor:
    """Returns the hidden states of the rows of a step that are read, [rows, hidden]; its K/V is then in the store.

    arguments: further arguments of the model's call.
    """
    attend = SlotAttend(store, batch, model.config.planes, model.config.scale)
    return model(batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters, **arguments)


def greedy(model: CausalLM, hidden: Tensor) -> np.ndarray:
    """Returns the most likely token of each row of hidden [rows, hidden], int64, as `choose` does; on a CPU, of a model
    that is not split."""
    blocks = [hidden] if len(hidden) <= HEAD_ROWS else hidden.split(HEAD_ROWS)
    return np.concatenate([likeliest(model.logits(block).numpy()) for block in blocks])


class SlotReads:
    """A ticket of a step over slots has its tokens and numbers, on their way from the device.

    ids   int64 [reads], on the device, as of SlotResult

    Logits take all ranks, and rank 0 alone reads them.
    """

    def __init__(self, model: CausalLM, hidden: Tensor, step: SlotStep, states: Tensor | None = None):
        """hidden: [rows that are read, hidden]; states: [slots, hidden], of rows that are kept; None: none are"""
        self.ids = torch.full((len(step.reads),), -1, dtype=torch.int64, device=hidden.device)
        self._logprobs: dict[int, TokenLogprobs] = {}
        is_token = np.ones(len(step.reads), bool)
        for numbers in step.numbers:
            is_token[numbers.reads] = False
        tokens = np.flatnonzero(is_token)
        if len(tokens):
            self._choose(model, hidden, step, tokens)
        self._numbers = [Reads(*_read(model, numbers, hidden, step, states)) for numbers in step.numbers]
        self._id_reads = Reads(self.ids)

    def result(self) -> SlotResult:
        """Waits for the device, and returns what the step gave."""
        return SlotResult(
            self._id_reads.result().values, self._logprobs, tuple(numbers.result() for numbers in self._numbers)
        )

    def _choose(self, model: CausalLM, hidden: Tensor, step: SlotStep, tokens: np.ndarray) -> None:
        """Takes the tokens of those of the reads that give tokens."""
        reads, drawing = step.reads[tokens], step.drawing
        is_all = len(tokens) == len(step.reads) and not len(step.state_reads)
        if not is_all:  # of other rows no logits are wanted
            rows, reads = np.unique(reads, return_inverse=True)
            hidden = hidden.index_select(0, send(rows, hidden.device))
            if drawing is not None:
                drawing = replace(drawing, reads=np.searchsorted(tokens, drawing.reads))
        for block in head_blocks(len(hidden)):
            logits = model.logits(hidden[block])
            if model.ranks.rank:
                continue
            first, stop = np.searchsorted(reads, (block.start, block.stop)).tolist()
            part = drawing
            if part is not None:
                part = part.part(*np.searchsorted(part.reads, (first, stop)).tolist())
                part = replace(part, reads=part.reads - first)
            ids, logprobs = choose(logits, reads[first:stop] - block.start, part)
            self.ids[slice(first, stop) if is_all else send(tokens[first:stop], hidden.device)] = ids
            self._logprobs |= {int(tokens[first + read]): value for read, value in logprobs.items()}


def _read(
    model: CausalLM, numbers: Numbers, hidden: Tensor, step: SlotStep, states: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns what some of a step's reads give: values float32, as many rows for each as `Numbers.sizes` says, and for
    "logprobs" whether each target is the most likely token. What several reads have in common is computed once."""
    kind, counts = numbers.readout.kind, numbers.counts
    if counts is None:
        rows = step.reads[numbers.reads]
    else:
        assert states is not None
        hidden = states
        above = zip(numbers.reads.tolist(), counts.tolist(), strict=True)
        rows = np.concatenate([NOTHING, *(_slots_above(step, read, count) for read, count in above)])
    once, places = np.unique(rows, return_inverse=True)
    hidden, places = hidden.index_select(0, send(once, hidden.device)), places.reshape(-1)
    if kind == "mean":
        assert counts is not None
        return mean_of_rows(hidden.float(), places, counts), None
    if kind == "logprobs":
        order = np.argsort(places, kind="stable")
        columns, targets = (
            send(places[order], hidden.device),
            send(numbers.targets[order].astype(np.int64), hidden.device),
        )
        values, greedy = logprobs_of(model, hidden, places[order], columns, targets, numbers.readout.top)
        back = send(np.argsort(order), hidden.device)
        return values[back], greedy[back]
    if kind == "logits":
        values = model.logits(hidden, numbers.readout.ids)
    else:
        values = model.head(hidden) if kind == "head" else hidden.float()
    return values[send(places, hidden.device)], None


def _slots_above(step: SlotStep, read: int, count: int) -> np.ndarray:
    """Returns the slots of the last `count` rows that the row of a read sees, in the order of their positions."""
    row = step.read_rows[step.reads[read]]
    visible = np.flatnonzero((step.run_first <= row) & (row < step.run_last))
    sizes = step.run_count[visible]
    slots = np.repeat(step.run_start[visible] - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
    return slots[len(slots) - count :]
