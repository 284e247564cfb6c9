"""The radix cache: what is kept of sequences that have ended, for those who come back.

Rows are kept as they lie, in the trie and in their slots: a later prompt that begins with the same tokens
finds them when it is entered into the trie, which is done anyway, token for token. So looking up costs
nothing of its own, and nothing is ever copied, shifted or matched in part.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..errors import InputError
from .slots import SlotPool
from .tree import Node, RadixTree

__all__ = ["POLICIES", "CacheOptions", "RadixCache"]

Policy = Literal["lru", "lfu", "priority"]
POLICIES: tuple[Policy, ...] = ("lru", "lfu", "priority")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """All there is to choose.

    policy       who goes first when room is needed: the least recently used ("lru"), the least often used
                 ("lfu"), or the lowest priority of a request ("priority"); the last two fall back on "lru"
    ttl          seconds after its last use at which a row goes; None: never
    max_tokens   most rows kept beside those in use; None: as many as the KV store holds
    min_overlap  prefixes of fewer tokens are neither used nor kept: they cost less to compute than to look after
    """

    policy: Policy = "lru"
    ttl: float | None = None
    max_tokens: int | None = None
    min_overlap: int = 16

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            message = f"the cache policy is {self.policy!r}"
            raise InputError(message, field="policy", remedy=f"use {', '.join(POLICIES)}")
        for name in ("ttl", "max_tokens", "min_overlap"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InputError(f"{name} is {value}", field=name, remedy="give 0 or more")


class RadixCache:
    """The kept nodes of a trie: computed, and used by no sequence.

    rows     how many rows may be evicted
    seconds  spent in here
    clock    seconds; another one for tests
    """

    def __init__(
        self,
        tree: RadixTree,
        pool: SlotPool,
        options: CacheOptions = CacheOptions(),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.options = options
        self.rows = 0
        self.seconds = 0.0
        self._tree = tree
        self._pool = pool
        self._clock = clock
        self._kept: dict[Node, None] = {}
        self._next_expiry = 0.0
        tree.on_split.append(self._split)

    def keep(self, node: Node) -> None:
        """No sequence uses the node any more. Its children are done with already."""
        started = time.perf_counter()
        if node.pending:
            self._forget_below(node)
        if node.pending and node.computed:
            lower = node
            node = self._tree.split(node, node.computed)
            self._drop(lower)
        if not node.computed or (not node.children and not node.pins and node.stop < self.options.min_overlap):
            self._drop(node)
        else:
            if len(node.slots) > len(node):  # room for tokens that never came
                self._pool.free(node.slots[len(node) :])
                node.slots = node.slots[: len(node)]
            node.kept, node.used = True, self._clock()
            self._kept[node] = None
            self.rows += 0 if node.pins else node.computed
            limit = self.options.max_tokens
            if limit is not None and self.rows > limit:
                self.evict(self.rows - limit)
        self.seconds += time.perf_counter() - started

    def take(self, path: list[Node]) -> None:
        """A sequence comes, whose tokens go through these nodes: what is kept of them is in use, if it is worth it."""
        overlap = sum(node.computed for node in path)
        for node in path:
            if not node.kept:
                continue
            node.kept = False
            del self._kept[node]
            self.rows -= 0 if node.pins else node.computed
            if overlap >= self.options.min_overlap or node.pins:
                node.uses += 1
            else:
                self._pool.free(node.give_up())

    def evict(self, rows: int) -> int:
        """Let at least `rows` rows go, or all there are; returns how many went."""
        started = time.perf_counter()
        heap = [(self._worth(n), id(n), n) for n in self._kept if not n.children and not n.pins]
        heapq.heapify(heap)
        gone = 0
        while heap and gone < rows:
            node = heapq.heappop(heap)[2]
            parent = node.parent
            gone += self._forget(node, rows - gone)
            if parent is not None and parent.kept and not parent.children and not parent.pins:
                heapq.heappush(heap, (self._worth(parent), id(parent), parent))
        self.seconds += time.perf_counter() - started
        return gone

    def expire(self) -> None:
        """Let go what has outlived its time; looks about once a tenth of that time."""
        if self.options.ttl is None:
            return
        now = self._clock()
        if now < self._next_expiry:
            return
        self._next_expiry = now + self.options.ttl / 10
        # Deepest first: a node goes after its children.
        for node in sorted(self._kept, key=lambda n: n.start, reverse=True):
            if not node.children and not node.pins and now - node.used >= self.options.ttl:
                self._forget(node)

    def clear(self) -> None:
        """Let all go that is not pinned."""
        self.evict(self.rows)

    def pin(self, namespace: Hashable, tokens: np.ndarray) -> int:
        """Never evict what is there of these tokens, until `unpin`; returns how many leading tokens that is."""
        return self._pin(namespace, tokens, 1)

    def unpin(self, namespace: Hashable, tokens: np.ndarray) -> int:
        return self._pin(namespace, tokens, -1)

    def _pin(self, namespace: Hashable, tokens: np.ndarray, change: int) -> int:
        found, total = self._tree.match(namespace, tokens)
        for node, same in found:
            if same < len(node):
                if same <= node.computed and change > 0:
                    node = self._tree.split(node, same)
                else:
                    total -= same
                    continue
            if change > 0 and node.pending:
                total -= len(node)
                continue
            before, node.pins = node.pins, max(0, node.pins + change)
            if node.kept and bool(before) != bool(node.pins):
                self.rows += -node.computed if node.pins else node.computed
        return total

    def _worth(self, node: Node) -> tuple[float, float]:
        first = {"lru": 0, "lfu": node.uses, "priority": node.priority}[self.options.policy]
        return (first, node.used)

    def _forget(self, node: Node, rows: int | None = None) -> int:
        """Evict a kept leaf, or the last `rows` rows of it: what lies before them may yet be asked for."""
        if rows is not None and 0 < rows < len(node):
            self._tree.split(node, len(node) - rows)
        size = node.computed
        del self._kept[node]
        node.kept = False
        self.rows -= size
        self._drop(node)
        return size

    def _forget_below(self, node: Node) -> None:
        """Rows whose ancestors are not there would never be found."""
        below = list(node.children.values())
        for child in below:
            below.extend(child.children.values())
        for child in reversed(below):
            self._forget(child)

    def _drop(self, node: Node) -> None:
        self._pool.free(node.give_up())
        node.detach()

    def _split(self, upper: Node, lower: Node) -> None:
        if lower.kept:
            self._kept[upper] = None

    def check(self) -> None:
        """AssertionError where the books do not balance."""
        kept = [node for node in self._tree.nodes() if node.kept]
        assert set(kept) == set(self._kept)
        assert self.rows == sum(node.computed for node in kept if not node.pins)
        assert all(node.users == 0 and node.pending == 0 for node in kept)
