"""Checks which blocks a looped model's rows visit, and after which visits they may be read."""

from __future__ import annotations

import math
from numbers import Real

from ..errors import InputError
from ..types import Exits
from .loop import Loop


def check_exits(exits: Exits, loop: Loop) -> None:
    """Raises InputError for values that cannot be, and for what the model has not: a gate, or visits.

    Whether an engine can follow them is for the engine to say (`EnginePart.check`).
    """
    threshold = exits.threshold
    if threshold is not None and not (_is_number(threshold) and 0 < threshold <= 1):
        message = f"exit_threshold is {threshold!r:.80}"
        raise InputError(
            message, field="exit_threshold", remedy="give a number above 0, at most 1", code="out_of_range"
        )
    if exits.change is not None and not (_is_number(exits.change) and exits.change > 0):
        message = f"exit_change is {exits.change!r:.80}"
        raise InputError(message, field="exit_change", remedy="give a number above 0", code="out_of_range")
    if threshold is not None and not loop.gate:
        message = f"exit_threshold is {threshold!r}, and the model has no gate"
        raise InputError(message, field="exit_threshold", remedy="leave it out", code="no_gate")
    if exits.route is not None:
        loop.check_route(exits.route)
    if any(visits < 1 for visits in exits.visits):
        raise InputError("exit_visits names fewer visits than one", field="exit_visits", remedy="give 1 or more")
    visits = len(loop.order if exits.route is None else exits.route)
    for name, value in (("min_visits", exits.min_visits), ("max_visits", exits.max_visits)):
        if value is not None and not 1 <= value <= visits:
            remedy = f"give a number from 1 to {visits}, the visits that the model makes"
            raise InputError(f"{name} is {value}", field=name, remedy=remedy, code="out_of_range")
    if exits.max_visits is not None and exits.min_visits > exits.max_visits:
        message = f"min_visits is {exits.min_visits}, which is more than max_visits ({exits.max_visits})"
        raise InputError(message, field="min_visits", remedy="give a smaller min_visits", code="out_of_range")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
