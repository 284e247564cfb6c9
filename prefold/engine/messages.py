"""The message of a step of generation, with what those who read it want. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..schedule.generate_step import GenerateStep
from ..schedule.steps import Numbers, SlotStep
from ..types import Readout
from ..worker.protocol import Facts
from .requests import NumberReader, Reader, adapter_number
from .sampling import drawing_of

__all__ = ["adapter_of", "is_known", "message_of"]


def message_of(
    facts: Facts,
    step: GenerateStep,
    readers: Sequence[Reader],
    hooks: Sequence[Callable[[GenerateStep, Sequence[Reader]], Mapping[str, Any]]] = (),
) -> SlotStep:
    """Returns the message of a step, with how tokens are chosen, what is read as numbers, and the rows' adapters.

    readers  of the step's takers
    hooks    return further fields of the message
    """
    drawing = drawing_of([reader.state for reader in readers], [running.unknown for running in step.takers])
    numbers = _numbers_of(readers)
    adapters = None
    if facts.adapters:
        adapters = np.full(step.num_rows, -1, np.int64)
        for namespace, first, stop in step.namespaces:
            adapters[first:stop] = adapter_of(facts, namespace)
    more: dict[str, Any] = {}
    for hook in hooks:
        more |= hook(step, readers)
    if drawing is None and not numbers and adapters is None and not more:
        return step.message
    return replace(step.message, drawing=drawing, numbers=numbers, adapters=adapters, **more)


def is_known(step: GenerateStep, readers: Sequence[Reader]) -> bool:
    """Returns whether the choice of the step's tokens depends on no token that is still to come."""
    return all(
        not running.unknown or reader.state is None or reader.state.independent
        for running, reader in zip(step.takers, readers, strict=True)
    )


def adapter_of(facts: Facts, namespace: Sequence[object]) -> int:
    """Returns the number of the adapter of a namespace, -1: none."""
    number = adapter_number(facts, namespace[0])  # type: ignore[arg-type]
    return -1 if number is None else number


def _numbers_of(readers: Sequence[Reader]) -> tuple[Numbers, ...]:
    """Returns those of a step's reads that give numbers, by readout."""
    found: dict[Readout, list[int]] = {}
    for i, reader in enumerate(readers):
        if isinstance(reader, NumberReader):
            found.setdefault(reader.readout, []).append(i)
    return tuple(
        Numbers(readout, np.array(reads, np.int64), np.array([readers[i].target for i in reads], np.int32))  # type: ignore[union-attr]
        for readout, reads in found.items()
    )
