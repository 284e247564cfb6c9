"""States that pass through the rows of one step, as tensors."""

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

# The most runs computed at once. It bounds the memory of a layer beside its rows.
MOST_RUNS = 64


def tensor_table(config: ModelConfig, rows: int, dtype: torch.dtype, device: torch.device) -> StateTable:
    """Return an empty table of states in tensors."""

    def zeros(count: int, part: StateShape) -> Tensor:
        return torch.zeros(count, *part.shape, dtype=torch.float32 if part.is_wide else dtype, device=device)

    return StateTable(config, rows, zeros, in_place=device.type == "cpu")


@dataclass(eq=False)
class Carry(StateFlow):
    """Passes states through the rows of one step, and writes the states to be stored into the table.

    Attributes:
        scatter: int64 [rows]: the model's row for each row of the stream; None if the step is not folded
        gather: int64: the stream's row for each row that the model computes; None if the step is not folded
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
        """Return the table rows in which the states after `runs.ends` are stored, int64."""
        return send(self.runs.slots, self.device)

    def of(self, layer: int) -> LayerStates:
        """Return the states of one layer."""
        return LayerStates(self, layer)

    def starts(self, layer: int, part: int) -> Tensor:
        """Return copies of the states that runs start from, each once, in ascending order of their table rows."""
        return self.table.tensors[layer][part].index_select(0, self._sent_starts)

    def unfold(self, x: Tensor) -> Tensor:
        """Expand rows of the model to rows of the stream."""
        return x if self.scatter is None else x.index_select(0, self.scatter)

    def fold(self, x: Tensor) -> Tensor:
        """Reduce rows of the stream to rows of the model."""
        return x if self.gather is None else x.index_select(0, self.gather)

    def neighbours(self, num_kept: int) -> tuple[list[Tensor], Tensor]:
        """Return `places` as tensors: (`above` as a list, `below` flat, [k * num_kept]).

        Their columns count the states of `starts`, not of the whole table.
        """
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
        """Return the runs in the order of computation, in groups of about the same length."""
        to = np.full(len(self.runs.first), -1, np.int64)
        to[self.runs.ends] = self.runs.slots
        goes_on = np.zeros(len(to), bool)
        goes_on[self._from_run[self._from_run >= 0]] = True
        groups = []
        for wave in self._waves:
            length = (self._stop - self.runs.first)[wave]
            classes = np.frexp(length)[1]  # binary logarithms: a run fills at least half of its group's padded tensor
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
    """A group of n runs of about the same length that are computed together."""

    runs: list[int]  # their numbers
    rows: Tensor  # int64 [n, longest run]: the rows of each run, padded with its first row
    inside: Tensor | None  # bool [n, longest run]: False for padding; None: there is no padding
    places: Tensor | None  # int64 [n]: indices into `Carry.starts` of the states they start from; None: see from_runs
    from_runs: list[int]  # [n]: if places is None, each run starts from the state after this run
    goes_on: list[int]  # indices of the runs (0 to n - 1) that later runs start from
    stored: Tensor  # int64: indices of the runs (0 to n - 1) with final states to be stored
    to: Tensor  # int64: the table rows for these states

    def pick(self, x: Tensor) -> Tensor:
        """Return x [rows, ...] by run: [n, longest run, ...], with zeros as padding."""
        x = x[self.rows]
        if self.inside is None:
            return x
        return x.masked_fill(~self.inside[(..., *[None] * (x.ndim - 2))], 0)


# (states that the runs of a group start from [n, ...], the group) -> (outputs for their rows [n, longest run, columns],
# states after the runs [n, ...])
Scan = Callable[[Tensor, Group], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer in a step: all that a recurrent layer sees of tries, paths and slots."""

    carry: Carry
    layer: int

    def conv(self, part: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a causal convolution of each channel along the paths of rows, [rows, channels].

        Args:
            part: the tensor of the state with the last taps - 1 rows of x, oldest first, [taps - 1, channels]
            x: [rows, channels]
            weight: [channels, taps]; the last tap is for the row itself
            bias: [channels]
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
        """Return the outputs of a recurrence along the paths of rows, [rows, columns].

        Args:
            part: the tensor of the state that the recurrence continues
            scan: computes a group of runs with known starting states
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
