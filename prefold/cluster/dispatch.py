"""Decides which waiting requests leave the live window, and for which replica. No I/O, no clock: the time is handed in.

A replica with room takes of the buckets that it holds the prefix of, then of those that nobody holds, most tokens
first; of one that another replica holds only where waiting for that takes longer than computing the prefix again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..stream.live import Bucket, LiveWindow, Waiting
from .policies import BestStart
from .router import Prompt, Router

__all__ = ["Assignment", "Dispatcher", "Limits"]

_SHORT = 0.25  # a replica of whose backlog so much is free will soon be short of work


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """Requests that a replica is to be given. prefix: leading tokens that they all share."""

    replica: Hashable
    requests: list[Waiting]
    prefix: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Says how much a replica may be sent.

    backlog   rows of prompts and outputs that it may have been sent and not ended: about what its KV store holds, and
              what it can look ahead by
    requests  how many of them; None: any number
    at_once   requests that leave together for it; None: any number
    busy      with so many requests it has enough to do to let others wait for more of their kind
    """

    backlog: int
    requests: int | None = None
    at_once: int | None = None
    busy: int = 1


class Dispatcher:
    """The live window and the router together.

    router   who holds what, and what each replica was sent
    window   options of `LiveWindow`
    limit_of what is put in with a request -> tokens of its output at most
    """

    def __init__(self, router: Router, *, limit_of: Any = lambda what: 0, **window: Any):
        self.router = router
        self._limit_of = limit_of
        self._by_prefix = isinstance(router.policy, BestStart)
        homes = {"homes": router.holders} if self._by_prefix else {}
        self.window = LiveWindow(**window, **homes)
        self._limits: dict[Hashable, Limits] = {}

    def join(self, replica: Hashable, limits: Limits) -> None:
        """A replica takes work."""
        self._limits[replica] = limits

    def leave(self, replica: Hashable) -> None:
        """A replica takes no more work."""
        self._limits.pop(replica, None)

    def room(self, replica: Hashable) -> int:
        """Returns how many rows a replica may still be sent."""
        load, limits = self.router.load(replica), self._limits[replica]
        if limits.requests is not None and load.requests >= limits.requests:
            return 0
        return limits.backlog - load.prefill_rows - load.decode_rows

    def dispatch(self, now: float) -> list[Assignment]:
        """Returns what leaves the window now. It is booked in the router as sent; whoever calls gives it away."""
        orders = []
        free = {replica: None for replica in self._limits if self.room(replica) > 0}  # in the order in which they came
        while len(self.window) and free:
            bucket = self.window.pressed(now)
            if bucket is not None:
                replica = self.router.choose(self._prompt(bucket), free)
            elif self._by_prefix:
                replica = min(free, key=self.router.seconds_to_wait)
                bucket = self._best_for(replica)
                if bucket is None:
                    del free[replica]
                    continue
            else:
                is_idle = any(not self._is_busy(replica) for replica in free)
                bucket = self.window.largest(grown=not is_idle)
                if bucket is None:
                    break
                replica = self.router.choose(self._prompt(bucket), free)
            orders.append(self._give(bucket, replica))
            if self.room(replica) <= 0:
                del free[replica]
        return orders

    def _best_for(self, replica: Hashable) -> Bucket | None:
        """Returns the bucket that a replica should go on with; None where it is better to wait for more to come."""
        load, grown = self.router.load(replica), self._is_busy(replica)
        bucket = self.window.largest(replica, grown=grown) or self.window.largest(grown=grown)
        if bucket is not None:
            return bucket
        if self.room(replica) < _SHORT * self._limits[replica].backlog:
            return None  # it has enough to do, and more of its kind may come
        for wait, holder in self._holders():
            bucket = self.window.largest(holder, grown=grown)
            if bucket is None:
                continue
            again = len(bucket.prefix) * load.speed.prefill
            if wait <= self.router.seconds_to_wait(replica) + again:
                return None  # who holds the others has less to do
            return bucket
        return None

    def _is_busy(self, replica: Hashable) -> bool:
        return self.router.load(replica).requests >= self._limits[replica].busy

    def _holders(self) -> list[tuple[float, Hashable]]:
        found = [(self.router.seconds_to_wait(one), one) for one in self.window.queues if one in self._limits]
        return sorted(found, key=lambda pair: -pair[0])

    def _give(self, bucket: Bucket, replica: Hashable) -> Assignment:
        prompt = self._prompt(bucket)
        held = self.router.matched(prompt).get(replica, 0)
        mean = bucket.tokens / bucket.requests
        room = max(0, self.room(replica) - (len(bucket.prefix) - held))
        first = next(self.window.requests_of(bucket))
        each = mean - len(bucket.prefix) + self.router.expected_output(self._limit_of(first.what))
        count = room / max(1.0, each)
        limits, has = self._limits[replica], self.router.load(replica).requests
        if limits.requests is not None:
            count = min(count, limits.requests - has)
        if limits.at_once is not None:
            count = min(count, limits.at_once)
        requests = self.window.take(bucket, int(count * mean))
        for waiting in requests:
            limit = self._limit_of(waiting.what)
            sent = Prompt(waiting.tokens, limit, waiting.namespace, len(bucket.prefix))
            self.router.send(waiting.key, sent, replica)
        return Assignment(replica, requests, len(bucket.prefix))

    @staticmethod
    def _prompt(bucket: Bucket) -> Prompt:
        return Prompt(np.asarray(bucket.prefix), namespace=bucket.namespace)
