"""The router's trie: which rows are held where, as replicas tell, or as is estimated of those that do not.

Tokens are kept once, however many replicas hold them. A *place* is a maximal run of rows that are treated alike; each
knows as a bit mask who holds its rows, and who was sent a prompt that will make it hold them. Places without a
reference go at once.
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
    """A place is a node of the router's trie, or the root above all rows of a namespace.

    tokens    its rows' token ids, as bytes
    stop      the position behind its last row
    held      bit r: replica r holds the rows
    coming    bit r: replica r was sent a prompt that goes through the place and has not ended
    children  by the bytes of the first token
    ends      how many runs and prompts end here
    namespace of a root
    users     how many of the prompts that were sent to a replica end here or below, by replica
    """

    __slots__ = ("children", "coming", "ends", "held", "namespace", "parent", "stop", "tokens", "users")

    def __init__(self, parent: Place | None, tokens: bytes, stop: int, namespace: Hashable = None):
        self.parent, self.namespace = parent, namespace
        self.tokens = tokens
        self.stop = stop
        self.held = 0
        self.coming = 0
        self.ends = 0
        self.children: dict[bytes, Place] | None = None
        self.users: dict[int, int] | None = None

    @property
    def start(self) -> int:
        return self.stop - len(self.tokens) // _BYTES


class PrefixIndex:
    """The places of all namespaces. A reference to a place is one to its end, which stays where it is."""

    def __init__(self) -> None:
        self.roots: dict[Hashable, Place] = {}

    def root(self, namespace: Hashable) -> Place:
        """Returns the root of a namespace, which is made where it is not there."""
        place = self.roots.get(namespace)
        if place is None:
            place = self.roots[namespace] = Place(None, b"", 0, namespace)
        return place

    def enter(self, place: Place, tokens: bytes) -> Place:
        """Returns the place that ends `tokens` below the end of `place`; made, and others cut, where needed. The
        caller refers to it from now on: see `leave`."""
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
        """One who refers to a place does so no more."""
        place.ends -= 1
        self._tidy(place)

    def cut_at(self, place: Place, stop: int) -> Place:
        """Returns the place on the path of `place` that ends at position `stop`; the caller now refers to it."""
        while place.start >= stop:
            assert place.parent is not None
            place = place.parent
        if place.stop != stop:
            place = self._cut(place, (stop - place.start) * _BYTES)
        place.ends += 1
        return place

    def hold(self, place: Place, start: int, bit: int) -> None:
        """The rows from `start` to the end of `place` are held."""
        at: Place | None = place
        while at is not None and at.stop > start:
            at.held |= bit
            at = at.parent

    def release(self, place: Place, start: int, bit: int) -> None:
        """The rows from `start` to the end of `place`, to which the caller refers no more, are not held any longer."""
        at: Place | None = place
        while at is not None and at.stop > start:
            at.held &= ~bit
            at = at.parent
        self.leave(place)

    def send(self, place: Place, replica: int) -> None:
        """Replica `replica` was sent a prompt that ends with `place`."""
        at = place
        while at.parent is not None:
            if at.users is None:
                at.users = {}
            at.users[replica] = at.users.get(replica, 0) + 1
            at.coming |= 1 << replica
            at = at.parent

    def unsend(self, place: Place, replica: int) -> None:
        """That prompt has ended; the caller refers to the place no more."""
        at = place
        while at.parent is not None:
            assert at.users is not None
            left = at.users[replica] - 1
            if left:
                at.users[replica] = left
            else:
                del at.users[replica]
                at.coming &= ~(1 << replica)
                at.users = at.users or None
            at = at.parent
        self.leave(place)

    def match(self, namespace: Hashable, tokens: bytes) -> Iterator[tuple[int, int, int]]:
        """Yields (rows, held, coming) along the path of `tokens`: how many leading rows, who holds them all and who
        will hold them all. Ends where no replica does."""
        place: Place | None = self.roots.get(namespace)
        at, size, held, coming = 0, len(tokens), -1, -1
        while place is not None and at < size and place.children:
            place = place.children.get(tokens[at : at + _BYTES])
            if place is None:
                return
            coming &= place.held | place.coming
            if not coming:
                return
            held &= place.held
            same = _same(place.tokens, tokens, at)
            at += same
            yield at // _BYTES, held, coming
            if same < len(place.tokens):
                return

    def _cut(self, place: Place, size: int) -> Place:
        """Cuts off the first `size` bytes of a place as a place above it, and returns that."""
        above = place.parent
        assert above is not None and above.children is not None and 0 < size < len(place.tokens)
        upper = Place(above, place.tokens[:size], place.stop - (len(place.tokens) - size) // _BYTES)
        upper.held, upper.coming = place.held, place.coming
        upper.users = None if place.users is None else dict(place.users)
        above.children[place.tokens[:_BYTES]] = upper
        place.parent, place.tokens = upper, place.tokens[size:]
        upper.children = {place.tokens[:_BYTES]: place}
        return upper

    def _tidy(self, place: Place) -> None:
        """Takes away a place without a reference, and joins one to its only child that is treated alike."""
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
                if child.held == place.held and child.users == place.users:
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


_BLOCK = 128  # a replica may count its cached tokens in blocks of up to so many


class EstimatedCache:
    """Holds the rows of the prompts that a replica has answered, the least recently used of them evicted.

    capacity  rows, as first guess. It falls to what was still found when an answer shows that rows are gone which
              should be there, and grows when rows are there which should be gone
    """

    def __init__(self, capacity: int = 1 << 17):
        self._tree = RadixTree()
        self._now = 0.0  # counts answers
        # No pool: nothing has slots here.
        options = CacheOptions(max_tokens=capacity, min_overlap=0)
        self._cache = RadixCache(self._tree, SlotPool(0), options, lambda: self._now)
        self._reporter = CacheReporter(self._tree)

    @property
    def capacity(self) -> int:
        assert self._cache.options.max_tokens is not None
        return self._cache.options.max_tokens

    def events(self) -> CacheEvents | None:
        """Returns what has changed since the last call."""
        return self._reporter.drain()

    def answered(
        self,
        namespace: Hashable,
        tokens: np.ndarray,
        *,
        held: int = 0,
        believed: int = 0,
        cached: int | None = None,
    ) -> None:
        """A prompt was answered, so its rows are held.

        held      how many of its leading rows were thought to be held when it was sent
        believed  those, and what prompts under way were to bring: they may have come in time, or not
        cached    how many were held, as the answer says; None: it does not say
        """
        if cached is not None:
            if cached + _BLOCK < held:
                self._forget_older_than(namespace, tokens, cached)
            elif cached > believed + _BLOCK:
                self._limit(self.capacity + 2 * (cached - believed))
        self._now += 1
        path = self._tree.insert(namespace, tokens).path()
        self._cache.take(path)
        for node in path:
            if node.pending:
                node.computed = len(node)
                self._tree.stored(node)
        for node in reversed(path):
            self._cache.keep(node)

    def _forget_older_than(self, namespace: Hashable, tokens: np.ndarray, cached: int) -> None:
        """The rows behind the first `cached` ones were gone, so all that was used before them is gone as well."""
        gone = [node for node, same in self._tree.match(namespace, tokens)[0] if node.start + same > cached]
        if not gone:
            return
        used = gone[0].used
        old = sum(node.computed for node in self._tree.nodes() if node.used <= used)
        self._limit(max(1, self._cache.rows - old))
        self._cache.evict(old)

    def _limit(self, rows: int) -> None:
        self._cache.options = replace(self._cache.options, max_tokens=rows)
