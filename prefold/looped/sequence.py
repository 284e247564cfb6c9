"""A sequence whose rows go through blocks a visit at a time: its route, and the slots of its rows at each visit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..schedule.generate_step import SequenceState
from ..types import Exits
from .cache import NodeVisit, Prefix, TailNode, VisitNode
from .outputs import NEVER, OutputRows
from .steps import CODA, DECIDES, LEAVES, PRELUDE, STAYS, VisitOptions

NAN = float("nan")


@dataclass(slots=True)
class ExitRecord:
    """An ExitRecord holds the route that a request's rows took and the visits after which they left, so that rows which
    are computed again take the same route and leave after the same visits.

    route   the blocks visited, prelude and coda included; None: not known yet
    prompt  int16 [rows of the prompt]: after how many visits each row left; None: not known yet
    tails   by sample: after how many visits the row of each of its tokens left

    Whether a row leaves after its n-th visit to a block depends on its recorded past, or else on its rule:

    recorded, or the rule                            before                at and behind
    that it left after m visits, which are not all   n < m: STAYS          n >= m: LEAVES
    that it made all m visits of its route           n < m: STAYS          n = m: STAYS; a row of a prompt by its rule
    its rule, min_visits a and max_visits b          n < a: STAYS          a <= n < b: DECIDES    n >= b: LEAVES

    For a route that ends is no exit: others may go on from its rows. By its rule a row STAYS for good where it has
    neither criteria nor max_visits, and after the last visit that any route may make. Rows of prompts that do not leave
    by rules always stay. `LoopedSequence.when` gives a line of the table as two numbers, and `leaves_after` applies
    them. Visits are entered in `tails` when a row is read.
    """

    route: tuple[int, ...] | None = None
    prompt: np.ndarray | None = None
    tails: dict[int, list[int]] = field(default_factory=dict)


def leaves_after(number: np.ndarray | int, decides: np.ndarray, leaves: np.ndarray, most: int) -> np.ndarray:
    """Returns whether rows leave after a visit, int8: LEAVES, STAYS or DECIDES, as the table of ExitRecord says.

    number           of the visit, of those to blocks, from 1
    decides, leaves  int64 [n]: as `LoopedSequence.when` gives them
    most             visits to blocks that any route may make
    """
    must_leave = (number >= leaves) & ((number < most) | (number == leaves))
    return np.where(must_leave, LEAVES, np.where((number >= decides) & (number < most), DECIDES, STAYS)).astype(np.int8)


class LoopedSequence(SequenceState):
    """A LoopedSequence is a SequenceState whose rows go through blocks a visit at a time.

    namespace     of its rows
    route         the visits that are known: blocks, PRELUDE first and CODA last where the model has them
    is_open       whether the router has still to say how the route goes on
    prefixes      the route prefix of each visit
    exits         when rows leave
    visits        how rows go through the model
    exit_record   the route and exits that were decided before
    outputs       the arrays that hold the slots of its tail, while it runs
    visit         the index of the visit that its rows come to next; as many as the route has: all rows are there
    steps_waited  for how many steps it has waited
    rows_there    how many leading rows of the prompt were there at each of the visits that it has come to
    """

    __slots__ = ("exit_record", "exits", "is_open", "namespace", "outputs", "prefixes", "rows_there", "visits")

    tail: TailNode

    def __init__(
        self,
        *arguments: Any,
        outputs: OutputRows,
        namespace: tuple[Hashable, ...],
        exits: Exits,
        visits: VisitOptions,
        exit_record: ExitRecord,
    ):
        super().__init__(*arguments)
        self.outputs, leaf, tokens = outputs, self.leaf, self.tail.tokens
        self.tail = TailNode(leaf, tokens, leaf.stop, outputs)
        self.tail.lost = bool(tokens)
        self.namespace, self.exits, self.visits, self.exit_record = namespace, exits, visits, exit_record
        self.route: list[int] = []  # type: ignore[assignment]
        self.prefixes: list[Prefix] = []
        self.rows_there = leaf.stop
        if exit_record.route is None:
            blocks = exits.route or (() if visits.routed else visits.order)
            route = (*((PRELUDE,) if visits.prelude else ()), *blocks)
            if blocks:
                route = exit_record.route = (*route, *((CODA,) if visits.coda else ()))
        else:
            route = exit_record.route
        self.is_open = exit_record.route is None
        for unit in route:
            self.go_on(unit)

    @property
    def visit(self) -> int:
        place = self.tail.place
        return 0 if place is None else int(self.outputs.visit[place])

    @visit.setter
    def visit(self, visit: int) -> None:
        assert self.tail.place is not None
        self.outputs.visit[self.tail.place] = visit

    @property
    def steps_waited(self) -> int:
        place = self.tail.place
        return 0 if place is None else int(self.outputs.steps_waited[place])

    @steps_waited.setter
    def steps_waited(self, steps: int) -> None:
        assert self.tail.place is not None
        self.outputs.steps_waited[self.tail.place] = steps

    def run(self) -> None:
        """Starts the sequence: its tail gets a place in the arrays, and its rows come to the first visit."""
        self.state, self.ready = "running", False
        self.tail.place = self.outputs.take()
        self.enter_row()

    def enter_row(self) -> None:
        """Enters the row of its last token into the arrays, as a row that comes to the first visit."""
        outputs, place, row = self.outputs, self.tail.place, len(self.tail.tokens) - 1
        outputs.room_for(row + 1)
        outputs.visit[place], outputs.row[place] = 0, row
        if row >= 0:
            outputs.token[place] = self.tail.tokens[row]
            outputs.decides[place], outputs.leaves[place] = self.when(row)

    def nodes(self) -> list[VisitNode]:
        """Returns the nodes of the prompt and the tail, from the root down."""
        return [*self.leaf.path(), self.tail]  # type: ignore[list-item]

    @property
    def last_node(self) -> VisitNode:
        """Returns the node of its last row."""
        return self.tail if self.tail.tokens else self.leaf  # type: ignore[return-value]

    def go_on(self, unit: int) -> None:
        """Adds a visit to the route, and enters its rows there."""
        self.route.append(unit)
        self.prefixes.append((*self.prefixes[-1], unit) if self.prefixes else (unit,))
        for node in self.nodes():
            node.visit(self.prefixes[-1]).users += 1

    def find(self, prefixes: Sequence[Prefix]) -> None:
        """Lowers `rows_there` to the leading rows of its prompt that are there at all of these visits."""
        path: list[VisitNode] = self.leaf.path()  # type: ignore[assignment]
        for prefix in prefixes:
            self.rows_there = min(self.rows_there, sum(node.visits[prefix].num_settled for node in path))

    def at(self, t: int) -> Iterator[NodeVisit]:
        """Yields the NodeVisit of each of its nodes at visit t, from the root down, until it generates."""
        return (node.visits[self.prefixes[t]] for node in self.nodes())

    @property
    def num_visits(self) -> int:
        """Returns how many of its visits are to blocks."""
        return sum(unit >= 0 for unit in self.route)

    def has_left(self, node: VisitNode, t: int, rows: slice) -> np.ndarray | None:
        """Returns which of a node's rows left before visit t, bool; None: none did, or all come to it, for it is the
        coda."""
        rows_left = node.visits[self.prefixes[t - 1]].has_left[rows] if t and self.route[t] != CODA else None
        return rows_left if rows_left is not None and rows_left.any() else None

    def slots_of_left(self, visit: NodeVisit, t: int) -> np.ndarray:
        """Returns the earlier slot that visit t uses for each unsettled row that left before it, int64; 0 for the other
        unsettled rows, and where K/V has to be projected."""
        node, rows = visit.node, slice(visit.num_settled, len(visit.node))
        is_left = self.has_left(node, t, rows)
        earlier = next((at for at in range(t - 1, -1, -1) if self.route[at] == self.route[t]), None)
        if is_left is None or earlier is None or (self.visits.keys == "project" and not earlier):
            return np.zeros(visit.num_pending, np.int64)
        reuses = is_left & ~visit.owns_slot[rows]
        if self.visits.keys == "project":
            reuses &= node.visits[self.prefixes[earlier - 1]].has_left[rows]
        return np.where(reuses, node.visits[self.prefixes[earlier]].slots[rows], 0)

    def state_slots(self, node: VisitNode, t: int, rows: slice) -> np.ndarray:
        """Returns the slots of the states with which rows come to visit t, int64; 0 before the first."""
        slots = np.zeros(rows.stop - rows.start, np.int64)
        for earlier in range(t - 1, -1, -1):
            earlier_visit, is_left = node.visits[self.prefixes[earlier]], self.has_left(node, earlier, rows)
            has_state = earlier_visit.owns_slot[rows]
            if is_left is not None:
                has_state = has_state & ~is_left  # a row that was projected has none
            slots = np.where((slots == 0) & has_state, earlier_visit.slots[rows], slots)
            if slots.all():
                break
        return slots

    def when(self, row: int) -> tuple[int, int]:
        """Returns two numbers of visits to blocks for a row of the tail: from the first on, its criteria decide whether
        it leaves; after the second it leaves in any case. Either may be NEVER. See the table of ExitRecord."""
        recorded = self.exit_record.tails.get(self.sample, ())
        recorded = recorded if row < len(recorded) else self.exits.visits
        num_visits = recorded[row] if row < len(recorded) else 0
        if not num_visits:
            return self._by_rule()
        ends = not self.is_open and num_visits == self.num_visits
        return NEVER, NEVER if ends else num_visits

    def _by_rule(self) -> tuple[int, int]:
        exits = self.exits
        most = NEVER if exits.max_visits is None or exits.max_visits >= len(self.visits.order) else exits.max_visits
        if exits.threshold in (None, 1) and exits.change is None:
            return NEVER, NEVER if most == NEVER else max(most, exits.min_visits)
        return exits.min_visits, most

    def _when_of_prompt(self, position: int) -> tuple[int, int]:
        """Returns the two numbers that `when` returns, for a row of the prompt."""
        num_visits = 0 if self.exit_record.prompt is None else int(self.exit_record.prompt[position])
        if num_visits and (self.is_open or num_visits != self.num_visits):
            return NEVER, num_visits
        decides, leaves = self._by_rule()
        return max(num_visits, decides), max(num_visits, leaves)

    def leaving(self, positions: range, t: int) -> tuple[np.ndarray, tuple[float, float]]:
        """Returns of rows at positions whether they leave after visit t, as `leaves_after` does, and the threshold and
        the change of state at which they do, nan where they do not."""
        start = self.leaf.stop
        if self.route[t] < 0 or (positions.start < start and not self.exits.prompts):
            return np.full(len(positions), STAYS, np.int8), (NAN, NAN)
        rules = [self.when(at - start) if at >= start else self._when_of_prompt(at) for at in positions]
        number = t + (self.route[0] != PRELUDE)  # of visits to blocks, this one included
        return leaves_after(number, *np.array(rules, np.int64).T, len(self.visits.order)), self.criteria

    @property
    def criteria(self) -> tuple[float, float]:
        """Returns the threshold and the change of state at which its rows leave, nan where they do not."""
        threshold, change = self.exits.threshold, self.exits.change
        return NAN if threshold in (None, 1) else float(threshold), NAN if change is None else change

    def visits_made(self, node: VisitNode) -> np.ndarray:
        """Returns after how many visits to blocks each row of a node left, int16, once all have left."""
        num_visits = np.zeros(len(node), np.int16)
        number = 0
        for unit, prefix in zip(self.route, self.prefixes, strict=True):
            number += unit >= 0
            if unit >= 0:
                num_visits[(num_visits == 0) & node.visits[prefix].has_left] = number
        num_visits[num_visits == 0] = number
        return num_visits

    def begin_output(self) -> None:
        """Makes it a sequence that generates, once all rows of its prompt and its tokens have left."""
        tails, tail = self.exit_record.tails.setdefault(self.sample, []), self.tail
        if self.exits.prompts and self.exit_record.prompt is None:
            self.exit_record.prompt = np.concatenate([self.visits_made(node) for node in self.nodes()[:-1]])
        if len(tail.tokens) > len(tails):
            tails.extend(self.visits_made(tail)[len(tails) :].tolist())
        tail.enter()
        self.ready = True
