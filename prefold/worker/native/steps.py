"""Convert steps to the arrays of the native executor: attention plans, rows to read, and the K/V between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...engine.schedule.steps import SlotStep, StreamStep
from ...model.config import ModelConfig
from ..attention.row_plan import RowPlan, plan_rows
from ..attention.slot_plan import SlotPlan, plan_slots, runs_by_window
from ..pool import PoolPlan, plan_pool

PathKV = Sequence[tuple[np.ndarray, np.ndarray | None]]  # as in NativePath


@dataclass(frozen=True, slots=True)
class NativePath:
    """The data carried between two steps of a row stream: K/V of the path, and hidden states for mean pooling.

    Attributes:
        rows: Number of rows of the path.
        kv: For each plane, keys [path, kv_heads, dim] and values [path, kv_heads, value dim]. They may belong to a
            longer path. Values are None if they are part of the keys.
        hidden: float32 [path, hidden], or None.
    """

    rows: int = 0
    kv: PathKV = ()
    hidden: np.ndarray | None = None

    def truncate(self, rows: int) -> NativePath:
        """Return the path's first `rows` rows, because the next window may share fewer rows.

        Raise ValueError if the path has fewer rows.
        """
        if rows > self.rows:
            raise ValueError(f"the step needs a path of {rows} rows, but its stream has {self.rows}")
        if rows == self.rows:
            return self
        return NativePath(rows, self.kv if rows else (), None if self.hidden is None else self.hidden[:rows])


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """The input of the forward pass of a stream step."""

    step: StreamStep
    tokens: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int64 [rows]
    read_rows: np.ndarray | None  # int64, the rows whose hidden state is read; None: all
    gather: np.ndarray | None  # int64, of a folded step (sharing "mlp"), else None
    scatter: np.ndarray | None  # int64, of a folded step, else None
    plans: dict[int | None, RowPlan]  # by sliding window; every row queries
    read_plans: dict[int | None, RowPlan]  # by sliding window; only read rows query, for the last layer
    read_order: np.ndarray | None  # sorts the read rows by their stream rows; None if the step is not folded
    keep_path: np.ndarray  # the rows of the carried path that stay
    keep_new: np.ndarray  # the new rows of the stream that join the path
    pool: PoolPlan[np.ndarray] | None = None  # for readout "mean", if the step reads anything
    adapters: np.ndarray | None = None  # int64 [rows], the adapter of each row; None: no row has an adapter


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """The input of the forward pass of a step over slots."""

    numbers: np.ndarray  # int64 [3, rows]: tokens, positions and slots
    read_rows: np.ndarray | None  # int64, the rows whose hidden state is read; None: all, in order
    plans: dict[int | None, SlotPlan]  # by sliding window; every row queries
    read_plans: dict[int | None, SlotPlan]  # by sliding window; only read rows query, for the last layer
    adapters: np.ndarray | None = None  # int64 [rows], the adapter of each row; None: no row has an adapter

    # A step over slots is never folded.
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
    """Return the input of a stream step's forward pass. Any thread may call this, while another step runs."""
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
    """Return the input of a slot step's forward pass.

    Args:
        config: The config of this rank's part of the model.
    """
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
    """Return the attention plan of a step for each sliding window.

    Args:
        queries: Querying rows, ascending; None: all.
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
