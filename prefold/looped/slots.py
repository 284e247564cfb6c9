"""Which slots of the store rows are given at a visit, and what is evicted for them."""

from __future__ import annotations

import numpy as np

from ..cache import SlotPool
from .cache import NodeVisit, VisitCache
from .sequence import Routed
from .steps import VisitOptions

# Slots that the output of a sequence is given at once at a visit, so that its rows lie side by side.
OUTPUT_SLOTS = 8


class SlotAllocator:
    """A SlotAllocator gives out the slots of a store.

    pool      the slots
    visits    how rows go through the model
    cache     holds rows that may be evicted where slots are short; or None
    is_short  whether slots were too few for rows that the last draft had room for
    """

    def __init__(self, pool: SlotPool, visits: VisitOptions, cache: VisitCache | None):
        self.pool, self.visits, self.cache = pool, visits, cache
        self.is_short = False

    def allocate(self, count: int) -> np.ndarray:
        """Returns `count` free slots, int64, or as many as there are."""
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
        """Returns how many slots a sequence may still need, at most: for its prompt, and for its output where room for
        that is set aside."""
        visits = self.visits
        most = max(len(sequence.route), len(visits.order) + visits.prelude + visits.coda if sequence.is_open else 0)
        last, tail = sequence.limit - 1, sequence.tail
        rows = last if sequence.reserve else min(last, len(tail.tokens) + OUTPUT_SLOTS)
        full = len(tail.tokens) - 1 if sequence.ready else 0
        count = (rows - full) * most
        if not sequence.ready:
            for node in sequence.leaf.path():
                there = [node.visits[prefix] for prefix in sequence.prefixes]  # type: ignore[attr-defined]
                count += len(node) * most - sum(int(np.count_nonzero(one.slots[: len(node)])) for one in there)
        return max(0, count)

    def give(self, sequence: Routed, visit: NodeVisit, most: int) -> tuple[int, int]:
        """Gives the next rows of a node slots at the visit that a sequence comes to, as long as there are slots, and no
        more than `most` of them are computed or projected. Returns how many rows have slots, and how many of them are
        computed or projected."""
        visit.make_room()
        node, first = visit.node, visit.done
        rows = slice(first, len(node))
        left = sequence.has_left(node, sequence.visit, rows)
        seen = np.zeros(rows.stop - first, np.int64)
        if left is not None:
            seen = np.where(left & ~visit.owned[rows], sequence.seen_of_left(node, sequence.visit, rows), 0)
        needs = seen == 0  # a slot of its own, to be computed or projected
        count = int(np.searchsorted(np.cumsum(needs), most, side="right"))
        places = np.flatnonzero(needs[:count] & ~visit.owned[first : first + count])
        slots = self.allocate(len(places))
        visit.hold(len(slots))
        if len(slots) < len(places):
            count = int(places[len(slots)])
            places = places[: len(slots)]
        visit.slots[first + places] = slots
        visit.owned[first + places] = True
        there = np.flatnonzero(~needs[:count])
        visit.slots[first + there] = seen[there]
        return count, int(np.count_nonzero(needs[:count]))
