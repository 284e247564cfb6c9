"""The radix tree: the trie of the rows of K/V, to be computed, in use, or kept.

Its nodes are nodes of a radix trie (`prefix.radix`). Their payload is the slots of the rows' K/V, which sequences use
the slots, and when the slots may be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...trie.radix import ID, RadixNode, RadixTrie

if TYPE_CHECKING:
    from .accounts import Account

NO_SLOTS = np.empty(0, np.int64)


@dataclass(eq=False, repr=False, slots=True)
class Node(RadixNode):
    """A run of rows that the same sequences share.

    The tokens that a sequence makes, its *tail*, are a Node below its prompt that is not in the trie: another sequence
    with the same tokens has a tail of its own.
    """

    tokens: Any  # int32 [n], the ids; for a tail a list that grows, and the ids are empty
    account: Account | None  # the account of the namespace's tenant in the RadixCache
    slots: np.ndarray  # int64 [s], where the K/V of the first s rows lies or will lie; empty: none are claimed
    num_computed: int = 0  # how many leading rows have their K/V there
    users: int = 0  # how many sequences, waiting or running, have tokens that go through the node
    lost: bool = False  # whether rows were computed before and given up, so that they are computed again
    # These belong to the RadixCache.
    kept: bool = False  # whether the cache holds the node: it is computed, and no sequence uses it
    scant: bool = False  # whether only waiting sequences took it out of the cache, for too few rows to be worth it
    pins: int = 0  # how often it is pinned; a pinned node is never evicted
    used_at: float = 0.0  # when a sequence used it last, by the cache's clock
    uses: int = 0  # how often sequences took it out of the cache
    priority: int = 0  # the highest priority of the requests that used it
    place: int = 0  # the number of its latest entry in the cache's heaps
    _runs: list[tuple[int, int]] | None = None

    @classmethod
    def make(cls, parent: Self | None, ids: bytes, start: int) -> Self:
        """Make a node of the trie."""
        account = None if parent is None else parent.account
        return cls(parent, ids, start, np.frombuffer(ids, ID), account, NO_SLOTS)

    def tail(self, tokens: list[int]) -> Self:
        """Return a node below this one that is not in the trie, with these tokens."""
        return type(self)(self, b"", self.stop, tokens, self.account, NO_SLOTS)

    def divide(self, upper: Self) -> None:
        size = len(upper)
        self.tokens = np.frombuffer(self.ids, ID)
        upper.slots, self.slots = self.slots[:size], self.slots[size:]
        upper.num_computed, self.num_computed = min(self.num_computed, size), max(0, self.num_computed - size)
        for name in ("users", "lost", "kept", "scant", "pins", "used_at", "uses", "priority"):
            setattr(upper, name, getattr(self, name))
        self._runs = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """How many rows are still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_slots(self) -> int:
        """How many slots its rows hold."""
        return len(self.slots)

    def claim(self, slots: np.ndarray) -> None:
        """Add slots for the rows behind those that have one."""
        self.slots = slots if not len(self.slots) else np.concatenate((self.slots, slots))
        self._runs = None
        if self.account is not None:
            self.account.hold(len(slots))

    def trim(self) -> np.ndarray:
        """Give up the slots beyond the last row, and return them."""
        slots, self.slots = self.slots[len(self) :], self.slots[: len(self)]
        if self.account is not None:
            self.account.num_slots -= len(slots)
        return slots

    def give_up(self) -> np.ndarray:
        """Forget the rows, and return their slots, which the pool takes back."""
        if self.account is not None:
            self.account.num_slots -= len(self.slots)
        slots, self.slots, self.num_computed, self._runs = self.slots, NO_SLOTS, 0, None
        return slots

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """The rows [first, stop) of each run of neighbouring slots."""
        if self._runs is None:
            breaks = np.flatnonzero(np.diff(self.slots) != 1) + 1 if len(self.slots) > 1 else ()
            edges = [0, *(int(b) for b in breaks), len(self.slots)]
            self._runs = [(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]
        return self._runs

    @property
    def neighbours(self) -> int:
        """How many slots follow the slot of the last computed row without a gap."""
        return next(stop for _, stop in self.stretches if stop >= self.num_computed) - self.num_computed

    def runs(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first slot, count, position of the first row) of each run of neighbouring slots that the first `rows`
        rows lie in."""
        for first, stop in self.stretches:
            if first >= rows:
                return
            yield int(self.slots[first]), min(stop, rows) - first, self.start + first


class RowTrie(RadixTrie[Node]):
    """The trie of all rows that a scheduler or a cache has: one for each namespace.

    Args:
        kind: The class of the nodes.

    Attributes:
        account_of: Returns the account of a namespace.
        on_split: Functions to call with (upper, lower) after a node was cut in two.
        on_store: Functions to call with a node after more of its rows were computed.
        on_drop: Functions to call with a node before its rows are given up.
        on_clear: Functions to call after all tries were forgotten.
        owner: Calls a function in the thread that owns the tries, and returns its result; before a thread owns them,
            in the caller's thread.
    """

    def __init__(self, kind: type[Node] = Node) -> None:
        super().__init__(kind.make)
        self.account_of: Callable[[Hashable], Account | None] = lambda namespace: None
        self.on_split: list[Callable[[Node, Node], None]] = []
        self.on_store: list[Callable[[Node], None]] = []
        self.on_drop: list[Callable[[Node], None]] = []
        self.on_clear: list[Callable[[], None]] = []
        self.owner: Callable[[Callable[[], Any]], Any] = lambda function: function()

    def plant(self, namespace: Hashable) -> Node:
        root = super().plant(namespace)
        root.account = self.account_of(namespace)
        return root

    def split(self, node: Node, size: int) -> Node:
        upper = super().split(node, size)
        for listener in self.on_split:
            listener(upper, node)
        return upper

    def stored(self, node: Node) -> None:
        """Call the functions of `on_store` with a node."""
        for listener in self.on_store:
            listener(node)

    def dropped(self, node: Node) -> None:
        """Call the functions of `on_drop` with a node."""
        for listener in self.on_drop:
            listener(node)

    def drop(self, node: Node) -> np.ndarray:
        """Forget the rows of a node, and return their slots, which the pool takes back."""
        self.dropped(node)
        return node.give_up()

    def clear(self) -> None:
        """Forget all tries."""
        self.roots.clear()
        for listener in self.on_clear:
            listener()
