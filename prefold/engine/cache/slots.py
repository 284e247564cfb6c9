"""The pool of slots of the KV store. Free slots are tracked as runs of neighbouring slots."""

from __future__ import annotations

import heapq

import numpy as np

# K/V that is not needed is written to this slot. It is never allocated and never read.
SCRATCH = 0
# How many free runs of about the right size are tried before a larger run is cut; and, if there is no larger run,
# before several runs are combined.
TRIES, MOST_TRIES = 8, 64


class SlotPool:
    """Allocates the slots 1 to `num_slots`, as runs of neighbouring slots if possible: kernels read these fastest.

    The time of a call depends on how many runs it allocates or frees, not on how many other runs are free. Free runs
    are in heaps by the binary logarithm of their usable size: their slots from the first even slot on. Two tables find
    a run by its first slot and by the slot just past its end. `free_slots` is the number of free slots.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self.free_slots = self.num_slots
        self._is_free = bytearray(b"\1") * (self.num_slots + 2)  # most runs are too short for NumPy to be faster
        self.sizes: dict[int, int] = {}  # first slot of a free run -> its size
        self._starts: dict[int, int] = {}  # slot just past a free run -> its first slot
        # Heap i has the first slots of runs with a usable size of 2**(i - 1) to 2**i - 1, and outdated entries. Heap 0
        # has runs of a single odd slot.
        self._by_room: list[list[int]] = [[] for _ in range(self.num_slots.bit_length() + 1)]
        self._add(1, self.num_slots)

    @property
    def used_slots(self) -> int:
        """The number of allocated slots."""
        return self.num_slots - self.free_slots

    def allocate(self, count: int) -> np.ndarray | None:
        """Return `count` slots, int64, ascending; None if too few are free.

        The slots are one run if a free run that is long enough is found quickly.
        """
        if count > self.free_slots:
            return None
        if (run := self.allocate_run(count)) is not None:
            return run
        parts, missing = [], count
        for kind in reversed(range(len(self._by_room))):
            while missing and (heap := self._heap(kind)):
                size = min(missing, self.sizes[heap[0]])
                parts.append(self._take(heap[0], heap[0], size))
                missing -= size
        return np.sort(np.concatenate(parts))

    def allocate_run(self, count: int) -> np.ndarray | None:
        """Return `count` neighbouring slots, int64, starting at an even slot; None if no free run is that long."""
        if count == 0:
            return np.empty(0, np.int64)
        start = self._find(count) if count <= self.free_slots else None
        return None if start is None else self._take(start, _even(start), count)

    def _find(self, count: int) -> int | None:
        """Return the first slot of a free run with a usable size of at least `count`; None if there is none."""
        kind = count.bit_length()
        kind_heap = self._heap(kind)
        start = self._first_fitting(kind_heap[:TRIES], count)
        if start is not None:
            return start
        for larger in range(kind + 1, len(self._by_room)):
            if heap := self._heap(larger):
                return heap[0]
        return self._first_fitting(kind_heap[TRIES:MOST_TRIES], count)

    def _first_fitting(self, starts: list[int], count: int) -> int | None:
        sizes = self.sizes
        return next((start for start in starts if start in sizes and _room(start, sizes[start]) >= count), None)

    def _heap(self, kind: int) -> list[int]:
        """Return the heap of a kind of runs, with no outdated entry at its head."""
        heap, sizes = self._by_room[kind], self.sizes
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
            self.sizes[start], self._starts[start + size] = size, start
            heap = self._by_room[_room(start, size).bit_length()]
            heapq.heappush(heap, start)
            if len(heap) > 2 * len(self.sizes) + 64:
                heap[:] = sorted({first for first in heap if first in self.sizes})

    def _remove(self, start: int) -> int:
        size = self.sizes.pop(start)
        del self._starts[start + size]
        return size

    def free(self, slots: np.ndarray) -> None:
        """Free slots, int64 in any order. Raise ValueError if a slot is free already or does not exist."""
        if len(slots) <= 1:  # single slots are frequent, and NumPy is slow for them
            for slot in slots.tolist():
                self._free_run(slot, 1)
            return
        slots = np.sort(slots)
        last = 0
        for stop in (*(np.flatnonzero(slots[1:] - slots[:-1] != 1) + 1).tolist(), len(slots)):
            self._free_run(int(slots[last]), stop - last)
            last = stop

    def _free_run(self, start: int, size: int) -> None:
        stop = start + size
        if start < 1 or stop > self.num_slots + 1 or 1 in self._is_free[start:stop]:
            raise ValueError(f"cannot free slots {start} to {stop - 1}: not all are in use")
        self._is_free[start:stop] = b"\1" * size
        self.free_slots += size
        if stop in self.sizes:
            stop += self._remove(stop)
        if start in self._starts:
            start = self._starts[start]
            self._remove(start)
        self._add(start, stop - start)


def _room(start: int, size: int) -> int:
    """Return the usable size of a free run: its slots from the first even slot on."""
    return size - (start & 1)


def _even(start: int) -> int:
    """Return the first even slot from here on, because kernels read keys in pairs."""
    return start + (start & 1)
