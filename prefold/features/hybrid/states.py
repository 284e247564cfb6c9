"""States by key, and how states pass through the rows of one step: what each row reads, in which order. No torch."""

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
    """The rows that a causal convolution of the kernels reads.

    A place is an index into the columns of all states of the table, `kept` per state, followed by the rows of the step.
    """

    above: np.ndarray  # int64 [kept, rows]: places of the rows above each row, the nearest first
    below: np.ndarray  # int64 [ends, kept]: places of the rows that form each state to be stored, the oldest first
    to: np.ndarray  # int64 [ends]: table rows for these states. Only the run that ends there may read the old state


@dataclass(frozen=True, eq=False, slots=True)
class RunOrder:
    """The runs of a step in an order of computation."""

    first: np.ndarray  # int64 [runs]: the first row of each run
    stop: np.ndarray  # int64 [runs]: the row after its last one
    # States are numbered: first the rows of the table, then `between` temporary states that only later runs read.
    source: np.ndarray  # int64 [runs]: the state that it starts from
    # int64 [runs]: the state that it writes, or -1 to discard it. In the same and in later waves only runs that
    # continue this run may read that state.
    to: np.ndarray
    waves: np.ndarray  # int64: index of the first run of each wave of independent runs, then the number of runs
    between: int


class StateTable:
    """States by key. A step writes its new states into free rows, which get their keys after the step: no copies.

    Attributes:
        tensors: by layer, the parts of its state, [rows, ...] each; row 0 is the state of ZERO, all zeros
        in_place: overwrite the state with the same key if no other run reads it. If false, a failed step leaves every
            state unchanged
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
        """Make a table with `rows` rows, which grows when needed.

        Args:
            zeros: makes an array or tensor of zeros for a number of states of one shape. On a CPU its memory is
                allocated page by page, on the first write
            layers: the layers of the states; None: all
        """
        layers = range(config.layers) if layers is None else layers
        self._shapes, self._zeros = [config.states(number) for number in layers], zeros
        self.tensors = [[zeros(rows, part) for part in parts] for parts in self._shapes]
        self.rows, self.in_place = rows, in_place
        self._row_of = {ZERO: 0}
        self._free = list(range(rows - 1, 0, -1))  # the last one is used next

    def place(self, runs: StateRuns) -> StateRuns:
        """Replace keys by rows of the table. Each state to be stored gets a row that no other run reads.

        Raise ValueError if a run starts from a state that is not in the table.
        """
        sources = runs.source.tolist()
        if missing := {key for key in sources if key >= 0} - self._row_of.keys():
            raise ValueError(f"the step starts from states that are not stored: {sorted(missing)}")
        above = list[int]()  # by run, the key of the stored state above it: runs that continue it may read it too
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
        """Assign the keys of a completed step to its new states.

        Args:
            placed: the result of `place` for its runs
        """
        unused = []
        for key, row in zip(runs.slots.tolist(), placed.slots.tolist(), strict=True):
            if (old := self._row_of.get(key)) != row:
                self._free.pop()  # this is `row`
                unused += [] if old is None else [old]
                self._row_of[key] = row
        self._free += unused

    def keep(self, keys: np.ndarray) -> None:
        """Discard the states of all other keys."""
        for key in self._row_of.keys() - {ZERO, *keys.tolist()}:
            self._free.append(self._row_of.pop(key))

    def copy(self) -> StateTable:
        """Return a table with copies of the states."""
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
    """The order in which states pass through the rows of one step, and the states that are stored into the table.

    Attributes:
        table: the states that the step starts from
        runs: the runs of the step; `source` and `slots` are rows of the table
        rows: number of rows: of the stream if the step is folded (sharing="mlp")
    """

    table: StateTable
    runs: StateRuns
    rows: int

    def __post_init__(self) -> None:
        runs = self.runs
        self._stop = np.append(runs.first[1:], self.rows)
        self._from_run = np.where(runs.source < 0, -1 - runs.source, -1)  # -1: the run starts from a stored state
        # Runs that start from the same state read it once.
        self._starts, places = np.unique(runs.source[runs.source >= 0], return_inverse=True)
        self._place = np.full(len(runs.first), -1, np.int64)
        self._place[runs.source >= 0] = places.reshape(-1)
        depth = np.zeros(len(runs.first), np.int64)
        for run in np.flatnonzero(self._from_run >= 0).tolist():
            depth[run] = depth[self._from_run[run]] + 1
        # Runs of one wave can be computed together: the runs that they continue are in earlier waves. Longest first.
        order = np.lexsort((runs.first - self._stop, depth))
        self._waves = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(order) else []
        self._conv: dict[int, ConvPlaces] = {}

    def places(self, num_kept: int) -> ConvPlaces:
        """Return the places of the `num_kept` rows above each row, and of the last `num_kept` rows after `runs.ends`.

        Both follow the paths of the rows. ConvPlaces defines places.
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
        """Return the runs in the order in which prefold's kernels compute them."""
        runs, count = self.runs, len(self.runs.first)
        to = np.full(count, -1, np.int64)
        to[self._from_run[self._from_run >= 0]] = 0
        to[runs.ends] = runs.slots  # never 0
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
