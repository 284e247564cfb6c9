"""The messages of rows that go through a looped model a visit at a time. NumPy arrays and plain numbers only.

A slot is then one row at one visit: it holds the K/V of one block's layers, and the row's state after the visit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..schedule.steps import NOTHING, Drawing, Message, Numbers, SlotResult
from .visit_options import VisitOptions

# Visits that are no blocks: the layers before the first block, and those after the last.
PRELUDE, CODA = -1, -2
# Whether a row leaves after a visit: it does, it does not, or its criteria decide.
LEAVES, STAYS, DECIDES = 1, -1, 0


@dataclass(frozen=True, slots=True)
class LoopedFacts:
    """LoopedFacts are what the host knows of a worker with a looped model.

    routes       whether a step's rows may visit the blocks in another order than the model's own
    gate         whether a gate says after which visit rows are read
    visits       how rows go through the model a visit at a time; None: they cannot
    visit_bytes  bytes of one slot of one row at one visit
    """

    routes: bool
    gate: bool
    visits: VisitOptions | None
    visit_bytes: int


@dataclass(frozen=True, slots=True)
class MakeVisitStore(Message):
    """A MakeVisitStore asks for so many slots of one row at one visit. Its result is nothing."""

    slots: int


@dataclass(frozen=True, eq=False, slots=True)
class Routing:
    """A Routing asks the router for the next block of n requests, by the states of all rows of their prompts.

    offsets  int64 [n + 1]: the rows of the i-th are those from offsets[i] up to offsets[i + 1]
    slots    int64: the slot that has each row's state
    tokens   int32: before the first visit, where no slot has one: the rows' tokens; else empty
    step     how many visits they have made
    fewest   int64 [n]: how many visits each makes at least
    """

    offsets: np.ndarray
    slots: np.ndarray
    tokens: np.ndarray
    step: int
    fewest: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class VisitRounds:
    """A VisitRounds says which of a step's n queries are further visits of the same rows. Those of a round go through
    its block once the round before is done; a query is left out where its row left before.

    blocks   int64 [rounds]: the number of the block, or PRELUDE
    offsets  int64 [rounds + 1]: the queries of the i-th round are those from offsets[i] up to offsets[i + 1]
    runs     int64 [rounds + 1]: likewise the runs of keys that they see
    row      int64 [n]: the number of the query's row, which is that of its first query
    before   int64 [n]: the query of the row's visit before; of the first round: -1
    ends     bool [n]: whether the row's route ends with this visit
    least    int64 [rounds]: where fewer rows would go through a round, neither it nor any after it is made: those that
             are left go on in a later step, beside others
    """

    blocks: np.ndarray
    offsets: np.ndarray
    runs: np.ndarray
    row: np.ndarray
    before: np.ndarray
    ends: np.ndarray
    least: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class VisitStep(Message):
    """A VisitStep asks for one visit of n rows to a block (or the prelude, or the coda): its rows may be at different
    visits of different routes. It may have no rows, and only read or route. With `rounds` it asks for several visits.

    Its rows are its queries, numbered from 0 to n - 1; with `rounds` a row has a query for each of its visits.

    block              the number of the block, PRELUDE or CODA; with `rounds` that of the first
    tokens, positions  int32 [n]
    source             int64 [n]: the slot of the row's visit before; 0: this is its first
    given              int64 [n]: the slot of the row's visit to the prelude; 0: it made none
    slots              int64 [n]: where the row's K/V and its state after this visit go
    leaves             int8 [n]: LEAVES, STAYS or DECIDES
    criteria           float64 [n, 2]: of rows that decide: the probability of having left from which on they leave
                       (nan: never), and the relative change of state down to which they do (nan: never)
    run_*              as of SlotStep
    project_*          int64 [m] each: rows that have left and need K/V of this block: the slot it goes to, the slot of
                       their state, that of their visit to the prelude, and their position
    read_slots         int64 [r]: slots of states that are read, once the rows are computed
    read_rows          int64 [r]: the row of the step that has to leave for it to be read; -1: it is read in any case.
                       With `rounds` its route may come to its end instead, and the slot is that of its last visit
    project_adapters   int64 [m]: the number of the adapter of each row that is projected, as of `adapters`
    reads, drawing, numbers, adapters   as of SlotStep, with `read_slots` in place of its read rows
    routings           what the router is asked for, once the rows are computed
    rounds             which queries are further visits of the same rows; None: each row makes one

    Its result is a VisitResult.
    """

    block: int
    tokens: np.ndarray
    positions: np.ndarray
    source: np.ndarray
    given: np.ndarray
    slots: np.ndarray
    leaves: np.ndarray
    criteria: np.ndarray
    run_start: np.ndarray
    run_count: np.ndarray
    run_position: np.ndarray
    run_first: np.ndarray
    run_last: np.ndarray
    project_slots: np.ndarray
    project_sources: np.ndarray
    project_given: np.ndarray
    project_positions: np.ndarray
    read_slots: np.ndarray
    read_rows: np.ndarray
    reads: np.ndarray = field(default_factory=lambda: NOTHING)
    routings: tuple[Routing, ...] = ()
    drawing: Drawing | None = None
    numbers: tuple[Numbers, ...] = ()
    adapters: np.ndarray | None = None
    project_adapters: np.ndarray | None = None
    rounds: VisitRounds | None = None

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the block; one that makes several visits counts at each."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False, slots=True)
class VisitResult(SlotResult):
    """A VisitResult holds what a VisitStep gave.

    left    bool [n]: whether each row left after this visit; with `rounds`, after the last that it made
    blocks  int64 [n, visits]: what the router chose for the requests of all `routings`, in their order, for the next
            visit or, where it plans, for all: a block, as many as there are blocks for the exit, or NOT_FINITE
    made    int64 [n]: with `rounds`, how many visits each row made
    """

    left: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    blocks: np.ndarray = field(default_factory=lambda: NOTHING.reshape(0, 1))
    made: np.ndarray = field(default_factory=lambda: NOTHING)
