"""How long the tower may run between steps. No torch."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["TowerPace"]

# The tower goes on where steps take long for another reason: it has this part of their time at least.
LEAST = 0.25
# So many steps after the tower's work it shows no more in how long one takes: the second step is still slower.
CALM = 16
# How much a new step counts beside those before it, and of how many sizes of steps their seconds are known.
NEW = 0.3
MOST_SIZES = 64


class TowerPace:
    """A TowerPace says how long the tower may run after each step, so that sequences that generate keep half of their
    rate.

    Where the tower has run before it, a step finds less in the processor's caches and takes longer. So what counts is
    how long a step of as many rows takes where the tower has not run: a step and the tower's work behind it may take
    twice that. Of a size of which that is not known, steps are as much slower as those of other sizes were.
    """

    def __init__(self) -> None:
        self._alone: OrderedDict[int, float] = OrderedDict()  # seconds by rows, those noted last at the end
        self._since = CALM  # steps since the tower ran
        self._slower = 1.0  # how many times as long a step takes where the tower has run

    def seconds_after(self, rows: int, seconds: float, *, disturbed: bool) -> float:
        """Takes note of a step, and returns for how many seconds the tower may run after it. disturbed: whether the
        tower has run since the step before."""
        self._since = 0 if disturbed else self._since + 1
        alone = self._alone.get(rows)
        if self._since >= CALM:
            alone = seconds if alone is None else alone + NEW * (seconds - alone)
            self._alone[rows] = alone
            self._alone.move_to_end(rows)
            if len(self._alone) > MOST_SIZES:
                self._alone.popitem(last=False)
        elif alone is None:
            alone = seconds / self._slower
        else:
            self._slower += NEW * (max(1.0, seconds / alone) - self._slower)
        return max(LEAST * seconds, 2 * min(alone, seconds) - seconds)
