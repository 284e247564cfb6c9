"""Messages for looped models: the way of a step's rows through the model, as arrays, and the facts. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...engine.schedule.steps import NOTHING, SlotResult
from ...spec.requests import Exits

# The K/V of a row that has left, for deeper visits: copied from its last visit to the block, or computed from its last
# state.
Keys = Literal["last", "project"]


@dataclass(frozen=True, slots=True)
class LoopedFacts:
    """A worker's facts about a looped model."""

    order: tuple[int, ...]  # the blocks that a request without a route visits
    gate: bool  # a gate computes each row's probability of leaving
    threshold: float  # default exit threshold
    routed: bool  # a router chooses the route of a request without one
    is_whole: bool  # the model is not split over ranks


@dataclass(frozen=True, slots=True)
class Way:
    """The part of a namespace on which the K/V of a looped model's rows depend, beside their tokens."""

    route: tuple[int, ...] | None = None  # the blocks to visit; None: the model's order, or the router's future choice
    exits: Exits | None = None  # when rows leave for good; None: they make all visits
    asker: Asker | None = None  # the request that waits for the router; no other request shares its rows


@dataclass(frozen=True, slots=True)
class ReadAfter:
    """The part of a namespace that says after which visit stored hidden states are read.

    None: as in the checkpoint.
    """

    exits: Exits | None = None


@dataclass(frozen=True, slots=True)
class Asker:
    """A request that waits for its router's answer."""

    key: Hashable  # the key of the request
    # Minimum and maximum number of visits that the router may choose.
    fewest: int
    most: int


MODEL_ORDER, AS_THE_MODEL = Way(), ReadAfter()


def may_leave(exits: Exits) -> bool:
    """Return whether rows with these exits, which have a threshold, can leave before their last visit."""
    criteria = exits.change is not None or exits.max_visits is not None or bool(exits.visits)
    return criteria or exits.threshold not in (None, 1)


def exits_row(exits: Exits | None) -> tuple[float | None, int, float]:
    """Return a row of `Passage.read_after`. NumPy turns None into nan."""
    return NO_EXITS if exits is None else (exits.threshold, exits.min_visits, exits.max_visits or np.inf)


NO_EXITS = (None, 1, np.inf)
NO_ASKS = NOTHING.reshape(0, 4)


@dataclass(frozen=True, eq=False, slots=True)
class Passage:
    """The way of the n rows of a SlotStep through a looped model: the `feature` of the step.

    Attributes:
        routes: the blocks of each route of the step
        route: int64 [n]: the route number of each row; None: all rows have the only route
        read_after: float64 [p + k, 3], one row for each of the step's `reads` and `state_reads`; None: rows are read
            after all of their visits. Columns: the exit probability at which the row is read (nan: the model's
            threshold); the minimum and the maximum number of visits before the read
        leave_after: float64 [n, 4]; None: no row leaves. Columns: the exit probability at which the row leaves (nan:
            never); the largest relative change of its state at which it leaves (nan: never); the minimum and the
            maximum number of its visits
        keys: the K/V of visits that a row does not make
        asks: int64 [a, 4]: prompts that the router routes. Columns: the first row, the row after the last, the minimum
            and the maximum number of visits
    """

    routes: tuple[tuple[int, ...], ...]
    route: np.ndarray | None = None
    read_after: np.ndarray | None = None
    leave_after: np.ndarray | None = None
    keys: Keys = "last"
    asks: np.ndarray = field(default_factory=lambda: NO_ASKS)


@dataclass(eq=False, slots=True)
class PassResult(SlotResult):
    """The result of a looped model's SlotStep.

    Attributes:
        visits: int64 [n]: number of visits of each row
        saved: number of visits that rows skipped because they had left
        routes: the router's choice of blocks for each of `Passage.asks`
    """

    visits: np.ndarray = field(default_factory=lambda: NOTHING)
    saved: int = 0
    routes: Sequence[tuple[int, ...]] = ()
