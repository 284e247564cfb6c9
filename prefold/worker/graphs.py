"""Decoding steps run as captured CUDA graphs, for a step of few rows would be over before Python has launched its
kernels one by one.

A graph reads and writes fixed places, so a step is laid into tensors of a fixed size: its rows are filled up to the
next of SIZES, and what attention reads of its plan to the most there can be at that size. Rows that fill up write
their K/V into the scratch slot and see nothing; what they give is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..attention import KVStore, SlotPlan
from ..attention.gpu import fixed_plan, pick_tile
from ..cache import SCRATCH
from ..device import send
from ..model import NO_ADAPTERS, CausalLM
from ..schedule.steps import SlotStep
from .slots import SlotBatch, fill_in, forward, slot_plans

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def padded_size(rows: int) -> int | None:
    """Returns the size that so many rows are filled up to; None: there is none."""
    return next((size for size in SIZES if size >= rows), None)


class FixedStep:
    """A fixed step is a decoding step in tensors that stay where they are: `load` lays a step into them, `forward` runs
    the one that lies there.

    size   rows
    tiles  rows of attention's tiles, by window
    keys   the most entries that the lists of the tiles have
    """

    def __init__(self, model: CausalLM, store: KVStore, size: int, tiles: dict[int | None, int], keys: int):
        self.model, self.store, self.size = model, store, size
        fixed = {w: fixed_plan(store.heads, size, rows, keys, w, store.device) for w, rows in tiles.items()}
        plans = {window: plan for window, (plan, _) in fixed.items()}
        self._tables = {window: tables for window, (_, tables) in fixed.items()}
        self._rows = torch.zeros((3, size), dtype=torch.int64, device=store.device)
        self._batch = SlotBatch(*self._rows, None, plans, plans, NO_ADAPTERS)

    def load(self, step: SlotStep, plans: dict[int | None, SlotPlan], last_ids: Tensor | None = None) -> None:
        """Lays in a step of at most `size` rows, behind what the device still does with the step before. last_ids: as
        for `fill_in`."""
        rows = np.zeros((3, self.size), np.int64)
        rows[2] = SCRATCH
        rows[:, : step.num_rows] = step.tokens, step.positions, step.slots
        self._rows.copy_(send(rows, self._rows.device), non_blocking=True)
        self._rows[0] = fill_in(self._rows[0], last_ids)
        for window, tables in self._tables.items():
            tables.load(plans[window])

    @torch.inference_mode()
    def forward(self) -> Tensor:
        """Returns the hidden states of all `size` rows."""
        return forward(self.model, self.store, self._batch)


@dataclass(slots=True)
class _CapturedStep:
    step: FixedStep
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class DecodeGraphs:
    """Runs graphs of the forward pass by size; each is captured when its size is first met.

    A step that a graph cannot stand for (rows of prompts, more rows than the largest size) is not taken.
    """

    def __init__(self, model: CausalLM, store: KVStore):
        self.model, self.store = model, store
        self._windows = {plane.window for plane in model.config.planes}
        self._captured: dict[tuple[object, ...], _CapturedStep] = {}
        self._keys = 1 << 14
        self._pool: object = None

    def takes(self, step: SlotStep) -> bool:
        """Returns whether a graph can stand for a step that has nothing beside its rows: it reads all of them, and
        there is a size for them."""
        reads_all = len(step.read_rows) == step.num_rows and not len(step.state_reads)
        return reads_all and padded_size(step.num_rows) is not None

    def run(self, step: SlotStep, last_ids: Tensor | None = None) -> Tensor:
        """Returns the hidden states [rows, hidden] of a step that is taken, until the next call. last_ids: as for
        `fill_in`."""
        plans = slot_plans(step, self.store, self._windows)
        captured = self._of(step, plans, last_ids)
        captured.step.load(step, plans, last_ids)
        captured.graph.replay()
        return captured.hidden[: step.num_rows]

    def _of(self, step: SlotStep, plans: dict[int | None, SlotPlan], last_ids: Tensor | None) -> _CapturedStep:
        size = padded_size(step.num_rows)
        assert size is not None
        picked = {window: pick_tile(plan, self.store.heads) for window, plan in plans.items()}
        needed = max(keys for _, keys in picked.values())
        if needed > self._keys:  # longer lists than any graph has room for: all are captured anew, with twice as much
            self._captured.clear()
            self._pool = None  # a pool whose graphs are all gone must not be used again
            self._keys = 2 * needed
        tiles = {window: rows for window, (rows, _) in picked.items()}
        key = (size, tuple(tiles.items()))
        if key not in self._captured:
            self._captured[key] = self._capture(size, tiles, step, plans, last_ids)
        return self._captured[key]

    def _capture(
        self,
        size: int,
        tiles: dict[int | None, int],
        step: SlotStep,
        plans: dict[int | None, SlotPlan],
        last_ids: Tensor | None,
    ) -> _CapturedStep:
        fixed = FixedStep(self.model, self.store, size, tiles, self._keys)
        fixed.load(step, plans, last_ids)
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
        return _CapturedStep(fixed, graph, hidden)
