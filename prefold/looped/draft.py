"""What the next step of a VisitScheduler computes: which block it visits, which rows go there, and the slots they get.

A step has rows of prompts, node by node, and rows of sequences that generate, over arrays (`decode.py`). All go to one
block: that which most rows go to next, or which a sequence has waited for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

import numpy as np

from ..schedule.admission import Admission
from ..schedule.generate_step import Running
from .cache import NodeVisit
from .decode import DecodeBatch, DecodeRows, Decoding, Part
from .sequence import Routed
from .slots import SlotAllocator


@dataclass(frozen=True, slots=True)
class Take:
    """A Take is some rows of a node that a step brings to a visit: the next `rows` that are not settled.

    sequence  the first that needs them
    t         which visit of its route
    """

    sequence: Routed
    t: int
    rows: int


@dataclass(slots=True)
class VisitDraft:
    """A VisitDraft is what a step will compute, while that is being decided.

    most      the most rows of the step
    add       adds rows of sequences to a draft
    unit      the block that it visits, PRELUDE or CODA; None: it only reads or routes
    left      how many more rows the step may have
    group     which sequences it has rows of, as their block or their template and visit
    takes     the rows of prompts, by what they are of
    parts     which sequences that generate have rows, while that is being decided
    decode    their rows, then; None: there are none
    reads     (sequence, what its last row has at this visit): its route ends here, and the sequence takes a token
    finished  (sequence, slot): the sequence takes a token from the state in the slot
    routings  sequences whose router is asked how their route goes on
    """

    most: int
    add: Callable[[VisitDraft, Collection[Running]], None]
    unit: int | None = None
    left: int = field(init=False)
    group: Hashable = None
    takes: dict[NodeVisit, Take] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    decode: DecodeRows | None = None
    reads: list[tuple[Routed, NodeVisit]] = field(default_factory=list)
    finished: list[tuple[Routed, int]] = field(default_factory=list)
    routings: list[Routed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.most

    @property
    def num_taken(self) -> int:
        """Returns how many rows were added."""
        return sum(take.rows for take in self.takes.values()) + sum(len(part[0]) for part in self.parts)

    def fill(self, running: Collection[Running]) -> None:
        """Adds rows of these sequences, while there is room."""
        self.add(self, running)

    @property
    def has_rows(self) -> bool:
        """Returns whether rows go to a block."""
        return bool(self.takes or self.parts)

    @property
    def is_empty(self) -> bool:
        """Returns whether the step would do nothing."""
        return not (self.has_rows or self.finished or self.routings)


@dataclass(slots=True)
class _Group:
    """A _Group is sequences that go to one block next: those that generate by their numbers in the batch, and prompts.
    longest: for how many steps one of them has waited; rows: how many go there."""

    unit: int
    numbers: np.ndarray
    prompts: list[Routed] = field(default_factory=list)
    longest: int = 0
    rows: int = 0


class Drafting:
    """A Drafting drafts steps.

    slots     gives out slots
    decoding  the rows of sequences that generate
    """

    def __init__(self, slots: SlotAllocator, decoding: Decoding):
        self.slots, self.decoding, self.visits = slots, decoding, slots.visits
        self._batch: DecodeBatch | None = None

    def draft(self, policy: Admission, running: Collection[Routed], most: int) -> VisitDraft:
        """Returns the rows of the next step, with slots given for them; the policy says who comes before whom."""
        self.slots.is_short = False
        self._batch = batch = self.decoding.batch(running)
        draft = policy.draft(running, VisitDraft(most, self.fill))
        if draft.parts:
            draft.decode = self.decoding.rows(batch, draft.parts)
            if policy.are_alike and len(batch.sequences) == len(running):
                self.decoding.go_on(draft.decode, most)
        return draft

    def fill(self, draft: VisitDraft, running: Collection[Routed]) -> None:
        """Adds rows of these sequences to a draft: of those whose next block is the draft's. Where it has none yet, it
        gets the block that most rows of these sequences go to, or that one of them has waited for too long."""
        groups = self._groups(draft, running)
        while groups:
            chosen = max(groups, key=lambda key: (self._overdue(groups[key].longest), groups[key].rows))
            group = groups.pop(chosen)
            if draft.has_rows and chosen != draft.group:
                continue
            draft.group, draft.unit = chosen, group.unit
            if draft.left and len(group.numbers):
                assert self._batch is not None
                part, rows = self.decoding.choose(self._batch, group.numbers, draft.left)
                draft.left -= rows
                if len(part[0]) or len(part[1]):
                    draft.parts.append(part)
            for sequence in sorted(group.prompts, key=lambda sequence: -sequence.waited):
                if draft.left:
                    self._take(draft, sequence)
            if draft.has_rows:
                break

    def _overdue(self, steps: int) -> int:
        return steps if steps >= self.visits.patience else 0

    def _groups(self, draft: VisitDraft, running: Collection[Routed]) -> dict[Hashable, _Group]:
        """Returns these sequences by where they go next; those that go to no block are added to the draft."""
        batch, groups = self._batch, dict[Hashable, _Group]()
        assert batch is not None
        outputs, by_template = batch.outputs, self.visits.group == "template"
        if len(batch.sequences) == len(running):
            numbers = np.arange(len(batch.sequences))
        else:
            numbers = np.array(sorted(batch.number[one] for one in running if one.ready), np.int64)
        visit = outputs.visit[batch.place[numbers]]
        if not self.visits.refill and visit.any():  # those that begin a row wait for those on their way
            numbers, visit = numbers[visit > 0], visit[visit > 0]
        route, waited = batch.route[numbers], outputs.waited[batch.place[numbers]]
        unit = batch.units[route, visit]
        kind = route * batch.most + visit if by_template else unit
        for value in np.unique(kind).tolist():
            some = np.flatnonzero(kind == value)
            block = int(unit[some[0]])
            key = (block, int(visit[some[0]]), batch.routes[route[some[0]]]) if by_template else block
            groups[key] = _Group(block, numbers[some], [], int(waited[some].max()), len(some))
        if len(batch.sequences) < len(running):
            for sequence in running:
                if not sequence.ready:
                    self._enter(draft, groups, sequence)
        return groups

    def _enter(self, draft: VisitDraft, groups: dict[Hashable, _Group], sequence: Routed) -> None:
        """Enters a sequence with a prompt to compute where it goes next."""
        self._advance(sequence)
        if sequence.visit == len(sequence.route):
            if not sequence.is_open:
                draft.finished.append((sequence, self._last_state(sequence)))
            elif not any(one.key == sequence.key for one in draft.routings):
                draft.routings.append(sequence)
            return
        unit = sequence.route[sequence.visit]
        key = (unit, sequence.visit, tuple(sequence.route)) if self.visits.group == "template" else unit
        group = groups.setdefault(key, _Group(unit, np.zeros(0, np.int64)))
        group.prompts.append(sequence)
        group.longest = max(group.longest, sequence.waited)
        group.rows += sum(visit.pending for visit in sequence.at(sequence.visit))

    def _advance(self, sequence: Routed) -> None:
        """Settles what needs no computing of a prompt's rows, and moves it on to the visit that some come to next."""
        while sequence.visit < len(sequence.route):
            pending = False
            for visit in sequence.at(sequence.visit):
                if visit.pending:
                    pending = pending or self._settle_left(sequence, visit)
            if pending:
                return
            sequence.visit += 1

    def _settle_left(self, sequence: Routed, visit: NodeVisit) -> bool:
        """Settles the next rows that left before and whose K/V is there already; returns whether rows are pending."""
        visit.make_room()
        node, first = visit.node, visit.done
        if not sequence.left_before(visit, sequence.visit):
            return True
        rows = slice(first, len(node))
        left = sequence.has_left(node, sequence.visit, rows)
        assert left is not None
        seen = sequence.seen_of_left(node, sequence.visit, rows)
        there = left & (seen != 0) & ~visit.owned[rows]
        count = len(there) if there.all() else int(there.argmin())
        if count:
            visit.slots[first : first + count] = seen[:count]
            visit.left[first : first + count] = True
            visit.settle(count)
        return visit.pending > 0

    def _take(self, draft: VisitDraft, sequence: Routed) -> None:
        """Adds the next rows of a prompt to a draft, and what is read of the last one."""
        t = sequence.visit
        for visit in sequence.at(t):
            taken = draft.takes[visit].rows if visit in draft.takes else 0
            missing = visit.pending - taken
            if not missing:
                continue
            if taken:
                return  # another sequence's, cut off
            rows, computed = self.slots.give(sequence, visit, draft.left)
            draft.left -= computed
            if rows:
                draft.takes[visit] = Take(sequence, t, rows)
            if rows < missing:
                return
        node = sequence.last_node
        last = node.visits[sequence.prefixes[t]]
        if sequence.is_open or t < len(sequence.route) - 1 or last not in draft.takes:
            return
        if sequence.has_left(node, t, slice(len(node) - 1, len(node))) is None:
            draft.reads.append((sequence, last))

    def _last_state(self, sequence: Routed) -> int:
        """Returns the slot of the state of a sequence's last row, which has made all its visits."""
        node = sequence.last_node
        return int(sequence.state_slots(node, len(sequence.route), slice(len(node) - 1, len(node)))[0])
