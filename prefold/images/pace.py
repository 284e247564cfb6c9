"""How long the tower may run between steps. No torch."""

from __future__ import annotations

from collections import OrderedDict

# The tower goes on where steps take long for another reason: it has this part of their time at least.
LEAST = 0.25
# So many steps after the tower's work it shows no more in how long one takes: the second step is still slower.
CALM = 16
# The time alone is as it was for so many steps; those behind them have longer contexts.
FRESH = 32
# How much a new step counts beside those before it, and of how many sizes of steps their seconds are known.
NEW = 0.3
MOST_SIZES = 64


class TowerPace:
    """A TowerPace says how long the tower may run after each step, so that sequences that generate keep half of their
    rate.

    Where an image is read beside it, or the tower has run before it, a step takes longer: it has less of the processor,
    and finds less in its caches. So what counts is how long a step of as many rows takes alone: a step and the tower's
    work behind it may take twice that. While the tower goes on, contexts grow, and with them the time alone: later it
    is taken from how many times as long steps took at first. So it is for a number of rows that was not seen alone.
    """

    def __init__(self) -> None:
        self._alone: OrderedDict[int, float] = OrderedDict()  # seconds by rows, those noted last at the end
        self._since = CALM  # steps since an image was on its way
        self._disturbed = 0  # steps with an image on its way, since a step alone
        self._slower = 1.0  # how many times as long a step takes where one is

    def seconds_after(self, rows: int, seconds: float, *, disturbed: bool) -> float:
        """Takes note of a step, and returns for how many seconds the tower may run after it. disturbed: whether an
        image was on its way."""
        self._since = 0 if disturbed else self._since + 1
        self._disturbed += disturbed
        alone = self._alone.get(rows)
        if self._since >= CALM:
            self._disturbed = 0
            alone = seconds if alone is None else alone + NEW * (seconds - alone)
            self._alone[rows] = alone
            self._alone.move_to_end(rows)
            if len(self._alone) > MOST_SIZES:
                self._alone.popitem(last=False)
        elif alone is None:
            alone = seconds / self._slower
        elif self._disturbed <= FRESH:
            self._slower += NEW * (max(1.0, seconds / alone) - self._slower)
        else:
            alone = max(alone, seconds / self._slower)
        return max(LEAST * seconds, 2 * min(alone, seconds) - seconds)
