"""A trie that grows and shrinks: prompts come and go, their rows stay while somebody needs them.

Beside `Trie`, which lays a known set of prompts flat once, this one is for sequences in flight and for
what is kept of them afterwards. Its nodes hold runs of tokens and the slots their K/V lie in; who needs
a node, and when it may go, is for the scheduler and the cache to say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["BrokenOff", "Node", "RadixTree", "common_prefix"]

_NO_SLOTS = np.empty(0, np.int64)


class Node:
    """A run of rows that the same sequences share.

    tokens    int32 [n] of a prompt, or a growing list of a sequence's own tokens (its tail)
    start     position of the first token
    slots     int64 [s]: where the first s rows' K/V lie or will lie; empty while nobody has claimed them
    computed  rows whose K/V is there
    users     sequences, waiting or running, whose tokens go through the node
    children  by first token; tails are no children, though the node is their parent
    lost      rows were computed once and given up: computing them is doing it again
    namespace of a root: what was given to `insert`

    kept, pins, used, uses, priority, place are the cache's: see cache.RadixCache.
    """

    __slots__ = (
        "_runs",
        "children",
        "computed",
        "kept",
        "lost",
        "namespace",
        "parent",
        "pins",
        "place",
        "priority",
        "slots",
        "start",
        "tokens",
        "used",
        "users",
        "uses",
    )

    def __init__(self, parent: Node | None, tokens: Any, start: int):
        self.parent = parent
        self.tokens = tokens
        self.start = start
        self.slots = _NO_SLOTS
        self.computed = 0
        self.users = 0
        self.children: dict[int, Node] = {}
        self.lost = False
        self.namespace: Hashable = None
        self.kept = False
        self.pins = 0
        self.used = 0.0
        self.uses = 0
        self.priority = 0
        self.place = 0
        self._runs: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.tokens)

    @property
    def pending(self) -> int:
        """Rows that are still to be computed."""
        return len(self.tokens) - self.computed

    def path(self) -> list[Node]:
        """From the root (left out) to this node."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def claim(self, slots: np.ndarray) -> None:
        """More slots for the rows to come."""
        self.slots = slots if not len(self.slots) else np.concatenate((self.slots, slots))
        self._runs = None

    def give_up(self) -> np.ndarray:
        """Forget the rows; returns their slots, for the pool."""
        slots, self.slots, self.computed, self._runs = self.slots, _NO_SLOTS, 0, None
        return slots

    def runs(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """(first slot, count, position of the first) of the first `rows` rows, where slots follow each other."""
        if self._runs is None:
            breaks = np.flatnonzero(np.diff(self.slots) != 1) + 1 if len(self.slots) > 1 else ()
            edges = [0, *(int(b) for b in breaks), len(self.slots)]
            self._runs = [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]
        for first, stop in self._runs:
            if first >= rows:
                return
            yield int(self.slots[first]), min(stop, rows) - first, self.start + first

    def split(self, size: int) -> Node:
        """Cut off the first `size` tokens as a node above this one, and return it. Who refers to this node
        refers to its end, and need not know."""
        assert 0 < size < len(self.tokens) and self.parent is not None
        upper = Node(self.parent, self.tokens[:size], self.start)
        upper.slots, self.slots = self.slots[:size], self.slots[size:]
        upper.computed, self.computed = min(self.computed, size), max(0, self.computed - size)
        for name in ("users", "lost", "kept", "pins", "used", "uses", "priority"):
            setattr(upper, name, getattr(self, name))
        self.parent.children[int(upper.tokens[0])] = upper
        self.parent, self.tokens, self.start = upper, self.tokens[size:], self.start + size
        upper.children[int(self.tokens[0])] = self
        self._runs = None
        return upper


class BrokenOff(Exception):
    """A change was broken off, and nothing has been made anew yet."""


class RadixTree:
    """The tries of several namespaces: nothing is shared between two (adapters, salts).

    on_split   called with (upper, lower) whenever a node is cut in two
    on_store   called with a node of which more rows have been computed
    on_drop    called with a node whose rows are about to be given up
    on_clear   called when all tries are forgotten
    lock       held by a change
    is_broken  a change was broken off by an exception, or is being made
    """

    def __init__(self) -> None:
        self.roots: dict[Hashable, Node] = {}
        self.on_split: list[Callable[[Node, Node], None]] = []
        self.on_store: list[Callable[[Node], None]] = []
        self.on_drop: list[Callable[[Node], None]] = []
        self.on_clear: list[Callable[[], None]] = []
        self.lock = threading.RLock()
        self.is_broken = False

    @contextmanager
    def change(self) -> Iterator[None]:
        """A change of the tries and of what depends on them, by one thread at a time.

        Raises BrokenOff where an exception (Ctrl-C falls anywhere) broke off a change before: they are not whole, and
        have to be made anew.
        """
        with self.lock:
            if self.is_broken:
                raise BrokenOff
            self.is_broken = True
            yield
            self.is_broken = False

    def insert(self, namespace: Hashable, tokens: np.ndarray) -> Node:
        """The node that ends with `tokens` (int32 [n], n >= 1); made, and others cut, where needed.

        Takes time linear in what matches, and one lookup a node.
        """
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(None, np.empty(0, np.int32), 0)
            node.namespace = namespace
        at = 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = Node(node, tokens[at:], node.stop)
                node.children[int(tokens[at])] = child
                return child
            same = common_prefix(child.tokens, tokens[at:])
            node = child if same == len(child) else self.split(child, same)
            at += same
        return node

    def match(self, namespace: Hashable, tokens: np.ndarray) -> tuple[list[tuple[Node, int]], int]:
        """The nodes that `tokens` goes through, each with how many of its rows match, and the sum; changes nothing."""
        node = self.roots.get(namespace)
        found: list[tuple[Node, int]] = []
        at = 0
        while node is not None and at < len(tokens):
            node = node.children.get(int(tokens[at]))
            if node is None:
                break
            same = common_prefix(node.tokens, tokens[at:])
            found.append((node, same))
            at += same
            if same < len(node):
                break
        return found, at

    def split(self, node: Node, size: int) -> Node:
        upper = node.split(size)
        for listener in self.on_split:
            listener(upper, node)
        return upper

    def stored(self, node: Node) -> None:
        """Tell that more of a node's rows have been computed."""
        for listener in self.on_store:
            listener(node)

    def drop(self, node: Node) -> np.ndarray:
        """Forget the rows of a node; returns their slots, for the pool."""
        for listener in self.on_drop:
            listener(node)
        return node.give_up()

    def nodes(self) -> Iterator[Node]:
        """All nodes but roots and tails."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def detach(self, node: Node) -> None:
        """Take a node out of its trie; it has no children any more. A root goes with its last child."""
        parent = node.parent
        assert not node.children and parent is not None
        first = int(node.tokens[0])
        if parent.children.get(first) is node:
            del parent.children[first]
        if parent.parent is None and not parent.children and self.roots.get(parent.namespace) is parent:
            del self.roots[parent.namespace]

    def clear(self) -> None:
        self.roots.clear()
        for listener in self.on_clear:
            listener()


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """How many leading tokens are equal."""
    size = min(len(a), len(b))
    different = np.asarray(a[:size]) != np.asarray(b[:size])
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size
