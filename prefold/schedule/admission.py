"""Who of those that wait is admitted next, and whose rows a step has: the policies that a scheduler may be handed.

A policy holds the sequences that wait. `InOrder` admits them as they came, which in a job is depth-first.
`FairAdmission` (`fair.py`) is for those who do not know of each other: it tells classes and tenants apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from .generate_step import Running

if TYPE_CHECKING:
    from .sequences import Sequences


class Fillable(Protocol):
    """A Fillable is the draft of a step, while who has rows in it is being decided.

    most  the most rows of the step
    left  how many more rows may be added
    """

    most: int
    left: int

    @property
    def num_taken(self) -> int:
        """Returns how many rows were added."""

    def fill(self, running: Collection[Running]) -> None:
        """Adds rows of these sequences, while there is room."""


D = TypeVar("D", bound=Fillable)


class Admission(Protocol):
    """An Admission holds the sequences that wait, and says who of them is next. Iterating yields them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Running]: ...
    def __contains__(self, sequence: object) -> bool: ...
    def clear(self) -> None: ...
    def check(self, running: Collection[Running]) -> None: ...

    def take_over(self, before: Admission, running: Iterable[Running]) -> None:
        """Goes on from another policy: with those that wait there, and those that run."""

    def add(self, sequences: Iterable[Running]) -> None:
        """Takes sequences that have come."""

    def put_back(self, sequence: Running) -> None:
        """Takes a sequence that ran and was preempted: it goes before those that have come since."""

    def remove(self, sequence: Running) -> None:
        """Forgets a sequence that ends before it runs."""

    def first(self, scheduler: Sequences, *, batches: bool = True) -> Running | None:
        """Returns who is admitted next, None where nobody should be now; batches: whether it may be one of a batch."""

    def admitted(self, sequence: Running, rows: int) -> None:
        """Books the sequence that `first` returned as running, with so many rows of its prompt to compute."""

    def ended(self, sequence: Running) -> None:
        """Books the end of a sequence that had been admitted."""

    def before(self, sequence: Running, running: Collection[Running]) -> Collection[Running]:
        """Returns those who run whose rows come before the rows of a sequence that waits."""

    def gives_way(self, sequence: Running, running: Collection[Running]) -> Running | None:
        """Returns who of those that run is preempted for one that waits; None: nobody."""

    def victim(self, running: Collection[Running]) -> Running:
        """Returns who of those that run is preempted where memory is too small for all."""

    @property
    def are_alike(self) -> bool:
        """Returns whether all that run have the same right to rows of a step."""

    def draft(self, running: Collection[Running], draft: D) -> D:
        """Returns the empty draft of a step, filled; changes nothing else."""


class InOrder:
    """An InOrder admits sequences in the order in which they came, and gives everybody rows in each step."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Running, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._waiting)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting

    def clear(self) -> None:
        self._waiting.clear()

    def check(self, running: Collection[Running]) -> None:
        pass

    def take_over(self, before: Admission, running: Iterable[Running]) -> None:
        self.add(before)

    def add(self, sequences: Iterable[Running]) -> None:
        self._waiting.update(dict.fromkeys(sequences))

    def put_back(self, sequence: Running) -> None:
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)

    def remove(self, sequence: Running) -> None:
        del self._waiting[sequence]

    def first(self, scheduler: Sequences, *, batches: bool = True) -> Running | None:
        return next(iter(self._waiting), None)

    def admitted(self, sequence: Running, rows: int) -> None:
        del self._waiting[sequence]

    def ended(self, sequence: Running) -> None:
        pass

    def before(self, sequence: Running, running: Collection[Running]) -> Collection[Running]:
        return running

    def gives_way(self, sequence: Running, running: Collection[Running]) -> Running | None:
        return None

    def victim(self, running: Collection[Running]) -> Running:
        return next(reversed(running))  # type: ignore[call-overload]

    @property
    def are_alike(self) -> bool:
        return True

    def draft(self, running: Collection[Running], draft: D) -> D:
        draft.fill(running)
        return draft
