"""What a cache tells of itself: numbered events of the rows it holds, for a router that keeps a picture of them.

A *run* is a stretch of rows of one path that are held together; its name is given by who reports it. Events are plain
data and go to another process as they are. Where one was lost, all that is held is told once more: `Cleared`, and
then everything as if it were new.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from .tree import Node, RadixTree

__all__ = ["CacheEvent", "CacheEvents", "CacheReporter", "Cleared", "Cut", "Removed", "Stored"]


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """Rows are held that were not. They follow the run `after`; where that is `run` itself, the run grows at its end.

    after      None: they are the first of their paths
    tokens     int32 [n]
    namespace  two runs of different namespaces share nothing; looked at where `after` is None
    """

    run: Hashable
    after: Hashable | None
    tokens: np.ndarray
    namespace: Hashable = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """A run is now two: its first `size` rows are the run `upper`, and those behind them keep its name."""

    run: Hashable
    upper: Hashable
    size: int


@dataclass(frozen=True, slots=True)
class Removed:
    """The rows of a run are held no more. Those of runs that follow it may still be."""

    run: Hashable


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is held any more."""


CacheEvent = Stored | Cut | Removed | Cleared


@dataclass(frozen=True, eq=False, slots=True)
class CacheEvents:
    """Consecutive events of one cache; `first` is the number of the first of them. Numbers begin at 0.

    epoch  differs after a restart, when numbers begin again
    """

    epoch: Hashable
    first: int
    events: tuple[CacheEvent, ...]


class CacheReporter:
    """Reports what changes in a tree, from the moment it is made. What nobody fetches is not kept for ever: beyond
    `max_pending` events everything that is held is told anew.

    Names of runs are numbers. A tail is told of when its rows are entered into the trie. All is called where the tree
    may be changed: by its thread, between two changes.
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
        """Report no more."""
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
        name, told = self._runs.get(node) or (next(self._names), 0)
        if rows == told:
            return
        above = node.parent
        assert above is not None
        after = name if told else None if above.parent is None else self._runs[above][0]
        namespace = above.namespace if above.parent is None else ()
        # A copy: the tokens may be a view of an array that is much larger.
        self._runs[node] = (name, rows)
        self._add(Stored(name, after, np.array(node.tokens[told:rows], np.int32), namespace))

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
