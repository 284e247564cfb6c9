"""How the rows of a step go through a looped model: facts, and messages of arrays. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...engine.schedule.steps import NOTHING, SlotResult
from ...spec.requests import Exits

# The K/V of a row that left, as deeper visits see it: copied from its last visit to the block, or computed from its
# last state.
Keys = Literal["last", "project"]


@dataclass(frozen=True, slots=True)
class LoopedFacts:
    """Facts about a looped model that the worker tells the host.

    order      the blocks of a request that gives no route
    gate       whether a gate gives each row's probability of leaving
    threshold  of requests that give none
    routed     whether a router chooses the route of a request that gives none
    is_whole   whether the model is not split over ranks
    """

    order: tuple[int, ...]
    gate: bool
    threshold: float
    routed: bool
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Way:
    """What the K/V of a looped model's rows depend on beside their tokens: a part of their namespace.

    route  the blocks that the rows visit; None: the model's order, or the route that the router will choose
    exits  when rows leave for good; None: they make all visits
    asker  the request whose router has not been asked yet; its rows are shared with no other request
    """

    route: tuple[int, ...] | None = None
    exits: Exits | None = None
    asker: Asker | None = None


@dataclass(frozen=True, slots=True)
class ReadAfter:
    """After which visit the kept hidden states of rows are read: a part of their namespace, unless it is as the
    checkpoint says."""

    exits: Exits | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """A request whose router has not been asked yet.

    key           of the request
    fewest, most  how many visits the router may choose
    """

    key: Hashable
    fewest: int
    most: int


MODEL_ORDER, AS_THE_MODEL = Way(), ReadAfter()


def may_leave(exits: Exits) -> bool:
    """Return whether rows with these exits can leave before their last visit. exits: with a threshold"""
    criteria = exits.change is not None or exits.max_visits is not None or bool(exits.visits)
    return criteria or exits.threshold not in (None, 1)


def exits_row(exits: Exits | None) -> tuple[float | None, int, float]:
    """Return a row of `Passage.read_after`; None stands for nan."""
    return NO_EXITS if exits is None else (exits.threshold, exits.min_visits, exits.max_visits or np.inf)


NO_EXITS = (None, 1, np.inf)
NO_ASKS = NOTHING.reshape(0, 4)


@dataclass(frozen=True, eq=False, slots=True)
class Passage:
    """How the n rows of a SlotStep go through a looped model: the `feature` of the step.

    routes      the blocks of each route that the step has
    route       int64 [n]: the number of each row's route; None: all rows have the only one
    read_after  float64 [p + k, 3]: for each of the step's `reads` and `state_reads`, the probability of having left
                from which on its row is read (nan: the model's threshold), and the fewest and the most visits after
                which it is read; None: rows are read when they have made all of their visits
    leave_after float64 [n, 4]: the probability of having left from which on a row leaves, and the change of its state
                down to which it leaves (nan: never), and the fewest and the most visits that it makes; None: no row
                leaves
    keys        the K/V of visits that a row does not make
    asks        int64 [a, 4]: prompts whose router is asked: the first row, the row behind the last, and the fewest and
                the most visits
    """

    routes: tuple[tuple[int, ...], ...]
    route: np.ndarray | None = None
    read_after: np.ndarray | None = None
    leave_after: np.ndarray | None = None
    keys: Keys = "last"
    asks: np.ndarray = field(default_factory=lambda: NO_ASKS)


@dataclass(eq=False, slots=True)
class PassResult(SlotResult):
    """The result of a SlotStep of a looped model.

    visits  int64 [n]: how many visits each row made
    saved   how many visits rows did not make because they had left
    routes  the blocks that the router chose for each of `Passage.asks`
    """

    visits: np.ndarray = field(default_factory=lambda: NOTHING)
    saved: int = 0
    routes: Sequence[tuple[int, ...]] = ()
