"""States that go through the rows of one step, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...model.config import ModelConfig, StateShape
from ...worker.torch.device import send
from .states import StateFlow, StateTable

# The most runs whose states are worked on at once: bounds what a layer holds beside its rows.
MOST_RUNS = 64


def tensor_table(config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> StateTable:
    """Returns a table of states as tensors."""

    def zeros(count: int, part: StateShape) -> Tensor:
        return torch.zeros(count, *part.shape, dtype=torch.float32 if part.is_wide else dtype, device=device)

    return StateTable(config, rows, zeros, in_place=device.type == "cpu")


@dataclass(eq=False)
class Carry(StateFlow):
    """A Carry takes states through the rows of one step, and writes those to be stored into the table.

    scatter  of a folded step, int64 [rows]: the row that the model computes for each row of the stream; else None
    gather   of a folded step, int64: the row of the stream for each row that the model computes; else None
    """

    device: torch.device
    scatter: Tensor | None = None
    gather: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
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
