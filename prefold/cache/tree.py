"""The radix tree: a trie that grows as prompts come and shrinks as they go.

`prefix.Trie` lays a known set of prompts flat, once. The radix tree is for sequences that run, and for the rows that
are kept of them afterwards. A node holds a run of tokens, and the slots of their K/V. The scheduler knows which
sequences need a node, and the cache decides when it is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .accounts import Account

_NO_SLOTS = np.empty(0, np.int64)


class Node:
    """A Node is a run of rows that the same sequences share.

    tokens        int32 [n] of a prompt, or the growing list of the tokens that a sequence has made (its tail)
    start         position of the first token
    slots         int64 [s]: where the K/V of the first s rows lies or will lie; empty while no slots are claimed for
                  them
    num_computed  how many rows have their K/V there
    users         how many sequences, waiting or running, have tokens that go through the node
    children      the nodes below, by first token; a tail is no child, though this node is its parent
    lost          whether rows were computed before and given up, so that they are computed again
    namespace     for a root: the namespace of its trie
    account       the account of the namespace's tenant in the RadixCache

    kept, scant, pins, used_at, uses, priority and place belong to the RadixCache:

    kept      whether the cache holds the node: it is computed, and no sequence uses it
    scant     whether only waiting sequences took it out of the cache, for too few rows to be worth it; they give the
              rows up when they begin
    pins      how often it is pinned; a pinned node is never evicted
    used_at   when a sequence used it last, by the cache's clock
    uses      how often sequences took it out of the cache
    priority  the highest priority of the requests that used it
    place     the number of its latest entry in the cache's heaps
    """

    __slots__ = (
        "_runs",
        "account",
        "children",
        "kept",
        "lost",
        "namespace",
        "num_computed",
        "parent",
        "pins",
        "place",
        "priority",
        "scant",
        "slots",
        "start",
        "tokens",
        "used_at",
        "users",
        "uses",
    )

    def __init__(self, parent: Node | None, tokens: Any, start: int):
        self.parent = parent
        self.account: Account | None = None if parent is None else parent.account
        self.tokens = tokens
        self.start = start
        self.slots = _NO_SLOTS
        self.num_computed = 0
        self.users = 0
        self.children: dict[int, Node] = {}
        self.lost = False
        self.namespace: Hashable = None
        self.kept = False
        self.scant = False
        self.pins = 0
        self.used_at = 0.0
        self.uses = 0
        self.priority = 0
        self.place = 0
        self._runs: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def stop(self) -> int:
        """Returns the position behind the last token."""
        return self.start + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Returns how many rows are still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_slots(self) -> int:
        """Returns how many slots its rows hold."""
        return len(self.slots)

    def path(self) -> list[Node]:
        """Returns the nodes from below the root down to this node."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def claim(self, slots: np.ndarray) -> None:
        """Adds slots for the rows behind those that have one."""
        self.slots = slots if not len(self.slots) else np.concatenate((self.slots, slots))
        self._runs = None
        if self.account is not None:
            self.account.hold(len(slots))

    def trim(self) -> np.ndarray:
        """Gives up the slots beyond the last row, and returns them."""
        slots, self.slots = self.slots[len(self) :], self.slots[: len(self)]
        if self.account is not None:
            self.account.num_slots -= len(slots)
        return slots

    def give_up(self) -> np.ndarray:
        """Forgets the rows, and returns their slots, which the pool takes back."""
        if self.account is not None:
            self.account.num_slots -= len(self.slots)
        slots, self.slots, self.num_computed, self._runs = self.slots, _NO_SLOTS, 0, None
        return slots

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Returns the rows [first, stop) of each run of neighbouring slots."""
        if self._runs is None:
            breaks = np.flatnonzero(np.diff(self.slots) != 1) + 1 if len(self.slots) > 1 else ()
            edges = [0, *(int(b) for b in breaks), len(self.slots)]
            self._runs = [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]
        return self._runs

    @property
    def neighbours(self) -> int:
        """Returns how many slots follow the slot of the last computed row without a gap."""
        return next(stop for _, stop in self.stretches if stop >= self.num_computed) - self.num_computed

    def runs(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yields (first slot, count, position of the first row) of each run of neighbouring slots that the first `rows`
        rows lie in."""
        for first, stop in self.stretches:
            if first >= rows:
                return
            yield int(self.slots[first]), min(stop, rows) - first, self.start + first

    def split(self, size: int) -> Node:
        """Cuts off the first `size` tokens as a new node above this one, and returns the new node.

        References to this node stay valid: they mean its last row, which stays in it.
        """
        assert 0 < size < len(self.tokens) and self.parent is not None
        upper = type(self)(self.parent, self.tokens[:size], self.start)
        upper.slots, self.slots = self.slots[:size], self.slots[size:]
        upper.num_computed, self.num_computed = min(self.num_computed, size), max(0, self.num_computed - size)
        for name in ("users", "lost", "kept", "scant", "pins", "used_at", "uses", "priority"):
            setattr(upper, name, getattr(self, name))
        self.parent.children[int(upper.tokens[0])] = upper
        self.parent, self.tokens, self.start = upper, self.tokens[size:], self.start + size
        upper.children[int(self.tokens[0])] = self
        self._runs = None
        return upper


class RadixTree:
    """A RadixTree holds one trie for each namespace (adapter and salt); two namespaces share nothing.

    kind        the class of its nodes
    roots       the root of each trie, by namespace
    account_of  returns the account of a namespace
    on_split    functions to call with (upper, lower) after a node was cut in two
    on_store    functions to call with a node after more of its rows were computed
    on_drop     functions to call with a node before its rows are given up
    on_clear    functions to call after all tries were forgotten
    owner       calls a function in the thread that owns the tries, and returns its result; before a thread owns them,
                in the caller's thread
    """

    def __init__(self, kind: type[Node] = Node) -> None:
        self.kind = kind
        self.roots: dict[Hashable, Node] = {}
        self.account_of: Callable[[Hashable], Account | None] = lambda namespace: None
        self.on_split: list[Callable[[Node, Node], None]] = []
        self.on_store: list[Callable[[Node], None]] = []
        self.on_drop: list[Callable[[Node], None]] = []
        self.on_clear: list[Callable[[], None]] = []
        self.owner: Callable[[Callable[[], Any]], Any] = lambda function: function()

    def insert(self, namespace: Hashable, tokens: np.ndarray) -> Node:
        """Returns the node that ends with `tokens` (int32 [n], n >= 1); makes it if it is not there.

        A node of which only the first part matches `tokens` is cut in two. The time is linear in the tokens that match,
        with one lookup for each node.
        """
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = self.kind(None, np.empty(0, np.int32), 0)
            node.namespace = namespace
            node.account = self.account_of(namespace)
        at = 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = self.kind(node, tokens[at:], node.stop)
                node.children[int(tokens[at])] = child
                return child
            same = common_prefix(child.tokens, tokens[at:])
            node = child if same == len(child) else self.split(child, same)
            at += same
        return node

    def match(self, namespace: Hashable, tokens: np.ndarray) -> tuple[list[tuple[Node, int]], int]:
        """Returns the nodes that `tokens` goes through, each with how many of its rows match, and the sum of these.
        Changes nothing."""
        node = self.roots.get(namespace)
        matches: list[tuple[Node, int]] = []
        at = 0
        while node is not None and at < len(tokens):
            node = node.children.get(int(tokens[at]))
            if node is None:
                break
            same = common_prefix(node.tokens, tokens[at:])
            matches.append((node, same))
            at += same
            if same < len(node):
                break
        return matches, at

    def split(self, node: Node, size: int) -> Node:
        """Cuts off the first `size` tokens of a node as a new node above it, and returns the new node."""
        upper = node.split(size)
        for listener in self.on_split:
            listener(upper, node)
        return upper

    def stored(self, node: Node) -> None:
        """Calls the functions of `on_store` with a node."""
        for listener in self.on_store:
            listener(node)

    def dropped(self, node: Node) -> None:
        """Calls the functions of `on_drop` with a node."""
        for listener in self.on_drop:
            listener(node)

    def drop(self, node: Node) -> np.ndarray:
        """Forgets the rows of a node, and returns their slots, which the pool takes back."""
        self.dropped(node)
        return node.give_up()

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes except roots and tails."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def detach(self, node: Node) -> None:
        """Takes a node that has no children out of its trie. A root goes with its last child."""
        parent = node.parent
        assert not node.children and parent is not None
        first = int(node.tokens[0])
        if parent.children.get(first) is node:
            del parent.children[first]
        if parent.parent is None and not parent.children and self.roots.get(parent.namespace) is parent:
            del self.roots[parent.namespace]

    def clear(self) -> None:
        """Forgets all tries."""
        self.roots.clear()
        for listener in self.on_clear:
            listener()


def common_prefix(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """Returns how many leading tokens are equal."""
    size = min(len(a), len(b))
    different = np.asarray(a[:size]) != np.asarray(b[:size])
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size
