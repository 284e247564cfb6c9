"""Daft's provider for vLLM, after its code at the time of the article (daft/execution/vllm.py and its sink).

The input has a few partitions, with one task each. A task

1. sorts its buffered prompts,
2. cuts them into buckets where neighbours share less than a third of their rows,
3. submits the largest buckets first, until at most 5,000 prompts are left; at the end of its input it submits all.

A partition arrives in one piece, so the buffer does not limit the size of buckets. Buckets of fewer than 16 prompts are
combined until they have 16 prompts, and then have no prefix. Submitting does not wait for results.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence

from .fleet import Feeder
from .requests import SimRequest, shared_rows

__all__ = ["DaftProvider", "DaftRouter"]


class DaftRouter:
    """Daft's router. A replica's load is the number of all prompts ever sent to it.

    - A batch with a prefix goes to a replica with fewer than `slack` prompts more than the least loaded one: to the
      replica that received the prefix most recently (within its last 8 batches), else to the last one.
    - A batch without a prefix goes to the first of the least loaded replicas.
    """

    slack, remembered = 256, 8

    def __init__(self, replicas: int):
        self.loads = [0] * replicas
        self._recent: list[list[Hashable | None]] = [[] for _ in range(replicas)]

    def route(self, prefix: Hashable | None, count: int) -> int:
        """Return the replica for a batch of `count` prompts."""
        least = min(self.loads)
        if prefix is None:
            best = self.loads.index(least)
        else:
            near = [i for i, load in enumerate(self.loads) if load < least + self.slack]
            seen = [(self._recent[i].index(prefix), i) for i in near if prefix in self._recent[i]]
            best = min(seen)[1] if seen else near[-1]
        self._recent[best] = [prefix, *self._recent[best]][: self.remembered]
        self.loads[best] += count
        return best


class DaftProvider(Feeder):
    """Submits all requests as soon as all replicas have loaded. The partitions take turns.

    Args:
        partitions: Number of tasks. Each has an equal part of the requests.
        batch: Prompts of a batch in input order, without bucketing; None: make buckets.
    """

    buffered, threshold, least = 5000, 0.33, 16

    def __init__(
        self,
        requests: Sequence[SimRequest],
        replicas: int,
        *,
        partitions: int = 8,
        batch: int | None = None,
    ):
        super().__init__()
        self._router = DaftRouter(replicas)
        self._replicas = replicas
        size = len(requests)
        parts = [requests[i * size // partitions : (i + 1) * size // partitions] for i in range(partitions)]
        self._batches = [self._buckets(part) if batch is None else _pieces(part, batch) for part in parts]
        self._has_given = False

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        if self._has_given or len(self.in_flight) < self._replicas:
            return []  # the provider waits for all of its actors
        self._has_given = True
        given = []
        while self._batches:
            for batches in list(self._batches):
                found = next(batches, None)
                if found is None:
                    self._batches.remove(batches)
                    continue
                prefix, requests = found
                replica = self._router.route(prefix, len(requests))
                self.in_flight[replica] += len(requests)
                given.append((replica, requests))
        return given

    def _buckets(self, part: Sequence[SimRequest]) -> Iterator[tuple[Hashable | None, list[SimRequest]]]:
        """Yield (prefix, requests) of each batch of a partition."""
        in_order = sorted(part, key=lambda request: request.path)
        cuts = [0]
        for i in range(1, len(in_order)):
            one, other = in_order[i - 1], in_order[i]
            shared = shared_rows(one.path, other.path)
            if shared < self.threshold * one.rows and shared < self.threshold * other.rows:
                cuts.append(i)
        heap = [(start - stop, -start, stop) for start, stop in zip(cuts, [*cuts[1:], len(in_order)], strict=True)]
        heapq.heapify(heap)
        left = len(in_order)
        for most in (self.buffered, 0):  # when the partition has arrived, and when the input has ended
            small: list[SimRequest] = []
            while left > most:
                size, start, stop = heapq.heappop(heap)
                bucket = in_order[-start:stop]
                left += size
                if len(bucket) >= self.least:
                    yield bucket[0].path[0], bucket
                    continue
                small += bucket
                if len(small) >= self.least:
                    yield None, small
                    small = []
            if small:
                yield None, small


def _pieces(part: Sequence[SimRequest], size: int) -> Iterator[tuple[None, list[SimRequest]]]:
    for start in range(0, len(part), size):
        yield None, list(part[start : start + size])
