"""A step over slots in PyTorch: its tensors, and `attend` over the KV store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine.schedule.steps import SlotStep
from ...model.config import ModelConfig, Plane
from ..attention.slot_plan import SlotPlan, runs_by_window
from .attention.store import KVStore
from .device import send
from .lora import NO_ADAPTERS, Adapter, RowAdapters
from .model import CausalLM
from .rows import heads_of


def make_store(model: CausalLM, slots: int) -> KVStore:
    """Allocate the K/V of `slots` rows, for this rank's heads."""
    return KVStore(heads_of(model.local, model.dtype), slots, model.device)


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """The input of the forward pass of a step over slots, on the device."""

    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [rows]
    read_rows: Tensor | None  # int64, the rows whose hidden state is read; None: all, in order
    plans: dict[int | None, SlotPlan]  # by sliding window; every row queries
    read_plans: dict[int | None, SlotPlan]  # by sliding window; only read rows query, for the last layer
    adapters: RowAdapters  # the LoRA adapter of each row


def prepare_slots(
    step: SlotStep,
    store: KVStore,
    config: ModelConfig,
    adapters: Mapping[str, Adapter],
    last_ids: Tensor | None = None,
) -> SlotBatch:
    """Return a step as tensors on the store's device.

    Args:
        adapters: {name: adapter}, in the order of the adapters' numbers in the step.
        last_ids: As in `fill_in`.
    """
    plans = slot_plans(step, store, config, {plane.window for plane in config.planes})
    read_rows, read_plans = None, plans
    if len(step.read_rows) < step.num_rows:
        read_rows, read_plans = step.read_rows, slot_plans(step, store, config, config.read_windows, step.read_rows)
    row_adapters = NO_ADAPTERS
    if step.adapters is not None and step.adapters.max(initial=-1) >= 0:
        row_adapters = RowAdapters(list(adapters.values()), step.adapters, read_rows)
    tokens, positions, slots = (send(array, store.device) for array in (step.tokens, step.positions, step.slots))
    read = None if read_rows is None else send(read_rows, store.device)
    return SlotBatch(fill_in(tokens, last_ids), positions, slots, read, plans, read_plans, row_adapters)


def slot_plans(
    step: SlotStep,
    store: KVStore,
    config: ModelConfig,
    windows: Iterable[int | None],
    queries: np.ndarray | None = None,
) -> dict[int | None, SlotPlan]:
    """Return the attention plan of a step for each sliding window.

    Args:
        queries: Querying rows, ascending; None: all.
    """
    plane_of = {plane.window: number for number, plane in enumerate(config.planes)}
    return {
        window: store.plan(runs, len(positions), positions, window, plane_of[window])
        for window, (runs, positions) in runs_by_window(step, windows, queries, config.has_spans).items()
    }


def fill_in(tokens: Tensor, last_ids: Tensor | None) -> Tensor:
    """Return the tokens of a step, int64 [rows], with placeholders replaced by tokens of the previous step.

    A placeholder -1 - i stands for the i-th of `last_ids`, int64 [reads]. last_ids None: there are no placeholders.
    """
    if last_ids is None or not len(last_ids):
        return tokens
    # A read without a token (-1) ends its sequence. Any valid id will do, because the row's result is ignored.
    return torch.where(tokens < 0, last_ids[(-1 - tokens).clamp(min=0)].clamp(min=0), tokens)


@dataclass(frozen=True, slots=True)
class SlotAttend:
    """`attend` of one step: it writes the rows' K/V to the store, then attends over the keys in the plan."""

    store: KVStore
    batch: SlotBatch
    planes: Sequence[Plane] | Mapping[int, Plane]
    scale: float

    def __call__(
        self, plane: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Return attention of q, [rows or read rows, heads, value dim].

        Store k [rows, kv_heads, dim] and v [rows, kv_heads, value dim] first. None: an earlier call for the plane did.
        """
        if k is not None and v is not None:
            self.store.write(plane, self.batch.slots, k, v)
        plans = self.batch.read_plans if len(q) < len(self.batch.slots) else self.batch.plans
        return self.store.attend(plane, q, plans[self.planes[plane].window], self.scale, sinks)


def forward(
    model: CausalLM, store: KVStore, batch: SlotBatch, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Tensor:
    """Run a step, and return the hidden states of the read rows, [rows, hidden]. Its K/V is then in the store.

    Args:
        arguments: Extra arguments of the model call.
    """
    attend = SlotAttend(store, batch, model.config.planes, model.config.scale)
    return model(batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters, **arguments)
