"""Admission policies: which waiting sequence is admitted next, and which sequences have rows in a step.

A policy holds the sequences that wait. `InOrder` admits them in the order they came, which in a job is depth-first.
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
    """A StepLimits says how many rows the next step may have, and of whom.

    rows         the most rows of the step; None: the `max_batch_rows` of the scheduler
    batch_rows   the most rows of batches in it; None: as many as there is room for
    batch_first  whether rows of batches go before rows of interactive requests
    lends        whether batches may use the sequences reserved for interactive requests
    """

    rows: int | None = None
    batch_rows: int | None = None
    batch_first: bool = False
    lends: bool = False


NO_LIMITS = StepLimits()


class Capacity(Protocol):
    """A Capacity is what a policy reads of a Scheduler."""

    pool: SlotPool
    cache: RadixCache | None
    max_running: int

    @property
    def running(self) -> Collection[SequenceState]: ...


class Admission(Protocol):
    """An Admission holds the sequences that wait, and decides which of them is next. Iterating over it yields them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[SequenceState]: ...
    def __contains__(self, sequence: object) -> bool: ...
    def clear(self) -> None: ...

    def take_over(self, before: Admission, running: Iterable[SequenceState]) -> None:
        """Takes over the waiting sequences of another policy, and the running sequences."""

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Adds sequences that wait from now on."""

    def put_back(self, sequence: SequenceState) -> None:
        """Adds a running sequence that was preempted; it waits before sequences that came after it."""

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence that ends before it is admitted."""

    def first(self, scheduler: Capacity, limits: StepLimits, *, batches: bool = True) -> SequenceState | None:
        """Returns the sequence that is admitted next; None: none now. batches: whether batches' count."""

    def note_admission(self, sequence: SequenceState, rows: int) -> None:
        """Books the sequence that `first` returned as running. rows: how many rows of its prompt are to be computed."""

    def note_end(self, sequence: SequenceState) -> None:
        """Books the end of an admitted sequence."""

    def before(self, sequence: SequenceState, running: Collection[SequenceState]) -> Collection[SequenceState]:
        """Returns the running sequences whose rows go before the rows of a waiting sequence."""

    def gives_way(self, sequence: SequenceState, running: Collection[SequenceState]) -> SequenceState | None:
        """Returns the running sequence that is preempted for a waiting one; None: none is."""

    def victim(self, running: Collection[SequenceState]) -> SequenceState:
        """Returns the running sequence that is preempted when memory is too small for all."""

    def are_alike(self, limits: StepLimits) -> bool:
        """Returns whether all running sequences have the same right to rows of a step."""

    def fill(self, plan: StepPlan, running: Collection[SequenceState], limits: StepLimits) -> StepPlan:
        """Adds rows of running sequences to the plan of a step, and returns the plan; changes nothing else."""


class InOrder:
    """An InOrder admits sequences in the order in which they came, and gives each of them rows in every step."""

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
