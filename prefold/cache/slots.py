"""Slots: where one row's K/V lies in the KV store. Which are free, as runs of neighbours."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

__all__ = ["SCRATCH", "SlotPool"]

# The slot that rows whose K/V nobody needs are written to. Never handed out, never read.
SCRATCH = 0


class SlotPool:
    """Slots 1 to `num_slots`, handed out in neighbouring runs where there are any (kernels read those fastest)."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """All slots are free."""
        self.free_slots = self.num_slots
        self._starts = [1] if self.num_slots else []  # of free runs, ascending
        self._sizes = {1: self.num_slots} if self.num_slots else {}

    @property
    def used_slots(self) -> int:
        return self.num_slots - self.free_slots

    def allocate(self, count: int) -> np.ndarray | None:
        """`count` slots, int64, ascending; one run if a run is long enough. None when too few are free."""
        if count > self.free_slots:
            return None
        if count == 0:
            return np.empty(0, np.int64)
        for start in self._starts:
            # An even first slot: kernels read keys in pairs.
            first = start + (start & 1)
            if self._sizes[start] - (first - start) >= count:
                return self._take(start, first, count)
        parts, left = [], count
        for start in sorted(self._starts, key=self._sizes.__getitem__, reverse=True):
            size = min(left, self._sizes[start])
            parts.append(self._take(start, start, size))
            left -= size
            if not left:
                break
        return np.sort(np.concatenate(parts))

    def _take(self, start: int, first: int, count: int) -> np.ndarray:
        stop = start + self._sizes.pop(start)
        place = bisect_left(self._starts, start)
        rest = [(start, first - start), (first + count, stop - first - count)]
        rest = [(s, size) for s, size in rest if size]
        self._starts[place : place + 1] = [s for s, _ in rest]
        self._sizes.update(rest)
        self.free_slots -= count
        return np.arange(first, first + count, dtype=np.int64)

    def free(self, slots: np.ndarray) -> None:
        """Take slots back. ValueError for one that is free already, or was never handed out."""
        if not len(slots):
            return
        slots = np.sort(slots)
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        for run in np.split(slots, breaks):
            self._give_back(int(run[0]), len(run))

    def _give_back(self, start: int, size: int) -> None:
        place = bisect_left(self._starts, start)
        before = self._starts[place - 1] if place else None
        after = self._starts[place] if place < len(self._starts) else None
        overlaps = (before is not None and before + self._sizes[before] > start) or (
            after is not None and after < start + size
        )
        if overlaps or start < 1 or start + size > self.num_slots + 1:
            raise ValueError(f"slots {start} to {start + size - 1} are given back, and are not in use")
        self.free_slots += size
        if after is not None and after == start + size:
            size += self._sizes.pop(after)
            del self._starts[place]
        if before is not None and before + self._sizes[before] == start:
            self._sizes[before] += size
            return
        self._starts.insert(place, start)
        self._sizes[start] = size

    def free_list(self) -> list[tuple[int, int]]:
        """Free runs as (start, size), ascending."""
        return [(start, self._sizes[start]) for start in self._starts]
