"""What the native executor needs of a step, as arrays: plans of attention, rows to read, and the K/V between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...engine.schedule.steps import SlotStep, StreamStep
from ...model.config import ModelConfig
from ..attention.row_plan import RowPlan, plan_rows
from ..attention.slot_plan import SlotPlan, plan_slots, runs_by_window
from ..pool import PoolPlan, plan_pool

PathKV = Sequence[tuple[np.ndarray, np.ndarray | None]]  # as of NativePath


@dataclass(frozen=True, slots=True)
class NativePath:
    """A NativePath is what is held between two steps of a row stream: the K/V of the path's rows, and for mean pooling
    their hidden states.

    rows    of the path
    kv      of each plane keys [path, kv_heads, dim] and values [path, kv_heads, value dim], which may be those of a
            longer path; values are None if they are numbers of the keys
    hidden  float32 [path, hidden], or None
    """

    rows: int = 0
    kv: PathKV = ()
    hidden: np.ndarray | None = None

    def truncate(self, rows: int) -> NativePath:
        """Return the first `rows` rows: the next window shares no more than these with the last one. Raise ValueError
        if there are fewer."""
        if rows > self.rows:
            raise ValueError(f"the step goes on with {rows} rows, its stream left {self.rows}")
        if rows == self.rows:
            return self
        return NativePath(rows, self.kv if rows else (), None if self.hidden is None else self.hidden[:rows])


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A StreamBatch is what the forward pass of a step of a row stream needs.

    tokens, positions  int64 [rows]
    read_rows   int64: rows whose hidden state is wanted; None: all of them
    gather, scatter  of a folded step (sharing "mlp"), int64; else None
    plans       by sliding window, every row queries
    read_plans  by sliding window, only the rows that are read query: for the last layer
    read_order  of a folded step: sorts the read rows by the stream row that stands for each; else None
    keep_path   which rows of the carried path stay
    keep_new    which of the new rows of the stream join it
    pool        for readout "mean", where something is read
    adapters    int64 [rows], the number of each row's adapter; None: no row has one
    """

    step: StreamStep
    tokens: np.ndarray
    positions: np.ndarray
    read_rows: np.ndarray | None
    gather: np.ndarray | None
    scatter: np.ndarray | None
    plans: dict[int | None, RowPlan]
    read_plans: dict[int | None, RowPlan]
    read_order: np.ndarray | None
    keep_path: np.ndarray
    keep_new: np.ndarray
    pool: PoolPlan[np.ndarray] | None = None
    adapters: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """A SlotBatch is what the forward pass of a step over slots needs.

    numbers     tokens, positions and slots, int64 [3, rows]
    read_rows   int64: rows whose hidden state is wanted; None: all of them, in order
    plans       by sliding window, every row queries
    read_plans  by sliding window, only the rows that are read query: for the last layer
    adapters    int64 [rows], the number of each row's adapter; None: no row has one
    """

    numbers: np.ndarray
    read_rows: np.ndarray | None
    plans: dict[int | None, SlotPlan]
    read_plans: dict[int | None, SlotPlan]
    adapters: np.ndarray | None = None

    # Those of a step over slots are never folded.
    gather = scatter = read_order = None

    @property
    def tokens(self) -> np.ndarray:
        """Return the tokens, int64 [rows]."""
        return self.numbers[0]

    @property
    def positions(self) -> np.ndarray:
        """Return the positions, int64 [rows]."""
        return self.numbers[1]

    @property
    def slots(self) -> np.ndarray:
        """Return the slots, int64 [rows]."""
        return self.numbers[2]


def prepare_stream(step: StreamStep, config: ModelConfig) -> StreamBatch:
    """Return all that the forward pass of a step needs; it may be called in any thread, while another step runs."""
    new_keys = step.path + np.arange(len(step.end) - step.path, dtype=np.int64)

    def plan(query_rows: np.ndarray, window: int | None) -> RowPlan:
        first, invariant = step.first if config.has_spans(window) else None, config.invariant
        return plan_rows(step.end, query_rows, step.key_positions, window, first=first, invariant=invariant)

    plans = {window: plan(new_keys, window) for window in {plane.window for plane in config.planes}}
    read_order, read_plans = None, plans
    if step.read_rows is not None:
        read_keys = step.read_rows if step.fold is None else step.fold.gather[step.read_rows]
        if step.fold is not None:
            read_order = np.argsort(read_keys)
            read_keys = read_keys[read_order]
        read_plans = {window: plan(step.path + read_keys, window) for window in config.read_windows}
    old = step.keep < step.path
    averages = step.read_out.readout.kind == "mean" and len(step.read_out.rows) > 0
    return StreamBatch(
        step=step,
        tokens=_int64(step.tokens),
        positions=_int64(step.positions),
        read_rows=None if step.read_rows is None else _int64(step.read_rows),
        gather=_int64(step.fold.gather) if step.fold else None,
        scatter=_int64(step.fold.scatter) if step.fold else None,
        plans=plans,
        read_plans=read_plans,
        read_order=read_order,
        keep_path=_int64(step.keep[old]),
        keep_new=_int64(step.keep[~old] - step.path),
        pool=plan_pool(step.end, step.key_positions, step.read_out.rows) if averages else None,
        adapters=None if step.adapter is None else np.full(step.num_rows, step.adapter, np.int64),
    )


def prepare_slots(step: SlotStep, config: ModelConfig) -> SlotBatch:
    """Return a step over slots as arrays. config: of this rank's part of the model"""
    plans = slot_plans(step, config, {plane.window for plane in config.planes})
    read_rows, read_plans = None, plans
    if len(step.read_rows) < step.num_rows:
        read_rows = _int64(step.read_rows)
        read_plans = slot_plans(step, config, config.read_windows, read_rows)
    adapters = step.adapters
    if adapters is not None and adapters.max(initial=-1) < 0:
        adapters = None
    numbers = np.stack((step.tokens, step.positions, step.slots), dtype=np.int64)
    return SlotBatch(numbers, read_rows, plans, read_plans, None if adapters is None else _int64(adapters))


def slot_plans(
    step: SlotStep, config: ModelConfig, windows: Iterable[int | None], queries: np.ndarray | None = None
) -> dict[int | None, SlotPlan]:
    """Return the plan of attention of a step for each of these sliding windows.

    queries: the rows that query, ascending; None: all.
    """
    groups, invariant, latent = config.group_of, config.invariant, config.latent
    return {
        window: plan_slots(
            runs, len(positions), positions, window, group=groups[window], invariant=invariant, latent=latent
        )
        for window, (runs, positions) in runs_by_window(step, windows, queries, config.has_spans).items()
    }


def _int64(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.int64)
