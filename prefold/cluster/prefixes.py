"""The router's trie of which replica has which rows. Replicas report their rows; for other replicas the rows are
estimated.

Tokens are stored once, for all replicas. A *place* is a node of the trie: a maximal run of rows that the same replicas
have or will have. Bit masks name these replicas.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ..engine.cache import CacheEvents, CacheOptions, CacheReporter, RadixCache, SlotPool
from ..engine.cache.tree import RowTrie
from ..trie import RadixNode, RadixTrie, token_bytes


@dataclass(eq=False, repr=False, slots=True)
class Place(RadixNode):
    """Rows that the same replicas have or will have."""

    holders: int = 0  # bit r: replica r has the rows
    coming_holders: int = 0  # bit r: replica r has an open request whose prompt passes through the place
    ends: int = 0  # number of runs and prompts that end here: the references to the place
    users: dict[int, int] | None = None  # {replica: number of its open prompts that end here or below}

    def divide(self, upper: Self) -> None:
        upper.holders, upper.coming_holders = self.holders, self.coming_holders
        upper.users = None if self.users is None else dict(self.users)


class PrefixIndex(RadixTrie[Place]):
    """The places of all namespaces. A place without references is removed at once."""

    def __init__(self) -> None:
        super().__init__(Place)

    def enter(self, namespace: Hashable, ids: bytes, below: Place | None = None) -> Place:
        """Return the place where `ids` ends, starting from the root or from the end of `below`.

        The caller has a reference to the place until `leave`.
        """
        place = self.insert(namespace, ids) if below is None else self.extend(below, ids)
        place.ends += 1
        return place

    def leave(self, place: Place) -> None:
        """Release a reference to a place.

        Places without references or children are removed. A place is merged with its only child if the same replicas
        have both.
        """
        place.ends -= 1
        while place.parent is not None and not place.ends:
            if len(place.children) == 1:
                (child,) = place.children.values()
                if (child.holders, child.users) == (place.holders, place.users):
                    self.join(place)
            if place.children:
                return
            above = place.parent
            self.remove(place)
            place = above

    def cut_at(self, place: Place, stop: int) -> Place:
        """Return the place on the path of `place` that ends at position `stop`. The caller gets a reference to it."""
        while place.start >= stop:
            assert place.parent is not None
            place = place.parent
        if place.stop != stop:
            place = self.split(place, stop - place.start)
        place.ends += 1
        return place

    def hold(self, place: Place, start: int, bit: int) -> None:
        """Mark the rows from position `start` to the end of `place` as present on a replica.

        Args:
            bit: the replica's bit
        """
        while place.parent is not None and place.start >= start:
            place.holders |= bit
            place = place.parent

    def release(self, place: Place, start: int, bit: int) -> None:
        """Mark the rows from position `start` to the end of `place` as absent on a replica.

        Also release the reference to `place`.
        """
        at = place
        while at.parent is not None and at.start >= start:
            at.holders &= ~bit
            at = at.parent
        self.leave(place)

    def send(self, place: Place, replica: int) -> None:
        """Record that a replica was sent a prompt that ends with `place`."""
        at = place
        while at.parent is not None:
            if at.users is None:
                at.users = {}
            at.users[replica] = at.users.get(replica, 0) + 1
            at.coming_holders |= 1 << replica
            at = at.parent

    def unsend(self, place: Place, replica: int) -> None:
        """Record that a prompt of `send` has ended, and release the reference to `place`."""
        at = place
        while at.parent is not None:
            assert at.users is not None
            count = at.users[replica] - 1
            if count:
                at.users[replica] = count
            else:
                del at.users[replica]
                at.coming_holders &= ~(1 << replica)
                at.users = at.users or None
            at = at.parent
        self.leave(place)


_BLOCK = 128  # a replica may count its cached tokens in blocks of up to this many


class EstimatedCache:
    """The estimated cache of a replica: the rows of the prompts that it has answered, with LRU eviction.

    Args:
        capacity: the maximum number of rows, at first a guess. It falls if an answer shows that expected rows are
            missing, and grows if rows are present that should have been evicted.
    """

    def __init__(self, capacity: int = 1 << 17):
        self._tree = RowTrie()
        self._now = 0.0  # the number of answers
        # The pool is empty, because estimated rows have no slots.
        options = CacheOptions(max_tokens=capacity, min_overlap=0)
        self._cache = RadixCache(self._tree, SlotPool(0), options, lambda: self._now)
        self._reporter = CacheReporter(self._tree)

    @property
    def capacity(self) -> int:
        assert self._cache.options.max_tokens is not None
        return self._cache.options.max_tokens

    def events(self) -> CacheEvents | None:
        """Return the events since the last call; None if there are none."""
        return self._reporter.drain()

    def answered(
        self, namespace: Hashable, tokens: np.ndarray, estimated_rows: int, matched_rows: int, cached_rows: int | None
    ) -> None:
        """Record that a prompt was answered, so its rows are cached.

        Args:
            estimated_rows: how many of its leading rows the estimate had when it was sent
            matched_rows: the same, with the rows of prompts in flight
            cached_rows: how many rows were cached according to the answer; None: the answer does not say
        """
        if cached_rows is not None:
            if cached_rows + _BLOCK < estimated_rows:
                self._forget_older_than(namespace, tokens, cached_rows)
            elif cached_rows > matched_rows + _BLOCK:
                self._limit(self.capacity + 2 * (cached_rows - matched_rows))
        self._now += 1
        path = self._tree.insert(namespace, token_bytes(tokens)).path()
        self._cache.take(path)
        for node in path:
            if node.num_pending:
                node.num_computed = len(node)
                self._tree.stored(node)
        for node in reversed(path):
            self._cache.keep(node)

    def _forget_older_than(self, namespace: Hashable, tokens: np.ndarray, cached: int) -> None:
        """Evict the rows of a prompt after its first `cached` rows, and all rows that were used less recently.

        The answer to the prompt has shown that these rows are not in the replica's cache any more.
        """
        matches = self._tree.match(namespace, token_bytes(tokens))
        evicted = [node for node, same in matches if node.start + same > cached]
        if not evicted:
            return
        used = evicted[0].used_at
        old = sum(node.num_computed for node in self._tree.nodes() if node.used_at <= used)
        self._limit(max(1, self._cache.rows - old))
        self._cache.evict(old)

    def _limit(self, rows: int) -> None:
        self._cache.options = replace(self._cache.options, max_tokens=rows)
