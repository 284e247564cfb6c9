"""The router's trie: which replica holds which rows, as replicas report, or as estimated for replicas that do not.

Tokens are kept once, however many replicas hold them. A *place* is a node of the trie: a maximal run of rows that the
same replicas hold or will hold; bit masks name these replicas.
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
    """Rows that the same replicas hold or will hold."""

    holders: int = 0  # bit r: replica r holds the rows
    coming_holders: int = 0  # bit r: replica r was sent a prompt that goes through the place and has not ended
    ends: int = 0  # how many runs and prompts end here: the references to the place
    users: dict[int, int] | None = None  # {replica: how many of the prompts that it was sent end here or below}

    def divide(self, upper: Self) -> None:
        upper.holders, upper.coming_holders = self.holders, self.coming_holders
        upper.users = None if self.users is None else dict(self.users)


class PrefixIndex(RadixTrie[Place]):
    """The places of all namespaces. A place without references is removed at once."""

    def __init__(self) -> None:
        super().__init__(Place)

    def enter(self, namespace: Hashable, ids: bytes, below: Place | None = None) -> Place:
        """Return the place that ends with `ids`, or ends `ids` below the end of another place. The caller holds a
        reference to it until `leave`."""
        place = self.insert(namespace, ids) if below is None else self.extend(below, ids)
        place.ends += 1
        return place

    def leave(self, place: Place) -> None:
        """Give up a reference to a place. Remove the places that nothing needs any more, and join a place to its only
        child if the same replicas hold both."""
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
        """Return the place on the path of `place` that ends at position `stop`. The caller holds a reference to it."""
        while place.start >= stop:
            assert place.parent is not None
            place = place.parent
        if place.stop != stop:
            place = self.split(place, stop - place.start)
        place.ends += 1
        return place

    def hold(self, place: Place, start: int, bit: int) -> None:
        """Mark the rows from `start` to the end of `place` as held. bit: of the replica"""
        while place.parent is not None and place.start >= start:
            place.holders |= bit
            place = place.parent

    def release(self, place: Place, start: int, bit: int) -> None:
        """Mark the rows from `start` to the end of `place` as no longer held, and give up the reference to `place`."""
        at = place
        while at.parent is not None and at.start >= start:
            at.holders &= ~bit
            at = at.parent
        self.leave(place)

    def send(self, place: Place, replica: int) -> None:
        """Book that a replica was sent a prompt that ends with `place`."""
        at = place
        while at.parent is not None:
            if at.users is None:
                at.users = {}
            at.users[replica] = at.users.get(replica, 0) + 1
            at.coming_holders |= 1 << replica
            at = at.parent

    def unsend(self, place: Place, replica: int) -> None:
        """Book that such a prompt has ended, and give up the reference to `place`."""
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
    """An EstimatedCache holds the rows of the prompts that a replica has answered, and evicts the least recently used.

    capacity  the most rows, at first a guess. It falls when an answer shows that rows are gone which should be there,
              and grows when rows are there which should be gone
    """

    def __init__(self, capacity: int = 1 << 17):
        self._tree = RowTrie()
        self._now = 0.0  # counts answers
        # The pool is empty: rows have no slots here.
        options = CacheOptions(max_tokens=capacity, min_overlap=0)
        self._cache = RadixCache(self._tree, SlotPool(0), options, lambda: self._now)
        self._reporter = CacheReporter(self._tree)

    @property
    def capacity(self) -> int:
        assert self._cache.options.max_tokens is not None
        return self._cache.options.max_tokens

    def events(self) -> CacheEvents | None:
        """Returns the events since the last call; None if there are none."""
        return self._reporter.drain()

    def answered(
        self, namespace: Hashable, tokens: np.ndarray, estimated_rows: int, matched_rows: int, cached_rows: int | None
    ) -> None:
        """Books that a prompt was answered, so that its rows are held.

        estimated_rows  how many of its leading rows the estimate held when it was sent
        matched_rows    how many it held then together with the prompts in flight
        cached_rows     how many were cached, as the answer says; None: it does not say
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
        """Evicts all rows that were used before the rows behind the first `cached` ones, which the answer shows to be
        gone.
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
