"""How rows go through a looped model a visit at a time: options and messages. NumPy arrays and plain numbers only.

A slot is then one row at one visit: it holds the K/V of one block's layers, and the row's state after the visit.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ..schedule.steps import NOTHING, Message, SlotResult, SlotStep
from ..types import Exits


@dataclass(frozen=True, slots=True)
class VisitOptions:
    """A VisitOptions says how rows go through the blocks of a looped model.

    order     the blocks of a request that gives no route
    blocks    how many blocks the model has
    prelude   whether there is a visit before the first block, with layers or for the state alone
    coda      whether there are layers after the last block
    routed    whether a router says the route of a request that gives none
    keys      the K/V that deeper visits see of a row that left: those of its "last" visit to that block, or K/V made
              of its state ("project")
    refill    whether rows come into the places of those that leave; else the next ones begin when all have left
    group     which rows make a step together: those whose next "block" is the same, or whose "template" and visit are
    patience  after so many steps without it a sequence decides which block comes next
    threshold of requests that give none
    step_visits  the most visits that the rows of a step make one after another, where no prompt is to be computed
    """

    order: tuple[int, ...]
    blocks: int
    prelude: bool = False
    coda: bool = False
    routed: bool = False
    keys: Literal["last", "project"] = "last"
    refill: bool = True
    group: Literal["block", "template"] = "block"
    patience: int = 16
    threshold: float = 1.0
    step_visits: int = 1


def rule_of(exits: Exits) -> tuple[Hashable, ...]:
    """Returns the rule by which rows leave, as the part of a namespace that keeps K/V of different rules apart. Route
    prefixes keep different routes apart."""
    return ("exits", replace(exits, route=None)) if may_leave(exits) else ()


def may_leave(exits: Exits) -> bool:
    """Returns whether a row may leave before its last visit."""
    criteria = exits.change is not None or exits.max_visits is not None or bool(exits.visits)
    return criteria or exits.threshold not in (None, 1)


def exits_row(exits: Exits | None) -> tuple[float | None, int, float]:
    """Returns the limits of exits as of SlotStep: the probability of having left from which on a row is read, and after
    how many visits it is read at least and at most."""
    return NO_EXITS if exits is None else (exits.threshold, exits.min_visits, exits.max_visits or np.inf)


# What `exits_row` gives where a row is read after its last visit.
NO_EXITS = (None, 1, np.inf)
# Visits that are no blocks: the layers before the first block, and those after the last.
PRELUDE, CODA = -1, -2
# Whether a row leaves after a visit: it does, it does not, or its criteria decide.
LEAVES, STAYS, DECIDES = 1, -1, 0


@dataclass(frozen=True, slots=True)
class LoopedFacts:
    """LoopedFacts are the facts about a looped model that a worker tells the host.

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
    runs     int64 [rounds + 1]: the runs of keys that the queries of each round see, divided in the same way
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


@dataclass(eq=False, slots=True)
class VisitStep(SlotStep):
    """A VisitStep asks for one visit of n rows to a block (or the prelude, or the coda): its rows may be at different
    visits of different routes. It may have no rows, and only read or route. With `rounds` it asks for several visits.

    Its rows are its queries, numbered from 0 to n - 1; with `rounds` a row has a query for each of its visits. Fields
    are as of SlotStep, but for these:

    block              the number of the block, PRELUDE or CODA; with `rounds` that of the first
    slots              int64 [n]: where the row's K/V and its state after this visit go
    source             int64 [n]: the slot of the row's visit before; 0: this is its first
    preludes           int64 [n]: the slot of the row's visit to the prelude; 0: it made none
    leaves             int8 [n]: LEAVES, STAYS or DECIDES
    criteria           float64 [n, 2]: of rows that decide: the probability of having left from which on they leave
                       (nan: never), and the relative change of state down to which they do (nan: never)
    project_*          int64 [m] each: rows that have left and need K/V of this block: the slot it goes to, the slot of
                       their state, that of their visit to the prelude, their position, and the number of their adapter
    read_slots         int64 [r]: slots of states that are read, once the rows are computed
    read_rows          int64 [r]: the row of the step that has to leave for it to be read; -1: it is read in any case.
                       With `rounds` its route may come to its end instead, and the slot is that of its last visit
    reads              int64 [p]: where in read_slots each read is
    routings           the questions to the router, asked once the rows are computed
    rounds             which queries are further visits of the same rows; None: each row makes one

    Its result is a VisitResult.
    """

    block: int = 0
    source: np.ndarray = field(default_factory=lambda: NOTHING)
    preludes: np.ndarray = field(default_factory=lambda: NOTHING)
    leaves: np.ndarray = field(default_factory=lambda: NOTHING)
    criteria: np.ndarray = field(default_factory=lambda: NOTHING)
    project_slots: np.ndarray = field(default_factory=lambda: NOTHING)
    project_sources: np.ndarray = field(default_factory=lambda: NOTHING)
    project_preludes: np.ndarray = field(default_factory=lambda: NOTHING)
    project_positions: np.ndarray = field(default_factory=lambda: NOTHING)
    project_adapters: np.ndarray | None = None
    read_slots: np.ndarray = field(default_factory=lambda: NOTHING)
    routings: tuple[Routing, ...] = ()
    rounds: VisitRounds | None = None

    def part(self, block: int, first: int, stop: int, runs: slice, going: np.ndarray | None = None) -> VisitStep:
        """Returns the step of the queries [first, stop) alone, which see these of its runs of keys and no others. It
        reads nothing.

        block  the block that they go through
        going  int64, ascending: the numbers of those that are left, counted from `first`; None: all
        """
        rows = slice(first, stop) if going is None else first + going
        start, count, position = self.run_start[runs], self.run_count[runs], self.run_position[runs]
        run_first, run_last = self.run_first[runs] - first, self.run_last[runs] - first
        if going is not None:
            number = going.searchsorted(np.arange(stop - first + 1))
            run_first, run_last = number[run_first], number[run_last]
            visible = np.flatnonzero(run_last > run_first)
            start, count, position = start[visible], count[visible], position[visible]
            run_first, run_last = run_first[visible], run_last[visible]
        return VisitStep(
            self.tokens[rows], self.positions[rows], self.slots[rows], start, count, position, run_first, run_last,
            NOTHING, block=block, source=self.source[rows], preludes=self.preludes[rows], leaves=self.leaves[rows],
            criteria=self.criteria[rows], adapters=None if self.adapters is None else self.adapters[rows],
        )  # fmt: skip


@dataclass(eq=False, slots=True)
class VisitResult(SlotResult):
    """A VisitResult is the result of a VisitStep.

    has_left    bool [n]: whether each row left after this visit; with `rounds`, after the last that it made
    blocks      int64 [n, visits]: the router's choices for the requests of all `routings`, in their order, for the next
                visit or, where it plans, for all: a block, as many as there are blocks for the exit, or NOT_FINITE
    num_visits  int64 [n]: with `rounds`, how many visits each row made
    """

    has_left: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    blocks: np.ndarray = field(default_factory=lambda: NOTHING.reshape(0, 1))
    num_visits: np.ndarray = field(default_factory=lambda: NOTHING)
