"""The time of a step by a roofline model. `costs.json` has machines and models by name.

    seconds = overhead + max(weights / bandwidth, linear FLOPs / rate) + K/V read / bandwidth + attention FLOPs / rate

The rates of a machine are measured rates, not the rates in its data sheet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from prefold.errors import InputError

# Number of decode rows that together read a shared run of K/V once.
TILE = 64

_RESERVED = 1.5e9  # bytes of GPU memory for other things than weights and K/V
_USABLE = 0.9  # share of a GPU's memory that an engine uses
WEIGHT_BYTES = 2  # bytes of a weight in bfloat16


@dataclass(frozen=True, slots=True)
class Machine:
    """A device."""

    name: str
    flops: float  # per second
    bandwidth: float  # bytes per second
    memory: float  # bytes
    overhead: float  # seconds per step
    dollars_per_hour: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model. The other fields are as in config.json."""

    name: str
    linear: float  # parameters that multiply every row
    total: float  # all parameters
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K/V of one row."""
        return 2 * self.layers * self.kv_heads * self.head_dim * WEIGHT_BYTES


class StepRows(NamedTuple):
    """The work of a step."""

    prefill: int  # prompt rows
    decode: int  # rows of running sequences
    keys: int  # K/V rows that the decode rows read, summed over sequences
    pairs: int  # (row, key) pairs of the prompt rows
    reads: int  # rows with logits


@dataclass(frozen=True, slots=True)
class StepCost:
    """The times of a model on a machine."""

    machine: Machine
    model: ModelShape

    def seconds(self, step: StepRows) -> float:
        """Return the seconds of one step."""
        machine, model = self.machine, self.model
        weights = (model.linear + model.vocab * model.hidden) * WEIGHT_BYTES
        linear = 2 * (model.linear * (step.prefill + step.decode) + model.vocab * model.hidden * step.reads)
        attention = 4 * model.layers * model.heads * model.head_dim * step.pairs
        read = step.keys * model.kv_bytes
        return (
            machine.overhead
            + max(weights / machine.bandwidth, linear / machine.flops)
            + read / machine.bandwidth
            + attention / machine.flops
        )

    @property
    def kv_rows(self) -> int:
        """Number of rows with K/V that fit in memory beside the weights. Raise InputError if the weights do not fit."""
        free = (
            self.machine.memory * _USABLE - self.model.total * WEIGHT_BYTES - min(_RESERVED, self.machine.memory / 10)
        )
        if free < self.model.kv_bytes:
            raise InputError(
                f"{self.model.name} does not fit on one {self.machine.name}",
                field="machine",
                remedy="name a machine with more memory, or a smaller model",
            )
        return int(free / self.model.kv_bytes)

    @property
    def prefill_seconds(self) -> float:
        """Seconds of one prompt row in a large step."""
        return 2 * self.model.linear / self.machine.flops

    def decode_seconds(self, running: int) -> float:
        """Return the seconds of one decode row while this many sequences run."""
        return self.seconds(StepRows(0, running, 0, 0, running)) / running


def machine_named(name: str) -> Machine:
    """Return a machine of costs.json. Raise InputError for an unknown name."""
    return Machine(name, **_named("machines", name))


def model_named(name: str) -> ModelShape:
    """Return a model of costs.json. Raise InputError for an unknown name."""
    return ModelShape(name, **_named("models", name))


def _named(kind: str, name: str) -> dict[str, Any]:
    entries = json.loads(files(__package__).joinpath("costs.json").read_text())[kind]
    if name not in entries:
        raise InputError(f"there is no {name!r} among the {kind}", field=kind[:-1], remedy=f"use {', '.join(entries)}")
    return entries[name]
