"""LoRA adapters (Hu et al. 2021), applied to the rows of a step that use them. `model.adapters` reads adapter files.

An adapter adds scaled B A x to the output of a linear for x. It is never merged into the weights. So rows of several
adapters and rows without one run through the model together, and only rows with an adapter pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...model.adapters import AdapterArrays, LinearAdapter, read_adapter
from ...model.config import ModelConfig
from ...spec.plugins import named_class
from .device import send
from .parallel import ALONE, Alone
from .tensors import tensor_of


@dataclass(frozen=True, slots=True)
class Part:
    """One module in a fused linear."""

    ranks: slice  # the module's rows of `Delta.a`
    columns: slice  # the module's columns of the output
    b: Tensor  # B, scaled, [columns, ranks]


@dataclass(frozen=True, slots=True)
class Delta:
    """The low-rank update of one linear by an adapter.

    Attributes:
        a: [ranks of all parts, inputs].
    """

    a: Tensor
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, arrays: LinearAdapter, dtype: torch.dtype, device: torch.device) -> Delta:
        parts = (Part(part.ranks, part.columns, tensor_of(part.b).to(device, dtype)) for part in arrays.parts)
        return cls(tensor_of(arrays.a).to(device, dtype), tuple(parts))

    def add_to(self, out: Tensor, x: Tensor, rows: slice | Tensor) -> None:
        low = F.linear(x[rows], self.a)
        for part in self.parts:
            high = F.linear(low[:, part.ranks], part.b)
            if isinstance(rows, slice):
                out[rows, part.columns] += high
            else:
                out[:, part.columns].index_add_(0, rows, high)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that fits a model.

    Attributes:
        name: The name that requests use.
        layers: For each layer, the updates of its linears, by name.
    """

    name: str
    layers: tuple[Mapping[str, Delta], ...]

    @classmethod
    def of(cls, arrays: AdapterArrays, dtype: torch.dtype, device: torch.device) -> Adapter:
        return cls(
            arrays.name,
            tuple({name: Delta.of(one, dtype, device) for name, one in layer.items()} for layer in arrays.layers),
        )

    @property
    def device(self) -> torch.device:
        return next(self._tensors()).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self):
        for layer in self.layers:
            for delta in layer.values():
                yield delta.a
                yield from (part.b for part in delta.parts)


class RowAdapters:
    """The adapter of each row.

    Attributes:
        adapters: The adapters of the step.
        numbers: int64 [rows], the index of each row's adapter, or -1.
        read_rows: int64, ascending, equal to the model's `read_rows`. None: all. It is on the host, so that no step
            waits for a device to read it.
    """

    def __init__(self, adapters: Sequence[Adapter], numbers: np.ndarray, read_rows: np.ndarray | None = None):
        self.adapters = tuple(adapters)
        self.numbers = numbers
        self.read_rows = read_rows

    @cached_property
    def read(self) -> RowAdapters:
        """Return the adapters of the read rows."""
        return self if self.read_rows is None or not self.adapters else self._of(self.numbers[self.read_rows])

    def _of(self, numbers: np.ndarray, read_rows: np.ndarray | None = None) -> RowAdapters:
        return RowAdapters(self.adapters, numbers, read_rows) if (numbers >= 0).any() else NO_ADAPTERS

    def add(self, out: Tensor, x: Tensor, layer: int, linear: str) -> Tensor:
        """Add the adapters' updates to out [rows, outputs], in place, and return it.

        Args:
            x: [rows, inputs], the input.
        """
        for rows, adapter in self._groups:
            delta = adapter.layers[layer].get(linear)
            if delta is not None:
                delta.add_to(out, x, rows)
        return out

    @cached_property
    def _groups(self) -> list[tuple[slice | Tensor, Adapter]]:
        """Return the rows of each adapter. Consecutive rows are a slice, which needs no copy."""
        groups: list[tuple[slice | Tensor, Adapter]] = []
        for number, adapter in enumerate(self.adapters):
            rows = np.flatnonzero(self.numbers == number)
            if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
                groups.append((slice(int(rows[0]), int(rows[-1]) + 1), adapter))
            elif len(rows):
                groups.append((send(rows, adapter.device), adapter))
        return groups


NO_ADAPTERS = RowAdapters((), np.empty(0, np.int64))


def load_adapter(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    name: str | None = None,
    ranks: Alone = ALONE,
) -> Adapter:
    """Load the adapter in a PEFT folder for a model of `config`. Arguments and errors are as in `read_adapter`.

    Args:
        dtype, device: The model's.
    """
    if config.loading:
        options: Any = {"dtype": dtype, "device": device, "name": name, "ranks": ranks}
        return named_class(f"{config.loading}:load_adapter")(path, config, **options)
    shard = ranks.shard(config) if ranks.size > 1 else None
    return Adapter.of(read_adapter(path, config, name=name, shard=shard), dtype, torch.device(device))
