"""How rows go through the blocks of a looped model, and which rules let them leave; as data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

from ..types import Exits


@dataclass(frozen=True, slots=True)
class VisitOptions:
    """A VisitOptions says how rows go through the blocks of a looped model.

    order     the blocks of a request that gives no route
    blocks    how many blocks the model has
    prelude   whether there is a visit before the first block, with layers or for the state alone
    coda      whether there are layers after the last block
    routed    whether a router says the route of a request that gives none
    keys      what deeper visits see of a row that left: the K/V of its "last" visit to that block, or K/V made of its
              state ("project")
    refill    whether rows come into the places of those that leave; else the next ones begin when all have left
    group     which rows make a step together: those whose next "block" is the same, or whose "template" and visit are
    patience  after so many steps without it a sequence decides which block comes next
    threshold of requests that give none
    step_visits  the most visits that the rows of a step make one after another, where nobody has a prompt to compute
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
    """Returns the part of a namespace that says which K/V rows have: by which rule they leave. Routes are told apart by
    their prefixes."""
    return ("exits", replace(exits, route=None)) if may_leave(exits) else ()


def may_leave(exits: Exits) -> bool:
    """Returns whether a row may leave before its last visit."""
    criteria = exits.change is not None or exits.max_visits is not None or bool(exits.visits)
    return criteria or exits.threshold not in (None, 1)
