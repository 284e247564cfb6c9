"""A step of generation where rows may leave: who makes which visits, over arrays, and its message."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .crew import Crew
from .sequence import Routed
from .steps import VisitResult, VisitStep


@dataclass(frozen=True, eq=False, slots=True)
class DecodeDraft:
    """A DecodeDraft is who makes the next visits.

    units    int64 [rounds]: the block that is visited in each round
    members  int64 [n]: their numbers in the crew, those of one route and visit side by side, depth-first
    rounds   int64 [queries]: the round of each query, ascending
    rows     int64 [queries]: its row: the number among `members`
    leaves   int8 [queries]: as of VisitStep
    """

    units: np.ndarray
    members: np.ndarray
    rounds: np.ndarray
    rows: np.ndarray
    leaves: np.ndarray

    @property
    def is_empty(self) -> bool:
        """Returns False: there is nobody without a row."""
        return False


@dataclass(frozen=True, eq=False, slots=True)
class DecodeStep:
    """A DecodeStep is one visit or more of a row for each of some sequences, and what it means for them.

    message         what the worker is given, as of RoutedStep
    draft           who makes which visits
    takers          the sequences of rows that are read if they leave, or end
    reads           int64: the number of each one's row
    crew            who runs
    place, at, row  int64 [n]: the place of each row's tail, the first visit that it makes, and the row's number in the
                    tail
    """

    message: VisitStep
    draft: DecodeDraft
    takers: list[Routed]
    reads: np.ndarray
    crew: Crew
    place: np.ndarray
    at: np.ndarray
    row: np.ndarray
    projects: list[tuple[Hashable, ...]] = field(default_factory=list)

    @property
    def members(self) -> np.ndarray:
        """Returns the number in the crew of the sequence of each row."""
        return self.draft.members

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through blocks, at most: one that makes several visits counts at each."""
        return len(self.draft.rows)

    @property
    def namespaces(self) -> list[tuple[tuple[Hashable, ...], int, int]]:
        """Returns (namespace, its first query, the query behind its last) of each query."""
        namespaces = [self.crew.sequences[number].namespace for number in self.members[self.draft.rows].tolist()]
        return [(namespace, query, query + 1) for query, namespace in enumerate(namespaces)]

    @property
    def first_rows(self) -> int:
        """Returns how many of its rows begin with their first visit."""
        return int(np.count_nonzero(self.at == 0))

    @property
    def decode_rows(self) -> int:
        """Returns how many of its rows begin with their first visit: each is the last token of a sequence."""
        return self.first_rows

    @property
    def first_takers(self) -> list[Routed]:
        """Returns the sequences whose rows begin with their first visit."""
        return [self.crew.sequences[number] for number in self.members[self.at == 0].tolist()]

    def made(self, result: VisitResult) -> np.ndarray:
        """Returns how many visits each row made, int64 [n]."""
        return result.made if self.message.rounds is not None else np.ones(len(self.members), np.int64)

    def visits(self, result: VisitResult) -> Sequence[int]:
        """Returns the last visit that the row of each taker made."""
        return (self.at + self.made(result) - 1)[self.reads].tolist()

    def block_calls(self, result: VisitResult) -> int:
        """Returns how many rows went through a block."""
        made, units = self.made(result), self.draft.units
        return sum(int(np.count_nonzero(made > number)) for number, unit in enumerate(units.tolist()) if unit >= 0)
