"""Rotary position embedding (Su et al. 2021): frequencies of each kind, and a table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import RopeConfig


def frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """Returns the angles a row turns per position, float32, and what cosines and sines are multiplied with. dim: of the
    numbers of a head that are turned, twice as many as there are angles.

    In float32 and in the order of operations of transformers: at position 8,000 the last bit of a
    frequency is 5e-4 of an angle.
    """
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return KINDS[rope.kind](powers, rope.theta, rope.settings)


def llama3(powers: Tensor, theta: float, settings: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Returns the frequencies of Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between
    blended."""
    factor, low, high = settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"]
    trained = settings["original_max_position_embeddings"]
    inv = 1.0 / powers
    wavelength = 2 * math.pi / inv
    blend = (trained / wavelength - low) / (high - low)
    middle = (1 - blend) * inv / factor + blend * inv
    long, short = wavelength > trained / low, wavelength < trained / high
    return torch.where(long, inv / factor, torch.where(short, inv, middle)), 1.0


def yarn(powers: Tensor, theta: float, settings: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Returns the frequencies of YaRN (Peng et al. 2023): dimensions that turn fast are kept, slow ones interpolated, a
    ramp between."""
    factor, half = settings["factor"], len(powers)

    def dimension_of(rotations: float) -> float:
        """Returns the dimension that turns so often within the trained context."""
        trained = settings["original_max_position_embeddings"]
        return 2 * half * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(settings["beta_fast"]), dimension_of(settings["beta_slow"])
    if settings["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    span = high - low or 0.001
    keep = 1 - ((torch.arange(half, dtype=torch.float32) - low) / span).clamp(0, 1)
    inv = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inv, yarn_attention_factor(settings)


def yarn_attention_factor(settings: Mapping[str, Any]) -> float:
    """Returns the temperature of YaRN, equation 22, or the ratio of two such as DeepSeek has it."""
    if settings["attention_factor"] is not None:
        return settings["attention_factor"]

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(settings["factor"]) + 1.0 if settings["factor"] > 1 else 1.0

    if settings["mscale"] and settings["mscale_all_dim"]:
        return temperature(settings["mscale"]) / temperature(settings["mscale_all_dim"])
    return temperature(1.0)


def longrope(powers: Tensor, theta: float, settings: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Returns the frequencies of LongRoPE (Ding et al. 2024), each divided by a factor of its own."""
    return 1.0 / (torch.tensor(settings["factors"], dtype=torch.float32) * powers), settings["attention_factor"]


KINDS: dict[str, Callable[[Tensor, float, Mapping[str, Any]], tuple[Tensor, float]]] = {
    "default": lambda powers, theta, settings: (1.0 / powers, 1.0),
    # Frequencies of 0: all cosines are 1 and all sines 0, so that nothing is turned.
    "none": lambda powers, theta, settings: (torch.zeros_like(powers), 1.0),
    # For positions divided by `factor`.
    "linear": lambda powers, theta, settings: (1.0 / powers / settings["factor"], 1.0),
    # Every frequency is divided by its own factor.
    "factors": lambda powers, theta, settings: (
        1.0 / powers / torch.tensor(settings["factors"], dtype=torch.float32), 1.0,
    ),
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}  # fmt: skip


class RotaryTable:
    """A RotaryTable gives cosines and sines by position, float32 [positions, dim] (cosines, then sines), and grows as
    needed."""

    FIRST_ROWS = 1024

    def __init__(self, rope: RopeConfig, dim: int, device: torch.device):
        turned = rope.turned(dim)
        inv, scale = frequencies(rope, turned)
        # What is not turned has a frequency of 0, and keeps its size.
        still = (dim - turned) // 2
        self.frequencies = F.pad(inv, (0, still)).to(device)
        self.scale: float | Tensor = scale
        if still and scale != 1:
            self.scale = F.pad(torch.full((turned // 2,), scale), (0, still), value=1.0).to(device)
        self.table = torch.empty(0, dim, device=device)

    def __call__(self, positions: Tensor) -> Tensor:
        """Returns float32 [rows, dim] for positions int64 [rows], multiplied with the attention factor."""
        if positions.device.type != "cpu":  # to ask for the largest would be to wait for it
            return self._of(positions)
        self.grow_to(int(positions.max()) + 1 if len(positions) else 0)
        return self.table.index_select(0, positions)

    def grow_to(self, rows: int) -> None:
        """Makes `table` cover so many positions, on a CPU."""
        if rows <= len(self.table):
            return
        rows = max(rows, 2 * len(self.table), self.FIRST_ROWS)
        # Outside of inference mode, so that a table built there also serves a pass with gradients.
        with torch.inference_mode(False), torch.no_grad():
            self.table = self._of(torch.arange(rows, device=self.table.device))

    def _of(self, positions: Tensor) -> Tensor:
        angles = positions.float()[:, None] * self.frequencies
        return torch.cat((angles.cos() * self.scale, angles.sin() * self.scale), -1)


class RotaryTables:
    """A RotaryTables gives cosines and sines of every plane; planes with the same settings share a table.

    table_of  by plane, the number of its table in the order in which planes have them first
    """

    def __init__(self, ropes: Sequence[RopeConfig], dim: int, device: torch.device):
        distinct: list[RopeConfig] = []
        for rope in ropes:
            if rope not in distinct:
                distinct.append(rope)
        self.device = device
        self._tables = [RotaryTable(rope, dim, device) for rope in distinct]
        self.table_of = [distinct.index(rope) for rope in ropes]

    def __call__(self, positions: Tensor) -> list[Tensor]:
        """Returns the result of each plane's `RotaryTable` for positions int64 [rows]."""
        tables = [table(positions) for table in self._tables]
        return [tables[i] for i in self.table_of]

    def covering(self, positions: int) -> list[Tensor]:
        """Returns the tables, each of at least so many positions; on a CPU."""
        for table in self._tables:
            table.grow_to(positions)
        return [table.table for table in self._tables]
