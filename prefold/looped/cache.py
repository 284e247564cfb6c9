"""Where the K/V of rows lie that go through blocks a visit at a time, and may leave before the last one.

A slot is one row at one visit. The rows of a node have slots for each *route prefix*, the blocks b_0..b_t that were
visited: routes that begin alike have their first visits in common, and (0, 1, 0) shares nothing with the third visit
of (1, 1, 0). A row that has left is referred to by deeper visits: they name the slot of an earlier visit, or one slot
that was projected from its state, and no K/V is copied.

Splitting a node, using, keeping and evicting it are those of any radix tree: all visits of a row come and go together.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..cache.radix import RadixCache
from ..cache.slots import SlotPool
from ..cache.tree import NO_SLOTS, Node
from ..prefix import shared_by, token_bytes
from ..prefix.radix import TOKEN
from .outputs import OutputRows
from .steps import VisitOptions

Prefix = tuple[int, ...]


class NodeVisit:
    """A NodeVisit holds the slots of a node's rows at one visit, which is to the last block of a route prefix.

    node         the node of the rows
    prefix       the blocks visited, this one included
    slots        int64 [rows]: where the K/V lies that this visit sees of each row; 0: nowhere yet
    owns_slot    bool: the slot was claimed for this row at this visit; else it is that of another visit of the row
    has_left     bool: the row left after this visit or an earlier one
    num_settled  how many leading rows are settled: the K/V that this visit sees of them are there
    users        how many sequences, waiting or running, take this route prefix
    """

    __slots__ = ("_runs", "has_left", "node", "num_settled", "owns_slot", "prefix", "slots", "users")

    def __init__(self, node: VisitNode, prefix: Prefix):
        self.node, self.prefix, self.users = node, prefix, 0
        self.forget()

    def forget(self) -> None:
        """Forgets all rows; the caller frees their slots."""
        size = len(self.node)
        self.slots, self.owns_slot, self.has_left = np.zeros(size, np.int64), np.zeros(size, bool), np.zeros(size, bool)
        self.num_settled = 0
        self._runs: list[tuple[int, int, int]] | None = None

    @property
    def num_pending(self) -> int:
        """Returns how many rows are not settled yet."""
        return len(self.node) - self.num_settled

    @property
    def root(self) -> Node:
        """Returns the node above; of the first of a path it is the root."""
        assert self.node.parent is not None
        return self.node.parent

    @property
    def parent(self) -> NodeVisit | None:
        """Returns the same visit of the node above; None below a root."""
        above = self.root
        return above.visits[self.prefix] if isinstance(above, VisitNode) and above.parent is not None else None

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Returns (first slot, count, position of the first row) of each run of slots that the settled rows lie in."""
        if self._runs is None:
            count, start = self.num_settled, self.node.start
            slots = self.slots[:count]
            edges = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), count] if count else []
            self._runs = [(int(slots[at]), stop - at, start + at) for at, stop in itertools.pairwise(edges)]
        return self._runs

    def settle(self, rows: int) -> None:
        """Counts the next `rows` rows as settled: the K/V that this visit sees of them are there."""
        self.num_settled, self._runs = self.num_settled + rows, None
        self.node.num_computed = max(self.node.num_computed, self.num_settled)

    def give_up(self) -> np.ndarray:
        """Forgets all rows, and returns the slots that were this visit's own, int64."""
        slots = self.slots[self.owns_slot]
        self.forget()
        if self.node.account is not None:
            self.node.account.num_slots -= len(slots)
        return slots

    def part(self, node: VisitNode, first: int, stop: int) -> NodeVisit:
        """Returns this visit of the rows from `first` up to `stop`, which are those of `node`."""
        part = NodeVisit(node, self.prefix)
        for name in ("slots", "owns_slot", "has_left"):
            setattr(part, name, getattr(self, name)[first:stop].copy())
        part.num_settled = min(max(self.num_settled - first, 0), stop - first)
        return part

    def cut(self, size: int) -> None:
        """Forgets the first `size` rows, which its node has no more."""
        self.slots, self.owns_slot, self.has_left = self.slots[size:], self.owns_slot[size:], self.has_left[size:]
        self.num_settled, self._runs = max(0, self.num_settled - size), None


class VisitNode(Node):
    """A VisitNode is a Node whose rows have slots for each visit.

    visits        by route prefix
    num_computed  how many leading rows are settled at some visit
    """

    __slots__ = ("visits",)

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.visits: dict[Prefix, NodeVisit] = {}

    def visit(self, prefix: Prefix) -> NodeVisit:
        """Returns the NodeVisit of a route prefix, which is made if the node has none yet."""
        visit = self.visits.get(prefix)
        if visit is None:
            visit = self.visits[prefix] = NodeVisit(self, prefix)
        return visit

    def give_up(self) -> np.ndarray:
        slots = [visit.give_up() for visit in self.visits.values()]
        for prefix in [prefix for prefix, visit in self.visits.items() if not visit.users]:
            del self.visits[prefix]
        self.num_computed = 0
        return np.concatenate(slots) if slots else np.empty(0, np.int64)

    def divide(self, upper: Node) -> None:
        super().divide(upper)
        assert isinstance(upper, VisitNode)
        size = len(upper)
        for prefix, visit in self.visits.items():
            upper.visits[prefix] = first = visit.part(upper, 0, size)
            first.users = visit.users
            visit.cut(size)
        for node in (upper, self):
            node.num_computed = max((visit.num_settled for visit in node.visits.values()), default=0)

    @property
    def num_slots(self) -> int:
        """Returns how many slots all visits of its rows hold."""
        return sum(int(np.count_nonzero(visit.owns_slot)) for visit in self.visits.values())


class TailNode(VisitNode):
    """A TailNode is the VisitNode of the tokens that a sequence has made.

    While rows of these are computed again, it is as any other. Once the sequence generates, the slots of its rows lie
    in arrays, and its visits are empty.

    outputs  the arrays
    place    its place there, while the sequence runs; or None
    """

    __slots__ = ("outputs", "place")

    def __init__(self, parent: Node, tokens: list[int], start: int, outputs: OutputRows):
        super().__init__(parent, b"", start, tokens, parent.account, NO_SLOTS)
        self.outputs = outputs
        self.place: int | None = None

    def enter(self) -> None:
        """Moves the slots of its rows from its visits into the arrays."""
        for visit in self.visits.values() if len(self) else ():
            at = self.place, len(visit.prefix) - 1
            self.outputs.enter(*at, visit.slots, visit.owns_slot, visit.has_left, np.array(visit.runs).T)
            visit.forget()

    def leave(self) -> np.ndarray:
        """Moves the slots of its rows from the arrays into its visits, and returns the spare slots, int64."""
        rows, outputs = len(self), self.outputs
        for visit in self.visits.values():
            at = self.place, len(visit.prefix) - 1
            visit.slots, visit.has_left = outputs.slots[at][:rows].copy(), outputs.has_left[at][:rows].copy()
            visit.owns_slot, visit.num_settled = outputs.owns_slot[at][:rows].copy(), int(outputs.num_settled[at])
        outputs.owns_slot[self.place] = False
        return self._release()

    def _release(self) -> np.ndarray:
        assert self.place is not None
        slots = self.outputs.release(self.place)
        self.place = None
        if self.account is not None:
            self.account.num_slots -= len(slots)
        return slots

    def give_up(self) -> np.ndarray:
        slots = super().give_up()
        return slots if self.place is None else np.concatenate((slots, self._release()))


class VisitCache(RadixCache):
    """A VisitCache is a RadixCache of nodes whose rows have slots for each visit. It counts rows, whatever their
    visits.

    A visit is *untaken* where sequences use its node, and none of them takes its route prefix: rows of another route,
    from before or since. Nodes that nobody uses are kept and evicted whole, with all of their visits; so untaken visits
    have to be looked for in nodes in use alone.

    num_slots  how many slots the rows hold that may be evicted
    untaken    the nodes in use that may have untaken visits
    """

    num_slots = 0

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.untaken: dict[VisitNode, None] = {}

    def forget_all(self) -> None:
        super().forget_all()
        self.num_slots = 0
        self.untaken.clear()

    def keep(self, node: Node) -> None:
        self.untaken.pop(node, None)  # type: ignore[call-overload]
        super().keep(node)

    def take(self, path: list[Node]) -> None:
        super().take(path)
        self.untaken.update((node, None) for node in path if not node.users and node.visits)  # type: ignore

    def evict_untaken(self) -> bool:
        """Evicts the visits that no sequence takes of nodes in use, and returns whether there were any. To be called
        where nothing else may be evicted: the cache finds no rows where rows above them are missing.

        No sequence takes visits that go on from these either, so that visits which stay refer to no slot of theirs.
        """
        nodes = [node for node in self.untaken if not node.pins]
        for node in nodes:
            del self.untaken[node]
            for prefix in [prefix for prefix, visit in node.visits.items() if not visit.users]:
                self._pool.free(node.visits.pop(prefix).give_up())
            computed = max((visit.num_settled for visit in node.visits.values()), default=0)
            if computed < node.num_computed:
                self._tree.dropped(node)
                node.num_computed = computed
                if computed:
                    self._tree.stored(node)
        return bool(nodes)

    def _count(self, node: Node, rows: int, nodes: int = 0) -> None:
        super()._count(node, rows, nodes)
        if rows and not node.pins:
            self.num_slots += node.num_slots if rows > 0 else -node.num_slots

    def graft(self, tail: Node, priority: int) -> None:
        """Enters the rows of a tail whose sequence ends into the tree: those that are settled at all of its visits."""
        assert isinstance(tail, TailNode) and tail.parent is not None
        spare, new = tail.leave(), None
        node, at = tail.parent, 0
        rows = min((visit.num_settled for visit in tail.visits.values()), default=0)
        ids = token_bytes(tail.tokens[:rows])
        while at < rows:
            child = node.children.get(ids[at * TOKEN : (at + 1) * TOKEN])
            if child is None:
                new = self._tree.extend(node, ids[at * TOKEN :])
                assert isinstance(new, VisitNode)
                new.priority, new.num_computed = priority, rows - at
                for prefix, visit in tail.visits.items():
                    new.visits[prefix] = visit.part(new, at, rows)
                    visit.owns_slot[at:rows] = False
                break
            assert isinstance(child, VisitNode)
            same = shared_by(child.ids, ids, at * TOKEN)
            # The rows below would have none above them at some visit.
            if any(prefix not in child.visits or child.visits[prefix].num_settled < same for prefix in tail.visits):
                break
            child = child if same == len(child) else self._tree.split(child, same)
            node, at = child, at + same
        self._pool.free(np.concatenate((tail.give_up(), spare)))
        if new is not None:
            self._tree.stored(new)
            self.keep(new)

    def _split(self, upper: Node, lower: Node) -> None:
        super()._split(upper, lower)
        if lower in self.untaken:
            self.untaken[upper] = None  # type: ignore[index]


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
