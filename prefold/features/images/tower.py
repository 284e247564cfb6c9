"""The tower at work: rows of a model's residual stream from tiles, some pieces at a time. No torch.

What is computed is the tower's program (`families.tower_program`). An executor runs its operations; attention and the
squares of patches are here, over the arrays of any executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from ...model.builders import QKV
from ...model.program import DELTA, OUT, Attend, Buffer, H, Operation, Program, X
from ...worker.arrays import Array, Arrays
from ...worker.attention import RowPlan
from .config import PIECE_ROWS
from .families import MERGED, PATCHES, TowerModel

MOST_PLANS = 256  # attention plans that are kept, one for each shape of queries and keys
# attend(layer, q, k, v, start) returns attention of q [n, heads, dim], whose first row is row `start` of all, shaped as
# q; k, v [tiles * patches, heads, dim], of all. Every patch sees all patches of its tile.
TowerAttention = Callable[[int, Array, Array, Array, int], Array]


class TowerExecutor(ABC, Generic[Array]):
    """Runs the operations of a tower.

    model   the tower
    arrays  operations on its arrays
    dtype   of rows, by name
    table   the embedding: of each place in a tile, [patches, hidden]
    """

    model: TowerModel
    arrays: Arrays[Array]
    dtype: str
    table: Array

    @abstractmethod
    def run(self, part: int, buffers: Mapping[Buffer, Array]) -> None:
        """Run one of `parts_of` over contiguous arrays, [rows, width] each. It reads them and writes into them; buffers
        that are not given it makes for itself."""

    @abstractmethod
    def plan(self, end: np.ndarray, query_rows: np.ndarray, first: np.ndarray) -> RowPlan:
        """Return a plan of attention; the arguments are those of `plan_rows`."""

    @abstractmethod
    def attend(self, q: Array, k: Array, v: Array, plan: RowPlan) -> Array:
        """Return attention of q [queries, heads, dim] over k, v [keys, heads, dim], shaped as q."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all that has been started is computed."""


def parts_of(program: Program) -> list[Sequence[Operation]]:
    """Return the operations that lie between those that are not an executor's: of each layer what comes before
    attention, and what comes after it; of the end what comes before the squares of patches, and what comes after."""
    parts = list[Sequence[Operation]]()
    for operations in program.layers:
        at = next(number for number, one in enumerate(operations) if isinstance(one, Attend))
        parts += operations[:at], operations[at + 1 :]
    at = next(number for number, one in enumerate(program.end) if MERGED in one.buffers)
    return [*parts, program.end[:at], program.end[at:]]


@dataclass(slots=True)
class TowerPass(Generic[Array]):
    """A TowerPass is some tiles on their way through the tower.

    tiles     how many they are
    rows      how many patches they have
    buffers   of all rows, what the next pieces read
    attend    computes attention
    num_done  pieces of work that are done, over all layers
    """

    tiles: int
    rows: int
    buffers: dict[Buffer, Array]
    attend: TowerAttention[Array]
    num_done: int = 0

    @property
    def units(self) -> int:
        """Return the pieces of a stage of a layer."""
        return -(-self.rows // PIECE_ROWS)


class Tower(Generic[Array]):
    """A Tower computes rows of a model's residual stream from tiles. They take the place of scaled embeddings."""

    def __init__(self, executor: TowerExecutor[Array]):
        self.executor: TowerExecutor[Array] = executor
        self.config = executor.model.tower
        program = executor.model.program()
        self._widths = program.widths
        self._attends = [one for layer in program.layers for one in layer if isinstance(one, Attend)]

    def __call__(self, tiles: Array, attend: TowerAttention[Array]) -> Array:
        """Return the rows of tiles float32 [tiles, 3, size, size], [tiles * rows, output], in the tower's dtype."""
        rows = self.start(tiles, attend)
        self.go_on(rows)
        return self.finish(rows)

    def start(self, tiles: Array, attend: TowerAttention[Array]) -> TowerPass[Array]:
        """Return tiles before the first layer; the arguments are those of a call of the tower."""
        config, arrays = self.config, self.executor.arrays
        size, side, patch = config.image_size, config.side, config.patch_size
        if tiles.ndim != 4 or tiles.shape[1:] != (3, size, size):
            raise ValueError(f"tiles are {list(tiles.shape)}; they must be [tiles, 3, {size}, {size}]")
        # If a patch does not divide the tile, the last pixels are in no patch.
        pixels = arrays.cast(tiles, self.executor.dtype)[:, :, : side * patch, : side * patch]
        # [tiles, row of patches, column of patches, colour, row, column]
        patches = pixels.reshape(-1, 3, side, patch, side, patch).swapaxes(1, 2).swapaxes(2, 4).swapaxes(3, 4)
        places = np.tile(np.arange(config.patches), len(tiles))
        buffers = {
            PATCHES: patches.reshape(-1, config.patch_inputs),
            X: arrays.take(self.executor.table, arrays.send(places)),
            DELTA: self._empty(DELTA, len(places)),
            QKV: self._empty(QKV, len(places)),
        }
        return TowerPass(len(tiles), len(places), buffers, attend)

    def go_on(self, rows: TowerPass[Array], stop: int | None = None) -> bool:
        """Do the pieces of work up to `stop` (None: all) that are not done. Return whether all pieces are done now.
        Neighbouring pieces of a stage are computed together, so that pieces cost nothing if no step waits."""
        units = rows.units
        every = 2 * units * self.config.layers
        stop = every if stop is None else min(stop, every)
        while rows.num_done < stop:
            stage, unit = divmod(rows.num_done, units)
            last = min(units, unit + stop - rows.num_done)
            self._run(rows, stage, slice(unit * PIECE_ROWS, min(last * PIECE_ROWS, rows.rows)))
            rows.num_done += last - unit
        return rows.num_done >= every

    def finish(self, rows: TowerPass[Array]) -> Array:
        """Return the projector's output for tiles that have gone through all layers, [tiles * rows, output]."""
        stage = 2 * self.config.layers
        normed = self._empty(H, rows.rows)
        self.executor.run(stage, {X: rows.buffers[X], DELTA: rows.buffers[DELTA], H: normed})
        merged = self._squares(normed)
        out = self._empty(OUT, len(merged))
        self.executor.run(stage + 1, {MERGED: merged, OUT: out})
        return out

    def _run(self, rows: TowerPass[Array], stage: int, part: slice) -> None:
        """Compute a stage of a layer for some rows: queries, keys and values; or, once all rows have these, attention
        and all that follows."""
        buffers = {name: array[part] for name, array in rows.buffers.items()}
        if stage % 2:
            buffers |= self._attended(rows, stage // 2, part)
        self.executor.run(stage, buffers)
        if stage == 1:
            rows.buffers.pop(PATCHES, None)

    def _attended(self, rows: TowerPass[Array], number: int, part: slice) -> dict[Buffer, Array]:
        """Return what attention of a layer gives for some rows."""
        attend = self._attends[number]
        qkv = rows.buffers[attend.source].reshape(rows.rows, 3 * attend.heads, attend.dim)
        q, k, v = (qkv[:, first * attend.heads : (first + 1) * attend.heads] for first in range(3))
        attended = rows.attend(number, q[part], k, v, part.start)
        return {attend.out: attended.reshape(len(attended), attend.heads * attend.dim)}

    def _squares(self, x: Array) -> Array:
        """Return a row for each square of patches: their mean, or their numbers side by side. x: [tiles * patches,
        hidden]"""
        config, arrays = self.config, self.executor.arrays
        side, merge, hidden = config.side, config.merge, config.hidden
        across = side // merge
        x = x.reshape(-1, side, side, hidden)[:, : across * merge, : across * merge]
        # [tiles, row, row of its square, column, column of its square, hidden]
        x = x.reshape(-1, across, merge, across, merge, hidden)
        if config.kind == "gemma3":
            return arrays.cast(arrays.float32(x).mean((2, 4)), self.executor.dtype).reshape(-1, hidden)
        return x.swapaxes(2, 3).reshape(-1, config.merged)

    def _empty(self, name: Buffer, rows: int) -> Array:
        return self.executor.arrays.empty((rows, self._widths[name]), self.executor.dtype)


class TowerAttend(Generic[Array]):
    """A TowerAttend is the `attend` of a tower: the interval attention of rows, in which each tile is one span."""

    def __init__(self, executor: TowerExecutor[Array]):
        self._executor: TowerExecutor[Array] = executor
        self._patches = executor.model.tower.patches
        self._plans: dict[tuple[int, int, int], RowPlan] = {}

    def __call__(self, layer: int, q: Array, k: Array, v: Array, start: int) -> Array:
        """Return attention of q, whose first row is row `start` of all, over k and v of all, shaped as q."""
        # Only the tiles that the queries are in count.
        low, high = start // self._patches * self._patches, -(-(start + len(q)) // self._patches) * self._patches
        k, v = k[low:high], v[low:high]
        shape = start - low, len(q), len(k)
        plan = self._plans.get(shape)
        if plan is None:
            every = np.arange(len(k))
            first = every - every % self._patches
            queries = every[start - low : start - low + len(q)]
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[shape] = self._executor.plan(first + self._patches, queries, first)
        return self._executor.attend(q, k, v, plan)
