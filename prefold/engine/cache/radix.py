"""The radix cache: keeps rows of ended sequences for later prompts with the same first tokens.

Kept rows stay in the radix tree and in their slots. A later prompt is inserted into the tree anyway, and meets the kept
rows there. So a lookup costs nothing extra, and the reuse is exact. Only with `CacheOptions.shifted` are rows also
reused at other positions (see `features/shifted`).
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ...spec.model import CacheOptions
from ...spec.requests import Namespace, Request, Share
from ...trie import clear_of_span, token_bytes
from .accounts import Account, Accounts
from .slots import SlotPool
from .tree import Node, RowTrie


class RadixCache:
    """The kept nodes of a radix tree: their rows are computed, and no sequence uses them.

    Attributes:
        rows: How many rows may be evicted.
        seconds: The time spent in the cache.
        accounts: One account per tenant.
        namespace_of: namespace_of(namespace of a request, its question, its tokens) -> the namespace of its rows. The
            scheduler sets it.

    Args:
        clock: Returns the time in seconds; tests pass their own.
    """

    def __init__(
        self,
        tree: RowTrie,
        pool: SlotPool,
        options: CacheOptions = CacheOptions(),  # noqa: B008
        clock: Callable[[], float] = time.monotonic,
    ):
        self.options = options
        self.rows = 0
        self.seconds = 0.0
        self.tree = tree
        self._pool = pool
        self._clock = clock
        self.kept: dict[Node, None] = {}
        self._next_expiry = 0.0
        # The heap `leaves` of an account has an entry (worth, place, node) for each kept node that can be evicted now:
        # it has no children and no pins. When this becomes true again, the node is pushed again with a new place. An
        # entry with an old place is skipped at the head.
        self.accounts = Accounts()
        self._tenant_of: Callable[[Hashable], Hashable] = lambda namespace: None
        self.namespace_of: Callable[..., Namespace] = lambda namespace, asked, tokens: namespace
        self._most_accounts = 1024  # above this number, accounts without rows are forgotten
        tree.account_of = self._account_of
        self._by_age: list[tuple[float, int, Node]] = []  # the same kind of heap, by age, for the TTL
        self._places = itertools.count(1)
        tree.on_split.append(self._split)

    def keep(self, node: Node) -> None:
        """Keep the computed rows of a node that no sequence uses any more, and drop its other rows.

        Its children must have been kept or dropped before.
        """
        started = time.perf_counter()
        if node.num_pending:
            self._evict_below(node)
            if node.num_computed:
                lower = node
                node = self.tree.split(node, node.num_computed)
                self._drop(lower)
        if not node.num_computed or (not node.children and not node.pins and node.stop < self.options.min_overlap):
            self._drop(node)
        else:
            if len(node.slots) > len(node.tokens):  # slots for tokens that were never generated
                self._pool.free(node.trim())
            node.kept, node.scant, node.used_at = True, False, self._clock()
            self.kept[node] = None
            self._count(node, node.num_computed, 1)
            self._enter(node)
            account = node.account
            assert account is not None
            self.accounts.use(account, node.used_at)
            self._cut_down(account)
            self._cut_to_most()
        self.seconds += time.perf_counter() - started

    def take(self, path: list[Node]) -> None:
        """Take the kept nodes of a path out of the cache for a waiting sequence.

        If their rows are fewer than `min_overlap`, the nodes are marked as scant: `use` will discard their rows.
        """
        overlap = sum([node.num_computed for node in path])
        if overlap and path[0].account is not None:
            self.accounts.use(path[0].account, self._clock())
        for node in path:
            if not node.kept:
                continue
            node.kept = False
            del self.kept[node]
            self._count(node, -node.num_computed, -1)
            node.scant = overlap < self.options.min_overlap and not node.pins
            node.uses += not node.scant

    def scant(self, path: Sequence[Node]) -> list[Node]:
        """Return the nodes of a path that would lose their rows in `use`; empty if enough rows are computed."""
        nodes = [node for node in path if node.scant and not node.pins]
        return nodes if nodes and sum(node.num_computed for node in path) < self.options.min_overlap else []

    def use(self, path: Sequence[Node]) -> list[Node]:
        """Let a sequence start to use the rows of its path. Return the scant nodes: their rows are recomputed.

        Rows are discarded only now, so that a sequence that ends while it waits costs none. Kept rows below the
        discarded rows are evicted if all sequences end before the rows above are recomputed (see `keep`).
        """
        given_up = self.scant(path)
        for node in given_up:
            self._pool.free(self.tree.drop(node))
        for node in path:
            if node.scant:
                node.scant = False
                node.uses += node not in given_up
        return given_up

    def touch(self, node: Node) -> None:
        """Record a use of this node and the nodes above it: their rows were copied for a sequence on another path."""
        now = self._clock()
        for above in node.path():
            if above.kept:
                above.used_at, above.uses = now, above.uses + 1
                self._enter(above)

    def graft(self, tail: Node, priority: int) -> None:
        """Enter the rows of an ending sequence's tail into the tree, for prompts that continue from its tokens."""
        leaf = tail.parent
        assert leaf is not None
        rows = min(tail.num_computed, len(tail.tokens))
        slots = tail.give_up()
        self._pool.free(slots[rows:])
        if not rows:
            return
        end = self.tree.extend(leaf, token_bytes(tail.tokens[:rows]))
        for node in end.path(below=leaf):
            own, slots = slots[: len(node.tokens)], slots[len(node.tokens) :]
            if len(node.slots):  # these rows exist already
                self._pool.free(own)
            else:  # the node is new, or a sequence waits for exactly these rows
                node.claim(own)
                node.num_computed = len(own)
                self.tree.stored(node)
        if not end.users and not end.kept:  # the node is new
            end.priority = priority
            self.keep(end)

    def evict(self, rows: int) -> int:
        """Evict at least `rows` rows, or all that may be evicted. Return how many were evicted."""
        started = time.perf_counter()
        evicted, now = 0, self._clock()
        while evicted < rows and (account := self.accounts.next(now)) is not None:
            evicted += self._evict_of(account, rows - evicted)
        self.seconds += time.perf_counter() - started
        return evicted

    def expire(self) -> None:
        """Evict nodes last used more than `ttl` seconds ago. Checks at most ten times per `ttl`."""
        if self.options.ttl is None:
            return
        now = self._clock()
        if now < self._next_expiry:
            return
        self._next_expiry = now + self.options.ttl / 10
        # A node's last use is not before its children's, so children are evicted first.
        while (node := self._first(self._by_age)) is not None and now - node.used_at >= self.options.ttl:
            self._evict_leaf(node)

    def clear(self) -> int:
        """Evict all rows that are not pinned, and return how many were evicted."""
        evicted: int = self.tree.owner(lambda: self.evict(self.rows))
        return evicted

    def place_of(self, request: Request) -> tuple[Namespace, np.ndarray]:
        """Return (namespace, tokens) of a generation request's rows, the arguments of `pin`."""
        return self.namespace_of(request.namespace, request.sampling, request.tokens), request.tokens

    def pin(self, namespace: Hashable, tokens: np.ndarray) -> int:
        """Pin the computed rows of these tokens until `unpin`, so that they are not evicted. Return the pinned length.

        If a step fails after its rows were booked, all rows are lost, and with them all pins.
        """
        pinned: int = self.tree.owner(lambda: self._pin(namespace, tokens))
        return pinned

    def _pin(self, namespace: Hashable, tokens: np.ndarray) -> int:
        pinned = 0
        for node, same in self.tree.match(namespace, token_bytes(tokens)):
            rows = clear_of_span(node.tokens, min(same, node.num_computed))
            if not rows:
                break
            if rows < len(node):
                node = self.tree.split(node, rows)
            if node.kept:
                self._count(node, -node.num_computed)
            node.pins += 1
            pinned += rows
            if rows < same:
                break
        return pinned

    def unpin(self, namespace: Hashable, tokens: np.ndarray) -> int:
        """Remove the longest pin along these tokens, and return how many leading tokens it covered."""
        unpinned: int = self.tree.owner(lambda: self._unpin(namespace, tokens))
        return unpinned

    def _unpin(self, namespace: Hashable, tokens: np.ndarray) -> int:
        matches = self.tree.match(namespace, token_bytes(tokens))
        path = [node for node, same in matches if same == len(node) and node.pins]
        while path and path[-1].pins == sum(child.pins for child in path[-1].children.values()):
            path.pop()  # all its pins extend further down
        for node in path:
            node.pins -= 1
            if node.kept and not node.pins:
                self._count(node, node.num_computed)
                self._enter(node)
        for node in path[:1]:
            assert node.account is not None
            self._cut_down(node.account)
        self._cut_to_most()
        return path[-1].stop if path else 0

    def forget_all(self) -> None:
        """Forget all nodes, after the tree and the pool were cleared."""
        self.kept.clear()
        self.accounts.clear()
        self._by_age.clear()
        self.rows = 0

    def set_tenants(self, tenant_of: Callable[[Hashable], Hashable], share_of: Callable[[Hashable], Share]) -> None:
        """Set the functions for the tenant of a namespace, and for a tenant's share of the cache."""

        def change() -> None:
            self._tenant_of = tenant_of
            self.accounts.set_shares(share_of)
            for account in self.accounts:
                self._cut_down(account)

        self.tree.owner(change)

    def _cut_down(self, account: Account) -> None:
        """Evict the rows of an account above its maximum."""
        while account.max_rows is not None and account.rows > account.max_rows:
            self._evict_of(account, account.rows - account.max_rows)

    def _cut_to_most(self) -> None:
        """Evict rows above `max_tokens`."""
        limit = self.options.max_tokens
        if limit is not None and self.rows > limit:
            self.evict(self.rows - limit)

    def _account_of(self, namespace: Hashable) -> Account:
        if len(self.accounts) > self._most_accounts:
            self.accounts.keep_only({root.account for root in self.tree.roots.values() if root.account is not None})
            self._most_accounts = max(1024, 2 * len(self.accounts))
        return self.accounts.of(self._tenant_of(namespace))

    def _count(self, node: Node, rows: int, nodes: int = 0) -> None:
        """Record `rows` more rows that may be evicted (none if the node is pinned), and `nodes` more kept nodes."""
        account = node.account
        assert account is not None
        account.nodes += nodes
        if not node.pins:
            self.rows += rows
            self.accounts.add(account, rows)

    def _evict_of(self, account: Account, rows: int) -> int:
        """Evict the least valuable leaf of an account, or only its last `rows` rows. Return how many were evicted."""
        node = self._first(account.leaves)
        assert node is not None
        return self._evict_leaf(node, rows)

    def worth(self, node: Node) -> tuple[float, float]:
        first = {"lru": 0, "lfu": node.uses, "priority": node.priority}[self.options.policy]
        return (first, node.used_at)

    def _enter(self, node: Node | None) -> None:
        """Push a node to the heaps if it can be evicted now."""
        if node is None or not node.kept or node.children or node.pins:
            return
        node.place = next(self._places)
        assert node.account is not None
        leaves = node.account.leaves
        heapq.heappush(leaves, (self.worth(node), node.place, node))
        if self.options.ttl is not None:
            heapq.heappush(self._by_age, (node.used_at, node.place, node))
        for heap, most in ((leaves, node.account.nodes), (self._by_age, len(self.kept))):
            if len(heap) > 2 * most + 64:
                heap[:] = [entry for entry in heap if self.is_evictable(entry)]
                heapq.heapify(heap)

    def is_evictable(self, entry: tuple[Any, int, Node]) -> bool:
        node = entry[2]
        return node.place == entry[1] and node.kept and not node.children and not node.pins

    def _first(self, heap: list[Any]) -> Node | None:
        while heap and not self.is_evictable(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _evict_leaf(self, node: Node, rows: int | None = None) -> int:
        """Evict a kept leaf, or only its last `rows` rows. Return how many rows were evicted.

        If the last rows start inside a span, the whole span is evicted. Later prompts may still use the rows before.
        """
        if rows is not None and 0 < rows < len(node) and (remaining := clear_of_span(node.tokens, len(node) - rows)):
            self.tree.split(node, remaining)
        size = node.num_computed
        del self.kept[node]
        self._count(node, -size, -1)
        node.kept = False
        self._drop(node)
        self._enter(node.parent)
        return size

    def _evict_below(self, node: Node) -> None:
        """Evict the kept nodes below a node: their rows are useless while rows above them are missing."""
        below = list(node.children.values())
        for child in below:
            below.extend(child.children.values())
        for child in reversed(below):
            self._evict_leaf(child)

    def _drop(self, node: Node) -> None:
        self._pool.free(self.tree.drop(node))
        self.tree.remove(node)

    def _split(self, upper: Node, lower: Node) -> None:
        if lower.kept:
            self.kept[upper] = None
            self._count(upper, 0, 1)
