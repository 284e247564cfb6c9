"""The next step of a VisitScheduler: which block it visits, which rows go there, and the slots that they get.

A step has rows of prompts, node by node, and rows of sequences that generate, over arrays (`decode.py`). All go to one
block: that which most rows go to next, or which a sequence has waited for too long.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

import numpy as np

from ..schedule.generate_step import SequenceState
from .cache import NodeVisit, SlotAllocator
from .decode import DecodeBatch, DecodeRows, Decoding, Part
from .sequence import LoopedSequence


@dataclass(frozen=True, slots=True)
class Take:
    """A Take says how many rows of a node a step brings to a visit: the next `rows` that are not settled.

    sequence  the first sequence that needs the rows
    t         the number of the visit in that sequence's route
    """

    sequence: LoopedSequence
    t: int
    rows: int


@dataclass(slots=True)
class _Group:
    """A _Group holds the sequences whose next block is the same: `numbers` in the batch of those that generate, and
    those with prompts to compute. longest: the most steps that any has waited; rows: how many rows go to the block."""

    unit: int
    numbers: np.ndarray
    prompts: list[LoopedSequence] = field(default_factory=list)
    longest: int = 0
    rows: int = 0


@dataclass(slots=True)
class VisitDraft:
    """A VisitDraft collects the rows and reads of the next step while they are being chosen.

    max_rows  the most rows of the step
    slots     gives out slots
    decoding  chooses rows of the generating sequences, which are those of `batch`
    unit      the block that the step visits, PRELUDE or CODA; None: it only reads or routes
    room      how many more rows the step may have
    group     the key of the group whose rows it has: their block, or their block, visit and route
    takes     the rows of prompts, by node and visit
    parts     the chosen rows of generating sequences, as of `Decoding.choose`
    decode    these rows, once all are chosen; None: there are none
    reads     (sequence, visit of its last node): its route ends here, and the sequence takes a token
    finished  (sequence, slot): the sequence takes a token from the state in the slot
    routings  sequences whose router is asked how their route goes on
    """

    max_rows: int
    slots: SlotAllocator
    decoding: Decoding
    batch: DecodeBatch
    unit: int | None = None
    room: int = field(init=False)
    group: Hashable = None
    takes: dict[NodeVisit, Take] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    decode: DecodeRows | None = None
    reads: list[tuple[LoopedSequence, NodeVisit]] = field(default_factory=list)
    finished: list[tuple[LoopedSequence, int]] = field(default_factory=list)
    routings: list[LoopedSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room = self.max_rows

    @property
    def num_rows(self) -> int:
        """Returns how many rows were added."""
        return sum(take.rows for take in self.takes.values()) + sum(len(part[0]) for part in self.parts)

    @property
    def has_rows(self) -> bool:
        """Returns whether rows go to a block."""
        return bool(self.takes or self.parts)

    @property
    def is_empty(self) -> bool:
        """Returns whether the step would do nothing."""
        return not (self.has_rows or self.finished or self.routings)

    def fill(self, running: Collection[SequenceState]) -> None:
        """Adds rows of these sequences, while there is room: of those whose next block is the step's. Where it has none
        yet, it gets the block that most rows of these sequences go to, or that one of them has waited for too long."""
        groups = self._groups(running)  # type: ignore[arg-type]

        def wants(key: Hashable) -> tuple[int, int]:
            longest = groups[key].longest
            return longest if longest >= self.slots.visits.patience else 0, groups[key].rows

        while groups:
            chosen = max(groups, key=wants)
            group = groups.pop(chosen)
            if self.has_rows and chosen != self.group:
                continue
            self.group, self.unit = chosen, group.unit
            if self.room and len(group.numbers):
                part, rows = self.decoding.choose(self.batch, group.numbers, self.room)
                self.room -= rows
                if len(part[0]) or len(part[1]):
                    self.parts.append(part)
            for sequence in sorted(group.prompts, key=lambda sequence: -sequence.steps_waited):
                if self.room:
                    self._take(sequence)
            if self.has_rows:
                break

    def _groups(self, running: Collection[LoopedSequence]) -> dict[Hashable, _Group]:
        """Returns these sequences, grouped by their next block; those that go to no block are added to the draft."""
        batch, visits, groups = self.batch, self.slots.visits, dict[Hashable, _Group]()
        outputs, by_template = batch.outputs, visits.group == "template"
        if len(batch.sequences) == len(running):
            numbers = np.arange(len(batch.sequences))
        else:
            numbers = np.array(sorted(batch.number[sequence] for sequence in running if sequence.ready), np.int64)
        visit = outputs.visit[batch.place[numbers]]
        if not visits.refill and visit.any():  # those that begin a row wait for those on their way
            numbers, visit = numbers[visit > 0], visit[visit > 0]
        route, steps_waited = batch.route[numbers], outputs.steps_waited[batch.place[numbers]]
        unit = batch.units[route, visit]
        kind = route * batch.most + visit if by_template else unit
        for value in np.unique(kind).tolist():
            members = np.flatnonzero(kind == value)
            block = int(unit[members[0]])
            key = (block, int(visit[members[0]]), batch.routes[route[members[0]]]) if by_template else block
            groups[key] = _Group(block, numbers[members], [], int(steps_waited[members].max()), len(members))
        if len(batch.sequences) < len(running):
            for sequence in running:
                if not sequence.ready:
                    self._enter(groups, sequence)
        return groups

    def _enter(self, groups: dict[Hashable, _Group], sequence: LoopedSequence) -> None:
        """Enters a sequence that has a prompt to compute into the group of its next block."""
        self._advance(sequence)
        if sequence.visit == len(sequence.route):
            if not sequence.is_open:
                node = sequence.last_node
                state = sequence.state_slots(node, len(sequence.route), slice(len(node) - 1, len(node)))
                self.finished.append((sequence, int(state[0])))
            elif not any(routing.key == sequence.key for routing in self.routings):
                self.routings.append(sequence)
            return
        unit = sequence.route[sequence.visit]
        key = (unit, sequence.visit, tuple(sequence.route)) if self.slots.visits.group == "template" else unit
        group = groups.setdefault(key, _Group(unit, np.zeros(0, np.int64)))
        group.prompts.append(sequence)
        group.longest = max(group.longest, sequence.steps_waited)
        group.rows += sum(visit.num_pending for visit in sequence.at(sequence.visit))

    def _advance(self, sequence: LoopedSequence) -> None:
        """Settles a prompt's rows that need no computing, and moves it on to the next visit with pending rows."""
        while sequence.visit < len(sequence.route):
            pending = False
            for visit in sequence.at(sequence.visit):
                if visit.num_pending:
                    pending = pending or self._settle_left(sequence, visit)
            if pending:
                return
            sequence.visit += 1

    def _settle_left(self, sequence: LoopedSequence, visit: NodeVisit) -> bool:
        """Settles the next rows that left before and whose K/V is there already; returns whether rows are pending."""
        first, slots = visit.num_settled, sequence.slots_of_left(visit, sequence.visit)
        count = len(slots) if slots.all() else int((slots == 0).argmax())
        if count:
            visit.slots[first : first + count] = slots[:count]
            visit.has_left[first : first + count] = True
            visit.settle(count)
        return visit.num_pending > 0

    def _take(self, sequence: LoopedSequence) -> None:
        """Adds the next rows of a prompt to the step, and the read of its last row."""
        t = sequence.visit
        for visit in sequence.at(t):
            num_taken = self.takes[visit].rows if visit in self.takes else 0
            missing = visit.num_pending - num_taken
            if not missing:
                continue
            if num_taken:
                return  # another sequence's, cut off
            rows = self._give(sequence, visit)
            if rows:
                self.takes[visit] = Take(sequence, t, rows)
            if rows < missing:
                return
        node = sequence.last_node
        last = node.visits[sequence.prefixes[t]]
        if sequence.is_open or t < len(sequence.route) - 1 or last not in self.takes:
            return
        if sequence.has_left(node, t, slice(len(node) - 1, len(node))) is None:
            self.reads.append((sequence, last))

    def _give(self, sequence: LoopedSequence, visit: NodeVisit) -> int:
        """Gives the next rows of a node slots at the visit that a sequence comes to, as long as there are slots, and
        room for those that are computed or projected. Returns how many rows have slots."""
        node, first, earlier_slots = visit.node, visit.num_settled, sequence.slots_of_left(visit, sequence.visit)
        needs = earlier_slots == 0  # a slot of its own, to be computed or projected
        count = int(np.searchsorted(np.cumsum(needs), self.room, side="right"))
        places = np.flatnonzero(needs[:count] & ~visit.owns_slot[first : first + count])
        slots = self.slots.allocate(len(places))
        if node.account is not None:
            node.account.hold(len(slots))
        if len(slots) < len(places):
            count = int(places[len(slots)])
            places = places[: len(slots)]
        visit.slots[first + places] = slots
        visit.owns_slot[first + places] = True
        reused = np.flatnonzero(~needs[:count])
        visit.slots[first + reused] = earlier_slots[reused]
        self.room -= int(np.count_nonzero(needs[:count]))
        return count
