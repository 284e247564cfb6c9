"""States by slot, and how they go through the rows of one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...model.device import send
from .config import HybridConfig, StateShape
from .steps import ZERO, StateRuns

# The most runs whose states are worked on at once: bounds what a layer holds beside its rows.
MOST_RUNS = 64


class StateTable:
    """A StateTable holds states by key. A step writes its new states into rows of the table, which get their keys when
    it has run: nothing is copied.

    tensors   by layer, those that its state consists of, [rows, ...] each; row 0 is the state of ZERO, zeros
    in_place  whether a new state may be written over the one whose key it gets, where no other run reads that; else a
              step that fails changes no state
    """

    def __init__(self, config: HybridConfig, rows: int, dtype: torch.dtype, device: torch.device):
        """Makes a table of so many rows, which grows; a page of a CPU's memory takes room when it is first written."""

        def zeros(part: StateShape) -> Tensor:
            return torch.zeros(rows, *part.shape, dtype=torch.float32 if part.is_wide else dtype, device=device)

        self.tensors = [list(map(zeros, config.states(number))) for number in range(config.layers)]
        self.rows, self.in_place = rows, device.type == "cpu"
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

    def _grow(self, rows: int) -> None:
        for parts in self.tensors:
            for number, old in enumerate(parts):
                parts[number] = old.new_zeros(self.rows + rows, *old.shape[1:])
                parts[number][: self.rows] = old
        self._free[:0] = range(self.rows + rows - 1, self.rows - 1, -1)
        self.rows += rows


@dataclass(eq=False)
class Carry:
    """A Carry takes states through the rows of one step, and writes those to be stored into the table.

    table    the states that the step starts from
    runs     how they go through the rows; `source` and `slots` are rows of the table
    rows     how many rows there are: those of the stream where the step is folded
    scatter  of a folded step, int64 [rows]: the row that the model computes for each row of the stream; else None
    gather   of a folded step, int64: the row of the stream for each row that the model computes; else None
    """

    table: StateTable
    runs: StateRuns
    rows: int
    device: torch.device
    scatter: Tensor | None = None
    gather: Tensor | None = None

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
        self._conv: dict[int, kernels.ConvPlaces] = {}
        self._sent: dict[int, tuple[list[Tensor], Tensor]] = {}

    @cached_property
    def _sent_starts(self) -> Tensor:
        return send(self._starts, self.device)

    @cached_property
    def to(self) -> Tensor:
        """Returns the rows of the table that `runs.ends` are stored in, int64."""
        return send(self.runs.slots, self.device)

    def of(self, layer: int) -> LayerStates:
        """Returns the states of one layer."""
        return LayerStates(self, layer)

    def starts(self, layer: int, part: int) -> Tensor:
        """Returns a copy of the states that runs start from, each once, in ascending order of their rows."""
        return self.table.tensors[layer][part].index_select(0, self._sent_starts)

    def picked(self, read: Tensor | None) -> Tensor | None:
        """Returns the rows of the stream that `read` is of the rows that the model computes, int64; None: all."""
        return read if self.gather is None else self.gather if read is None else self.gather[read]

    def unfold(self, x: Tensor) -> Tensor:
        """Returns a tensor of the rows that the model computes as one of the rows of the stream."""
        return x if self.scatter is None else x.index_select(0, self.scatter)

    def fold(self, x: Tensor) -> Tensor:
        """Returns a tensor of the rows of the stream as one of the rows that the model computes."""
        return x if self.gather is None else x.index_select(0, self.gather)

    def neighbours(self, num_kept: int) -> tuple[list[Tensor], Tensor]:
        """Returns `places` as tensors, those above, and those below in one tensor [k * num_kept]; they count columns of
        `starts` in place of those of the table."""
        if num_kept not in self._sent:
            places, columns = self.places(num_kept), self.table.rows * num_kept

            def of_starts(place: np.ndarray) -> Tensor:
                start = np.searchsorted(self._starts, place // num_kept)
                behind = place - columns + len(self._starts) * num_kept
                return send(np.where(place < columns, start * num_kept + place % num_kept, behind), self.device)

            self._sent[num_kept] = [of_starts(rows) for rows in places.above], of_starts(places.below.reshape(-1))
        return self._sent[num_kept]

    def places(self, num_kept: int) -> kernels.ConvPlaces:
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
            self._conv[num_kept] = kernels.ConvPlaces(of_rows, below[self.runs.ends], self.runs.slots)
        return self._conv[num_kept]

    @cached_property
    def order(self) -> kernels.RunOrder:
        """Returns the runs in the order in which our kernels compute them."""
        runs, count = self.runs, len(self.runs.first)
        to = np.full(count, -1, np.int64)
        to[self._from_run[self._from_run >= 0]] = 0
        to[runs.ends] = runs.slots  # which are more than 0
        between = np.flatnonzero(to == 0)
        to[between] = self.table.rows + np.arange(len(between))
        order = np.concatenate(self._waves) if self._waves else np.zeros(0, np.int64)
        source = np.where(self._from_run >= 0, to[self._from_run], runs.source)
        return kernels.RunOrder(
            runs.first[order],
            self._stop[order],
            source[order],
            to[order],
            np.cumsum([0, *map(len, self._waves)], dtype=np.int64),
            len(between),
        )

    @cached_property
    def groups(self) -> list[Group]:
        """Returns the runs in the order in which they are computed, some of about the same length at a time."""
        to = np.full(len(self.runs.first), -1, np.int64)
        to[self.runs.ends] = self.runs.slots
        goes_on = np.zeros(len(to), bool)
        goes_on[self._from_run[self._from_run >= 0]] = True
        groups = []
        for wave in self._waves:
            length = (self._stop - self.runs.first)[wave]
            classes = np.frexp(length)[1]  # binary logarithms: runs of one class fill half of a padded tensor or more
            cuts = {*range(0, len(wave), MOST_RUNS), *(np.flatnonzero(np.diff(classes)) + 1).tolist()}
            for group in np.split(wave, sorted(cuts - {0})):
                first, stop = self.runs.first[group, None], self._stop[group, None]
                rows = first + np.arange(int((stop - first).max(initial=0)))
                inside = rows < stop
                groups.append(
                    Group(
                        runs=group.tolist(),
                        rows=send(np.where(inside, rows, first), self.device),
                        inside=None if inside.all() else send(inside, self.device),
                        places=None if (self._place[group] < 0).any() else send(self._place[group], self.device),
                        from_runs=self._from_run[group].tolist(),
                        goes_on=np.flatnonzero(goes_on[group]).tolist(),
                        stored=send(np.flatnonzero(to[group] >= 0), self.device),
                        to=send(to[group][to[group] >= 0], self.device),
                    )
                )
        return groups


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """A Group is n runs of about the same length that are computed together.

    runs       their numbers
    rows       int64 [n, most rows of a run]: the rows of each run; behind its last, its first once more
    inside     bool, shaped as `rows`: which of these are rows of the run; None: all
    places     int64 [n]: which of the states of `Carry.starts` they start from; None: the ends of `from_runs`
    from_runs  the run that each starts from the end of
    goes_on    which of the n runs a later run starts from the end of
    stored     int64: of which of the n runs the states at their ends are stored
    to         int64: the rows of the table for these
    """

    runs: list[int]
    rows: Tensor
    inside: Tensor | None
    places: Tensor | None
    from_runs: list[int]
    goes_on: list[int]
    stored: Tensor
    to: Tensor

    def pick(self, x: Tensor) -> Tensor:
        """Returns x [rows, ...] by runs: [n, most rows of a run, ...], zeros behind the rows of a run."""
        x = x[self.rows]
        if self.inside is None:
            return x
        return x.masked_fill(~self.inside[(..., *[None] * (x.ndim - 2))], 0)


# Takes the states that the runs of a group start from, [n, ...], and the group; returns what it gives for their rows,
# [n, most rows of a run, columns], and the states at their ends.
Scan = Callable[[Tensor, Group], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerStates:
    """A LayerStates is what a mixer knows of tries, paths and slots: the states of its layer in a step."""

    carry: Carry
    layer: int

    def conv(self, part: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns a causal convolution of each channel along the paths of rows, shaped as x.

        part    which tensor of the state has the last taps - 1 rows of x, oldest first, [taps - 1, channels]
        x       [rows, channels]
        weight  [channels, taps]: the last tap is that of the row itself
        bias    [channels]
        """
        carry, width = self.carry, weight.shape[1] - 1
        x = carry.unfold(x)
        places, ends = carry.neighbours(width)
        rows = torch.cat((carry.starts(self.layer, part).flatten(0, 1), x))
        out = x * weight[:, width] if bias is None else torch.addcmul(bias, x, weight[:, width])
        for back, place in enumerate(places, 1):
            out.addcmul_(rows.index_select(0, place), weight[:, width - back])
        table = carry.table.tensors[self.layer][part]
        table.index_copy_(0, carry.to, rows.index_select(0, ends).unflatten(0, (len(carry.to), width)))
        return carry.fold(out)

    def scan(self, part: int, scan: Scan, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns what a recurrence along the paths gives for each row of the stream, [rows, columns].

        part  which tensor of the state it goes on from
        scan  computes some runs; it is called for runs whose starts are known
        """
        carry = self.carry
        starts, table = carry.starts(self.layer, part), carry.table.tensors[self.layer][part]
        out = torch.empty(carry.rows, columns, dtype=dtype, device=carry.device)
        at_end: dict[int, Tensor] = {}
        for group in carry.groups:
            if group.places is not None:
                start = starts.index_select(0, group.places)
            else:
                start = torch.stack([at_end[run] for run in group.from_runs])
            values, ends = scan(start, group)
            rows, values = group.rows.flatten(), values.flatten(0, 1)
            if group.inside is not None:
                inside = group.inside.flatten()
                rows, values = rows[inside], values[inside]
            out.index_copy_(0, rows, values)
            for i in group.goes_on:
                at_end[group.runs[i]] = ends[i]
            every = len(group.to) == len(group.runs)
            table.index_copy_(0, group.to, ends if every else ends.index_select(0, group.stored))
        return carry.fold(out)
