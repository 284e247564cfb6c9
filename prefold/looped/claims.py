"""Which rows the next step of a VisitScheduler has, and the slots that they are given."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

import numpy as np

from ..cache import SlotPool
from ..schedule.admission import Admission
from .cache import NodeVisit, VisitCache, VisitNode
from .draft import Take, VisitDraft
from .sequence import Routed
from .steps import DECIDES, VisitOptions
from .tails import TailVisit

# Slots that a tail takes at once at a visit, so that its rows lie side by side.
TAIL_SLOTS = 8


class Claims:
    """A Claims drafts steps, and claims slots for their rows.

    pool      the slots
    visits    how rows go through the model
    cache     holds rows that may be evicted where slots are short; or None
    is_short  whether there were too few slots for rows that the last draft had room for
    """

    def __init__(self, pool: SlotPool, visits: VisitOptions, cache: VisitCache | None):
        self.pool, self.visits, self.cache = pool, visits, cache
        self.is_short = False

    def draft(self, policy: Admission, running: Collection[Routed], most: int) -> VisitDraft:
        """Returns the rows of the next step, with slots claimed for them; the policy says who comes before whom."""
        self.is_short = False
        return policy.draft(running, VisitDraft(most, self.fill))

    def fill(self, draft: VisitDraft, running: Iterable[Routed]) -> None:
        """Adds rows of these sequences to a draft: where it has none, of those that go to the block which most come to,
        or somebody waits for."""
        groups: dict[Hashable, list[Routed]] = {}
        for sequence in running:
            self.advance(sequence)
            if sequence.visit < len(sequence.route):
                groups.setdefault(self._group(sequence), []).append(sequence)
            elif sequence.is_open:
                if not any(one.key == sequence.key for one in draft.routings):
                    draft.routings.append(sequence)
            else:
                draft.finished.append((sequence, self._last_state(sequence)))
        if not self.visits.refill:
            groups = self._of_one_wave(groups)
        while groups:
            chosen = max(groups, key=lambda group: self._urgency(groups[group]))
            members = groups.pop(chosen)
            if draft.takes and chosen != draft.group:
                continue
            draft.group = chosen
            members.sort(key=lambda sequence: (not sequence.ready, -sequence.waited))
            draft.unit = members[0].route[members[0].visit]
            for sequence in members:
                if draft.left:
                    self._take(draft, sequence)
            if draft.takes:
                break

    def _group(self, sequence: Routed) -> Hashable:
        unit = sequence.route[sequence.visit]
        return unit if self.visits.group == "block" else (unit, sequence.visit, tuple(sequence.route))

    def _urgency(self, members: list[Routed]) -> tuple[int, int]:
        longest = max(sequence.waited for sequence in members)
        rows = sum(1 if sequence.ready else self._pending(sequence) for sequence in members)
        return (longest if longest >= self.visits.patience else 0, rows)

    def _pending(self, sequence: Routed) -> int:
        return sum(visit.pending for visit in sequence.at(sequence.visit))

    def _of_one_wave(self, groups: dict[Hashable, list[Routed]]) -> dict[Hashable, list[Routed]]:
        """Returns only those of the decoding sequences that are on their way, and prompts, while any is on its way."""
        inside = [one for members in groups.values() for one in members if one.ready and one.visit]
        if not inside:
            return groups
        found = {}
        for group, members in groups.items():
            some = [one for one in members if not one.ready or one.visit]
            if some:
                found[group] = some
        return found

    def advance(self, sequence: Routed) -> None:
        """Settles what needs no computing of a sequence's rows, and moves it on to the visit that some come to next."""
        while sequence.visit < len(sequence.route):
            pending = False
            for visit in sequence.at(sequence.visit):
                if visit.pending:
                    pending = pending or self.settle_left(sequence, visit)
            if pending:
                return
            sequence.visit += 1

    def settle_left(self, sequence: Routed, visit: NodeVisit) -> bool:
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
        """Adds the next rows of a sequence to a draft, and what is read of the last one."""
        t = sequence.visit
        for visit in sequence.at(t):
            taken = draft.takes[visit].rows if visit in draft.takes else 0
            missing = visit.pending - taken
            if not missing:
                continue
            if taken:
                return  # another sequence's, cut off
            rows = self._claim(draft, sequence, visit)
            if rows:
                draft.takes[visit] = Take(sequence, t, rows)
            if rows < missing:
                return
        last = self._last(sequence, t)
        final = not sequence.is_open and t == len(sequence.route) - 1
        if last not in draft.takes or not self._is_computed(sequence, last):
            return
        # What is read of a model with a coda is read after it.
        may_leave = sequence.ready and not self.visits.coda and sequence.leaves(last.node.stop - 1, t) >= DECIDES
        if final or may_leave:
            draft.reads.append((sequence, last, final))

    def _last(self, sequence: Routed, t: int) -> NodeVisit:
        """Returns what the node of a sequence's last row has at visit t."""
        node = sequence.tail if sequence.tail.tokens else sequence.leaf
        return node.visits[sequence.prefixes[t]]  # type: ignore[union-attr]

    def _is_computed(self, sequence: Routed, last: NodeVisit) -> bool:
        rows = slice(len(last.node) - 1, len(last.node))
        return sequence.has_left(last.node, sequence.visit, rows) is None

    def _last_state(self, sequence: Routed) -> int:
        """Returns the slot of the state of a sequence's last row, which has made all its visits."""
        node = sequence.tail if sequence.tail.tokens else sequence.leaf
        assert isinstance(node, VisitNode)
        rows = slice(len(node) - 1, len(node))
        return int(sequence.state_slots(node, len(sequence.route), rows)[0])

    def _claim(self, draft: VisitDraft, sequence: Routed, visit: NodeVisit) -> int:
        """Gives the next rows of a node slots at a visit, as many as the step and the store have room for; returns how
        many."""
        visit.make_room()
        node, first = visit.node, visit.done
        rows = slice(first, len(node))
        pending = rows.stop - first
        left = sequence.has_left(node, sequence.visit, rows)
        if left is None:
            count, needs = min(pending, draft.left), None
            computed = count
        else:
            seen = np.where(left & ~visit.owned[rows], sequence.seen_of_left(node, sequence.visit, rows), 0)
            needs = seen == 0  # a slot of its own, to be computed or projected
            count = int(np.searchsorted(np.cumsum(needs), draft.left, side="right"))
            computed = int(np.count_nonzero(needs[:count]))
        wanted = ~visit.owned[first : first + count]
        if needs is not None:
            wanted &= needs[:count]
        places = np.flatnonzero(wanted)
        slots = self._slots(sequence, visit, len(places))
        if len(slots) < len(places):
            count = int(places[len(slots)])
            places = places[: len(slots)]
            computed = count if needs is None else int(np.count_nonzero(needs[:count]))
        visit.slots[first + places] = slots
        visit.owned[first + places] = True
        if needs is not None:
            there = np.flatnonzero(~needs[:count])
            visit.slots[first + there] = seen[there]
        draft.left -= computed
        return count

    def _slots(self, sequence: Routed, visit: NodeVisit, count: int) -> np.ndarray:
        """Returns up to `count` slots for rows at a visit; of a tail some more are claimed, for the rows to come."""
        if not isinstance(visit, TailVisit):
            slots = self._allocate(count)
            visit.hold(len(slots))
            return slots
        slots = visit.take_spare(count)
        wanted = count - len(slots)
        if not wanted:
            return slots
        more = max(0, min(TAIL_SLOTS, sequence.limit - 1 - len(sequence.tail.tokens))) if sequence.ready else 0
        if self.pool.free_slots < wanted + more:
            more = 0
        found = self._allocate(wanted + more)
        rest = found[wanted:]
        if len(rest) and rest[-1] - rest[0] == len(rest) - 1:
            visit.keep_spare(rest)
            visit.hold(len(found))
        else:
            self.pool.free(rest)
            visit.hold(len(found) - len(rest))
        return np.concatenate((slots, found[:wanted]))

    def _allocate(self, count: int) -> np.ndarray:
        """Returns `count` free slots, or as many as there are."""
        self.make_free(count)
        slots = self.pool.allocate(min(count, self.pool.free_slots))
        assert slots is not None
        self.is_short |= len(slots) < count
        return slots

    @property
    def num_kept(self) -> int:
        """Returns how many slots may be evicted."""
        return 0 if self.cache is None else self.cache.num_slots

    def make_free(self, count: int) -> None:
        """Evicts kept rows until so many slots are free, or nothing is left to evict."""
        visits = len(self.visits.order)
        while self.pool.free_slots < count and self.cache is not None:
            rows = max(1, (count - self.pool.free_slots) // visits)
            if not (self.cache.evict(rows) or self.cache.evict_untaken()):
                return

    def to_come(self, sequence: Routed) -> int:
        """Returns how many slots a sequence may still claim, at most: for its prompt, and for its output where room for
        that is set aside."""
        visits = self.visits
        most = max(len(sequence.route), len(visits.order) + visits.prelude + visits.coda if sequence.is_open else 0)
        last, tail = sequence.limit - 1, sequence.tail
        rows = last if sequence.reserve else min(last, len(tail.tokens) + TAIL_SLOTS)
        full = len(tail.tokens) - 1 if sequence.ready else 0
        count = (rows - full) * most
        if not sequence.ready:
            for node in sequence.leaf.path():
                there = [node.visits[prefix] for prefix in sequence.prefixes]  # type: ignore[attr-defined]
                count += len(node) * most - sum(int(np.count_nonzero(one.slots[: len(node)])) for one in there)
        return max(0, count)
