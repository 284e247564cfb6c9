"""Tables of cosines and sines of rotary positions, as tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...model.config import RopeConfig
from ...model.rotary import FIRST_ROWS, distinct_values, padded_frequencies


class RotaryTable:
    """Cosines, then sines, by position, float32 [positions, dim]. The table grows as needed."""

    def __init__(self, rope: RopeConfig, dim: int, device: torch.device):
        inv, scale = padded_frequencies(rope, dim)
        self.frequencies = torch.from_numpy(inv).to(device)
        self.scale = scale if isinstance(scale, float) else torch.from_numpy(scale).to(device)
        self.table = torch.empty(0, dim, device=device)

    def __call__(self, positions: Tensor) -> Tensor:
        """Return float32 [rows, dim] for positions int64 [rows], multiplied by the attention factor."""
        if positions.device.type != "cpu":  # reading the largest position would wait for the device
            return self._of(positions)
        self.grow_to(int(positions.max()) + 1 if len(positions) else 0)
        return self.table.index_select(0, positions)

    def grow_to(self, rows: int) -> None:
        """Extend `table` to at least `rows` positions, on a CPU."""
        if rows <= len(self.table):
            return
        rows = max(rows, 2 * len(self.table), FIRST_ROWS)
        # Outside of inference mode, so that a table built there also serves a pass with gradients.
        with torch.inference_mode(False), torch.no_grad():
            self.table = self._of(torch.arange(rows, device=self.table.device))

    def _of(self, positions: Tensor) -> Tensor:
        angles = positions.float()[:, None] * self.frequencies
        return torch.cat((angles.cos() * self.scale, angles.sin() * self.scale), -1)


class RotaryTables:
    """Cosines and sines of every plane. Planes with equal settings share a table.

    Args:
        ropes: The rotary settings of each plane.
        dims: The size of the rotated part of a head, for each plane.

    Attributes:
        table_of: The number of each plane's table, counted in order of first use.
    """

    def __init__(self, ropes: Sequence[RopeConfig], dims: Sequence[int], device: torch.device):
        distinct, self.table_of = distinct_values(list(zip(ropes, dims, strict=True)))
        self.device = device
        self._tables = [RotaryTable(rope, dim, device) for rope, dim in distinct]

    def __call__(self, positions: Tensor) -> list[Tensor]:
        """Return the result of each plane's `RotaryTable` for positions int64 [rows]."""
        tables = [table(positions) for table in self._tables]
        return [tables[i] for i in self.table_of]

    def covering(self, positions: int) -> list[Tensor]:
        """Return the tables, each with at least `positions` positions. On a CPU only."""
        for table in self._tables:
            table.grow_to(positions)
        return [table.table for table in self._tables]
