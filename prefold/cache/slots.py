"""Slots are the places of rows in the KV store. This module knows which of them are free, as runs of neighbours."""

from __future__ import annotations

import heapq

import numpy as np

# The slot that rows whose K/V nobody needs are written to. Never handed out, never read.
SCRATCH = 0
# How many free runs of about the wanted size are looked at before a larger one is cut; and where there is no larger
# one, before several are given out.
TRIES, MOST_TRIES = 8, 64


class SlotPool:
    """A SlotPool gives out the slots 1 to `num_slots`, as runs of neighbours where it can: kernels read those fastest.

    The time of a call depends on how many runs it gives out or takes back, and not on how many others are free: free
    runs are kept by the binary logarithm of their room, the slots from an even one on, and found by their first slot
    and by the slot behind their last.

    free_slots  how many slots are free
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """Takes all slots back."""
        self.free_slots = self.num_slots
        self._is_free = bytearray(b"\1") * (self.num_slots + 2)  # most runs are too short for NumPy to gain
        self._sizes: dict[int, int] = {}  # of free runs, by their first slot
        self._starts: dict[int, int] = {}  # by the slot behind them
        # First slots of the runs with room for 2**(i - 1) to 2**i - 1, as heaps; among them some where none begins any
        # more. The first heap has those of a single odd slot, in which nothing begins that could begin elsewhere.
        self._by_room: list[list[int]] = [[] for _ in range(self.num_slots.bit_length() + 1)]
        self._add(1, self.num_slots)

    @property
    def used_slots(self) -> int:
        """Returns how many slots have been given out and not taken back."""
        return self.num_slots - self.free_slots

    def allocate(self, count: int) -> np.ndarray | None:
        """Returns `count` slots, int64, ascending; one run if one of those that are looked at is long enough. None when
        too few are free."""
        if count > self.free_slots:
            return None
        if (run := self.allocate_run(count)) is not None:
            return run
        parts, left = [], count
        for kind in reversed(range(len(self._by_room))):
            while left and (heap := self._heap(kind)):
                size = min(left, self._sizes[heap[0]])
                parts.append(self._take(heap[0], heap[0], size))
                left -= size
        return np.sort(np.concatenate(parts))

    def allocate_run(self, count: int) -> np.ndarray | None:
        """Returns `count` neighbouring slots, int64, the first of them even; None where no free run is so long."""
        if count == 0:
            return np.empty(0, np.int64)
        start = self._find(count) if count <= self.free_slots else None
        return None if start is None else self._take(start, _even(start), count)

    def _find(self, count: int) -> int | None:
        """Returns where a free run begins that has room for `count`."""
        kind = count.bit_length()
        own = self._heap(kind)
        found = self._first_fitting(own[:TRIES], count)
        if found is not None:
            return found
        for larger in range(kind + 1, len(self._by_room)):
            if heap := self._heap(larger):
                return heap[0]
        return self._first_fitting(own[TRIES:MOST_TRIES], count)

    def _first_fitting(self, starts: list[int], count: int) -> int | None:
        sizes = self._sizes
        return next((start for start in starts if start in sizes and _room(start, sizes[start]) >= count), None)

    def _heap(self, kind: int) -> list[int]:
        """Returns the first slots of the runs of a kind; the first of them is where one begins."""
        heap, sizes = self._by_room[kind], self._sizes
        while heap and (heap[0] not in sizes or _room(heap[0], sizes[heap[0]]).bit_length() != kind):
            heapq.heappop(heap)
        return heap

    def _take(self, start: int, first: int, count: int) -> np.ndarray:
        size = self._remove(start)
        self._add(start, first - start)
        self._add(first + count, start + size - first - count)
        self._is_free[first : first + count] = bytes(count)
        self.free_slots -= count
        return np.arange(first, first + count, dtype=np.int64)

    def _add(self, start: int, size: int) -> None:
        if size:
            self._sizes[start], self._starts[start + size] = size, start
            heap = self._by_room[_room(start, size).bit_length()]
            heapq.heappush(heap, start)
            if len(heap) > 2 * len(self._sizes) + 64:
                heap[:] = sorted({first for first in heap if first in self._sizes})

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        return size

    def free(self, slots: np.ndarray) -> None:
        """Takes slots back, int64 in any order. Raises ValueError for one that is free already or does not exist."""
        if len(slots) <= 1:  # as when the last rows of many tenants go
            for slot in slots.tolist():
                self._give_back(slot, 1)
            return
        slots = np.sort(slots)
        last = 0
        for stop in (*(np.flatnonzero(slots[1:] - slots[:-1] != 1) + 1).tolist(), len(slots)):
            self._give_back(int(slots[last]), stop - last)
            last = stop

    def _give_back(self, start: int, size: int) -> None:
        stop = start + size
        if start < 1 or stop > self.num_slots + 1 or 1 in self._is_free[start:stop]:
            raise ValueError(f"slots {start} to {stop - 1} are given back, and are not in use")
        self._is_free[start:stop] = b"\1" * size
        self.free_slots += size
        if stop in self._sizes:
            stop += self._remove(stop)
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        self._add(start, stop - start)

    def free_list(self) -> list[tuple[int, int]]:
        """Returns the free runs as (start, size), ascending."""
        return sorted(self._sizes.items())


def _room(start: int, size: int) -> int:
    """Returns how many slots a free run has from an even one on."""
    return size - (start & 1)


def _even(start: int) -> int:
    """Returns the first even slot from here on: kernels read keys in pairs."""
    return start + (start & 1)
