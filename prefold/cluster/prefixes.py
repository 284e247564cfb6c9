"""The router's trie: which replica holds which rows, as replicas report, or as estimated for replicas that do not.

Tokens are kept once, however many replicas hold them. A *place* is a maximal run of rows that the same replicas hold or
will hold; bit masks name these replicas. A place without references is removed at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import numpy as np

from ..cache import CacheEvents, CacheOptions, CacheReporter, RadixCache, SlotPool
from ..cache.tree import RadixTree
from ..stream.window import shared_by

_BYTES = 4  # of a token id


def token_bytes(tokens: np.ndarray) -> bytes:
    """Returns token ids as bytes, int32 each."""
    return np.ascontiguousarray(tokens, np.int32).tobytes()


class Place:
    """A Place is a node of the router's trie, or the root above all rows of a namespace.

    tokens          the token ids of its rows, as bytes
    stop            the position behind its last row
    holders         bit r: replica r holds the rows
    coming_holders  bit r: replica r was sent a prompt that goes through the place and has not ended
    children        the places below, by the bytes of their first tokens
    ends            how many runs and prompts end here
    namespace       for a root: its namespace
    users           {replica: how many of the prompts that it was sent end here or below}
    """

    __slots__ = ("children", "coming_holders", "ends", "holders", "namespace", "parent", "stop", "tokens", "users")

    def __init__(self, parent: Place | None, tokens: bytes, stop: int, namespace: Hashable = None):
        self.parent, self.namespace = parent, namespace
        self.tokens = tokens
        self.stop = stop
        self.holders = 0
        self.coming_holders = 0
        self.ends = 0
        self.children: dict[bytes, Place] | None = None
        self.users: dict[int, int] | None = None

    @property
    def start(self) -> int:
        return self.stop - len(self.tokens) // _BYTES


class PrefixIndex:
    """A PrefixIndex holds the places of all namespaces. A reference to a place means its end, which never moves."""

    def __init__(self) -> None:
        self.roots: dict[Hashable, Place] = {}

    def root(self, namespace: Hashable) -> Place:
        """Returns the root of a namespace; makes it if it is not there."""
        place = self.roots.get(namespace)
        if place is None:
            place = self.roots[namespace] = Place(None, b"", 0, namespace)
        return place

    def enter(self, place: Place, tokens: bytes) -> Place:
        """Returns the place that ends `tokens` below the end of `place`; makes it, and cuts another, if needed. The
        caller holds a reference to it until `leave`."""
        at, size = 0, len(tokens)
        while at < size:
            first = tokens[at : at + _BYTES]
            child = place.children.get(first) if place.children else None
            if child is None:
                child = Place(place, tokens[at:] if at else tokens, place.stop + (size - at) // _BYTES)
                if place.children is None:
                    place.children = {}
                place.children[first] = child
                place = child
                break
            same = _same(child.tokens, tokens, at)
            place = child if same == len(child.tokens) else self._cut(child, same)
            at += same
        place.ends += 1
        return place

    def leave(self, place: Place) -> None:
        """Gives up a reference to a place."""
        place.ends -= 1
        self._tidy(place)

    def cut_at(self, place: Place, stop: int) -> Place:
        """Returns the place on the path of `place` that ends at position `stop`; the caller holds a reference to it."""
        while place.start >= stop:
            assert place.parent is not None
            place = place.parent
        if place.stop != stop:
            place = self._cut(place, (stop - place.start) * _BYTES)
        place.ends += 1
        return place

    def hold(self, place: Place, start: int, bit: int) -> None:
        """Marks the rows from `start` to the end of `place` as held. bit: of the replica"""
        at: Place | None = place
        while at is not None and at.stop > start:
            at.holders |= bit
            at = at.parent

    def release(self, place: Place, start: int, bit: int) -> None:
        """Marks the rows from `start` to the end of `place` as no longer held, and gives up the reference to
        `place`."""
        at: Place | None = place
        while at is not None and at.stop > start:
            at.holders &= ~bit
            at = at.parent
        self.leave(place)

    def send(self, place: Place, replica: int) -> None:
        """Books that a replica was sent a prompt that ends with `place`."""
        at = place
        while at.parent is not None:
            if at.users is None:
                at.users = {}
            at.users[replica] = at.users.get(replica, 0) + 1
            at.coming_holders |= 1 << replica
            at = at.parent

    def unsend(self, place: Place, replica: int) -> None:
        """Books that such a prompt has ended, and gives up the reference to `place`."""
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

    def match(self, namespace: Hashable, tokens: bytes) -> Iterator[tuple[int, int, int]]:
        """Yields (rows, holders, coming holders) along the path of `tokens`: a number of leading rows, and the bits of
        the replicas that hold them all and that will hold them all. Ends where no replica will."""
        place: Place | None = self.roots.get(namespace)
        at, size, holders, coming_holders = 0, len(tokens), -1, -1
        while place is not None and at < size and place.children:
            place = place.children.get(tokens[at : at + _BYTES])
            if place is None:
                return
            coming_holders &= place.holders | place.coming_holders
            if not coming_holders:
                return
            holders &= place.holders
            same = _same(place.tokens, tokens, at)
            at += same
            yield at // _BYTES, holders, coming_holders
            if same < len(place.tokens):
                return

    def _cut(self, place: Place, size: int) -> Place:
        """Cuts off the first `size` bytes of a place as a new place above it, and returns the new place."""
        above = place.parent
        assert above is not None and above.children is not None and 0 < size < len(place.tokens)
        upper = Place(above, place.tokens[:size], place.stop - (len(place.tokens) - size) // _BYTES)
        upper.holders, upper.coming_holders = place.holders, place.coming_holders
        upper.users = None if place.users is None else dict(place.users)
        above.children[place.tokens[:_BYTES]] = upper
        place.parent, place.tokens = upper, place.tokens[size:]
        upper.children = {place.tokens[:_BYTES]: place}
        return upper

    def _tidy(self, place: Place) -> None:
        """Removes a place without references, or joins it to its only child if the same replicas hold both."""
        while place.parent is not None and not place.ends:
            above = place.parent
            assert above.children is not None
            if not place.children:
                del above.children[place.tokens[:_BYTES]]
                if not above.children:
                    above.children = None
                place = above
                continue
            if len(place.children) == 1:
                (child,) = place.children.values()
                if child.holders == place.holders and child.users == place.users:
                    above.children[place.tokens[:_BYTES]] = child
                    child.parent, child.tokens = above, place.tokens + child.tokens
            return
        if place.parent is None and not place.children:
            self.roots.pop(place.namespace, None)


def _same(tokens: bytes, other: bytes, at: int) -> int:
    """Returns how many leading bytes of `tokens` are those of `other` from `at` on, in whole tokens."""
    if other.startswith(tokens, at):
        return len(tokens)
    return shared_by(tokens, other[at : at + len(tokens)]) * _BYTES


_BLOCK = 128  # a replica may count its cached tokens in blocks of up to this many


class EstimatedCache:
    """An EstimatedCache holds the rows of the prompts that a replica has answered, and evicts the least recently used.

    capacity  the most rows, at first a guess. It falls when an answer shows that rows are gone which should be there,
              and grows when rows are there which should be gone
    """

    def __init__(self, capacity: int = 1 << 17):
        self._tree = RadixTree()
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
        path = self._tree.insert(namespace, tokens).path()
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
        evicted = [node for node, same in self._tree.match(namespace, tokens)[0] if node.start + same > cached]
        if not evicted:
            return
        used = evicted[0].used_at
        old = sum(node.num_computed for node in self._tree.nodes() if node.used_at <= used)
        self._limit(max(1, self._cache.rows - old))
        self._cache.evict(old)

    def _limit(self, rows: int) -> None:
        self._cache.options = replace(self._cache.options, max_tokens=rows)
