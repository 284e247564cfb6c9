"""How large a step is: the measured times of steps, a server's step policy, and the limits that follow. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .meter import StepBudget
from .schedule.admission import StepLimits
from .schedule.fair import FairAdmission
from .schedule.scheduler import Scheduler

DECAY = 0.95  # the weight of a step as a share of the weight of the next one
# A step may have at most this many times the rows of the largest step before it.
GROWTH = 4
# A step grows by at most this share of the last steps' rows, unless the last steps had very few rows.
MORE = 0.25
# The rows of prompts that a step has room for however long it takes; and the rows of a batch before anything is
# measured.
LEAST_ROWS = 16
# For this many seconds after the last interactive request a batch makes no step, so that a client that sends its next
# request at once need not wait.
PAUSE_SECONDS = 0.02
# For this many seconds after the last interactive request the steps of a batch are short.
LATELY_SECONDS = 2.0
# A batch may lengthen a step in which interactive requests generate by this share of its time.
LENGTHENED = 0.25
# While interactive requests came lately, a step of a batch alone takes as long as this many steps of a single row.
SHORT_STEPS = 2.0
# While interactive requests of several tenants came lately, a step takes this many seconds.
SHARED_SECONDS = 0.1
# Without interactive requests lately, a step of a batch takes this many seconds.
ALONE_SECONDS = 0.25


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
        """Return how many rows a step of so many seconds may have: at least 1, and at most GROWTH times the rows of the
        last steps, because larger steps have not been measured."""
        if not self.count:
            return LEAST_ROWS
        most = GROWTH * max(self._most, LEAST_ROWS)
        return max(1, int(min(most, (seconds - self._fixed) / max(self._row, 1e-12))))

    def more_rows(self, seconds: float) -> int:
        """Return how many further rows make a step longer by so many seconds, at least 1, and at most a part of the
        rows of the last steps: what many more rows cost cannot be told from steps of few."""
        return max(1, int(min(max(LEAST_ROWS, self._most * MORE), seconds / max(self._row, 1e-12))))


class StepPolicy:
    """A StepPolicy decides before each step how many rows it may have, and how many of these belong to batches.

    While the prompt of an interactive request is being computed, batches get no rows. Beside interactive requests that
    generate, they get as many rows as lengthen a step by a quarter; without interactive requests, as many as a short
    step has. If that leaves them without rows for long, they get `batch_share` of the time.

    admission     the queue of the requests that it decides on
    times         the measured times of steps
    has_new_shares  whether the shares of tenants are to be read again before the next step
    step_seconds  the most that a step should take while there are interactive requests; None: SHARED_SECONDS while they
                  are of several tenants, else as long as they need
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
        self.has_new_shares = False
        self._step_seconds = step_seconds
        self._clock = clock
        self._live_at = float("-inf")  # the last time at which there was an interactive request
        self._shared_at = float("-inf")  # the last time at which several tenants had one
        self._settled_at = clock()
        self._due = 0.0  # seconds that batches have a right to

    def note_live(self) -> None:
        """Records that there is an interactive request now."""
        self._live_at = self._clock()

    def settle(self, scheduler: Scheduler, max_rows: int) -> StepLimits:
        """Returns the limits of the scheduler's next step, which may have at most `max_rows` rows."""
        queue, now = self.admission, self._clock()
        if self.has_new_shares:
            self.has_new_shares = False
            queue.read_shares(scheduler.cache)
        seconds, self._settled_at = now - self._settled_at, now
        num_live = queue.num_running(batch=False)
        if num_live or queue.num_waiting(batch=False):
            self._live_at = now
        if queue.num_owners(batch=False) > 1:
            self._shared_at = now
        lends = not self._is_lately(now)
        step_seconds = self._step_seconds
        if step_seconds is None and now - self._shared_at < LATELY_SECONDS:
            step_seconds = SHARED_SECONDS
        if step_seconds is not None and not lends:
            rows = num_live + LEAST_ROWS
            max_rows = min(max_rows, max(rows, self.times.rows_within(step_seconds)))
        if not queue.num_running(batch=True):
            self._due = 0.0
            return StepLimits(max_rows, lends=lends)
        if batch_rows := self._batch_rows(scheduler, num_live, now):
            self._due = 0.0
            return StepLimits(max_rows, batch_rows, lends=lends)
        self._due += self.batch_share * seconds
        # Batches get a step only when it is due that much time: a step costs much more than another row in it.
        if is_due := self._due > LENGTHENED * (self.times.seconds_of(1) or ALONE_SECONDS):
            batch_rows, self._due = self.times.more_rows(self._due), 0.0
        return StepLimits(max_rows, batch_rows, is_due, lends)

    def _batch_rows(self, scheduler: Scheduler, num_live: int, now: float) -> int:
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
        """Returns how long a step of a batch may take when interactive requests came lately."""
        if self._step_seconds is not None:
            return self._step_seconds
        return min(ALONE_SECONDS, SHORT_STEPS * (self.times.seconds_of(1) or ALONE_SECONDS))

    def _is_lately(self, now: float) -> bool:
        return now - self._live_at < LATELY_SECONDS

    @property
    def pause(self) -> float:
        """Returns for how many more seconds no step is made if only batches have work."""
        return max(0.0, self._live_at + PAUSE_SECONDS - self._clock())


class StepPace:
    """The limits of each step: set by the step policy if there is one, and never more than the budget.

    policy  the step policy, by which interactive requests and batches share the engine; None without one
    limits  the limits of the next step
    """

    def __init__(self, scheduler: Any, budget: StepBudget):
        self._scheduler, self._budget = scheduler, budget
        self.policy: StepPolicy | None = None
        self.reset()

    def reset(self) -> None:
        """Set the limits to the budget, until the next step is decided."""
        self.limits = self._whole = StepLimits(self._budget.rows)

    def shrink(self) -> None:
        """Lower the limits after the budget has become smaller."""
        self.limits = replace(self.limits, rows=self._budget.rows)

    @contextmanager
    def without_policy(self) -> Iterator[None]:
        """Ask no step policy in this context, so that batches may have any number of rows."""
        policy, self.policy = self.policy, None
        try:
            yield
        finally:
            self.policy = policy

    def before_admission(self) -> None:
        """Set the limits of the next step to the budget if no policy sets them."""
        if self.policy is None:
            if self._whole.rows != self._budget.rows:
                self._whole = StepLimits(self._budget.rows)
            self.limits = self._whole

    def before_plan(self) -> None:
        """Set the limits of the next step if a policy does."""
        if self.policy is not None:
            self.limits = self.policy.settle(self._scheduler, self._budget.rows)

    def note(self, rows: int, seconds: float) -> None:
        """Record a step of so many rows."""
        if self.policy is not None:
            self.policy.times.note_step(rows, seconds)
