"""Rotary position embedding (Su et al. 2021): frequencies of each kind, and tables of cosines and sines. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from .config import RopeConfig

Floats = np.ndarray  # float32
T = TypeVar("T")
FIRST_ROWS = 1024  # initial size of a table


def frequencies(rope: RopeConfig, dim: int) -> tuple[Floats, float]:
    """Return the angle per position of each rotated pair, float32, and the factor of cosines and sines.

    `dim` is the number of rotated elements per head, twice the number of angles. It follows the order of
    operations in transformers: at position 8,000 the last bit of a frequency changes an angle by 5e-4.
    """
    powers = np.float32(rope.theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    return KINDS[rope.kind](powers, rope.theta, rope.settings)


def llama3(powers: Floats, theta: float, settings: Mapping[str, Any]) -> tuple[Floats, float]:
    """Return the frequencies of Llama 3.1.

    Long wavelengths are divided by `factor`, short wavelengths stay, and wavelengths between them are blended.
    """
    factor, low, high = settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"]
    trained = settings["original_max_position_embeddings"]
    inv = 1 / powers
    wavelength = 2 * math.pi / inv
    blend = (trained / wavelength - low) / (high - low)
    middle = (1 - blend) * inv / factor + blend * inv
    long, short = wavelength > trained / low, wavelength < trained / high
    return np.where(long, inv / factor, np.where(short, inv, middle)).astype(np.float32), 1.0


def yarn(powers: Floats, theta: float, settings: Mapping[str, Any]) -> tuple[Floats, float]:
    """Return the frequencies of YaRN (Peng et al. 2023).

    Fast-rotating dimensions stay, slow dimensions are interpolated, and a linear ramp connects them.
    """
    factor, half = settings["factor"], len(powers)

    def dimension_of(rotations: float) -> float:
        """Return the dimension that rotates this often within the trained context."""
        trained = settings["original_max_position_embeddings"]
        return 2 * half * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(settings["beta_fast"]), dimension_of(settings["beta_slow"])
    if settings["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    span = high - low or 0.001
    keep = 1 - ((np.arange(half, dtype=np.float32) - low) / span).clip(0, 1)
    inv = 1 / (factor * powers) * (1 - keep) + 1 / powers * keep
    return inv.astype(np.float32), yarn_attention_factor(settings)


def yarn_attention_factor(settings: Mapping[str, Any]) -> float:
    """Return YaRN's temperature (equation 22), or DeepSeek's ratio of two temperatures."""
    if settings["attention_factor"] is not None:
        return settings["attention_factor"]

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(settings["factor"]) + 1.0 if settings["factor"] > 1 else 1.0

    if settings["mscale"] and settings["mscale_all_dim"]:
        return temperature(settings["mscale"]) / temperature(settings["mscale_all_dim"])
    return temperature(1.0)


def longrope(powers: Floats, theta: float, settings: Mapping[str, Any]) -> tuple[Floats, float]:
    """Return the frequencies of LongRoPE (Ding et al. 2024), each divided by its own factor."""
    return 1 / (np.array(settings["factors"], np.float32) * powers), settings["attention_factor"]


def proportional(powers: Floats, theta: float, settings: Mapping[str, float]) -> tuple[Floats, float]:
    """Return frequencies for whole heads. After the rotated share of the head, they are 0 (Gemma 4)."""
    inv = 1 / powers
    inv[int(settings["share"] * 2 * len(powers) // 2) :] = 0
    return inv / np.float32(settings["factor"]), 1.0


KINDS: dict[str, Callable[[Floats, float, Mapping[str, Any]], tuple[Floats, float]]] = {
    "default": lambda powers, theta, settings: (1 / powers, 1.0),
    # With frequency 0 all cosines are 1 and all sines 0, so nothing rotates.
    "none": lambda powers, theta, settings: (np.zeros_like(powers), 1.0),
    # The same as dividing positions by `factor`.
    "linear": lambda powers, theta, settings: (1 / powers / settings["factor"], 1.0),
    # Each frequency has its own divisor.
    "factors": lambda powers, theta, settings: (
        1 / powers / np.array(settings["factors"], np.float32), 1.0,
    ),
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "proportional": proportional,
}  # fmt: skip


def padded_frequencies(rope: RopeConfig, dim: int) -> tuple[Floats, float | Floats]:
    """Return `frequencies` for heads of `dim` elements, and the factor of cosines and sines.

    Elements that do not rotate have frequency 0 and factor 1.
    """
    turned = rope.turned(dim)
    inv, scale = frequencies(rope, turned)
    still = (dim - turned) // 2
    if still and scale != 1:
        return np.pad(inv, (0, still)), np.pad(np.full(turned // 2, scale, np.float32), (0, still), constant_values=1)
    return np.pad(inv, (0, still)), scale


def distinct_values(values: Sequence[T]) -> tuple[list[T], list[int]]:
    """Return the distinct values, and per plane the index of its value among them."""
    distinct: list[T] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct, [distinct.index(value) for value in values]


class AngleTables:
    """Cosines and sines by position, one table for all planes with the same settings. Tables grow as needed.

    Attributes:
        table_of: per plane, the index of its table.
        dims: per table, the rotated elements per head.
        tables: float32 [positions, dim] each, cosines before sines.
    """

    def __init__(self, ropes: Sequence[RopeConfig], dims: Sequence[int]):
        """Create the tables for planes with these rotary settings and head sizes."""
        distinct, self.table_of = distinct_values(list(zip(ropes, dims, strict=True)))
        self._frequencies = [padded_frequencies(rope, dim) for rope, dim in distinct]
        self.dims = [dim for _, dim in distinct]
        self.tables = [np.empty((0, dim), np.float32) for dim in self.dims]

    def covering(self, positions: int) -> list[Floats]:
        """Return the tables, each with at least `positions` positions."""
        for number, (inv, scale) in enumerate(self._frequencies):
            if (had := len(self.tables[number])) < positions:
                rows = np.arange(max(positions, 2 * had, FIRST_ROWS), dtype=np.float32)
                angles = rows[:, None] * inv
                self.tables[number] = np.concatenate(
                    (np.cos(angles) * scale, np.sin(angles) * scale), 1, dtype=np.float32
                )
        return self.tables
