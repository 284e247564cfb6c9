"""In which order numbers are read for those who wait: classes and tenants take turns, as in `schedule/fair.py`."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence

from ..types import Owner, Readout, Share
from .reading import Part, Reading

__all__ = ["Turns"]

IDLE_OWNERS = 1024
# So many times the rows are taken of a reading that waits alone: it stops when another comes.
ALONE = 16


class Turns:
    """A Turns holds parts of readings that wait. Those of interactive requests come before those of batches, and of the
    tenants the one is next that was given the fewest rows over its weight. Readings of one owner take turns too, a part
    of each."""

    def __init__(self) -> None:
        self.share_of: Callable[[Hashable], Share] = lambda tenant: Share()
        self._waiting: dict[Owner, OrderedDict[Reading, deque[Part]]] = {}  # the owner's next reading is the first
        self._given: dict[Owner, float] = {}
        self._now = [0.0, 0.0]  # what the owner of each class that was next last had been given

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def has_interactive(self) -> bool:
        """Returns whether a reading waits that is no batch's."""
        return any(not owner.is_batch for owner in self._waiting)

    def has_others(self, than: Reading) -> bool:
        """Returns whether another reading waits."""
        return any(reading is not than for line in self._waiting.values() for reading in line)

    def add(self, parts: Sequence[Part]) -> None:
        """Takes parts of a reading that have come."""
        reading = parts[0].reading
        owner = reading.reply.owner
        if owner not in self._waiting:
            self._waiting[owner] = OrderedDict()
            if len(self._given) > IDLE_OWNERS + 2 * len(self._waiting):
                self._given = {
                    one: given
                    for one, given in self._given.items()
                    if given > self._now[one.is_batch] or one in self._waiting
                }
            # Who was away has no claim on what it did not use.
            self._given[owner] = max(self._given.get(owner, 0.0), self._now[owner.is_batch])
        self._waiting[owner].setdefault(reading, deque()).extend(parts)

    def give_back(self, parts: Sequence[Part]) -> None:
        """Takes parts back that were taken from a reading while it was alone, and not read: they are its next."""
        for part in reversed(parts):
            owner = part.reading.reply.owner
            # What it was given of them stays: those who came since begin where it was before the last of them. Nobody
            # else waited when they were taken, who would begin further back.
            self._given.setdefault(owner, self._now[owner.is_batch])
            line = self._waiting.setdefault(owner, OrderedDict())
            line.setdefault(part.reading, deque()).appendleft(part)

    def take(self, rows: int) -> list[Part]:
        """Takes out those that are next and read the same as the first of them, until they have so many rows: one at
        least, and more where nobody else waits. Where somebody does, another part of the same reading must fit."""
        lines = self._waiting
        is_alone = len(lines) == 1 and len(next(iter(lines.values()))) == 1
        if is_alone:
            rows *= ALONE
        found: list[Part] = []
        readout: Readout | None = None
        numbers = itertools.count()
        left = {owner: deque(line) for owner, line in lines.items()}
        heap = [(owner.is_batch, self._given[owner], next(numbers), owner) for owner in left]
        heapq.heapify(heap)
        while heap and (rows > 0 or not found):
            is_batch, given, _, owner = heap[0]
            if not left[owner]:
                heapq.heappop(heap)
                continue
            reading, line = left[owner].popleft(), lines[owner]
            if reading.reply.is_cancelled:
                del line[reading]
            elif readout is None or reading.readout == readout:
                readout = reading.readout
                found.append(part := line[reading].popleft())
                rows -= part.rows
                if line[reading]:
                    line.move_to_end(reading)
                    # Parts are nearly a take: one that does not fit would be as much again for others to wait for.
                    if is_alone or line[reading][0].rows <= rows:
                        left[owner].append(reading)
                else:
                    del line[reading]
                self._now[is_batch] = max(self._now[is_batch], given)
                given += part.rows / self.share_of(owner.tenant).weight
                self._given[owner] = given
                heapq.heapreplace(heap, (is_batch, given, next(numbers), owner))
        for owner in [owner for owner, line in lines.items() if not line]:
            del lines[owner]
        return found
