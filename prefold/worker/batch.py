"""A step of the row stream as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..attention import RowAttention, RowPlan
from ..device import send
from ..model import NO_ADAPTERS, Adapter, RowAdapters
from ..model.config import Plane
from ..schedule.steps import StreamStep
from .pool import PoolPlan, plan_pool


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch is what the forward pass of a step and its read-out need, on the device.

    attention        who attends, by the plans
    plans            by sliding window, every row queries
    read_plans       by sliding window, only the read rows query: for the last layer
    read_order       sharing "mlp": sorts the read rows by the stream row that stands for each; else None
    keep_path        which rows of the carried path stay
    keep_new         which of the new rows of the stream join it
    reads, targets   of the step, int64
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
    reads: Tensor
    targets: Tensor
    pool: PoolPlan | None = None
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
    averages = step.readout.kind == "mean" and len(step.reads) > 0
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
        reads=send(step.reads, device),
        targets=send(step.targets, device),
        pool=plan_pool(step.end, step.key_positions, step.reads, device) if averages else None,
        adapters=row_adapters,
    )
