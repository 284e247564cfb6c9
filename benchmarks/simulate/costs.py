"""Estimates how long a step takes, by a roofline. `costs.json` holds machines and models by name.

    seconds = overhead + max(weights / bandwidth, linear FLOPs / rate) + K/V read / bandwidth + attention FLOPs / rate

A machine's numbers are those that it reaches, not those of its data sheet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from prefold.errors import InputError

# Decode rows for which a shared run of K/V is read once.
TILE = 64

_RESERVED = 1.5e9  # bytes of a GPU that neither weights nor K/V take
_USABLE = 0.9  # the share of a GPU's memory that an engine uses
WEIGHT_BYTES = 2  # of a number: bfloat16


@dataclass(frozen=True, slots=True)
class Machine:
    """A Machine is a device. flops: operations a second; bandwidth: bytes a second; overhead: seconds of a step"""

    name: str
    flops: float
    bandwidth: float
    memory: float
    overhead: float
    dollars_per_hour: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A ModelShape describes a model. linear: parameters that every row is multiplied with; total: all parameters; the
    other fields are those of its config"""

    name: str
    linear: float
    total: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes of one row's K/V."""
        return 2 * self.layers * self.kv_heads * self.head_dim * WEIGHT_BYTES


class StepRows(NamedTuple):
    """A StepRows counts the work of a step.

    prefill  rows of prompts
    decode   rows of running sequences
    keys     rows of K/V that the decode rows read, summed over sequences
    pairs    (row, key) pairs of the prompts' rows
    reads    rows whose logits are computed
    """

    prefill: int
    decode: int
    keys: int
    pairs: int
    reads: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """A StepCost computes the times of a model on a machine."""

    machine: Machine
    model: ModelShape

    def seconds(self, step: StepRows) -> float:
        """Returns how long one step takes."""
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
        """Returns how many rows' K/V fit beside the weights. Raises InputError if the weights do not fit."""
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
        """Returns the seconds of one row of a prompt in a large step."""
        return 2 * self.model.linear / self.machine.flops

    def decode_seconds(self, running: int) -> float:
        """Returns the seconds of one row of an output while so many sequences run."""
        return self.seconds(StepRows(0, running, 0, 0, running)) / running


def machine_named(name: str) -> Machine:
    """Returns a machine of costs.json. Raises InputError for an unknown name."""
    return Machine(name, **_named("machines", name))


def model_named(name: str) -> ModelShape:
    """Returns a model of costs.json. Raises InputError for an unknown name."""
    return ModelShape(name, **_named("models", name))


def _named(kind: str, name: str) -> dict[str, Any]:
    entries = json.loads(files(__package__).joinpath("costs.json").read_text())[kind]
    if name not in entries:
        raise InputError(f"there is no {name!r} among the {kind}", field=kind[:-1], remedy=f"use {', '.join(entries)}")
    return entries[name]
