"""Decoding steps as captured CUDA graphs: a step of few rows is over before Python has launched its kernels one by one.

A graph reads and writes fixed places, so a step is laid into tensors of a fixed size: its rows are filled up to the
next of SIZES, and what attention reads of its plan to the most there can be at that size. Rows that fill up write
their K/V into the scratch slot and see nothing; what they give is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..attention import KVStore, SlotPlan
from ..attention.gpu import attend_fixed, fixed_tables, pick_tile, write_slots
from ..cache import SCRATCH
from ..device import send
from ..model import CausalLM
from ..model.config import Plane
from ..schedule.steps import SlotStep
from .slots import fill_in, slot_plans

if TYPE_CHECKING:
    from ..attention.slot_triton import FixedTables

__all__ = ["SIZES", "DecodeGraphs", "FixedStep", "padded_size"]

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def padded_size(rows: int) -> int | None:
    """The size that so many rows are filled up to; None: there is none."""
    return next((size for size in SIZES if size >= rows), None)


class FixedStep:
    """A decoding step in tensors that stay where they are: `load` lays one in, `forward` runs what lies there.

    size   rows
    tiles  rows of attention's tiles, by window
    """

    def __init__(self, model: CausalLM, store: KVStore, size: int, tiles: dict[int | None, int], keys: int):
        self.model, self.store, self.size = model, store, size
        self._tables = {
            window: fixed_tables(store.heads, size, rows, keys, window is not None, model.device)
            for window, rows in tiles.items()
        }
        # tokens, positions, slots
        self._rows = torch.zeros((3, size), dtype=torch.int64, device=model.device)

    def load(self, step: SlotStep, plans: dict[int | None, SlotPlan], given: Tensor | None = None) -> None:
        """A step of at most `size` rows; behind what the device still does with the one before. given: as
        for `fill_in`."""
        rows = np.zeros((3, self.size), np.int64)
        rows[2] = SCRATCH
        rows[:, : step.num_rows] = step.tokens, step.positions, step.slots
        self._rows.copy_(send(rows, self._rows.device), non_blocking=True)
        self._rows[0] = fill_in(self._rows[0], given)
        for window, tables in self._tables.items():
            tables.load(plans[window])

    @torch.inference_mode()
    def forward(self) -> Tensor:
        """Hidden states of all `size` rows."""
        tokens, positions, slots = self._rows
        config = self.model.config
        attend = _FixedAttend(self.store, self._tables, slots, config.planes, config.scale)
        return self.model(tokens, positions, attend)


@dataclass(frozen=True, slots=True)
class _FixedAttend:
    """`SlotAttend` over tables that stay where they are."""

    store: KVStore
    tables: dict[int | None, FixedTables]
    slots: Tensor
    planes: Sequence[Plane]
    scale: float

    def __call__(self, plane: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.store.plane(plane)
        write_slots(keys, values, self.slots, k, v)
        window = self.planes[plane].window
        return attend_fixed(q, keys, values, self.tables[window], scale=self.scale, window=window)


@dataclass(slots=True)
class _Captured:
    step: FixedStep
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class DecodeGraphs:
    """Graphs of the forward pass by size, captured when a size is first met.

    A step that a graph cannot stand for (rows of prompts, more rows than the largest size) is not taken.
    """

    def __init__(self, model: CausalLM, store: KVStore):
        self.model, self.store = model, store
        self._windows = {plane.window for plane in model.config.planes}
        self._captured: dict[tuple, _Captured] = {}
        self._keys = 1 << 14
        self._pool: object = None

    def takes(self, step: SlotStep) -> bool:
        """Returns whether a graph can stand for a step: it reads all of its rows, and there is a size for them."""
        return len(step.read_rows) == step.num_rows and padded_size(step.num_rows) is not None

    def run(self, step: SlotStep, given: Tensor | None = None) -> Tensor:
        """Returns the hidden states [rows, hidden] of a step that is taken, until the next call. given: as for
        `fill_in`."""
        plans = slot_plans(step, self.store, self._windows)
        captured = self._of(step, plans, given)
        captured.step.load(step, plans, given)
        captured.graph.replay()
        return captured.hidden[: step.num_rows]

    def _of(self, step: SlotStep, plans: dict[int | None, SlotPlan], given: Tensor | None) -> _Captured:
        size = padded_size(step.num_rows)
        assert size is not None
        picked = {window: pick_tile(plan, self.store.heads) for window, plan in plans.items()}
        needed = max(keys for _, keys in picked.values())
        if needed > self._keys:  # longer lists than any graph has room for: all are captured anew, with twice as much
            self._captured.clear()
            self._keys = 2 * needed
        tiles = {window: rows for window, (rows, _) in picked.items()}
        key = (size, tuple(tiles.items()))
        if key not in self._captured:
            self._captured[key] = self._capture(size, tiles, step, plans, given)
        return self._captured[key]

    def _capture(
        self,
        size: int,
        tiles: dict[int | None, int],
        step: SlotStep,
        plans: dict[int | None, SlotPlan],
        given: Tensor | None,
    ) -> _Captured:
        fixed = FixedStep(self.model, self.store, size, tiles, self._keys)
        fixed.load(step, plans, given)
        # Once outside of the graph: kernels are compiled and libraries make their workspaces. What it writes, the
        # replay writes again.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fixed.forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = fixed.forward()
        return _Captured(fixed, graph, hidden)
