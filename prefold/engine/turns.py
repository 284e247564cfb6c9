"""In which order numbers are read for those who wait: classes and tenants take turns, as in `schedule/fair.py`."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator

from ..types import Owner, Readout, Share
from .reading import Part

__all__ = ["Turns"]

IDLE_OWNERS = 1024


class Turns:
    """A Turns holds readings that wait. Interactive ones come before batches, and of the tenants the one is next that
    was given the fewest tokens over its weight."""

    def __init__(self) -> None:
        self.share_of: Callable[[Hashable], Share] = lambda tenant: Share()
        self._waiting: dict[Owner, deque[Part]] = {}
        self._given: dict[Owner, float] = {}
        self._now = 0.0  # what the owner that was next last had been given

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, part: Part) -> None:
        """Takes a reading that has come."""
        owner = part[0].reply.owner
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            if len(self._given) > IDLE_OWNERS + 2 * len(self._waiting):
                self._given = {
                    one: given for one, given in self._given.items() if given > self._now or one in self._waiting
                }
            # Who was away has no claim on what it did not use.
            self._given[owner] = max(self._given.get(owner, 0.0), self._now)
        self._waiting[owner].append(part)

    def take(self, tokens: int) -> list[Part]:
        """Takes out those that are next and read the same as the first of them, until they have so many tokens."""
        found: list[Part] = []
        readout: Readout | None = None
        numbers = itertools.count()
        left: dict[Owner, Iterator[Part]] = {owner: iter(tuple(parts)) for owner, parts in self._waiting.items()}
        heap = [(owner.is_batch, self._given[owner], next(numbers), owner) for owner in left]
        heapq.heapify(heap)
        taken: set[int] = set()
        while heap and (tokens > 0 or not found):
            is_batch, given, _, owner = heap[0]
            part = next(left[owner], None)
            if part is None:
                heapq.heappop(heap)
                continue
            reading = part[0]
            if reading.reply.is_cancelled:
                taken.add(id(part))
            elif readout is None or reading.readout == readout:
                readout = reading.readout
                taken.add(id(part))
                found.append(part)
                tokens -= reading.reply.tokens
                if not is_batch:
                    self._now = max(self._now, given)
                given += reading.reply.tokens / self.share_of(owner.tenant).weight
                self._given[owner] = given
                heapq.heapreplace(heap, (is_batch, given, next(numbers), owner))
        for owner, parts in list(self._waiting.items()):
            self._waiting[owner] = deque(part for part in parts if id(part) not in taken)
            if not self._waiting[owner]:
                del self._waiting[owner]
        return found
