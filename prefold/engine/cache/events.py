"""Events of a cache: numbered messages about its rows, by which a router knows where rows are.

A *run* is a stretch of rows on one path that are stored and removed together; the reporter names each run. Events are
plain data and can be sent to other processes. If an event was lost, the reporter sends `CacheCleared`, and then reports
all rows as if they were new.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from ...spec.requests import NO_NAMESPACE
from .tree import Node, RowTrie


@dataclass(frozen=True, eq=False, slots=True)
class RowsStored:
    """n more rows are held."""

    run: Hashable  # the run of the rows
    after: Hashable | None  # the run before them; `run` itself if that run grows at its end; None: from position 0
    tokens: np.ndarray  # int32 [n]: the token ids of the rows
    namespace: Hashable = NO_NAMESPACE  # for rows from position 0; namespaces share no rows


@dataclass(frozen=True, slots=True)
class Cut:
    """A run is now two: its first `size` rows are the run `upper`, and the others keep its name."""

    run: Hashable
    upper: Hashable
    size: int


@dataclass(frozen=True, slots=True)
class RowsRemoved:
    """The rows of a run are no longer held. The runs after it may still be held."""

    run: Hashable


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No rows are held any more."""


CacheEvent = RowsStored | Cut | RowsRemoved | CacheCleared


@dataclass(frozen=True, eq=False, slots=True)
class CacheEvents:
    """Consecutive events of one cache."""

    epoch: Hashable  # changes when the cache restarts; numbers then restart at 0
    first: int  # number of the first of these events
    events: tuple[CacheEvent, ...]


class EventLog:
    """Numbers the events of a cache, which is empty at the start of an epoch."""

    def __init__(self, epoch: Hashable = 0):
        self.begin(epoch)

    def begin(self, epoch: Hashable) -> None:
        """Start a new epoch, and drop the events that were not fetched."""
        self._epoch, self._first = epoch, 0
        self._pending: list[CacheEvent] = [CacheCleared()]

    def add(self, *events: CacheEvent) -> None:
        self._pending += events

    def drain(self) -> CacheEvents | None:
        """Return the events since the last call; None if there are none."""
        if not self._pending:
            return None
        events = CacheEvents(self._epoch, self._first, tuple(self._pending))
        self._first += len(self._pending)
        self._pending = []
        return events


class CacheReporter:
    """Records the changes of a radix tree as events, from its creation on.

    The names of runs are numbers. The rows of a tail are reported when they enter the tree. The thread that changes the
    tree calls all methods, between two changes.

    Args:
        max_pending: Limit on events that wait to be fetched. Beyond it, all are dropped, and the next call of `drain`
            reports all held rows again.
    """

    def __init__(self, tree: RowTrie, *, epoch: Hashable = 0, max_pending: int = 1 << 16):
        self._tree = tree
        self._epoch = epoch
        self._max_pending = max_pending
        self._names = itertools.count()
        self._runs: dict[Node, tuple[int, int]] = {}  # node -> name of its run, number of reported rows
        self._pending: list[CacheEvent] = []
        self._first = 0
        self._limit: float = max_pending
        self._has_lost = False  # events were dropped, so `drain` must report all rows again
        tree.on_store.append(self._store)
        tree.on_split.append(self._split)
        tree.on_drop.append(self._drop)
        tree.on_clear.append(self._clear)
        self._report_all()

    def close(self) -> None:
        """Stop reporting."""
        self._tree.on_store.remove(self._store)
        self._tree.on_split.remove(self._split)
        self._tree.on_drop.remove(self._drop)
        self._tree.on_clear.remove(self._clear)

    def drain(self) -> CacheEvents | None:
        """Return the events since the last call; None if there are none."""
        if self._has_lost:
            self._report_all()
        if not self._pending:
            return None
        events, self._pending, self._limit = tuple(self._pending), [], self._max_pending
        report = CacheEvents(self._epoch, self._first, events)
        self._first += len(events)
        return report

    def snapshot(self) -> CacheEvents:
        """Return events that report all held rows again; events that were not fetched are dropped."""
        self._has_lost = True
        report = self.drain()
        assert report is not None
        return report

    def _report_all(self) -> None:
        self._has_lost = False
        self._first += len(self._pending)
        self._pending = [CacheCleared()]
        self._runs = {}
        self._limit = float("inf")
        nodes = [node for node in self._tree.nodes() if node.num_computed]
        named = set(nodes)
        for node in nodes:  # a node above held rows needs a name, even if its own rows are not held
            above = node.parent
            while above is not None and above.parent is not None and above not in named:
                named.add(above)
                above = above.parent
        partly = []
        for node in sorted(named, key=lambda node: node.start):
            has_below = any(child in named for child in node.children.values())
            if node.num_pending and has_below:
                partly.append(node)
            self._report(node, len(node) if has_below else node.num_computed)
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
        if not self._has_lost and not isinstance(node.tokens, list):  # the tokens of a tail are a list
            self._report(node, node.num_computed)

    def _report(self, node: Node, rows: int) -> None:
        if rows == self._runs.get(node, (0, 0))[1]:
            return
        # An ended sequence may leave rows below rows that are not computed yet. Rows that are not computed get a
        # temporary name.
        partly: list[Node] = []
        above = node.parent
        while above is not None and above.parent is not None and self._runs.get(above, (0, 0))[1] < len(above):
            partly.append(above)
            above = above.parent
        partly.reverse()
        for above in partly:
            self._name(above, len(above))
        self._name(node, rows)
        for above in partly:
            self._drop(above)
            self._store(above)

    def _name(self, node: Node, rows: int) -> None:
        if self._has_lost:
            return
        name, reported = self._runs.get(node) or (next(self._names), 0)
        above = node.parent
        assert above is not None
        after = name if reported else None if above.parent is None else self._runs[above][0]
        namespace = above.namespace if above.parent is None else ()
        # Copy: a slice would keep all tokens of the node in memory.
        self._runs[node] = (name, rows)
        self._add(RowsStored(name, after, np.array(node.tokens[reported:rows], np.int32), namespace))

    def _split(self, upper: Node, lower: Node) -> None:
        if lower not in self._runs:
            return
        name, reported = self._runs[lower]
        if reported <= len(upper):
            self._runs[upper] = self._runs.pop(lower)
            return
        above = next(self._names)
        self._runs[upper], self._runs[lower] = (above, len(upper)), (name, reported - len(upper))
        self._add(Cut(name, above, len(upper)))

    def _drop(self, node: Node) -> None:
        if node in self._runs:
            self._add(RowsRemoved(self._runs.pop(node)[0]))

    def _clear(self) -> None:
        self._runs = {}
        self._add(CacheCleared())
