"""States by slot, and how they go through the rows of one step: which rows each reads, in which order. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...model.config import ModelConfig, StateShape
from .steps import ZERO, StateRuns


@dataclass(frozen=True, eq=False, slots=True)
class ConvPlaces:
    """A ConvPlaces says which rows a causal convolution of the kernels reads. A place below `kept` columns for each
    state of the table is one of these columns; the places above are rows.

    above  int64 [kept, rows]: of each row the places of the rows above it, the nearest first
    below  int64 [ends, kept]: the rows that each state to be stored consists of, the oldest first
    to     int64 [ends]: where in the table these are stored. Only the rows of the run that ends there may read the
           state whose place it takes
    """

    above: np.ndarray
    below: np.ndarray
    to: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class RunOrder:
    """A RunOrder is the runs of a step in an order in which they can be computed.

    first, stop  int64 [runs]: the first row of each run, and the row behind its last
    source, to   int64 [runs]: the states that it starts from and leaves, those of the table, and behind these others
                 that only later runs need; to is -1 where no state is needed, and else a state that no other run of
                 its wave or of a later one starts from, but for runs that go on from this one
    waves        int64: where the runs that do not depend on each other begin, and the number of all
    between      how many states only later runs need
    """

    first: np.ndarray
    stop: np.ndarray
    source: np.ndarray
    to: np.ndarray
    waves: np.ndarray
    between: int


class StateTable:
    """A StateTable holds states by key. A step writes its new states into rows of the table, which get their keys when
    it has run: nothing is copied.

    tensors   by layer, those that its state consists of, [rows, ...] each; row 0 is the state of ZERO, zeros
    in_place  whether a new state may be written over the one whose key it gets, where no other run reads that; else a
              step that fails changes no state
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        zeros: Callable[[int, StateShape], Any],
        *,
        in_place: bool = True,
        layers: Iterable[int] | None = None,
    ):
        """Makes a table of so many rows, which grows.

        zeros: returns an array, or a tensor, of so many states of a shape. A page of a CPU's memory takes room when it
        is first written. layers: whose states it holds; None: all
        """
        layers = range(config.layers) if layers is None else layers
        self._shapes, self._zeros = [config.states(number) for number in layers], zeros
        self.tensors = [[zeros(rows, part) for part in parts] for parts in self._shapes]
        self.rows, self.in_place = rows, in_place
        self._row_of = {ZERO: 0}
        self._free = list(range(rows - 1, 0, -1))  # the next one to be taken is the last

    def place(self, runs: StateRuns) -> StateRuns:
        """Returns runs with rows of the table in place of keys; each state that is stored gets a row that no other run
        reads. Raises ValueError where a state is not there that a run starts from."""
        sources = runs.source.tolist()
        if missing := {key for key in sources if key >= 0} - self._row_of.keys():
            raise ValueError(f"the step goes on from states that are not there, {sorted(missing)}")
        above = list[int]()  # by run, the key of the state above it: runs that go on from others may read it too
        for key in sources:
            above.append(key if key >= 0 else above[-1 - key])
        readers, slots, num_taken = Counter(above), list[int](), 0
        for run, key in zip(runs.ends.tolist(), runs.slots.tolist(), strict=True):
            row = self._row_of.get(key)
            if row is None or not self.in_place or readers[key] != (above[run] == key):
                num_taken += 1
                if num_taken > len(self._free):
                    self._grow(max(len(runs.ends), self.rows // 4))
                row = self._free[-num_taken]
            slots.append(row)
        source = [self._row_of[key] if key >= 0 else key for key in sources]
        return replace(runs, source=np.array(source, np.int64), slots=np.array(slots, np.int64))

    def store(self, runs: StateRuns, placed: StateRuns) -> None:
        """Gives the new states of a step that has run their keys. placed: what `place` returned of its runs"""
        unused = []
        for key, row in zip(runs.slots.tolist(), placed.slots.tolist(), strict=True):
            if (old := self._row_of.get(key)) != row:
                self._free.pop()  # which is `row`
                unused += [] if old is None else [old]
                self._row_of[key] = row
        self._free += unused

    def keep(self, keys: np.ndarray) -> None:
        """Lets the states of all other keys go."""
        for key in self._row_of.keys() - {ZERO, *keys.tolist()}:
            self._free.append(self._row_of.pop(key))

    def copy(self) -> StateTable:
        """Return a table with the same states in memory of its own."""
        other = copy(self)
        other.tensors = [[tensor.copy() for tensor in parts] for parts in self.tensors]
        other._row_of, other._free = self._row_of.copy(), self._free.copy()
        return other

    def _grow(self, rows: int) -> None:
        for parts, shapes in zip(self.tensors, self._shapes, strict=True):
            for number, (old, shape) in enumerate(zip(parts, shapes, strict=True)):
                parts[number] = self._zeros(self.rows + rows, shape)
                parts[number][: self.rows] = old
        self._free[:0] = range(self.rows + rows - 1, self.rows - 1, -1)
        self.rows += rows


@dataclass(eq=False)
class StateFlow:
    """A StateFlow says how states go through the rows of one step, and which are stored into the table.

    table    the states that the step starts from
    runs     how they go through the rows; `source` and `slots` are rows of the table
    rows     how many rows there are: those of the stream where the step is folded
    """

    table: StateTable
    runs: StateRuns
    rows: int

    def __post_init__(self) -> None:
        runs = self.runs
        self._stop = np.append(runs.first[1:], self.rows)
        self._from_run = np.where(runs.source < 0, -1 - runs.source, -1)  # -1: it starts from a slot
        # Several runs that start from one state read it once.
        self._starts, places = np.unique(runs.source[runs.source >= 0], return_inverse=True)
        self._place = np.full(len(runs.first), -1, np.int64)
        self._place[runs.source >= 0] = places.reshape(-1)
        depth = np.zeros(len(runs.first), np.int64)
        for run in np.flatnonzero(self._from_run >= 0).tolist():
            depth[run] = depth[self._from_run[run]] + 1
        # Runs whose starts are known when those before them have ended, longest first: they run side by side.
        order = np.lexsort((runs.first - self._stop, depth))
        self._waves = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(order) else []
        self._conv: dict[int, ConvPlaces] = {}

    def places(self, num_kept: int) -> ConvPlaces:
        """Returns of each row the places of the rows 1 to `num_kept` rows above it on its path, and those of the last
        `num_kept` rows on the paths of `runs.ends`.

        A place is of the `num_kept` columns of each of the table's states, one state after another, then of the rows.
        """
        if num_kept not in self._conv:
            first, length = self.runs.first, self._stop - self.runs.first
            columns, base = np.arange(num_kept), self.table.rows * num_kept
            above = np.empty((len(first), num_kept), np.int64)
            below = np.empty((len(first), num_kept), np.int64)
            for wave in self._waves:
                from_run = self._from_run[wave]
                in_table = self.runs.source[wave, None] * num_kept + columns
                above[wave] = np.where(from_run[:, None] >= 0, below[from_run], in_table)
                at = length[wave, None] - num_kept + columns
                outside = np.take_along_axis(above[wave], np.clip(at + num_kept, 0, num_kept - 1), 1)
                below[wave] = np.where(at >= 0, base + first[wave, None] + at, outside)
            run = np.repeat(np.arange(len(first)), length)
            row = np.arange(self.rows)
            of_rows = np.empty((num_kept, self.rows), np.int64)
            for back in range(1, num_kept + 1):
                at = row - first[run] - back
                outside = above[run, np.clip(at + num_kept, 0, num_kept - 1)]
                of_rows[back - 1] = np.where(at >= 0, base + row - back, outside)
            self._conv[num_kept] = ConvPlaces(of_rows, below[self.runs.ends], self.runs.slots)
        return self._conv[num_kept]

    @cached_property
    def order(self) -> RunOrder:
        """Returns the runs in the order in which our kernels compute them."""
        runs, count = self.runs, len(self.runs.first)
        to = np.full(count, -1, np.int64)
        to[self._from_run[self._from_run >= 0]] = 0
        to[runs.ends] = runs.slots  # which are more than 0
        between = np.flatnonzero(to == 0)
        to[between] = self.table.rows + np.arange(len(between))
        order = np.concatenate(self._waves) if self._waves else np.zeros(0, np.int64)
        source = np.where(self._from_run >= 0, to[self._from_run], runs.source)
        return RunOrder(
            runs.first[order],
            self._stop[order],
            source[order],
            to[order],
            np.cumsum([0, *map(len, self._waves)], dtype=np.int64),
            len(between),
        )
