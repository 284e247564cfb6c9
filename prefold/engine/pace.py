"""The measured times of steps."""

from __future__ import annotations

DECAY = 0.95  # the weight of a step as a share of the weight of the next one
# A step may have at most this many times the rows of the largest step before it.
GROWTH = 4
# More rows are added to a step at a time than this share of those of the last steps only where these are very few.
MORE = 0.25
# The rows of prompts that a step has room for however long it takes; and the rows of a batch before anything is
# measured.
LEAST_ROWS = 16


class StepTimes:
    """Estimates how long a step takes: a fixed time, and a time for each row.

    Both are fitted to the last steps by least squares of the relative errors: a step that took much longer than others
    (the machine was busy, or kernels were compiled) counts for little. Later steps weigh more.
    """

    __slots__ = ("_fixed", "_most", "_row", "count", "w", "wx", "wxx", "wxy", "wy")

    def __init__(self) -> None:
        self.count = 0  # steps noted
        self.w = self.wx = self.wy = self.wxx = self.wxy = 0.0  # sums of weights, and of weighted values
        self._fixed, self._row = 0.0, 0.0
        self._most = 0.0  # rows of the largest of the last steps

    def note_step(self, rows: int, seconds: float) -> None:
        """Record a step."""
        self.count += 1
        self._most = max(rows, DECAY * self._most)
        weight = 1 / max(seconds, 1e-9) ** 2
        self.w = DECAY * self.w + weight
        self.wx, self.wy = DECAY * self.wx + weight * rows, DECAY * self.wy + weight * seconds
        self.wxx, self.wxy = DECAY * self.wxx + weight * (rows * rows), DECAY * self.wxy + weight * (rows * seconds)
        x, y = self.wx / self.w, self.wy / self.w
        variance = self.wxx / self.w - x * x
        if variance > 0.01 * x * x:  # if all steps have about the same rows, the time of a row cannot be told
            self._row = max(0.0, (self.wxy / self.w - x * y) / variance)
        elif not self._row:
            self._row = y / x
        self._row = min(self._row, y / x)
        self._fixed = y - self._row * x

    def seconds_of(self, rows: int) -> float | None:
        """Return how long a step of so many rows takes; None before the first step."""
        return self._fixed + self._row * rows if self.count else None

    def rows_within(self, seconds: float) -> int:
        """Return how many rows a step of so many seconds may have, at least 1, and at most GROWTH times those of the
        last steps: larger steps have not been measured."""
        if not self.count:
            return LEAST_ROWS
        most = GROWTH * max(self._most, LEAST_ROWS)
        return max(1, int(min(most, (seconds - self._fixed) / max(self._row, 1e-12))))

    def more_rows(self, seconds: float) -> int:
        """Return how many further rows make a step longer by so many seconds, at least 1, and at most a part of the
        rows of the last steps: what many more rows cost cannot be told from steps of few."""
        return max(1, int(min(max(LEAST_ROWS, self._most * MORE), seconds / max(self._row, 1e-12))))
