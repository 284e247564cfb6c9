"""The messages of hybrids: steps that say from which states their rows start, and which states are kept. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...engine.schedule.steps import NOTHING, Message, SlotStep, StreamStep

# The slot of the state before the first row of a prompt: it holds zeros, and is never written.
ZERO = 0


@dataclass(frozen=True, eq=False, slots=True)
class StateRuns:
    """A StateRuns says how states go through the rows of a step.

    A run is some neighbouring rows, each of which goes on from the row before. Rows are those of the stream where a
    step is folded.

    first   int64 [r], ascending from 0: the first row of each run
    source  int64 [r]: the slot of the state that a run starts from, or -1 - i: the state at the end of run i, which is
            an earlier run of the step
    ends    int64 [k]: runs whose states at their ends are stored
    slots   int64 [k]: the slot of each of these. It may be one that runs of the step start from, which all of them read
            as it was before the step
    """

    first: np.ndarray = field(default_factory=lambda: NOTHING)
    source: np.ndarray = field(default_factory=lambda: NOTHING)
    ends: np.ndarray = field(default_factory=lambda: NOTHING)
    slots: np.ndarray = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, eq=False, slots=True)
class StateStreamStep(StreamStep):
    """A StateStreamStep is a StreamStep for a hybrid. The slot of a state of a stream's path is the number of the rows
    above it.

    runs         how states go through its rows
    kept_states  int64, ascending: the slots of the states of the carried path that later steps need
    """

    runs: StateRuns = field(default_factory=StateRuns)
    kept_states: np.ndarray = field(default_factory=lambda: NOTHING)


@dataclass(eq=False, slots=True)
class StateSlotStep(SlotStep):
    """A StateSlotStep is a SlotStep for a hybrid.

    runs  how states go through its rows; slots are those of the store that `MakeStates` made
    """

    runs: StateRuns = field(default_factory=StateRuns)


@dataclass(frozen=True, slots=True)
class MakeStates(Message):
    """A MakeStates asks for room for so many states, the one of ZERO among them."""

    slots: int


@dataclass(frozen=True, slots=True)
class StateFacts:
    """A StateFacts is what the host knows of a hybrid: state_bytes, the bytes of one state in all layers."""

    state_bytes: int
