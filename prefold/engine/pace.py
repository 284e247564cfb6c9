"""How large a step is: measured step times, a server's step policy, and the resulting limits. No torch."""

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

DECAY = 0.95  # weight of a step, relative to the weight of the next step
# Limit on the rows of a step, as a multiple of the largest recent step.
GROWTH = 4
# Limit on the growth of a step, as a share of recent steps' rows (unless these were very few).
MORE = 0.25
# Prompt rows that a step may always have, however long they take. Also the rows of a batch before anything is measured.
LEAST_ROWS = 16
# A batch makes no step for this many seconds after the last interactive request. So a client that sends its next
# request at once does not wait.
PAUSE_SECONDS = 0.02
# Steps of a batch are short for this many seconds after the last interactive request.
LATELY_SECONDS = 2.0
# A batch may lengthen a step in which interactive requests generate by this share of its time.
LENGTHENED = 0.25
# After recent interactive requests, a step with only batch rows takes as long as this many steps of one row.
SHORT_STEPS = 2.0
# After recent interactive requests of several tenants, a step takes this many seconds.
SHARED_SECONDS = 0.1
# Without recent interactive requests, a step of a batch takes this many seconds.
ALONE_SECONDS = 0.25


class StepTimes:
    """Estimates the time of a step: a fixed time plus a time per row.

    Both are fitted to recent steps by least squares of relative errors. So a step that took unusually long (a busy
    machine, or kernel compilation) has little weight. Later steps have more weight.
    """

    __slots__ = ("_fixed", "_most", "_row", "count", "w", "wx", "wxx", "wxy", "wy")

    def __init__(self) -> None:
        self.count = 0  # steps noted
        self.w = self.wx = self.wy = self.wxx = self.wxy = 0.0  # sums of weights and of weighted values
        self._fixed, self._row = 0.0, 0.0
        self._most = 0.0  # rows of the largest recent step

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
        if variance > 0.01 * x * x:  # with equal row counts, the time per row cannot be estimated
            self._row = max(0.0, (self.wxy / self.w - x * y) / variance)
        elif not self._row:
            self._row = y / x
        self._row = min(self._row, y / x)
        self._fixed = y - self._row * x

    def seconds_of(self, rows: int) -> float | None:
        """Return the estimated time of a step with this many rows; None before the first step."""
        return self._fixed + self._row * rows if self.count else None

    def rows_within(self, seconds: float) -> int:
        """Return how many rows fit in a step of this many seconds, at least 1.

        The result is at most GROWTH times the rows of recent steps, because larger steps have not been measured.
        """
        if not self.count:
            return LEAST_ROWS
        most = GROWTH * max(self._most, LEAST_ROWS)
        return max(1, int(min(most, (seconds - self._fixed) / max(self._row, 1e-12))))

    def more_rows(self, seconds: float) -> int:
        """Return how many more rows lengthen a step by this many seconds, at least 1.

        The result is at most a share of the rows of recent steps: small steps say little about the cost of many more
        rows.
        """
        return max(1, int(min(max(LEAST_ROWS, self._most * MORE), seconds / max(self._row, 1e-12))))


class StepPolicy:
    """Decides before each step how many rows it may have, and how many of them batches get.

    While the prompt of an interactive request is computed, batches get no rows. While interactive requests generate,
    batches may lengthen a step by a quarter. Without interactive requests, batches fill a short step. If batches get no
    rows for long, they get `batch_share` of the time.

    Attributes:
        admission: The queue of the requests.
        batch_share: The minimum share of time for batches.
        times: The measured times of steps.
        has_new_shares: The shares of tenants must be read again before the next step.

    Args:
        step_seconds: Limit on the time of a step while there are interactive requests. None: SHARED_SECONDS if they are
            from several tenants, else no limit.
        clock: Returns the time in seconds.
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
        self._live_at = float("-inf")  # the last time with an interactive request
        self._shared_at = float("-inf")  # the last time with interactive requests of several tenants
        self._settled_at = clock()
        self._due = 0.0  # seconds that batches are owed

    def note_live(self) -> None:
        """Record that there is an interactive request now."""
        self._live_at = self._clock()

    def settle(self, scheduler: Scheduler, max_rows: int) -> StepLimits:
        """Return the limits of the scheduler's next step, which may have at most `max_rows` rows."""
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
        # Batches get a step only once they are owed that much time: a step costs much more than another row in it.
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
        """The time that a step of a batch may take after recent interactive requests."""
        if self._step_seconds is not None:
            return self._step_seconds
        return min(ALONE_SECONDS, SHORT_STEPS * (self.times.seconds_of(1) or ALONE_SECONDS))

    def _is_lately(self, now: float) -> bool:
        return now - self._live_at < LATELY_SECONDS

    @property
    def pause(self) -> float:
        """The remaining seconds without a step if only batches have work."""
        return max(0.0, self._live_at + PAUSE_SECONDS - self._clock())


class StepPace:
    """The limits of each step: set by the step policy if there is one, and never above the budget.

    Attributes:
        policy: The step policy that divides the engine between interactive requests and batches, or None.
        limits: The limits of the next step.
    """

    def __init__(self, scheduler: Any, budget: StepBudget):
        self._scheduler, self._budget = scheduler, budget
        self.policy: StepPolicy | None = None
        self.reset()

    def reset(self) -> None:
        """Set the limits to the budget, until the next step is decided."""
        self.limits = self._whole = StepLimits(self._budget.rows)

    def shrink(self) -> None:
        """Lower the limits after the budget has shrunk."""
        self.limits = replace(self.limits, rows=self._budget.rows)

    @contextmanager
    def without_policy(self) -> Iterator[None]:
        """Return a context without the step policy, in which batches may have any number of rows."""
        policy, self.policy = self.policy, None
        try:
            yield
        finally:
            self.policy = policy

    def before_admission(self) -> None:
        """Set the limits of the next step to the budget if there is no policy."""
        if self.policy is None:
            if self._whole.rows != self._budget.rows:
                self._whole = StepLimits(self._budget.rows)
            self.limits = self._whole

    def before_plan(self) -> None:
        """Set the limits of the next step if there is a policy."""
        if self.policy is not None:
            self.limits = self.policy.settle(self._scheduler, self._budget.rows)

    def note(self, rows: int, seconds: float) -> None:
        """Record a step."""
        if self.policy is not None:
            self.policy.times.note_step(rows, seconds)
