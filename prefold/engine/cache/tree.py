"""The radix tree: the trie of all K/V rows: waiting to be computed, in use, or kept.

Its nodes are nodes of a radix trie (`trie.radix`). Their payload is the slots of the rows' K/V, the number of sequences
that use them, and their state in the cache.
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

    The tokens that a sequence generates are its *tail*: a Node below its prompt, outside the trie. Another sequence
    with the same tokens has its own tail.
    """

    tokens: Any  # int32 [n]: the ids. For a tail, a list that grows; `ids` is then empty
    account: Account | None  # account of the namespace's tenant in the RadixCache
    slots: np.ndarray  # int64 [s]: slots for the K/V of the first s rows; empty before they are claimed
    num_computed: int = 0  # number of leading rows with K/V in `slots`
    users: int = 0  # number of waiting or running sequences that go through the node
    lost: bool = False  # rows were computed before and discarded, so they must be recomputed
    # The RadixCache sets the following.
    kept: bool = False  # the node is in the cache: computed, and no sequence uses it
    scant: bool = False  # only waiting sequences took the node out of the cache, and its path has too few rows
    pins: int = 0  # number of pins; a pinned node is never evicted
    used_at: float = 0.0  # last use by a sequence, by the cache's clock
    uses: int = 0  # number of times that sequences took the node out of the cache
    priority: int = 0  # highest priority of the requests that used the node
    place: int = 0  # number of the node's latest entry in the cache's heaps
    _runs: list[tuple[int, int]] | None = None

    @classmethod
    def make(cls, parent: Self | None, ids: bytes, start: int) -> Self:
        account = None if parent is None else parent.account
        return cls(parent, ids, start, np.frombuffer(ids, ID), account, NO_SLOTS)

    def tail(self, tokens: list[int]) -> Self:
        """Return a node below this one, outside the trie, with these tokens."""
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
        """The position just past the last token."""
        return self.start + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """The number of rows that are not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def num_slots(self) -> int:
        """The number of slots of its rows."""
        return len(self.slots)

    def claim(self, slots: np.ndarray) -> None:
        """Add slots for the rows after those with slots."""
        self.slots = slots if not len(self.slots) else np.concatenate((self.slots, slots))
        self._runs = None
        if self.account is not None:
            self.account.hold(len(slots))

    def trim(self) -> np.ndarray:
        """Remove the slots past the last row, and return them."""
        slots, self.slots = self.slots[len(self) :], self.slots[: len(self)]
        if self.account is not None:
            self.account.num_slots -= len(slots)
        return slots

    def give_up(self) -> np.ndarray:
        """Forget the rows, and return their slots to be freed."""
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
        """The number of slots directly after the slot of the last computed row, without a gap."""
        return next(stop for _, stop in self.stretches if stop >= self.num_computed) - self.num_computed

    def runs(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first slot, count, first position) for each run of neighbouring slots of the first `rows` rows."""
        for first, stop in self.stretches:
            if first >= rows:
                return
            yield int(self.slots[first]), min(stop, rows) - first, self.start + first


class RowTrie(RadixTrie[Node]):
    """The tries of all rows of a scheduler or a cache, one per namespace.

    Args:
        kind: The class of the nodes.

    Attributes:
        account_of: Returns the account of a namespace.
        on_split: Functions called with (upper, lower) after a node was split.
        on_store: Functions called with a node after more of its rows were computed.
        on_drop: Functions called with a node before its rows are dropped.
        on_clear: Functions called after all tries were cleared.
        owner: Calls a function in the thread that owns the tries, and returns its result. Before a thread owns them, it
            runs in the caller's thread.
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
        """Drop the rows of a node, and return their slots to be freed."""
        self.dropped(node)
        return node.give_up()

    def clear(self) -> None:
        """Forget all tries."""
        self.roots.clear()
        for listener in self.on_clear:
            listener()
