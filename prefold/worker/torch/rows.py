"""A step of the row stream: its tensors, `attend`, one forward pass, and the K/V of the path that a step hands to the
next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine.schedule.steps import StreamStep
from ...model.config import ModelConfig, Plane
from ..attention import RowPlan
from ..pool import PoolPlan, plan_pool, sent
from .arrays import TorchArrays
from .attention.heads import Heads
from .attention.row_attention import RowAttention
from .device import send
from .lora import NO_ADAPTERS, Adapter, RowAdapters
from .model import CausalLM


def heads_of(model: CausalLM) -> Heads:
    """Returns the heads that attention of this model is over; of a model that is split over ranks, this rank's."""
    return heads_in(model.local, model.dtype)


def heads_in(config: ModelConfig, dtype: torch.dtype) -> Heads:
    """Returns the heads of a model, or of a rank's part of it, by its config and the dtype of rows."""
    kept = None if config.kv_dtype is None else getattr(torch, config.kv_dtype)
    return Heads(config.heads, config.kv_heads, config.head_dim, dtype, config.attention_cap, kept)


PathKV = Mapping[int, tuple[Tensor, Tensor]]  # by plane: keys and values, [path, kv_heads, head_dim] each


@dataclass(frozen=True, slots=True)
class Path:
    """A path is what is held between two steps: the K/V of its rows, and for mean pooling their hidden states.

    kv      by plane: keys and values, [path, kv_heads, head_dim] each
    hidden  float32 [path, hidden], or None
    """

    kv: PathKV = field(default_factory=dict)
    hidden: Tensor | None = None

    @property
    def rows(self) -> int:
        """Returns how many rows the path has."""
        return next((len(keys) for keys, _ in self.kv.values()), 0)

    def truncate(self, rows: int) -> Path:
        """Returns the first `rows` rows: the next window shares no more than these with the last one."""
        if rows == self.rows:
            return self
        kv = {plane: (keys[:rows], values[:rows]) for plane, (keys, values) in self.kv.items()}
        return Path(kv, None if self.hidden is None else self.hidden[:rows])


@dataclass(slots=True)
class StepAttend:
    """`attend` of one step: queries of its rows over the carried path and its own rows.

    The model calls it once for each plane; after that `next_kv` holds the K/V of the path above the next step.
    """

    batch: Batch
    path: Path
    planes: Sequence[Plane]
    scale: float
    next_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Returns attention of q [rows or read rows, heads, dim] over k, v [rows, kv_heads, dim], shaped as q."""
        batch, window = self.batch, self.planes[plane].window
        read_only = len(q) < len(k)
        path_k, path_v = self.path.kv.get(plane, (None, None))
        if batch.scatter is not None:
            k, v = k.index_select(0, batch.scatter), v.index_select(0, batch.scatter)
            q = q.index_select(0, batch.read_order if read_only else batch.scatter)
        plan = (batch.read_plans if read_only else batch.plans)[window]
        o = batch.attention.attend(q, k, v, plan, scale=self.scale, path_k=path_k, path_v=path_v, sinks=sinks)
        if batch.scatter is not None:
            o = (
                torch.empty_like(o).index_copy_(0, batch.read_order, o)
                if read_only
                else o.index_select(0, batch.gather)
            )
        self.next_kv[plane] = join(path_k, k, batch), join(path_v, v, batch)
        return o


def join(path: Tensor | None, new: Tensor, batch: Batch) -> Tensor:
    """Returns the rows of `path` and `new` that the next step needs: copies, so that the step's memory can go."""
    kept = new.index_select(0, batch.keep_new)
    if path is None or not len(batch.keep_path):
        return kept
    return torch.cat((path.index_select(0, batch.keep_path), kept))


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch is what the forward pass of a step and its read-out need, on the device.

    attention        computes attention by the plans
    plans            by sliding window, every row queries
    read_plans       by sliding window, only the read rows query: for the last layer
    read_order       sharing "mlp": sorts the read rows by the stream row that stands for each; else None
    keep_path        which rows of the carried path stay
    keep_new         which of the new rows of the stream join it
    pool             for readout "mean", where something is read
    adapters         which rows have a LoRA adapter
    """

    step: StreamStep
    attention: RowAttention
    tokens: Tensor
    positions: Tensor
    read_rows: Tensor | None
    gather: Tensor | None
    scatter: Tensor | None
    plans: dict[int | None, RowPlan]
    read_plans: dict[int | None, RowPlan]
    read_order: Tensor | None
    keep_path: Tensor
    keep_new: Tensor
    pool: PoolPlan[Tensor] | None = None
    adapters: RowAdapters = NO_ADAPTERS


def prepare(
    step: StreamStep, planes: Sequence[Plane], attention: RowAttention, adapters: Sequence[Adapter] = ()
) -> Batch:
    """Returns all that the forward pass of `step` needs; it may be called in any thread, while another step runs.

    adapters: those that steps number, in their order.
    """
    device = attention.device
    new_keys = step.path + np.arange(len(step.end) - step.path, dtype=np.int64)
    windows = {plane.window for plane in planes}
    last_window = planes[-1].window

    def plan(query_rows: np.ndarray, window: int | None) -> RowPlan:
        return attention.plan(step.end, query_rows, step.key_positions, window, path=step.path, first=step.first)

    plans = {window: plan(new_keys, window) for window in windows}
    read_order = None
    if step.read_rows is None:
        read_plans = plans
    else:
        read_keys = step.read_rows if step.fold is None else step.fold.gather[step.read_rows]
        if step.fold is not None:
            read_order = np.argsort(read_keys)
            read_keys = read_keys[read_order]
        read_plans = {last_window: plan(step.path + read_keys, last_window)}

    def tensor(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else send(array, device)

    old = step.keep < step.path
    row_adapters = NO_ADAPTERS
    if step.adapter is not None:
        row_adapters = RowAdapters(adapters, np.full(step.num_rows, step.adapter, np.int64), step.read_rows)
    averages = step.read_out.readout.kind == "mean" and len(step.read_out.rows) > 0
    pool = plan_pool(step.end, step.key_positions, step.read_out.rows) if averages else None
    return Batch(
        step=step,
        attention=attention,
        tokens=send(step.tokens, device),
        positions=send(step.positions, device),
        read_rows=tensor(step.read_rows),
        gather=tensor(step.fold.gather) if step.fold else None,
        scatter=tensor(step.fold.scatter) if step.fold else None,
        plans=plans,
        read_plans=read_plans,
        read_order=tensor(read_order),
        keep_path=send(step.keep[old], device),
        keep_new=send(step.keep[~old] - step.path, device),
        pool=None if pool is None else sent(pool, TorchArrays(device)),
        adapters=row_adapters,
    )


def forward_stream(model: CausalLM, batch: Batch, path: Path, arguments: Mapping[str, Any]) -> tuple[Tensor, PathKV]:
    """Returns the hidden states of the rows of a step that are read, [rows, hidden], and the K/V of the path above the
    next step, as of Path. arguments: further arguments of the model's call"""
    attend = StepAttend(batch, path, model.config.planes, model.config.scale)
    hidden = model(batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters, **arguments)
    return hidden, attend.next_kv
