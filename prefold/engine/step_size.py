"""The number of rows that a step of generation may have: set by a step policy, or learned from earlier steps. No torch,
no clock.

A device that waits for its weights takes as long for a step of few rows as for one of a single row: there, rows of
prompts beside those of outputs cost next to nothing. With large steps all sequences that fit begin together: their
prompts are computed first, and afterwards the device waits for its weights. With steps of just as many rows as come and
go in the long run,

    rows = R (p + d) / d        R sequences at once, p rows of each prompt to compute, d tokens of each output

sequences begin one after the other, and prompts are computed beside outputs. A device that computes all the time (a CPU
does) gains nothing by this, and the end of a job is longer, as sequences end one after the other too. So the seconds
are compared that n sequences take:

    large steps    n p c + n d / R t       c seconds of a row in large steps, t of a step with R rows of outputs alone
    small steps    (n d / R + d) t'        t' seconds of such a step; the larger of t and its rows' c until it is known
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..schedule.admission import StepLimits
from ..schedule.generate_step import GenerateStep, SequenceState
from .clock import Fit
from .meter import StepBudget
from .step_policy import StepPolicy

_SHARE = 0.95  # of the rows that come and go in the long run: with more, sequences would begin together after all
_SHADOW = 0.7  # of the rows that take as long as a step of outputs alone: further rows would not be hidden
_GAIN = 0.97  # small steps are tried if they should take less than this share of the seconds of large ones
_FEW = 8  # steps of a kind that must be measured before their time is used
_ROOM = 16  # rows of prompts that a small step has room for beside the outputs, at least
_CHANGE = 0.1  # another number of rows is used only if it differs by this share
_PAUSE = 1000  # steps until small steps are tried again after they did not help; it doubles each time


class StepSize:
    """A StepSize learns from the times of steps how many rows a step should have.

    small  the rows of small steps; None while steps are large
    """

    def __init__(self) -> None:
        self._steps, self._pause, self._resume_at = 0, _PAUSE, 0
        self.reset()

    def reset(self) -> None:
        """Forgets what was learned, and begins with large steps: the next requests may be different."""
        self.small: int | None = None
        self._row = Fit(relative=True)  # seconds of a row in large steps
        self._alone, self._running = Fit(relative=True), Fit()  # seconds and rows of steps with outputs alone
        self._mixed = Fit(relative=True)  # seconds of small steps that are full
        self._prompt, self._output = Fit(), Fit()  # computed rows of a prompt, and tokens of an output
        self._prefill = 0  # computed rows of prompts that are not complete yet
        self._num_ended = 0

    def rows(self, max_rows: int, waiting: int, running: int, least: int = 1) -> int:
        """Returns how many rows the next step may have, at most `max_rows`.

        waiting  sequences that are not admitted yet
        running  sequences that are admitted, each of which may have a row of its output
        least    rows of prompts that may have to be computed in one step
        """
        if self.small is None or not waiting:
            return max_rows
        return min(max_rows, max(self.small, running + max(_ROOM, least)))

    def note(
        self,
        prefill: int,
        decode: int,
        seconds: float,
        *,
        max_rows: int,
        waiting: int,
        began: int,
        ended: int,
        tokens: int,
        steps: int = 1,
    ) -> None:
        """Records a step, or `steps` equal steps.

        prefill   the step's rows of prompts
        decode    the step's rows of outputs
        seconds   the time of the step
        max_rows  the argument of `rows` before the step
        waiting   sequences that were not admitted yet
        began     sequences that got their first token from the step
        ended     sequences that ended with the step
        tokens    tokens that the ended sequences had made
        steps     how many equal steps there were
        """
        self._steps += steps
        self._prefill += prefill
        if began:
            self._prompt.note(self._prefill / began, count=began)
            self._prefill = 0
        if ended:
            self._num_ended += ended
            self._output.note(tokens / ended, count=ended)
        if not waiting:
            return  # the last sequences run, and steps become smaller by themselves
        rows = prefill + decode
        if not prefill:
            self._alone.note(seconds, count=steps)
            self._running.note(decode, count=steps)
        elif self.small is not None and rows >= 0.9 * self.small:
            self._mixed.note(seconds, count=steps)
        elif self.small is None and prefill >= 3 * decode:
            self._row.note(seconds / rows, weight=rows)
        if self._num_ended and self._row.count and self._alone.count >= _FEW and self._steps >= self._resume_at:
            self._choose(max_rows, waiting)

    def _choose(self, max_rows: int, waiting: int) -> None:
        running, prompt, output = self._running.mean, self._prompt.mean, max(1.0, self._output.mean)
        row, alone = self._row.mean, self._alone.mean
        # How many sequences will come is not known: supposed are as many as have ended, or as wait if these are more.
        count = max(waiting, self._num_ended)
        steady = running * (prompt + output) / output
        small = round(max(_SHARE * steady, _SHADOW * alone / row))
        seconds = self._mixed.mean if self._mixed.count >= _FEW else max(alone, row * small)
        # If steps have room for more rows than come and go, more sequences begin and end together.
        tail = output * min(1.0, steady / small)
        small_seconds = (max(count * (prompt + output) / small, count * output / running) + tail) * seconds
        large_seconds = count * (prompt * row + output / running * alone)
        if small < max_rows and small_seconds < (_GAIN if self.small is None else 1.0) * large_seconds:
            if self.small is None or abs(small - self.small) > _CHANGE * self.small:
                self.small, self._mixed = small, Fit(relative=True)
        elif self.small is not None:
            self.reset()
            self._resume_at, self._pause = self._steps + self._pause, 2 * self._pause


class StepRowLimit:
    """A StepRowLimit decides before each step what its limits are, and records what the step took.

    A step policy decides if there is one. Otherwise the number is learned (`learns`), or it is the budget. It is never
    more than the budget.

    budget  the most rows of a step
    learns  whether steps without a policy may be smaller than the budget
    policy  the step policy, by which interactive requests and batches share the engine; None without one
    limits  the limits of the next step
    """

    def __init__(self, scheduler: Any, budget: StepBudget, *, learns: bool):
        self._scheduler, self._budget = scheduler, budget
        self._size = StepSize() if learns else None
        self.policy: StepPolicy | None = None
        self._learned = StepLimits(budget.rows)  # the limits where no policy sets them
        self.reset()

    def reset(self) -> None:
        """Sets the limits to the budget, until the next step is decided."""
        self.limits = StepLimits(self._budget.rows)

    def shrink(self) -> None:
        """Lowers the limits after the budget has become smaller."""
        self.limits = replace(self.limits, rows=self._budget.rows)

    @contextmanager
    def without_policy(self) -> Iterator[None]:
        """Returns a context in which the step policy is not asked, and batches may have any number of rows."""
        policy, self.policy = self.policy, None
        try:
            yield
        finally:
            self.policy = policy

    def before_admission(self, *, is_idle: bool) -> None:
        """Sets the limits of the next step if no policy does. is_idle: whether no request is open."""
        if self._size is not None and is_idle:
            self._size.reset()
        if self.policy is None:
            scheduler, budget = self._scheduler, self._budget
            rows = budget.rows
            if self._size is not None:
                rows = self._size.rows(rows, scheduler.num_waiting, len(scheduler.running), least=budget.least)
            if rows != self._learned.rows:
                self._learned = StepLimits(rows)
            self.limits = self._learned

    def before_plan(self) -> None:
        """Sets the limits of the next step if a policy does."""
        if self.policy is not None:
            self.limits = self.policy.settle(self._scheduler, self._budget.rows)

    def note(self, step: GenerateStep, seconds: float, sequences: Sequence[SequenceState]) -> None:
        """Records what a step took. sequences: the sequences that ended with it."""
        if self.policy is not None:
            self.policy.times.note_step(step.num_rows, seconds)
        elif self._size is not None:
            self._size.note(
                step.num_rows - step.decode_rows,
                step.decode_rows,
                seconds,
                max_rows=self._budget.rows,
                waiting=self._scheduler.num_waiting,
                began=len(step.consumers) - step.decode_rows,
                ended=len(sequences),
                tokens=sum(sequence.num_known for sequence in sequences),
            )
