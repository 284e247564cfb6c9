"""Compute rows of a model's residual stream from tiles with a tower, a few pieces at a time. No torch.

The tower's operations are its program (`families.tower_program`), which an executor runs. Attention and the squares of
patches are computed here, on the arrays of any executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from ...model.builders import QKV
from ...model.config import RopeConfig
from ...model.program import DELTA, OUT, Attend, Buffer, H, Operation, Program, X
from ...model.rotary import frequencies
from ...worker.arrays import Array, Arrays
from ...worker.attention import RowPlan
from .config import PIECE_ROWS
from .families import TowerModel
from .gemma4 import MERGED, PATCHES

MOST_PLANS = 256  # maximum number of stored attention plans, one per shape of queries and keys
# attend(layer, q, k, v, start) returns the attention of q [n, heads, dim], shaped as q. Row 0 of q is row `start` of
# all rows; k and v are of all rows, [tiles * patches, heads, dim]. Every patch sees all patches of its tile.
TowerAttention = Callable[[int, Array, Array, Array, int], Array]


class TowerExecutor(ABC, Generic[Array]):
    """Runs the operations of a tower.

    Attributes:
        model: the tower
        arrays: operations on the executor's arrays
        dtype: name of the rows' dtype
        table: the position embeddings of each place in a tile, [patches, hidden]; for "gemma4" of each place from left
            to right, followed by each place from top to bottom
        beside: the weights of `Program.beside`
    """

    model: TowerModel
    arrays: Arrays[Array]
    dtype: str
    table: Array
    beside: Sequence[Array]

    @abstractmethod
    def run(self, part: int, buffers: Mapping[Buffer, Array]) -> None:
        """Run one of `parts_of` over contiguous arrays [rows, width], which it reads and writes.

        The executor creates all other buffers itself.
        """

    @abstractmethod
    def plan(self, end: np.ndarray, query_rows: np.ndarray, first: np.ndarray) -> RowPlan:
        """Return a plan of attention. Arguments are as for `plan_rows`."""

    @abstractmethod
    def attend(self, q: Array, k: Array, v: Array, plan: RowPlan) -> Array:
        """Return the attention of q [queries, heads, dim] over k, v [keys, heads, dim], shaped as q."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all work that has started is done."""


def parts_of(program: Program) -> list[Sequence[Operation]]:
    """Return the parts of a program that an executor runs.

    Each layer has two parts: before and after attention. `end` has two parts: before and after the squares of patches.
    """
    parts = list[Sequence[Operation]]()
    for operations in program.layers:
        at = next(number for number, one in enumerate(operations) if isinstance(one, Attend))
        parts += operations[:at], operations[at + 1 :]
    at = next(number for number, one in enumerate(program.end) if MERGED in one.buffers)
    return [*parts, program.end[:at], program.end[at:]]


@dataclass(slots=True)
class TowerPass(Generic[Array]):
    """Tiles on their way through the tower.

    Attributes:
        grid: patches per tile (from top to bottom, from left to right)
        rows: number of patches of all tiles
        turns: (cosines, sines) that rotate queries and keys, float32 [rows, 1, 2, numbers]; the third axis is the
            horizontal place, then the vertical place. None: no rotation
        buffers: the buffers of all rows that later pieces read
        attend: computes attention
        num_done: completed pieces of work, over all layers
    """

    grid: tuple[int, int]
    rows: int
    turns: tuple[Array, Array] | None
    buffers: dict[Buffer, Array]
    attend: TowerAttention[Array]
    num_done: int = 0

    @property
    def units(self) -> int:
        """Return the number of pieces in one stage of a layer."""
        return -(-self.rows // PIECE_ROWS)


class Tower(Generic[Array]):
    """Computes rows of a model's residual stream from tiles. They replace scaled embeddings."""

    def __init__(self, executor: TowerExecutor[Array]):
        self.executor: TowerExecutor[Array] = executor
        self.config = executor.model.tower
        program = executor.model.program()
        self._widths = program.widths
        self._attends = [one for layer in program.layers for one in layer if isinstance(one, Attend)]
        last = parts_of(program)[-2][-1]
        self._ended: Buffer = X if last.fills is None else last.fills[0]  # the input of the squares

    def __call__(self, tiles: Array, attend: TowerAttention[Array]) -> Array:
        """Return rows [tiles * rows, output] in the tower's dtype from tiles, float32 [tiles, 3, height, width]."""
        rows = self.start(tiles, attend)
        self.go_on(rows)
        return self.finish(rows)

    def start(self, tiles: Array, attend: TowerAttention[Array]) -> TowerPass[Array]:
        """Return tiles before the first layer. Arguments are as for `__call__`."""
        config, arrays = self.config, self.executor.arrays
        if tiles.ndim != 4 or tiles.shape[1] != 3:
            raise ValueError(f"tiles are {list(tiles.shape)}; they must be [tiles, 3, height, width]")
        down, across = config.grid(*tiles.shape[2:])
        is_gemma4, patch = config.kind == "gemma4", config.patch_size
        pixels = arrays.cast(2 * (tiles - 0.5) if is_gemma4 else tiles, self.executor.dtype)
        # If the patch size does not divide the tile, the last pixels belong to no patch.
        pixels = pixels[:, :, : down * patch, : across * patch]
        # [tiles, row of patches, column of patches, row, colour, column]
        patches = pixels.reshape(-1, 3, down, patch, across, patch).swapaxes(1, 2).swapaxes(2, 4)
        # The weights expect the colour last ("gemma4"), or before the row.
        patches = patches.swapaxes(4, 5) if is_gemma4 else patches.swapaxes(3, 4)
        places, table, turns = np.tile(np.arange(down * across), len(tiles)), self.executor.table, None
        if is_gemma4:
            xs, ys = places % across, places // across
            x = arrays.take(table, arrays.send(xs)) + arrays.take(table, arrays.send(config.places + ys))
            turns = self._turns(xs, ys)
        else:
            x = arrays.take(table, arrays.send(places))
        buffers = {
            PATCHES: patches.reshape(-1, config.patch_inputs),
            X: x,
            DELTA: self._empty(DELTA, len(places)),
            QKV: self._empty(QKV, len(places)),
        }
        return TowerPass((down, across), len(places), turns, buffers, attend)

    def _turns(self, xs: np.ndarray, ys: np.ndarray) -> tuple[Array, Array]:
        """Return (cosines, sines) for patches at these places, as `TowerPass.turns`."""
        turned, _ = frequencies(RopeConfig(theta=self.config.theta), self.config.head_dim // 2)
        angles = (np.stack((xs, ys), -1).astype(np.float32)[..., None] * turned)[:, None]
        send = self.executor.arrays.send
        return send(np.cos(angles)), send(np.sin(angles))

    def go_on(self, rows: TowerPass[Array], stop: int | None = None) -> bool:
        """Compute the pieces up to `stop` (None: all). Return whether all pieces are complete.

        Neighbouring pieces of a stage are computed together, so cutting into pieces costs nothing if no step waits.
        """
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
        """Return the projector's output for tiles that have passed all layers, [tiles * rows, output]."""
        stage = 2 * self.config.layers
        buffers = {X: rows.buffers[X], DELTA: rows.buffers[DELTA], H: self._empty(H, rows.rows)}
        self.executor.run(stage, buffers)
        merged = self._squares(buffers[self._ended], rows.grid)
        out = self._empty(OUT, len(merged))
        self.executor.run(stage + 1, {MERGED: merged, OUT: out})
        return out

    def _run(self, rows: TowerPass[Array], stage: int, part: slice) -> None:
        """Compute a stage of a layer for some rows.

        Even stages compute queries, keys and values. Odd stages, after all rows have these, compute the rest.
        """
        buffers = {name: array[part] for name, array in rows.buffers.items()}
        if stage % 2:
            buffers |= self._attended(rows, stage // 2, part)
        self.executor.run(stage, buffers)
        if stage % 2 == 0 and rows.turns is not None:
            self._turn(buffers[QKV], *(turns[part] for turns in rows.turns))
        if stage == 1:
            rows.buffers.pop(PATCHES, None)

    def _turn(self, qkv: Array, cosines: Array, sines: Array) -> None:
        """Rotate queries and keys of some rows in place: half of each head by column, the other half by row."""
        config, arrays = self.config, self.executor.arrays
        quarter, size = config.head_dim // 4, 2 * config.q_size
        # [rows, heads, axis, half of the axis's values, values]
        halves = arrays.float32(qkv[:, :size]).reshape(len(qkv), 2 * config.heads, 2, 2, quarter)
        first, second = halves[:, :, :, 0], halves[:, :, :, 1]
        turned = arrays.beside((first * cosines - second * sines, second * cosines + first * sines))
        qkv[:, :size] = arrays.cast(turned.reshape(len(qkv), size), self.executor.dtype)

    def _attended(self, rows: TowerPass[Array], number: int, part: slice) -> dict[Buffer, Array]:
        """Return the output of a layer's attention for some rows."""
        attend = self._attends[number]
        qkv = rows.buffers[attend.source].reshape(rows.rows, 3 * attend.heads, attend.dim)
        q, k, v = (qkv[:, first * attend.heads : (first + 1) * attend.heads] for first in range(3))
        attended = rows.attend(number, q[part], k, v, part.start)
        return {attend.out: attended.reshape(len(attended), attend.heads * attend.dim)}

    def _squares(self, x: Array, grid: tuple[int, int]) -> Array:
        """Return one row per square of patches: their mean, or their values concatenated.

        Args:
            x: [tiles * patches, hidden]
            grid: as in TowerPass
        """
        config, arrays = self.config, self.executor.arrays
        merge, hidden = config.merge, config.hidden
        down, across = (patches // merge for patches in grid)
        x = x.reshape(-1, *grid, hidden)[:, : down * merge, : across * merge]
        # [tiles, row, row of its square, column, column of its square, hidden]
        x = x.reshape(-1, down, merge, across, merge, hidden)
        if config.kind == "idefics3":
            return x.swapaxes(2, 3).reshape(-1, config.merged)
        mean = arrays.float32(x).mean((2, 4))
        if config.shifts:
            shift, factor = self.executor.beside
            mean = (mean - shift) * factor
        return arrays.cast(mean, self.executor.dtype).reshape(-1, hidden)

    def _empty(self, name: Buffer, rows: int) -> Array:
        return self.executor.arrays.empty((rows, self._widths[name]), self.executor.dtype)


class TowerAttend(Generic[Array]):
    """The `attend` of a tower: interval attention in which each tile is one span."""

    def __init__(self, executor: TowerExecutor[Array]):
        self._executor: TowerExecutor[Array] = executor
        tower = executor.model.tower
        self._patches = tower.patches if tower.image_size else 0  # 0: all rows are one tile
        self._plans: dict[tuple[int, int, int], RowPlan] = {}

    def __call__(self, layer: int, q: Array, k: Array, v: Array, start: int) -> Array:
        """Return the attention of q over k and v of all rows, shaped as q. Row 0 of q is row `start` of all rows."""
        # Only the tiles of the queries count.
        patches = self._patches or len(k)
        low, high = start // patches * patches, -(-(start + len(q)) // patches) * patches
        k, v = k[low:high], v[low:high]
        shape = start - low, len(q), len(k)
        plan = self._plans.get(shape)
        if plan is None:
            every = np.arange(len(k))
            first = every - every % patches
            queries = every[start - low : start - low + len(q)]
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[shape] = self._executor.plan(first + patches, queries, first)
        return self._executor.attend(q, k, v, plan)
