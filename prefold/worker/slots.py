"""A generation step as tensors, and `attend` over the KV store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..attention import Heads, KeyRuns, KVStore, SlotPlan, place_slots, plan_slots
from ..device import send
from ..model import NO_ADAPTERS, Adapter, CausalLM, RowAdapters
from ..model.config import Plane
from ..schedule.steps import SlotStep

__all__ = ["SlotAttend", "SlotBatch", "fill_in", "make_store", "prepare_slots"]


def make_store(model: CausalLM, slots: int) -> KVStore:
    """Room for the K/V of `slots` rows: of the heads that this rank has."""
    config = model.local
    return KVStore(len(config.planes), config.kv_heads, config.head_dim, slots, model.dtype, model.device)


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """What the forward pass of a step needs, on the device.

    read_rows    int64: rows whose hidden state is wanted; None: all of them, in order
    plans        one per distinct attention window: every row queries
    read_plans   the same with only the read rows as queries (the last layer)
    adapters     which rows have a LoRA adapter
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    read_rows: Tensor | None
    plans: dict[int | None, SlotPlan]
    read_plans: dict[int | None, SlotPlan]
    adapters: RowAdapters


def prepare_slots(
    step: SlotStep,
    planes: Sequence[Plane],
    heads: Heads,
    device: torch.device,
    adapters: Mapping[str, Adapter],
    given: Tensor | None = None,
) -> SlotBatch:
    """heads: the model's. adapters: in the order of their numbers. given: as for `fill_in`."""
    runs = KeyRuns(step.run_start, step.run_count, step.run_position, step.run_first, step.run_last)
    windows = {plane.window for plane in planes}
    positions = step.positions.astype(np.int64)

    def plan(runs: KeyRuns, positions: np.ndarray, window: int | None) -> SlotPlan:
        compiled = device.type == "cpu"
        made = plan_slots(runs, len(positions), positions, window, group=heads.group, compiled=compiled)
        if heads.fits(device):
            place_slots(made, heads, device)
        return made

    plans = {window: plan(runs, positions, window) for window in windows}
    read_all = len(step.read_rows) == step.num_rows
    if read_all:
        read_plans = plans
    else:
        kept = step.read_rows
        first, last = np.searchsorted(kept, runs.first), np.searchsorted(kept, runs.last)
        seen = last > first
        of_read = KeyRuns(runs.start[seen], runs.count[seen], runs.position[seen], first[seen], last[seen])
        window = planes[-1].window
        # A step may end in the middle of every prompt, and read nothing.
        read_plans = {window: plan(of_read, positions[kept], window)}
    tokens, rows, slots, reads = (send(a, device) for a in (step.tokens, step.positions, step.slots, step.read_rows))
    read = None if read_all else reads
    tokens = fill_in(tokens, given)
    return SlotBatch(tokens, rows, slots, read, plans, read_plans, row_adapters(step, adapters, read_all=read_all))


def fill_in(tokens: Tensor, given: Tensor | None) -> Tensor:
    """Tokens of a step, int64, with those of the step before put in: -1 - i is the i-th of `given`, int64; None: all
    are known."""
    if given is None or not len(given):
        return tokens
    # Whoever gets no token ends, and what comes of its row is not looked at.
    return torch.where(tokens < 0, given[(-1 - tokens).clamp(min=0)].clamp(min=0), tokens)


def row_adapters(step: SlotStep, adapters: Mapping[str, Adapter], *, read_all: bool) -> RowAdapters:
    if step.adapters is None:
        return NO_ADAPTERS
    return RowAdapters(list(adapters.values()), step.adapters, None if read_all else step.read_rows)


@dataclass(frozen=True, slots=True)
class SlotAttend:
    """Attention of one step: its rows' K/V go into the store, then each row sees what its plan says."""

    store: KVStore
    batch: SlotBatch
    planes: Sequence[Plane]
    scale: float

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows or read rows, heads, dim], k, v [rows, kv_heads, dim] -> o, shaped as q."""
        self.store.write(plane, self.batch.slots, k, v)
        plans = self.batch.read_plans if len(q) < len(k) else self.batch.plans
        return self.store.attend(plane, q, plans[self.planes[plane].window], self.scale)
