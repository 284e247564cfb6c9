"""Admission policies: which waiting sequence is admitted next, and which sequences get rows in a step.

A policy holds the waiting sequences. `InOrder` admits them in order of arrival, which in a job is depth-first.
`FairAdmission` (`fair.py`) is for a server: it distinguishes classes and tenants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..cache import RadixCache, SlotPool
from .generate_step import SequenceState, StepPlan


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits on the rows of the next step."""

    rows: int | None = None  # the most rows of the step; None: the scheduler's `max_batch_rows`
    batch_rows: int | None = None  # the most rows of batches in it; None: no separate limit
    batch_first: bool = False  # rows of batches come before rows of interactive requests
    lends: bool = False  # batches may use the sequences reserved for interactive requests


NO_LIMITS = StepLimits()


class Capacity(Protocol):
    """The parts of a Scheduler that a policy reads."""

    pool: SlotPool
    cache: RadixCache | None
    max_running: int

    @property
    def running(self) -> Collection[SequenceState]: ...


class Admission(Protocol):
    """The waiting sequences, and the decision which is next. Iteration yields the waiting sequences."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[SequenceState]: ...
    def __contains__(self, sequence: object) -> bool: ...
    def clear(self) -> None: ...

    def take_over(self, before: Admission, running: Iterable[SequenceState]) -> None:
        """Take the waiting sequences of another policy, and the running sequences."""

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Add waiting sequences."""

    def put_back(self, sequence: SequenceState) -> None:
        """Add a running sequence that was preempted; it waits before later arrivals."""

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence that ends before it is admitted."""

    def first(self, scheduler: Capacity, limits: StepLimits, *, batches: bool = True) -> SequenceState | None:
        """Return the sequence to admit next, or None. With batches=False, sequences of batches do not count."""

    def note_admission(self, sequence: SequenceState, rows: int) -> None:
        """Mark the sequence returned by `first` as running; `rows` of its prompt must be computed."""

    def note_end(self, sequence: SequenceState) -> None:
        """Record the end of an admitted sequence."""

    def before(self, sequence: SequenceState, running: Collection[SequenceState]) -> Collection[SequenceState]:
        """Return the running sequences that get rows before a waiting sequence does."""

    def gives_way(self, sequence: SequenceState, running: Collection[SequenceState]) -> SequenceState | None:
        """Return the running sequence to preempt for a waiting one, or None."""

    def victim(self, running: Collection[SequenceState]) -> SequenceState:
        """Return the running sequence to preempt if memory is too small for all."""

    def are_alike(self, limits: StepLimits) -> bool:
        """Return True if all running sequences have the same right to rows of a step."""

    def fill(self, plan: StepPlan, running: Collection[SequenceState], limits: StepLimits) -> StepPlan:
        """Add rows of running sequences to the plan of a step, and return the plan; change nothing else."""


class InOrder:
    """Admits sequences in order of arrival, and gives each of them rows in every step."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[SequenceState, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._waiting)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting

    def clear(self) -> None:
        self._waiting.clear()

    def take_over(self, before: Admission, running: Iterable[SequenceState]) -> None:
        self.add(before)

    def add(self, sequences: Iterable[SequenceState]) -> None:
        self._waiting.update(dict.fromkeys(sequences))

    def put_back(self, sequence: SequenceState) -> None:
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)

    def remove(self, sequence: SequenceState) -> None:
        del self._waiting[sequence]

    def first(self, scheduler: Capacity, limits: StepLimits, *, batches: bool = True) -> SequenceState | None:
        return next(iter(self._waiting), None)

    def note_admission(self, sequence: SequenceState, rows: int) -> None:
        del self._waiting[sequence]

    def note_end(self, sequence: SequenceState) -> None:
        pass

    def before(self, sequence: SequenceState, running: Collection[SequenceState]) -> Collection[SequenceState]:
        return running

    def gives_way(self, sequence: SequenceState, running: Collection[SequenceState]) -> SequenceState | None:
        return None

    def victim(self, running: Collection[SequenceState]) -> SequenceState:
        return next(reversed(running))  # type: ignore[call-overload]

    def are_alike(self, limits: StepLimits) -> bool:
        return True

    def fill(self, plan: StepPlan, running: Collection[SequenceState], limits: StepLimits) -> StepPlan:
        plan.fill(running)
        return plan
