"""Visits of rows that are generated, where nobody has a prompt to compute: drafted, laid out, booked for all at once.

A step of generation is one visit of one row for each of many sequences, so that what is done for a row by itself would
take as long as the visit. Here everything is done over arrays: those of `Tails`, and what stays the same while the same
sequences run: in which order they lie, and which slots they see of their prompts at each visit.

Such a step is what `visit_draft` lays out of the same rows, but for their order. Where a row that left needs K/V that
are made of its state, where there is a coda, or slots are short, there is none, and the step is drafted row by row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

import numpy as np

from ..cache import Tails
from ..cache.tree import Node
from .generate_step import joined
from .routed import Routed
from .visit_claims import TAIL_SLOTS, Claims
from .visit_steps import DECIDES, LEAVES, PRELUDE, STAYS, VisitStep

__all__ = ["DecodeDraft", "DecodeStep", "Decoding"]

NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class DecodeDraft:
    """A DecodeDraft is who makes a visit next.

    unit     the block visited
    members  int64 [n]: their numbers in the crew, those of one route and visit side by side, depth-first
    """

    unit: int
    members: np.ndarray

    @property
    def is_empty(self) -> bool:
        """Returns False: there is nobody without a row."""
        return False


@dataclass(frozen=True, eq=False, slots=True)
class DecodeStep:
    """A DecodeStep is one visit of a row for each of some sequences, and what it means for them.

    message         what the worker is given, as of RoutedStep
    takers, visits  as of RoutedStep
    crew            who runs
    members         int64 [n]: the number in the crew of the sequence of each row
    place, at, row  int64 [n]: the place of each row's tail, the visit that it makes, and the row's number in the tail
    """

    message: VisitStep
    takers: list[Routed]
    visits: list[int]
    crew: _Crew
    members: np.ndarray
    place: np.ndarray
    at: np.ndarray
    row: np.ndarray
    projects: list[tuple[Hashable, ...]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Returns how many rows go through the block."""
        return len(self.members)

    @property
    def spans(self) -> list[tuple[tuple[Hashable, ...], int, int]]:
        """Returns (namespace, its first query, the query behind its last) of each row."""
        namespaces = [self.crew.sequences[number].namespace for number in self.members.tolist()]
        return [(namespace, row, row + 1) for row, namespace in enumerate(namespaces)]

    @property
    def first_rows(self) -> int:
        """Returns how many of its rows are at their first visit."""
        return int(np.count_nonzero(self.at == 0))

    @property
    def decode_rows(self) -> int:
        """Returns how many of its rows are at their first visit: each is the last token of a sequence."""
        return self.first_rows

    @property
    def first_takers(self) -> list[Routed]:
        """Returns the sequences whose rows are at their first visit."""
        return [self.crew.sequences[number] for number in self.members[self.at == 0].tolist()]


@dataclass(frozen=True, eq=False, slots=True)
class _Route:
    """What steps ask of a route.

    units   int64 [visits]
    seen    int64 [visits, visits]: which visit's slot the second visit sees of a row that left after the first; -1:
            none, or none of a visit between them
    rest    int64 [visits]: how many visits to blocks come after each
    """

    units: np.ndarray
    seen: np.ndarray
    rest: np.ndarray

    @classmethod
    def of(cls, route: list[int]) -> _Route:
        visits = len(route)
        seen = np.full((visits, visits), -1, np.int64)
        for left in range(visits):
            last = {unit: at for at, unit in enumerate(route[: left + 1])}
            for at in range(left + 1, visits):
                if route[at] not in last:
                    break
                seen[left, at] = last[route[at]]
        blocks = np.array([unit >= 0 for unit in route], np.int64)
        return cls(np.array(route, np.int64), seen, blocks[::-1].cumsum()[::-1] - blocks)


class _Crew:
    """A _Crew is what stays the same while the same sequences run and none of them has a prompt to compute.

    sequences  by route, and depth-first
    place      int64 [n]: of their tails
    start      int64 [n]: the position of the first row of each tail
    route      int64 [n]: the number of each one's route
    criteria   float64 [n, 2]: as of VisitStep
    """

    def __init__(self, running: Collection[Routed], tails: Tails, visits: int):
        self.tails, self.most = tails, visits
        numbers: dict[tuple[int, ...], int] = {}
        for sequence in running:
            numbers.setdefault(tuple(sequence.route), len(numbers))
        order = _depth_first(running)
        self.sequences = sorted(order, key=lambda one: numbers[tuple(one.route)])
        self.route = np.array([numbers[tuple(one.route)] for one in self.sequences], np.int64)
        self.place = np.array([one.tail.place for one in self.sequences], np.int64)
        self.start = np.array([one.leaf.stop for one in self.sequences], np.int64)
        self.criteria = np.array([one.criteria for one in self.sequences], np.float64)
        self.routes = [_Route.of(list(route)) for route in numbers]
        size = (len(numbers), visits)
        self.units, self.rest = np.full(size, PRELUDE - 2, np.int64), np.zeros(size, np.int64)
        self.seen = np.full((*size, visits), -1, np.int64)
        for number, route in enumerate(self.routes):
            length = len(route.units)
            self.units[number, :length], self.rest[number, :length] = route.units, route.rest
            self.seen[number, :length, :length] = route.seen
        self.length = np.array([len(route.units) for route in self.routes], np.int64)[self.route]
        self.has_prelude = self.units[:, 0] == PRELUDE
        self._tables: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

    def prompts(self, route: int, visit: int) -> tuple[np.ndarray, ...]:
        """Returns the runs of slots that are seen of prompts at a visit of a route: the start, count and position of
        each, and the numbers of the first sequence that sees it and of the one behind the last."""
        found = self._tables.get((route, visit))
        if found is None:
            runs: list[tuple[int, int, int, int, int]] = []
            first_of, *_, last_of = np.flatnonzero(self.route == route).repeat(2).tolist()
            prefix = self.sequences[first_of].prefixes[visit]
            open_nodes: list[tuple[Node, int, int]] = []  # (node, its first run, the run behind its last)
            for number in range(first_of, last_of + 2):
                path = self.sequences[number].leaf.path() if number <= last_of else []
                same = 0
                while same < min(len(path), len(open_nodes)) and open_nodes[same][0] is path[same]:
                    same += 1
                for _, first, stop in open_nodes[same:]:
                    for at in range(first, stop):
                        runs[at] = (*runs[at][:4], number)
                del open_nodes[same:]
                for node in path[same:]:
                    there, first = node.visits[prefix], len(runs)  # type: ignore[attr-defined]
                    runs += [
                        (start, count, position, number, number)
                        for start, count, position in zip(there.starts, there.counts, there.positions, strict=True)
                    ]
                    open_nodes.append((node, first, len(runs)))
            table = np.array(runs, np.int64).reshape(-1, 5)
            found = self._tables[route, visit] = tuple(np.ascontiguousarray(column) for column in table.T)
        return found


class Decoding:
    """A Decoding drafts, lays out and books steps of generation.

    claims  gives out slots
    tails   what the sequences' tails have
    """

    def __init__(self, claims: Claims, tails: Tails):
        self.claims, self.visits, self.tails = claims, claims.visits, tails
        self._crew: _Crew | None = None

    def forget(self) -> None:
        """Forgets who runs: somebody has come or gone."""
        self._crew = None

    def draft(self, running: Collection[Routed], most: int) -> DecodeDraft | None:
        """Returns who makes the next visit, at most so many, with slots claimed for them; None where that is for Claims
        to say."""
        if self._crew is None:
            if self.visits.coda or self.visits.keys != "last" or not all(sequence.ready for sequence in running):
                return None
            self._crew = _Crew(running, self.tails, self.tails.visits)
        crew, tails = self._crew, self.tails
        place = crew.place
        visit, row = tails.visit[place], tails.row[place]
        if not (visit < crew.length).all():
            return None
        for number in np.flatnonzero(tails.done[place, visit] != row).tolist():
            sequence = crew.sequences[number]
            there = sequence.tail.visits[sequence.prefixes[visit[number]]]
            self.claims.settle_left(sequence, there)
        behind = tails.done[place, visit] != row
        unit = crew.units[crew.route, visit]
        kind = unit - PRELUDE
        if self.visits.group == "template":
            kind = (crew.route * crew.most + visit) * (kind.max() + 1) + kind
        if not self.visits.refill and visit.any():
            kind = np.where(visit > 0, kind, -1)
        chosen = self._chosen(kind, tails.waited[place])
        members = np.flatnonzero(kind == chosen)
        if len(members) > most:  # those who waited longest
            members = np.sort(members[np.argsort(-tails.waited[place[members]], kind="stable")[:most]])
        if behind[members].any():  # K/V are to be made of the states of rows that left
            return None
        at = crew.route[members] * crew.most + visit[members]
        members = members[np.argsort(at, kind="stable")]
        if not self._claim(place[members], visit[members], row[members], members):
            return None
        return DecodeDraft(int(unit[members[0]]), members)

    def _chosen(self, kind: np.ndarray, waited: np.ndarray) -> int:
        """Returns the kind that most are of, or one of whom has waited for long."""
        patience = self.visits.patience
        longest = int(np.where(kind >= 0, waited, 0).argmax())
        if kind[longest] >= 0 and waited[longest] >= patience:
            return int(kind[longest])
        return int(np.bincount(kind[kind >= 0]).argmax())

    def _claim(self, place: np.ndarray, visit: np.ndarray, row: np.ndarray, members: np.ndarray) -> bool:
        """Gives rows their slots at the visits they come to; returns whether there were enough."""
        tails, crew = self.tails, self._crew
        assert crew is not None
        needs = ~tails.owned[place, visit, row]
        short = np.flatnonzero(needs & (tails.num_spare[place, visit] == 0))
        for i in short.tolist():
            sequence = crew.sequences[members[i]]
            count = 1 + max(0, min(TAIL_SLOTS, sequence.limit - 1 - len(sequence.tail.tokens)))
            self.claims.make_free(count)
            found = self.claims.pool.allocate(count)
            if found is None or found[-1] - found[0] != count - 1:
                if found is not None:
                    self.claims.pool.free(found)
                return False
            tails.spare_at[place[i], visit[i]], tails.num_spare[place[i], visit[i]] = found[0], count
        at = place[needs], visit[needs]
        tails.slots[*at, row[needs]] = tails.spare_at[at]
        tails.owned[*at, row[needs]] = True
        tails.spare_at[at] += 1
        tails.num_spare[at] -= 1
        return True

    # ------------------------------------------------------------------------------------------------ the step

    def lay_out(self, draft: DecodeDraft) -> DecodeStep:
        """Returns the step of a draft; changes nothing."""
        crew, tails, members = self._crew, self.tails, draft.members
        assert crew is not None
        place, route = crew.place[members], crew.route[members]
        visit, row = tails.visit[place], tails.row[place]
        slots, position = tails.slots[place, visit, row], crew.start[members] + row
        runs = self._runs(members, route, visit, place, slots, position)
        zero = np.zeros_like(slots)
        source = np.where(visit > 0, tails.slots[place, np.maximum(visit - 1, 0), row], zero)
        given = np.where(crew.has_prelude[route] & (visit > 0), tails.slots[place, 0, row], zero)
        leaves = self._leaves(draft.unit, crew, route, visit, place)
        ends = visit == crew.length[members] - 1
        reads = np.flatnonzero(ends | (leaves >= DECIDES))
        message = VisitStep(
            block=draft.unit,
            tokens=tails.token[place].astype(np.int32),
            positions=position.astype(np.int32),
            source=source,
            given=given,
            slots=slots,
            leaves=leaves,
            criteria=crew.criteria[members],
            run_start=runs[0], run_count=runs[1], run_position=runs[2], run_first=runs[3], run_last=runs[4],
            project_slots=NOTHING, project_sources=NOTHING, project_given=NOTHING, project_positions=NOTHING,
            read_slots=slots[reads],
            read_rows=np.where(ends[reads], -1, reads),
            reads=np.arange(len(reads)),
        )  # fmt: skip
        takers = [crew.sequences[number] for number in members[reads].tolist()]
        return DecodeStep(message, takers, visit[reads].tolist(), crew, members, place, visit, row)

    def _leaves(self, unit: int, crew: _Crew, route: np.ndarray, visit: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Returns whether rows leave after a visit, as `Routed.leaves` does."""
        if unit < 0:
            return np.full(len(place), STAYS, np.int8)
        number = visit + ~crew.has_prelude[route]
        most, leaves = len(self.visits.order), self.tails.leaves[place]
        decides = (number >= self.tails.decides[place]) & (number < most)
        gone = (number >= leaves) & ((number < most) | (number == leaves))
        return np.where(gone, LEAVES, np.where(decides, DECIDES, STAYS)).astype(np.int8)

    def _runs(
        self,
        members: np.ndarray,
        route: np.ndarray,
        visit: np.ndarray,
        place: np.ndarray,
        slots: np.ndarray,
        position: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """Returns the runs of keys that rows see: of prompts, of their tails, and themselves."""
        crew, tails = self._crew, self.tails
        assert crew is not None
        kind = route * crew.most + visit
        edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
        found = []
        for first, stop in itertools.pairwise(edges):
            start, count, at, begins, ends = crew.prompts(int(route[first]), int(visit[first]))
            some = members[first:stop]
            begins, ends = first + some.searchsorted(begins), first + some.searchsorted(ends)
            seen = ends > begins
            found.append((start[seen], count[seen], at[seen], begins[seen], ends[seen]))
        # Those of each row's tail, and last the row itself.
        number = tails.num_runs[place, visit]
        ends = (number + 1).cumsum()
        query = np.repeat(np.arange(len(place)), number + 1)
        which = np.arange(ends[-1]) - np.repeat(ends - number - 1, number + 1)
        own = ends - 1
        which[own] = 0
        at = (place * tails.visits + visit)[query] * tails.run_start.shape[2] + which
        start, count, where = (
            array.reshape(-1)[at] for array in (tails.run_start, tails.run_count, tails.run_position)
        )
        start[own], count[own], where[own] = slots, 1, position
        found.append((start, count, where, query, query + 1))
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.argsort(columns[3], kind="stable")
        return joined(*(column[order] for column in columns))

    def begin(self, step: DecodeStep) -> int:
        """Books a step as being run. Returns how many slots all who run would need if nobody shared anything."""
        crew, tails = step.crew, self.tails
        tails.waited[crew.place] += 1
        tails.waited[step.place] = 0
        return int(((tails.row[crew.place] + 1 + crew.start) * crew.length).sum())

    def book(self, step: DecodeStep, left: np.ndarray) -> int:
        """Books the rows that a step brought to their visits, `left`, bool [n], of which left for good. Returns how
        many visits these do not make."""
        crew, tails, place, visit, row = step.crew, self.tails, step.place, step.at, step.row
        start, route = crew.start[step.members], crew.route[step.members]
        slots = tails.slots[place, visit, row]
        tails.left[place, visit, row] = left
        tails.done[place, visit] = row + 1
        tails.add_runs(place, visit, slots, 1, start + row)
        tails.visit[place] = visit + 1
        gone = np.flatnonzero(left)
        if not len(gone):
            return 0
        # What deeper visits see of them is there, but for K/V that are made of a state, and what comes behind such.
        seen = crew.seen[route[gone], visit[gone]]
        which, deeper = np.nonzero((seen >= 0) & (tails.done[place[gone]] == row[gone, None]))
        seen, which = seen[which, deeper], gone[which]
        place, row = place[which], row[which]
        slots = tails.slots[place, seen, row]
        tails.slots[place, deeper, row] = slots
        tails.left[place, deeper, row] = True
        tails.done[place, deeper] = row + 1
        tails.add_runs(place, deeper, slots, 1, start[which] + row)
        return int(crew.rest[route[gone], visit[gone]].sum())


def _depth_first(running: Collection[Routed]) -> list[Routed]:
    """Returns sequences in an order in which those below one node lie side by side."""
    below: dict[Node, dict[Node, None]] = {}
    at: dict[Node, list[Routed]] = {}
    tops: dict[Node, None] = {}
    for sequence in running:
        node = sequence.leaf
        at.setdefault(node, []).append(sequence)
        while node.parent is not None:
            children = below.setdefault(node.parent, {})
            is_new = node not in children
            children[node] = None
            if not is_new:
                break
            node = node.parent
        else:
            tops[node] = None
    order: list[Routed] = []
    stack = list(reversed(tops))
    while stack:
        node = stack.pop()
        order += at.get(node, ())
        stack += reversed(below.get(node, {}))
    return order
