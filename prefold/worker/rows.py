"""A step of the row stream: its tensors, `attend`, one forward pass, its read-out, and the K/V of the path that a step
hands to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Heads, RowAttention, RowPlan
from ..device import send
from ..model import NO_ADAPTERS, Adapter, CausalLM, RowAdapters
from ..model.config import ModelConfig, Plane
from ..model.ops import log_sum_exp
from ..schedule.steps import StepResult, StreamStep
from .pool import PoolPlan, mean_of_paths, plan_pool


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


# Rows of the LM head computed at once: bounds the logits to 256 x vocabulary float32 numbers.
HEAD_ROWS = 256
# Rows of logits that are copied at once, where ranks are counted.
RANKED_ROWS = 32


def head_blocks(rows: int) -> Iterator[slice]:
    """Yields slices of the rows whose logits are wanted, as many rows at a time as may be."""
    for first in range(0, rows, HEAD_ROWS):
        yield slice(first, min(rows, first + HEAD_ROWS))


class Reads:
    """A ticket of a step has what it read, on its way from the device.

    values, greedy  as of StepResult
    """

    def __init__(self, values: Tensor, greedy: Tensor | None = None):
        self._values, self._greedy = _fetch(values), None if greedy is None else _fetch(greedy)
        self._event = torch.cuda.Event() if values.is_cuda else None
        if self._event is not None:
            self._event.record()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        return StepResult(self._values.numpy(), None if self._greedy is None else self._greedy.numpy())


def _fetch(tensor: Tensor) -> Tensor:
    """Returns the tensor on the host, or soon to be there."""
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def forward_stream(model: CausalLM, batch: Batch, path: Path, arguments: Mapping[str, Any]) -> tuple[Tensor, PathKV]:
    """Returns the hidden states of the rows of a step that are read, [rows, hidden], and the K/V of the path above the
    next step, as of Path. arguments: further arguments of the model's call"""
    attend = StepAttend(batch, path, model.config.planes, model.config.scale)
    hidden = model(batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters, **arguments)
    return hidden, attend.next_kv


def read_stream(model: CausalLM, batch: Batch, path: Path, hidden: Tensor, kv: PathKV) -> tuple[Reads, Path]:
    """Returns what is read of a step, not waited for, and the path above the next step.

    hidden, kv: as of `forward_stream`. On a rank other than 0 what is read of the whole vocabulary is empty.
    """
    readout = batch.step.readout
    if readout.kind == "mean":
        values, sums = mean_pool(hidden, batch, path)
        return Reads(values), Path(kv, sums)
    if readout.kind == "logprobs":
        reads = Reads(*logprobs_of(model, hidden, batch.step.reads, batch.reads, batch.targets, readout.top))
        return reads, Path(kv)
    if readout.kind == "logits":
        values = model.logits(hidden, readout.ids)
    elif readout.kind == "head":
        values = model.head(hidden)
    else:
        values = hidden.float()
    return Reads(values), Path(kv)


def logprobs_of(
    model: CausalLM, hidden: Tensor, places: np.ndarray, reads: Tensor, ids: Tensor, top: int | None
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each of `ids`, and whether it is the most likely id of its row; a row's
    log-sum-exp is computed once for all its targets. On a rank other than 0 they are no numbers.

    places  int64 [n], ascending: the row of `hidden` of each
    reads   the same on the device
    top     as of Readout
    """
    columns = () if top is None else (2 + 2 * top,)
    values = torch.empty((len(ids), *columns), dtype=torch.float32, device=hidden.device)
    greedy = torch.empty(len(ids), dtype=torch.bool, device=hidden.device)
    for block in head_blocks(len(hidden)):
        logits = model.logits(hidden[block])
        if model.ranks.rank:
            continue
        inside = slice(*np.searchsorted(places, (block.start, block.stop)).tolist())
        values[inside], greedy[inside] = log_probs(logits, reads[inside] - block.start, ids[inside], top)
    return values, greedy


def log_probs(logits: Tensor, rows: Tensor, ids: Tensor, top: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each of `ids` in its row of logits float32 [r, vocab], and whether it is the most
    likely id of that row. rows, ids: int64 [n]; top: as of Readout."""
    sums, largest = log_sum_exp(logits)
    chosen = logits[rows, ids]
    values = chosen - sums[rows]
    if top is not None:
        few = zip(rows.split(RANKED_ROWS), chosen.split(RANKED_ROWS), strict=True)
        ranks = 1 + torch.cat([(logits[block] > own[:, None]).sum(-1) for block, own in few])
        best, places = logits.topk(top, -1)
        # A float32 holds every id below 2**24 exactly.
        columns = (values[:, None], ranks[:, None], (best - sums[:, None])[rows], places[rows])
        values = torch.cat([column.float() for column in columns], -1)
    return values, largest[rows] == ids


def mean_pool(hidden: Tensor, batch: Batch, path: Path) -> tuple[Tensor, Tensor]:
    """Returns the mean over the path down to each key in `reads`, and the hidden states of the next path."""
    new = hidden.float() if batch.scatter is None else hidden.float().index_select(0, batch.scatter)
    keys = new if path.hidden is None else torch.cat((path.hidden, new))
    means = keys.new_empty(0, keys.shape[1]) if batch.pool is None else mean_of_paths(keys, batch.pool)
    return means, join(path.hidden, new, batch)
