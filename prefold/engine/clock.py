"""The clock of an engine: what its steps cost, as learned from the last ones. No torch.

Small rules stand over it: how many rows a step has (`step_policy.py`, `step_size.py`), and with which sharing a window
is computed (`stream.py`).
"""

from __future__ import annotations

DECAY = 0.95  # the weight of a step, or a sequence, as a share of the weight of the next
# A step may have at most this many times the rows of the largest step before it.
GROWTH = 4
# More rows are added to a step at a time than this share of those of the last steps only where these are very few.
MORE = 0.25
# The rows of prompts that a step has room for however long it takes; and the rows of a batch before anything is
# measured.
LEAST_ROWS = 16


class Fit:
    """A Fit relates one quantity y to another x, by values of which later ones weigh more.

    decay     the weight of a value, as a share of the weight of the next one
    relative  whether errors count relative to y: a step that took much longer than others (the machine was busy with
              something else, or kernels were compiled) counts for little
    count     how many values there were
    """

    __slots__ = ("_decay", "_relative", "count", "w", "wx", "wxx", "wxy", "wy")

    def __init__(self, decay: float = DECAY, *, relative: bool = False):
        self._decay, self._relative, self.count = decay, relative, 0
        self.w = self.wx = self.wy = self.wxx = self.wxy = 0.0  # sums of weights, and of weighted values

    def note(self, y: float, x: float = 0.0, *, count: int = 1, weight: float = 1.0) -> None:
        """Records a value that came `count` times."""
        decay = self._decay**count
        if self._relative:
            weight /= max(y, 1e-9) ** 2
        weight *= (1 - decay) / (1 - self._decay)
        self.count += count
        self.w = decay * self.w + weight
        self.wx, self.wy = decay * self.wx + weight * x, decay * self.wy + weight * y
        self.wxx, self.wxy = decay * self.wxx + weight * (x * x), decay * self.wxy + weight * (x * y)

    @property
    def mean(self) -> float:
        """Returns the mean of y."""
        return self.wy / self.w

    @property
    def ratio(self) -> float:
        """Returns y for each unit of x."""
        return self.wy / self.wx


class StepTimes(Fit):
    """A StepTimes estimates how long a step takes: a fixed time, and a time for each row. Both are fitted to the last
    steps by least squares of the relative errors.
    """

    __slots__ = ("_fixed", "_most", "_row")

    def __init__(self) -> None:
        super().__init__(relative=True)
        self._fixed, self._row = 0.0, 0.0
        self._most = 0.0  # rows of the largest of the last steps

    def note_step(self, rows: int, seconds: float) -> None:
        """Records a step."""
        self._most = max(rows, DECAY * self._most)
        self.note(seconds, rows)
        x, y = self.wx / self.w, self.mean
        variance = self.wxx / self.w - x * x
        if variance > 0.01 * x * x:  # if all steps have about the same rows, the time of a row cannot be told
            self._row = max(0.0, (self.wxy / self.w - x * y) / variance)
        elif not self._row:
            self._row = y / x
        self._row = min(self._row, y / x)
        self._fixed = y - self._row * x

    def seconds_of(self, rows: int) -> float | None:
        """Returns how long a step of so many rows takes; None before the first step."""
        return self._fixed + self._row * rows if self.count else None

    def rows_within(self, seconds: float) -> int:
        """Returns how many rows a step of so many seconds may have, at least 1, and at most GROWTH times those of
        the last steps: larger steps have not been measured."""
        if not self.count:
            return LEAST_ROWS
        most = GROWTH * max(self._most, LEAST_ROWS)
        return max(1, int(min(most, (seconds - self._fixed) / max(self._row, 1e-12))))

    def more_rows(self, seconds: float) -> int:
        """Returns how many further rows make a step longer by so many seconds, at least 1, and at most a part of the
        rows of the last steps: what many more rows cost cannot be told from steps of few."""
        return max(1, int(min(max(LEAST_ROWS, self._most * MORE), seconds / max(self._row, 1e-12))))
