"""Checks after which visits a looped model's rows may be read."""

from __future__ import annotations

import math
from numbers import Real

from ..errors import InputError
from ..types import Exits

__all__ = ["check_exits"]


def check_exits(exits: Exits | None, visits: int | None) -> Exits | None:
    """Returns `exits`. Raises InputError for values that cannot be, and for a model that has no gate.

    visits: those of a pass of the model; None: it has no gate, so that all rows are read after the last visit
    """
    if exits is None:
        return None
    threshold = exits.threshold
    if threshold is not None and not (
        isinstance(threshold, Real)
        and not isinstance(threshold, bool)
        and math.isfinite(threshold)
        and 0 < threshold <= 1
    ):
        message = f"exit_threshold is {threshold!r:.80}"
        raise InputError(
            message, field="exit_threshold", remedy="give a number above 0, at most 1", code="out_of_range"
        )
    given = {"exit_threshold": threshold, "min_visits": exits.min_visits, "max_visits": exits.max_visits}
    if visits is None:
        name = next(name for name, value in given.items() if value not in (None, 1) or name == "max_visits")
        message = f"{name} is {given[name]!r}, and the model has no gate: its rows are read after the last visit"
        raise InputError(message, field=name, remedy="leave it out", code="no_gate")
    for name in ("min_visits", "max_visits"):
        value = given[name]
        if value is not None and not 1 <= value <= visits:
            remedy = f"give a number from 1 to {visits}, the visits that the model makes"
            raise InputError(f"{name} is {value}", field=name, remedy=remedy, code="out_of_range")
    if exits.max_visits is not None and exits.min_visits > exits.max_visits:
        message = f"min_visits is {exits.min_visits}, which is more than max_visits ({exits.max_visits})"
        raise InputError(message, field="min_visits", remedy="give a smaller min_visits", code="out_of_range")
    return exits
