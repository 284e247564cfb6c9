"""What a cache tells of itself: numbered events of the rows that it holds, from which a router knows what is where.

A *run* is a stretch of rows of one path that are held together. Whoever reports a run gives it its name. Events are
plain data, and go to another process as they are. Where one was lost, all that is held is told anew: first `Cleared`,
then everything that is held as if it were new.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from .tree import Node, RadixTree


@dataclass(frozen=True, eq=False, slots=True)
class RowsStored:
    """A RowsStored says that n more rows are held.

    run        the run that they belong to
    after      the run that they follow; `run` itself: that run grows at its end; None: they begin at position 0
    tokens     int32 [n]
    namespace  of rows that begin at position 0: rows of two namespaces share nothing
    """

    run: Hashable
    after: Hashable | None
    tokens: np.ndarray
    namespace: Hashable = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """A Cut says that a run is now two: its first `size` rows are the run `upper`, and the others keep its name."""

    run: Hashable
    upper: Hashable
    size: int


@dataclass(frozen=True, slots=True)
class Removed:
    """A Removed says that the rows of a run are not held any more. Those of runs that follow it may still be."""

    run: Hashable


@dataclass(frozen=True, slots=True)
class Cleared:
    """A Cleared says that nothing is held any more."""


CacheEvent = RowsStored | Cut | Removed | Cleared


@dataclass(frozen=True, eq=False, slots=True)
class CacheEvents:
    """A CacheEvents holds consecutive events of one cache.

    epoch  differs after a restart of the cache, when numbers begin again
    first  the number of the first of the events; numbers begin at 0
    """

    epoch: Hashable
    first: int
    events: tuple[CacheEvent, ...]


class EventLog:
    """An EventLog numbers the events of a cache, which is empty when an epoch begins."""

    def __init__(self, epoch: Hashable = 0):
        self.begin(epoch)

    def begin(self, epoch: Hashable) -> None:
        """Begins a new epoch; events that nobody has fetched are dropped."""
        self._epoch, self._first = epoch, 0
        self._pending: list[CacheEvent] = [Cleared()]

    def add(self, *events: CacheEvent) -> None:
        self._pending += events

    def drain(self) -> CacheEvents | None:
        """Returns the events since the last call, None where there are none."""
        if not self._pending:
            return None
        found = CacheEvents(self._epoch, self._first, tuple(self._pending))
        self._first += len(self._pending)
        self._pending = []
        return found


class CacheReporter:
    """A CacheReporter reports what changes in a radix tree, from the moment the reporter is made.

    Names of runs are numbers. The rows of a tail are told of when they are entered into the tree. All methods are
    called where the tree may be changed: by the thread that changes it, between two changes.

    max_pending  the most events that wait to be fetched; where there are more, they are dropped, and the next call of
                 `drain` tells anew of all that is held
    """

    def __init__(self, tree: RadixTree, *, epoch: Hashable = 0, max_pending: int = 1 << 16):
        self._tree = tree
        self._epoch = epoch
        self._max_pending = max_pending
        self._names = itertools.count()
        self._runs: dict[Node, tuple[int, int]] = {}  # its name, and how many of the node's rows were told of
        self._pending: list[CacheEvent] = []
        self._first = 0
        self._limit: float = max_pending
        self._has_lost = False  # events; all is told anew when somebody fetches them
        tree.on_store.append(self._store)
        tree.on_split.append(self._split)
        tree.on_drop.append(self._drop)
        tree.on_clear.append(self._clear)
        self._tell_all()

    def close(self) -> None:
        """Ends the reporting."""
        self._tree.on_store.remove(self._store)
        self._tree.on_split.remove(self._split)
        self._tree.on_drop.remove(self._drop)
        self._tree.on_clear.remove(self._clear)

    def drain(self) -> CacheEvents | None:
        """Returns the events since the last call, None where there are none."""
        if self._has_lost:
            self._tell_all()
        if not self._pending:
            return None
        events, self._pending, self._limit = tuple(self._pending), [], self._max_pending
        found = CacheEvents(self._epoch, self._first, events)
        self._first += len(events)
        return found

    def snapshot(self) -> CacheEvents:
        """Returns events that tell of all that is held, whatever was told before; those not fetched yet are dropped."""
        self._has_lost = True
        found = self.drain()
        assert found is not None
        return found

    def _tell_all(self) -> None:
        self._has_lost = False
        self._first += len(self._pending)
        self._pending = [Cleared()]
        self._runs = {}
        self._limit = float("inf")
        nodes = [node for node in self._tree.nodes() if node.computed]
        told = set(nodes)
        for node in nodes:  # what lies above held rows has a name, even if it is not held itself
            above = node.parent
            while above is not None and above.parent is not None and above not in told:
                told.add(above)
                above = above.parent
        partly = []
        for node in sorted(told, key=lambda node: node.start):
            has_below = any(child in told for child in node.children.values())
            if node.pending and has_below:
                partly.append(node)
            self._tell(node, len(node) if has_below else node.computed)
        for node in partly:
            self._drop(node)
            self._store(node)
        self._limit = len(self._pending) + self._max_pending

    def _add(self, event: CacheEvent) -> None:
        if self._has_lost:
            return
        self._pending.append(event)
        if len(self._pending) > self._limit:
            self._has_lost = True
            self._first += len(self._pending)
            self._pending, self._runs = [], {}

    def _store(self, node: Node) -> None:
        if not self._has_lost and not isinstance(node.tokens, list):  # a list: it is a tail
            self._tell(node, node.computed)

    def _tell(self, node: Node, rows: int) -> None:
        if rows == self._runs.get(node, (0, 0))[1]:
            return
        # What a sequence leaves may lie below rows that are still to be computed: these have a name meanwhile.
        partly: list[Node] = []
        above = node.parent
        while above is not None and above.parent is not None and self._runs.get(above, (0, 0))[1] < len(above):
            partly.append(above)
            above = above.parent
        partly.reverse()
        for one in partly:
            self._name(one, len(one))
        self._name(node, rows)
        for one in partly:
            self._drop(one)
            self._store(one)

    def _name(self, node: Node, rows: int) -> None:
        if self._has_lost:
            return
        name, told = self._runs.get(node) or (next(self._names), 0)
        above = node.parent
        assert above is not None
        after = name if told else None if above.parent is None else self._runs[above][0]
        namespace = above.namespace if above.parent is None else ()
        # A copy: the tokens may be a view of an array that is much larger.
        self._runs[node] = (name, rows)
        self._add(RowsStored(name, after, np.array(node.tokens[told:rows], np.int32), namespace))

    def _split(self, upper: Node, lower: Node) -> None:
        if lower not in self._runs:
            return
        name, told = self._runs[lower]
        if told <= len(upper):
            self._runs[upper] = self._runs.pop(lower)
            return
        above = next(self._names)
        self._runs[upper], self._runs[lower] = (above, len(upper)), (name, told - len(upper))
        self._add(Cut(name, above, len(upper)))

    def _drop(self, node: Node) -> None:
        if node in self._runs:
            self._add(Removed(self._runs.pop(node)[0]))

    def _clear(self) -> None:
        self._runs = {}
        self._add(Cleared())
