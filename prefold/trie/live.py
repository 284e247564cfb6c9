"""The live window: requests that wait for a replica, in buckets that share a prefix.

The window is bounded in tokens. Adding a prompt costs time proportional to its length. A prompt leaves together with
others of its bucket when a replica has free capacity. The caller passes the current time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ..errors import InputError
from ..spec.requests import NO_NAMESPACE
from .radix import RadixNode, RadixTrie, token_bytes


@dataclass(eq=False, repr=False, slots=True)
class WaitingNode(RadixNode):
    """A run of tokens shared by waiting prompts."""

    requests: int = 0  # how many prompts end here or below; 0: the node is no longer in the trie
    tokens: int = 0  # total length of these prompts
    ending: dict[Hashable, WaitingRequest] = field(default_factory=dict)  # the prompts that end here, by key

    def divide(self, upper: Self) -> None:
        upper.requests, upper.tokens = self.requests, self.tokens


@dataclass(frozen=True, eq=False, slots=True)
class WaitingRequest:
    """A request in the window."""

    key: Hashable
    tokens: np.ndarray
    namespace: Hashable
    since: float  # when the request was added, as passed by the caller
    payload: Any  # the caller's data
    leaf: WaitingNode


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """Requests that share a prefix and can leave the window together.

    A bucket is a topmost node with a path of at least `threshold` times the mean length of the prompts below the node.
    A prompt that ends above all such nodes forms its own bucket.
    """

    namespace: Hashable
    prefix: np.ndarray  # int32 [n]: the tokens that all its requests start with
    requests: int  # number of requests
    tokens: int  # total tokens of the requests
    node: WaitingNode
    is_whole: bool  # True: all prompts at or below the node; False: only the prompts that end at the node


class LiveWindow:
    """Requests that wait, grouped into buckets by prefix.

    Args:
        max_tokens: The window is full from this many tokens on, and accepts no more requests.
        threshold: Minimum share of a prompt that a bucket has in common.
        grown_tokens: A bucket of at least this many tokens may leave; a smaller one waits for more requests.
        max_age: Seconds after which a request no longer waits for others.
        homes: homes(namespace, prefix) -> the replicas whose caches hold the prefix. Each replica has a queue. A bucket
            without such a replica is in the queue None.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        threshold: float = 0.3,
        grown_tokens: int = 8192,
        max_age: float = 2.0,
        homes: Callable[[Hashable, np.ndarray], Collection[Hashable]] = lambda namespace, prefix: (),
    ):
        for name, value, least in (("max_tokens", max_tokens, 1), ("threshold", threshold, 0), ("max_age", max_age, 0)):
            if value < least:
                raise InputError(f"{name} is {value}", field=name, remedy=f"give {least} or more")
        self.max_tokens, self.threshold = max_tokens, threshold
        self.grown_tokens, self.max_age = grown_tokens, max_age
        self.num_tokens = 0
        self.is_closed = False
        self._homes = homes
        self.trie = RadixTrie(WaitingNode)
        self.by_key: OrderedDict[Hashable, WaitingRequest] = OrderedDict()
        # The buckets of each queue, as a heap of (-tokens, place, node, is_whole). A bucket that changes is pushed
        # again, and its old entry is skipped later. When most entries are outdated, the heap is rebuilt.
        self.heaps: dict[Hashable, list[tuple[int, int, WaitingNode, bool]]] = {}
        self._places = itertools.count()

    def __len__(self) -> int:
        return len(self.by_key)

    @property
    def is_full(self) -> bool:
        """True if the window accepts no more requests until some have left."""
        return self.num_tokens >= self.max_tokens

    def put(
        self,
        key: Hashable,
        tokens: np.ndarray,
        *,
        now: float,
        namespace: Hashable = NO_NAMESPACE,
        payload: Any = None,
        returns: bool = False,
    ) -> None:
        """Add a prompt.

        Args:
            tokens: int32 [n], n >= 1.
            returns: The request has left before and comes back; a closed window accepts only such requests.

        Raises:
            InputError: The key already waits, or the window is closed.
            RuntimeError: The window is full.
        """
        if key in self.by_key:
            raise InputError(f"a request with key {key!r} waits already", field="key", remedy="use unique keys")
        if self.is_closed and not returns:
            raise InputError("the window is closed", field="key", remedy="put requests before calling close()")
        if self.is_full:
            raise RuntimeError("the window is full")
        # This prompt may split the bucket on its path into the buckets below.
        ids = token_bytes(tokens)
        matches = self.trie.match(namespace, ids)
        before = next((node for node, same in matches if same == len(node) and self._has_enough(node)), None)
        leaf = self.trie.insert(namespace, ids)
        waiting = WaitingRequest(key, tokens, namespace, now, payload, leaf)
        self.by_key[key] = waiting
        self.num_tokens += len(tokens)
        for node in leaf.path():
            node.requests += 1
            node.tokens += len(tokens)
        leaf.ending[key] = waiting
        self._enter_along(leaf, before)

    def close(self) -> None:
        """Declare that no more requests come. Buckets then stop waiting for more."""
        self.is_closed = True

    def waiting(self) -> Iterator[WaitingRequest]:
        """Iterate over the waiting requests, oldest first."""
        return iter(list(self.by_key.values()))

    def oldest(self) -> Bucket | None:
        """Return the bucket of the request that has waited longest; None if no request waits."""
        waiting = next(iter(self.by_key.values()), None)
        return None if waiting is None else self.bucket_of(waiting.key)

    def next_deadline(self) -> float | None:
        """Return the time at which the oldest request reaches `max_age`; None if no request waits."""
        waiting = next(iter(self.by_key.values()), None)
        return None if waiting is None else waiting.since + self.max_age

    def overdue(self, now: float) -> Bucket | None:
        """Return the bucket of the oldest request if it has waited for `max_age`, else None."""
        due = self.next_deadline()
        return self.oldest() if due is not None and now >= due else None

    def largest(self, queue: Hashable = None, *, grown: bool = True) -> Bucket | None:
        """Return the bucket of a queue with the most tokens, or None.

        With `grown`, a bucket of fewer than `grown_tokens` tokens is returned only if the window is full or closed.
        """
        heap = self.heaps.get(queue)
        while heap:
            tokens, _, node, is_whole = heap[0]
            bucket = self.bucket(node, is_whole)
            if bucket is None or bucket.tokens != -tokens:
                heapq.heappop(heap)
                continue
            homes = self._homes(bucket.namespace, bucket.prefix)
            if queue not in homes and (homes or queue is not None):  # the cached prefix has moved to other replicas
                heapq.heappop(heap)
                self._enter(node, is_whole)
                continue
            waits = grown and bucket.tokens < self.grown_tokens and not (self.is_full or self.is_closed)
            return None if waits else bucket
        self.heaps.pop(queue, None)
        return None

    def bucket_of(self, key: Hashable) -> Bucket:
        """Return the bucket that contains a request. Raise KeyError if the request does not wait."""
        leaf = self.by_key[key].leaf
        node = next((node for node in leaf.path() if self._has_enough(node)), None)
        bucket = self.bucket(leaf, False) if node is None else self.bucket(node, True)
        assert bucket is not None
        return bucket

    def current(self, bucket: Bucket) -> Bucket | None:
        """Return the bucket as it is now, after requests left or joined; None if it is empty."""
        if not bucket.node.requests:
            return None
        current = self.bucket(bucket.node, bucket.is_whole)
        if current is None:
            node = next((node for node in bucket.node.path() if self._has_enough(node)), None)
            current = None if node is None else self.bucket(node, True)
        return current

    def take(self, bucket: Bucket, max_tokens: int | None = None) -> list[WaitingRequest]:
        """Remove requests of a bucket from the window and return them.

        All requests leave, or as many as fit into `max_tokens`, but at least one. They are neighbours in the trie, so
        they share as much as possible. Raise KeyError if the bucket has changed since it was looked up.
        """
        now = self.bucket(bucket.node, bucket.is_whole)
        if now is None or (now.requests, now.tokens) != (bucket.requests, bucket.tokens):
            raise KeyError("the bucket has changed")
        requests: list[WaitingRequest] = []
        room = bucket.tokens if max_tokens is None else max_tokens
        for waiting in self.requests_of(bucket):
            if requests and len(waiting.tokens) > room:
                break
            room -= len(waiting.tokens)
            requests.append(waiting)
        for waiting in requests:
            self._remove(waiting)
        node = bucket.node
        while node.parent is not None and not node.requests:
            node = node.parent
        if node.parent is not None:
            self._enter_along(node, bucket.node if bucket.is_whole and node is bucket.node else None)
        return requests

    @property
    def queues(self) -> list[Hashable]:
        """The queues that may have a bucket."""
        return list(self.heaps)

    def requests_of(self, bucket: Bucket) -> Iterator[WaitingRequest]:
        """Yield the requests of a bucket in trie order."""
        if bucket.is_whole:
            return self._requests_below(bucket.node)
        return iter(list(bucket.node.ending.values()))

    def _has_enough(self, node: WaitingNode) -> bool:
        return node.stop * node.requests >= self.threshold * node.tokens

    def bucket(self, node: WaitingNode, is_whole: bool) -> Bucket | None:
        """Return the bucket at a node; None if the node is no bucket."""
        size = self._size(node, is_whole)
        if size is None:
            return None
        end = node
        while is_whole and len(end.children) == 1 and not end.ending:
            (end,) = end.children.values()
        path = end.path()
        above = path[0].parent
        assert above is not None
        prefix = np.frombuffer(b"".join([node.ids for node in path]), np.int32)
        return Bucket(above.namespace, prefix, *size, node, is_whole)

    def _size(self, node: WaitingNode, is_whole: bool) -> tuple[int, int] | None:
        """Return the requests and the tokens of the bucket at a node; None if the node is no bucket."""
        if not node.requests or any(self._has_enough(above) for above in node.path()[:-1]):
            return None
        if self._has_enough(node) != is_whole or not (is_whole or node.ending):
            return None
        if is_whole:
            return node.requests, node.tokens
        return len(node.ending), len(node.ending) * node.stop

    def buckets_below(self, node: WaitingNode) -> Iterator[tuple[WaitingNode, bool]]:
        unseen = [node]
        while unseen:
            node = unseen.pop()
            if self._has_enough(node):
                yield node, True
                continue
            if node.ending:
                yield node, False
            unseen.extend(node.children.values())

    def _enter_along(self, end: WaitingNode, before: WaitingNode | None) -> None:
        """Push the buckets on the path of `end` into their queues after the totals changed.

        `before` is the bucket that was on this path until now.
        """
        path = end.path()
        first = next((node for node in path if self._has_enough(node)), None)
        if first is not None:
            self._enter(first, True)
        elif end.ending:
            self._enter(end, False)
        if before is not None and (first is None or first not in before.path()):
            for node, is_whole in self.buckets_below(before):
                self._enter(node, is_whole)

    def _enter(self, node: WaitingNode, is_whole: bool) -> None:
        bucket = self.bucket(node, is_whole)
        if bucket is None:
            return
        for queue in self._homes(bucket.namespace, bucket.prefix) or (None,):
            heap = self.heaps.setdefault(queue, [])
            heapq.heappush(heap, (-bucket.tokens, next(self._places), node, is_whole))
            if len(heap) > 2 * len(self.by_key) + 64:
                heap[:] = {entry[2:]: entry for entry in heap if self._is_size(entry)}.values()
                heapq.heapify(heap)

    def _is_size(self, entry: tuple[int, int, WaitingNode, bool]) -> bool:
        tokens, _, node, is_whole = entry
        size = self._size(node, is_whole)
        return size is not None and size[1] == -tokens

    def _requests_below(self, node: WaitingNode) -> Iterator[WaitingRequest]:
        unseen = [node]
        while unseen:
            node = unseen.pop()
            yield from node.ending.values()
            unseen.extend(reversed(node.children.values()))

    def _remove(self, waiting: WaitingRequest) -> None:
        del self.by_key[waiting.key]
        self.num_tokens -= len(waiting.tokens)
        del waiting.leaf.ending[waiting.key]
        for node in reversed(waiting.leaf.path()):
            node.requests -= 1
            node.tokens -= len(waiting.tokens)
            if not node.requests:
                self.trie.remove(node)
