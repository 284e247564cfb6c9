"""The messages of hybrids: steps with the states that their rows start from and the states to store. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...engine.schedule.steps import NOTHING, Message, SlotStep, StreamStep

# The slot of the state before the first row of a prompt. It is all zeros and is never written.
ZERO = 0


@dataclass(frozen=True, eq=False, slots=True)
class StateRuns:
    """The runs of a step. A run is a range of rows in which each row continues the row before.

    Rows are counted in the stream if the step is folded (sharing="mlp").
    """

    first: np.ndarray = field(default_factory=lambda: NOTHING)  # int64 [r], ascending from 0: the first row of each run
    # int64 [r]: the slot of the state that a run starts from, or -1 - i for the state after run i, an earlier run
    source: np.ndarray = field(default_factory=lambda: NOTHING)
    ends: np.ndarray = field(default_factory=lambda: NOTHING)  # int64 [k]: the runs after which the state is stored
    # int64 [k]: the slot of each of these states. Runs of the step may start from the same slot: they all read the
    # state from before the step.
    slots: np.ndarray = field(default_factory=lambda: NOTHING)


@dataclass(frozen=True, eq=False, slots=True)
class StateStreamStep(StreamStep):
    """A StreamStep for a hybrid. The slot of a state on a stream's path is the number of rows above it."""

    runs: StateRuns = field(default_factory=StateRuns)
    # int64, ascending: slots of the carried path's states that later steps need
    kept_states: np.ndarray = field(default_factory=lambda: NOTHING)


@dataclass(eq=False, slots=True)
class StateSlotStep(SlotStep):
    """A SlotStep for a hybrid."""

    # The slots of `runs` are slots of the store that `MakeStates` created.
    runs: StateRuns = field(default_factory=StateRuns)


@dataclass(frozen=True, slots=True)
class MakeStates(Message):
    """A request for memory for this number of states, including the state of ZERO."""

    slots: int


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Facts about a hybrid that the engine needs."""

    state_bytes: int  # bytes of one state in all layers
