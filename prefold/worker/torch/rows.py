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


def heads_of(config: ModelConfig, dtype: torch.dtype) -> list[Heads]:
    """Return the heads of each plane of a model, or of a rank's part of it. dtype: of rows"""
    kept = None if config.kv_dtype is None else getattr(torch, config.kv_dtype)
    every = (config.kv_sizes(plane) for plane in range(len(config.planes)))
    return [
        Heads(config.heads, sizes.heads, sizes.dim, dtype, config.attention_cap, kept, sizes.value_dim, sizes.in_keys)
        for sizes in every
    ]


def row_attention_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[int | None, RowAttention]:
    """Return what computes attention over rows, by sliding window. config, dtype: as of `heads_of`"""
    heads = {plane.window: of for plane, of in zip(config.planes, heads_of(config, dtype), strict=True)}
    made = {of: RowAttention(of, device) for of in heads.values()}
    return {window: made[of] for window, of in heads.items()}


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
    _fresh: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(
        self, plane: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Return attention of q [rows or read rows, heads, dim] over k [rows, kv_heads, dim] and v [rows, kv_heads,
        value dim], or over those of an earlier call for the plane: [rows or read rows, heads, value dim]."""
        batch, window = self.batch, self.planes[plane].window
        is_own = k is not None and v is not None
        if k is None or v is None:  # an earlier layer's
            k, v = self._fresh[plane]
        else:
            self._fresh[plane] = k, v
        read_only = len(q) < len(k)
        path_k, path_v = self.path.kv.get(plane, (None, None))
        if batch.scatter is not None:
            k, v = k.index_select(0, batch.scatter), v.index_select(0, batch.scatter)
            q = q.index_select(0, batch.read_order if read_only else batch.scatter)
        plan = (batch.read_plans if read_only else batch.plans)[window]
        o = batch.attention[window].attend(q, k, v, plan, scale=self.scale, path_k=path_k, path_v=path_v, sinks=sinks)
        if batch.scatter is not None:
            o = (
                torch.empty_like(o).index_copy_(0, batch.read_order, o)
                if read_only
                else o.index_select(0, batch.gather)
            )
        if is_own:
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

    attention        computes attention by the plans, by sliding window
    plans            by sliding window, every row queries
    read_plans       by sliding window, only the read rows query: for the last layer
    read_order       sharing "mlp": sorts the read rows by the stream row that stands for each; else None
    keep_path        which rows of the carried path stay
    keep_new         which of the new rows of the stream join it
    pool             for readout "mean", where something is read
    adapters         which rows have a LoRA adapter
    """

    step: StreamStep
    attention: Mapping[int | None, RowAttention]
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
    step: StreamStep,
    config: ModelConfig,
    attention: Mapping[int | None, RowAttention],
    adapters: Sequence[Adapter] = (),
) -> Batch:
    """Returns all that the forward pass of `step` needs; it may be called in any thread, while another step runs.

    adapters: those that steps number, in their order.
    """
    device = next(iter(attention.values())).device
    new_keys = step.path + np.arange(len(step.end) - step.path, dtype=np.int64)
    windows = {plane.window for plane in config.planes}

    def plan(query_rows: np.ndarray, window: int | None) -> RowPlan:
        first = step.first if config.has_spans(window) else None
        return attention[window].plan(step.end, query_rows, step.key_positions, window, path=step.path, first=first)

    plans = {window: plan(new_keys, window) for window in windows}
    read_order = None
    if step.read_rows is None:
        read_plans = plans
    else:
        read_keys = step.read_rows if step.fold is None else step.fold.gather[step.read_rows]
        if step.fold is not None:
            read_order = np.argsort(read_keys)
            read_keys = read_keys[read_order]
        read_plans = {window: plan(step.path + read_keys, window) for window in config.read_windows}

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
