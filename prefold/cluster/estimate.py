"""What a replica that reports no events probably holds: a radix cache of its own, corrected by each answer.

The estimate speaks the same events as a replica that reports, so the router knows one way of learning only.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from ..cache import CacheEvents, CacheOptions, CacheReporter, RadixCache, SlotPool
from ..cache.tree import RadixTree

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
        self._cache = RadixCache(self._tree, SlotPool(0), CacheOptions(max_tokens=capacity, min_overlap=0), self._clock)
        self._reporter = CacheReporter(self._tree)

    def _clock(self) -> float:
        return self._now

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
