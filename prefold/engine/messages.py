"""The message of a step of generation, with what those who read it want. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..looped.decode_step import DecodeStep
from ..looped.draft import RoutedStep
from ..looped.steps import VisitStep
from ..schedule.generate_step import GenerateStep
from ..schedule.steps import Numbers, SlotStep
from ..types import Exits, Readout
from ..worker.protocol import Facts
from .requests import NumberReader, Reader, adapter_number
from .sampling import drawing_of

__all__ = ["is_known", "message_of"]


def message_of(
    facts: Facts, step: GenerateStep | RoutedStep | DecodeStep, readers: Sequence[Reader], *, visits: bool
) -> SlotStep | VisitStep:
    """Returns the message of a step, with how tokens are chosen, what is read as numbers, the rows' adapters, and when
    rows are read.

    readers  of the step's takers
    visits   whether a step is a visit; then its rows say themselves when they leave
    """
    drawing = drawing_of([reader.state for reader in readers], [running.unknown for running in step.takers])
    numbers = _numbers_of(readers)
    adapters = None
    if facts.adapters:
        adapters = np.full(step.num_rows, -1, np.int64)
        for namespace, first, stop in step.namespaces:
            adapters[first:stop] = _adapter(facts, namespace)
    exits = None if visits else _exits_of(readers)
    if drawing is None and not numbers and adapters is None and exits is None:
        return step.message
    if isinstance(step, GenerateStep):
        return replace(step.message, drawing=drawing, numbers=numbers, adapters=adapters, exits=exits)
    projected = None
    if adapters is not None:
        projected = np.array([_adapter(facts, namespace) for namespace in step.projects], np.int64)
    return replace(step.message, drawing=drawing, numbers=numbers, adapters=adapters, project_adapters=projected)


def is_known(step: GenerateStep, readers: Sequence[Reader]) -> bool:
    """Returns whether the choice of the step's tokens depends on no token that is still to come."""
    return all(
        not running.unknown or reader.state is None or reader.state.independent
        for running, reader in zip(step.takers, readers, strict=True)
    )


def _adapter(facts: Facts, namespace: Sequence[object]) -> int:
    """Returns the number of the adapter of a namespace, -1: none."""
    number = adapter_number(facts, namespace[0])  # type: ignore[arg-type]
    return -1 if number is None else number


def _exits_of(readers: Sequence[Reader]) -> np.ndarray | None:
    """Returns when the rows of a step's reads leave, as of SlotStep; None: all as the checkpoint says."""
    if all(reader.read_exits is None for reader in readers):
        return None
    asked = [reader.read_exits or Exits() for reader in readers]
    rows = [(one.threshold, one.min_visits, one.max_visits or np.inf) for one in asked]
    return np.array(rows, np.float64)  # None becomes nan


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
