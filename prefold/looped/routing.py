"""Who picks the blocks of a looped model's visits, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import UnsupportedModelError

ROUTING_KINDS = ("fixed", "soft", "hard", "top", "planned")


@dataclass(frozen=True, slots=True)
class Routing:
    """A Routing says how a looped model's router picks the block of each visit, or that there are no more visits.

    A request makes one visit at least, and at most as many as the order of its Loop has.

    kind       "fixed": the router is not asked; the visits are those of the order. "soft": every block is visited, and
               what they give is mixed by the router's probabilities. "hard": the likeliest block. "top": the `top`
               likeliest, mixed. "planned": all visits at once before the first one, by the planner, each as with "hard"
    reads      what the router reads: "request": the mean and the last of the states of a prompt's rows, so that all of
               these rows take one route, and the rows generated after them too; "row": a row's own state, so that each
               row takes a route of its own
    threshold  there are no more visits where the probability of leaving is at least this (not with "soft", which goes
               on with what has not left)
    top        how many blocks "top" mixes
    planner    whether there is a planner beside the router
    """

    kind: Literal["fixed", "soft", "hard", "top", "planned"] = "hard"
    reads: Literal["request", "row"] = "request"
    threshold: float = 0.5
    top: int = 1
    planner: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ROUTING_KINDS:
            raise UnsupportedModelError(f"kind is {self.kind!r}; it must be one of {', '.join(ROUTING_KINDS)}")
        if self.reads not in ("request", "row"):
            raise UnsupportedModelError(f'reads is {self.reads!r}; it must be "request" or "row"')
        if not 0 < self.threshold <= 1:
            raise UnsupportedModelError(f"threshold is {self.threshold}; it must be above 0 and at most 1")
        if self.top < 1:
            raise UnsupportedModelError(f"top is {self.top}; at least one block is visited")
        if self.kind == "planned" and not self.planner:
            raise UnsupportedModelError('kind is "planned" and planner is false; a planner has weights of its own')
        if self.planner and self.reads == "row":
            raise UnsupportedModelError('planner is true and reads is "row"; a planner reads requests')
