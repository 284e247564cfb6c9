"""One round of a step whose rows make several visits one after another, as a step of its own."""

from __future__ import annotations

import numpy as np

from .steps import VisitStep


def part_of(
    step: VisitStep, block: int, first: int, stop: int, runs: slice, going: np.ndarray | None = None
) -> VisitStep:
    """Returns the step of the queries [first, stop) of a step, which see these of its runs of keys and no others. It
    reads nothing.

    block  which they go through
    going  int64, ascending: the numbers of those that are left, counted from `first`; None: all
    """
    rows = slice(first, stop) if going is None else first + going
    start, count, position = step.run_start[runs], step.run_count[runs], step.run_position[runs]
    run_first, run_last = step.run_first[runs] - first, step.run_last[runs] - first
    if going is not None:
        number = going.searchsorted(np.arange(stop - first + 1))
        run_first, run_last = number[run_first], number[run_last]
        seen = np.flatnonzero(run_last > run_first)
        start, count, position = start[seen], count[seen], position[seen]
        run_first, run_last = run_first[seen], run_last[seen]
    nothing = step.project_slots[:0]
    return VisitStep(
        block, step.tokens[rows], step.positions[rows], step.source[rows], step.given[rows], step.slots[rows],
        step.leaves[rows], step.criteria[rows], start, count, position, run_first, run_last,
        nothing, nothing, nothing, nothing, nothing, nothing,
        adapters=None if step.adapters is None else step.adapters[rows],
    )  # fmt: skip
