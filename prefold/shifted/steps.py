"""The message of rows that are reused at other positions, and what the host knows of them. NumPy arrays only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..schedule.steps import Message


@dataclass(frozen=True, slots=True)
class ShiftedFacts:
    """ShiftedFacts are what the host knows of a worker that moves rows.

    fixed  why rows cannot be moved to other positions, in words; None: they can
    """

    fixed: str | None = None


@dataclass(frozen=True, eq=False, slots=True)
class MoveRows(Message):
    """A MoveRows asks for copies of the K/V of n rows, as rows at other positions: their keys are turned by the rotary
    angles between the two. Everything is read before anything is written.

    sources, positions      int64 [n]: the slots that are read, and the positions their rows were computed at
    slots, new_positions    int64 [n]: the slots that are written, none twice, and the positions of the copies
    """

    sources: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    new_positions: np.ndarray
