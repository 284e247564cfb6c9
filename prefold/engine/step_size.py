"""How many rows a step of generation may have: as a pace says, or by what was learned from steps. No torch, no clock.

A device that waits for its weights takes as long for a step of few rows as for one of a single row: there, rows of
prompts beside those of outputs cost next to nothing. With large steps all sequences that there is room for begin
together: their prompts are computed first, and afterwards the device waits for its weights. With steps of just as many
rows as come and go in the long run,

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
from typing import Any

from ..schedule.generate_step import GenerateStep, Running
from .meter import StepBudget
from .pace import Pace

_SHARE = 0.95  # of the rows that come and go in the long run: with more, sequences would begin together after all
_SHADOW = 0.7  # of the rows that take as long as a step of outputs alone: in the rest nothing can be hidden
_GAIN = 0.97  # small steps are begun with where they take less than this of the seconds of large ones
_KEPT = 0.95  # how much a step, or a sequence, counts, of the one after it
_FEW = 8  # steps of a kind that are needed to know what it takes
_ROOM = 16  # rows of prompts that there is room for beside the outputs, at least
_CHANGE = 0.1  # by so much another number of rows must differ to be taken
_PAUSE = 1000  # steps until small ones are tried again where they did not help; each time twice as many


class _Mean:
    """A _Mean is the mean of what came lately."""

    __slots__ = ("count", "sum", "weight")

    def __init__(self) -> None:
        self.sum, self.weight, self.count = 0.0, 0.0, 0

    def note(self, value: float, count: int = 1, weight: float = 1.0) -> None:
        """Takes note of a value that came `count` times."""
        kept = _KEPT**count
        weight *= (1 - kept) / (1 - _KEPT)
        self.sum, self.weight = kept * self.sum + weight * value, kept * self.weight + weight
        self.count += count

    def note_seconds(self, seconds: float, count: int = 1, weight: float = 1.0) -> None:
        """Takes note of seconds so that relative errors count: what took much longer than the rest (the machine was
        busy with something else, or kernels were compiled) counts for little."""
        self.note(seconds, count, weight / max(seconds, 1e-9) ** 2)

    @property
    def value(self) -> float:
        return self.sum / self.weight


class StepSize:
    """A StepSize says before each step how many rows it may have, and is told afterwards what it took.

    small  the rows of small steps; None: steps are large
    """

    def __init__(self) -> None:
        self._steps, self._pause, self._resume_at = 0, _PAUSE, 0
        self.reset()

    def reset(self) -> None:
        """Begins anew, with large steps: other requests come."""
        self.small: int | None = None
        self._row = _Mean()  # seconds of a row in large steps
        self._alone, self._running = _Mean(), _Mean()  # seconds and rows of steps that have outputs alone
        self._mixed = _Mean()  # seconds of steps that have all the rows of a small one
        self._prompt, self._output = _Mean(), _Mean()  # rows of a prompt that were computed, and tokens of an output
        self._prefill = 0  # rows of prompts that are not complete
        self._ended = 0

    def rows(self, most: int, waiting: int, running: int, least: int = 1) -> int:
        """Returns how many rows the next step may have, at most `most`.

        waiting  sequences that were not admitted yet
        running  sequences that were, each of which may have a row of its output
        least    rows of prompts that may have to be computed in one step
        """
        if self.small is None or not waiting:
            return most
        return min(most, max(self.small, running + max(_ROOM, least)))

    def note(
        self,
        prefill: int,
        decode: int,
        seconds: float,
        *,
        most: int,
        waiting: int,
        began: int,
        ended: int,
        tokens: int,
        steps: int = 1,
    ) -> None:
        """Takes note of a step; or of several alike, of which the seconds and rows of one are given.

        prefill  its rows of prompts
        decode   its rows of outputs
        most     as it was for `rows`
        waiting  sequences that were not admitted yet
        began    sequences that got their first token from it
        ended    sequences that ended with it
        tokens   that these had made
        """
        self._steps += steps
        self._prefill += prefill
        if began:
            self._prompt.note(self._prefill / began, began)
            self._prefill = 0
        if ended:
            self._ended += ended
            self._output.note(tokens / ended, ended)
        if not waiting:
            return  # the last ones: steps have what is left
        rows = prefill + decode
        if not prefill:
            self._alone.note_seconds(seconds, steps)
            self._running.note(decode, steps)
        elif self.small is not None and rows >= 0.9 * self.small:
            self._mixed.note_seconds(seconds, steps)
        elif self.small is None and prefill >= 3 * decode:
            self._row.note_seconds(seconds / rows, weight=rows)
        if self._ended and self._row.count and self._alone.count >= _FEW and self._steps >= self._resume_at:
            self._choose(most, waiting)

    def _choose(self, most: int, waiting: int) -> None:
        running, prompt, output = self._running.value, self._prompt.value, max(1.0, self._output.value)
        row, alone = self._row.value, self._alone.value
        # Nobody knows how many will come: as many again as have ended, if no more than that wait already.
        count = max(waiting, self._ended)
        steady = running * (prompt + output) / output
        small = round(max(_SHARE * steady, _SHADOW * alone / row))
        each = self._mixed.value if self._mixed.count >= _FEW else max(alone, row * small)
        # Where steps have room for more than comes and goes, more sequences begin and end together.
        tail = output * min(1.0, steady / small)
        small_seconds = (max(count * (prompt + output) / small, count * output / running) + tail) * each
        large_seconds = count * (prompt * row + output / running * alone)
        if small < most and small_seconds < (_GAIN if self.small is None else 1.0) * large_seconds:
            if self.small is None or abs(small - self.small) > _CHANGE * self.small:
                self.small, self._mixed = small, _Mean()
        elif self.small is not None:
            self.reset()
            self._resume_at, self._pause = self._steps + self._pause, 2 * self._pause


class StepRows:
    """A StepRows says before each step how many rows it may have, and takes note of what the step took.

    A pace says how many, where there is one. Without a pace it is as many as were found to be fast (`learns`), or as
    many as there are. It is never more than the budget.

    budget  the most rows of a step
    learns  whether steps without a pace may be smaller than the budget
    pace    of requests that live readers and batches share an engine for; None: there is none
    most    the most rows of the next step
    """

    def __init__(self, scheduler: Any, budget: StepBudget, *, learns: bool):
        self._scheduler, self._budget = scheduler, budget
        self._size = StepSize() if learns else None
        self.pace: Pace | None = None
        self.most = budget.rows
        self._is_unpaced = False  # whether the pace says nothing for now

    def reset(self) -> None:
        """Lets steps have as many rows as the budget, until somebody says otherwise."""
        self.most = self._budget.rows

    def shrink(self) -> None:
        """Takes note that the budget is smaller than it was."""
        self.most = min(self.most, self._budget.rows)

    @contextmanager
    def unpaced(self) -> Iterator[None]:
        """Returns a context in which no pace says how many rows steps have, and of whom."""
        if self.pace is not None:
            self.reset()
            self.pace.admission.batch_rows = None
        self._is_unpaced = True
        try:
            yield
        finally:
            self._is_unpaced = False

    @property
    def _speaks(self) -> Pace | None:
        """Returns the pace that says how many rows the next step may have; None: none does."""
        return None if self._is_unpaced else self.pace

    def before_admission(self, *, is_idle: bool) -> None:
        """Says how many rows the next step may have, where no pace does. is_idle: nobody has anything to do."""
        if self._size is not None and is_idle:
            self._size.reset()
        if self._speaks is None:
            scheduler, budget = self._scheduler, self._budget
            self.most = budget.rows
            if self._size is not None:
                waiting, running = scheduler.num_waiting, len(scheduler.running)
                self.most = self._size.rows(budget.rows, waiting, running, least=budget.least)

    def before_plan(self) -> None:
        """Says how many rows the next step may have, where a pace does."""
        if (pace := self._speaks) is not None:
            self.most = pace.settle(self._scheduler, self._budget.rows)

    def note(self, step: GenerateStep, seconds: float, done: Sequence[Running]) -> None:
        """Takes note of what a step took. done: the sequences that ended with it."""
        if (pace := self._speaks) is not None:
            pace.times.note(step.num_rows, seconds)
        elif self._size is not None:
            self._size.note(
                step.num_rows - step.decode_rows,
                step.decode_rows,
                seconds,
                most=self._budget.rows,
                waiting=self._scheduler.num_waiting,
                began=len(step.takers) - step.decode_rows,
                ended=len(done),
                tokens=sum(sequence.known for sequence in done),
            )
