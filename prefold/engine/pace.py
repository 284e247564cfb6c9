"""How long steps take, and how many rows one may have where interactive requests and batches share them."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..schedule.fair import FairAdmission
from ..schedule.sequences import Sequences

# How much less a step counts than the one after it.
KEPT = 0.95
# A step may have so many times the rows of those before.
GROWTH = 4
# For so many seconds after the last interactive request a batch makes no step: whoever asks again at once waits for
# none. And for so many seconds its steps are short.
PAUSE_SECONDS = 0.02
LATELY_SECONDS = 2.0
# By which part a batch may lengthen a step in which interactive requests generate; how long its own steps are, in steps
# of a single row, while there were interactive requests lately; and in seconds, where there were none.
LENGTHENED = 0.25
SHORT_STEPS = 2.0
ALONE_SECONDS = 0.25
# Rows of prompts that a step has room for, however long it takes, and rows of a batch of which nothing is known yet.
LEAST_ROWS = 16


class StepTimes:
    """A StepTimes knows how long steps took lately: some time for each, and some for each of their rows.

    Both are fitted to the last steps, so that the sum of the squares of relative errors is least.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of weights, rows, seconds, rows^2, rows * seconds
        self._fixed, self._row = 0.0, 0.0
        self._most = 0.0  # rows of the largest of the last steps

    def note(self, rows: int, seconds: float) -> None:
        """Takes note of a step. One that took much longer than others (the machine was busy with something else, or
        kernels were compiled) counts for little, as errors are relative."""
        self._most = max(rows, KEPT * self._most)
        weight = 1 / max(seconds, 1e-9) ** 2
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = tuple(KEPT * old + weight * one for old, one in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        total, *means = self._sums
        x, y, xx, xy = (one / total for one in means)
        if xx - x * x > 0.01 * x * x:  # else all have the same rows, and what is known of one row stays
            self._row = max(0.0, (xy - x * y) / (xx - x * x))
        elif not self._row:
            self._row = y / x
        self._row = min(self._row, y / x)
        self._fixed = y - self._row * x

    def seconds_of(self, rows: int) -> float | None:
        """Returns how long a step of so many rows takes; None where nothing is known."""
        return self._fixed + self._row * rows if self._sums[0] else None

    def rows_within(self, seconds: float) -> int:
        """Returns how many rows a step may have that takes no longer, at least 1. They are GROWTH times those of the
        last steps at most: of larger ones nothing is known."""
        if not self._sums[0]:
            return LEAST_ROWS
        most = GROWTH * max(self._most, LEAST_ROWS)
        return max(1, int(min(most, (seconds - self._fixed) / max(self._row, 1e-12))))

    def more_rows(self, seconds: float) -> int:
        """Returns by how many rows a step is so much longer, at least 1. They are a part of those that the last steps
        had at most: from a few rows it cannot be told what many more cost."""
        return max(1, int(min(max(LEAST_ROWS, self._most * LENGTHENED), seconds / max(self._row, 1e-12))))


class Pace:
    """A Pace says before each step how many rows it may have, and how many of these are of batches.

    While the prompt of an interactive request is being computed, batches have none. Beside interactive requests that
    generate, they have as many as lengthen a step by a quarter; without any, as many as a short step has. Where that
    leaves them nothing for long, they get `batch_share` of the time.

    times         of steps
    step_seconds  what a step should take at most while there are interactive requests; None: what it takes, and of
                  batches what is said above
    """

    def __init__(
        self,
        admission: FairAdmission,
        *,
        step_seconds: float | None = None,
        batch_share: float = 0.02,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.admission = admission
        self.batch_share = batch_share
        self.times = StepTimes()
        self._step_seconds = step_seconds
        self._clock = clock
        self._live_at = float("-inf")  # when there was an interactive request
        self._settled_at = clock()
        self._due = 0.0  # seconds that are due to batches

    def note_live(self) -> None:
        """Takes note that there is an interactive request."""
        self._live_at = self._clock()

    def settle(self, scheduler: Sequences, most: int) -> int:
        """Returns how many rows the scheduler's next step may have, at most `most`, and tells the policy how many of
        batches."""
        policy, now = self.admission, self._clock()
        passed, self._settled_at = now - self._settled_at, now
        num_live = policy.num_running(batch=False)
        if num_live or policy.num_waiting(batch=False):
            self._live_at = now
        policy.lends = not self._is_lately(now)
        if self._step_seconds is not None and self._is_lately(now):
            rows = num_live + LEAST_ROWS
            most = min(most, max(rows, self.times.rows_within(self._step_seconds)))
        if not policy.num_running(batch=True):
            policy.batch_rows, policy.batch_first, self._due = None, False, 0.0
            return most
        policy.batch_rows, policy.batch_first = self._batch_rows(scheduler, num_live, now), False
        if policy.batch_rows:
            self._due = 0.0
            return most
        self._due += self.batch_share * passed
        # As little at a time as nobody notices, and no less: a step costs much more than another row of it.
        if self._due > LENGTHENED * (self.times.seconds_of(1) or ALONE_SECONDS):
            policy.batch_rows, policy.batch_first = self.times.more_rows(self._due), True
            self._due = 0.0
        return most

    def _batch_rows(self, scheduler: Sequences, num_live: int, now: float) -> int:
        if not num_live:
            return self.times.rows_within(self._short if self._is_lately(now) else ALONE_SECONDS)
        if any(not sequence.ready and not sequence.owner.is_batch for sequence in scheduler.running):
            return 0
        alone = self.times.seconds_of(num_live)
        if alone is None:
            return LEAST_ROWS
        seconds = (1 + LENGTHENED) * alone if self._step_seconds is None else self._step_seconds
        return max(0, self.times.rows_within(seconds) - num_live)

    @property
    def _short(self) -> float:
        """Returns how long a step of a batch should take while there were interactive requests lately."""
        if self._step_seconds is not None:
            return self._step_seconds
        return min(ALONE_SECONDS, SHORT_STEPS * (self.times.seconds_of(1) or ALONE_SECONDS))

    def _is_lately(self, now: float) -> bool:
        return now - self._live_at < LATELY_SECONDS

    @property
    def pause(self) -> float:
        """Returns for how many seconds a batch should make no step, where nobody else has anything to do."""
        return max(0.0, self._live_at + PAUSE_SECONDS - self._clock())
