"""A step of the row stream in PyTorch: its tensors, `attend`, the forward pass, and the K/V of the path."""

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
    """Return the heads of each plane of a model, or of a rank's part of it.

    Args:
        dtype: The dtype of rows.
    """
    kept = None if config.kv_dtype is None else getattr(torch, config.kv_dtype)
    every = (config.kv_sizes(plane) for plane in range(len(config.planes)))
    return [
        Heads(config.heads, sizes.heads, sizes.dim, dtype, config.attention_cap, kept, sizes.value_dim, sizes.in_keys)
        for sizes in every
    ]


def row_attention_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[int | None, RowAttention]:
    """Return the attention over rows for each sliding window.

    Args:
        config, dtype: As in `heads_of`.
    """
    heads = {plane.window: of for plane, of in zip(config.planes, heads_of(config, dtype), strict=True)}
    made = {of: RowAttention(of, device) for of in heads.values()}
    return {window: made[of] for window, of in heads.items()}


PathKV = Mapping[int, tuple[Tensor, Tensor]]  # by plane: keys and values, [path, kv_heads, head_dim] each


@dataclass(frozen=True, slots=True)
class Path:
    """The data carried between two steps of a row stream: K/V of the path, and hidden states for mean pooling."""

    kv: PathKV = field(default_factory=dict)
    hidden: Tensor | None = None  # float32 [path, hidden], or None

    @property
    def rows(self) -> int:
        """Return the number of rows of the path."""
        return next((len(keys) for keys, _ in self.kv.values()), 0)

    def truncate(self, rows: int) -> Path:
        """Return the path's first `rows` rows, because the next window may share fewer rows."""
        if rows == self.rows:
            return self
        kv = {plane: (keys[:rows], values[:rows]) for plane, (keys, values) in self.kv.items()}
        return Path(kv, None if self.hidden is None else self.hidden[:rows])


@dataclass(slots=True)
class StepAttend:
    """`attend` of one step: queries of its rows, over the carried path and its own rows.

    The model calls it once for each plane. After that, `next_kv` has the K/V of the path above the next step.
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
        """Return attention of q, [rows or read rows, heads, value dim].

        Args:
            k: [rows, kv_heads, dim].
            v: [rows, kv_heads, value dim]; None: the keys and values of an earlier call for the plane.
        """
        batch, window = self.batch, self.planes[plane].window
        is_own = k is not None and v is not None
        if k is None or v is None:  # an earlier layer computed them
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
    """Return the rows of `path` and `new` that the next step needs, as copies, to let the step's memory go free."""
    kept = new.index_select(0, batch.keep_new)
    if path is None or not len(batch.keep_path):
        return kept
    return torch.cat((path.index_select(0, batch.keep_path), kept))


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of a stream step's forward pass and read-outs, on the device."""

    step: StreamStep
    attention: Mapping[int | None, RowAttention]  # by sliding window
    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    read_rows: Tensor | None  # int64, the rows whose hidden state is read; None: all
    gather: Tensor | None  # int64, of a folded step (sharing "mlp"), else None
    scatter: Tensor | None  # int64, of a folded step, else None
    plans: dict[int | None, RowPlan]  # by sliding window; every row queries
    read_plans: dict[int | None, RowPlan]  # by sliding window; only read rows query, for the last layer
    read_order: Tensor | None  # sorts the read rows by their stream rows; None if the step is not folded
    keep_path: Tensor  # the rows of the carried path that stay
    keep_new: Tensor  # the new rows of the stream that join the path
    pool: PoolPlan[Tensor] | None = None  # for readout "mean", if the step reads anything
    adapters: RowAdapters = NO_ADAPTERS  # the LoRA adapter of each row


def prepare(
    step: StreamStep,
    config: ModelConfig,
    attention: Mapping[int | None, RowAttention],
    adapters: Sequence[Adapter] = (),
) -> Batch:
    """Return the input of a stream step's forward pass. Any thread may call this, while another step runs.

    Args:
        adapters: {name: adapter}, in the order of the adapters' numbers in the step.
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
    """Run a step.

    Return the hidden states of the read rows, [rows, hidden], and the K/V of the path above the next step.

    Args:
        arguments: Extra arguments of the model call.
    """
    attend = StepAttend(batch, path, model.config.planes, model.config.scale)
    hidden = model(batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters, **arguments)
    return hidden, attend.next_kv
