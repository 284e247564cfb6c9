"""The slots of generated tokens' rows at each visit, of all sequences that run, in arrays.

Sequences that generate go on a row at a time, many of them in one step. Their slots lie side by side, so that a
step is drafted, laid out and booked for all of them at once. A tail whose rows are computed again is a node like others
until all are there: TailNode.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NEVER = 1 << 30  # a number of visits that no row makes
_PLACES, _ROWS, _RUNS = 8, 32, 8  # the smallest size of the arrays


class OutputRows:
    """OutputRows hold the slots and progress of the tails of running sequences; each tail has a place in the arrays.

    slots, owns_slot, has_left   [places, visits, rows]: as of NodeVisit
    num_settled          int64 [places, visits]: as of NodeVisit
    run_start, run_count, run_position   int64 [places, visits, runs]: the settled rows as runs of neighbouring slots
    num_runs             int64 [places, visits]
    spare_at, num_spare  int64 [places, visits]: the first of the slots claimed for rows to come, and how many they are
    visit                int64 [places]: the visit that the sequence's rows come to next
    steps_waited         int64 [places]: for how many steps the sequence has waited
    row, token           int64 [places]: the last row of the tail, and its token; -1 and 0 where it has none
    decides, leaves      int64 [places]: from how many visits on that row's criteria decide, and after how many it
                         leaves in any case; or NEVER
    """

    def __init__(self, visits: int):
        self.visits = visits
        self.clear()

    def clear(self) -> None:
        """Forgets all tails."""
        self._free: list[int] = []
        self._size = (0, _ROWS, _RUNS)
        visits = self.visits
        self.slots = np.zeros((0, visits, _ROWS), np.int64)
        self.owns_slot, self.has_left = (np.zeros((0, visits, _ROWS), bool) for _ in range(2))
        self.run_start, self.run_count, self.run_position = (np.zeros((0, visits, _RUNS), np.int64) for _ in range(3))
        self.num_settled, self.num_runs = (np.zeros((0, visits), np.int64) for _ in range(2))
        self.spare_at, self.num_spare = (np.zeros((0, visits), np.int64) for _ in range(2))
        self.visit, self.steps_waited, self.row, self.token, self.decides, self.leaves = (
            np.zeros(0, np.int64) for _ in range(6)
        )

    def take(self) -> int:
        """Claims a free place, whose arrays are empty, and returns its number."""
        if not self._free:
            places, rows, runs = self._size
            self._resize(max(_PLACES, 2 * places), rows, runs)
            self._free = list(range(self._size[0] - 1, places - 1, -1))
        place = self._free.pop()
        self.row[place] = -1
        return place

    def enter(
        self, place: int, visit: int, slots: np.ndarray, owns_slot: np.ndarray, has_left: np.ndarray, runs: np.ndarray
    ) -> None:
        """Enters the settled rows of a visit at a place. runs: their starts, counts and positions,
        int64 [3, runs]"""
        rows, count = len(slots), runs.shape[1]
        self.slots[place, visit, :rows], self.owns_slot[place, visit, :rows] = slots, owns_slot
        self.has_left[place, visit, :rows], self.num_settled[place, visit] = has_left, rows
        if count > self._size[2]:
            self._resize(self._size[0], self._size[1], 2 * count)
        for array, numbers in zip((self.run_start, self.run_count, self.run_position), runs, strict=True):
            array[place, visit, :count] = numbers
        self.num_runs[place, visit] = count

    def release(self, place: int) -> np.ndarray:
        """Frees a place, and shrinks the arrays if its tail was long and all others are short. Returns the slots that
        were the tail's own, int64."""
        rows = int(self.row[place]) + 1
        visits, number = ragged(self.num_spare[place])
        slots = self.slots[place, :, :rows][self.owns_slot[place, :, :rows]]
        slots = np.concatenate((slots, self.spare_at[place, visits] + number))
        for array in (self.slots, self.owns_slot, self.has_left):
            array[place, :, :rows] = 0
        for array in (self.num_settled, self.num_runs, self.num_spare):
            array[place] = 0
        self.visit[place], self.steps_waited[place], self.row[place] = 0, 0, -1
        self._free.append(place)
        if self._size[1] > _ROWS and 4 * rows > self._size[1]:
            self._shrink()
        return slots

    def room_for(self, rows: int) -> None:
        """Enlarges the arrays so that each place has room for `rows` rows."""
        places, now, runs = self._size
        if rows > now:
            self._resize(places, max(rows, 2 * now), runs)

    def _shrink(self) -> None:
        """Shrinks the arrays to twice the rows and runs needed, where all tails need a quarter of the rows at most."""
        places, rows, runs = self._size
        longest, most = int(self.row.max()) + 1, int(self.num_runs.max())
        if 4 * longest <= rows:
            self._resize(places, max(_ROWS, 2 * longest), min(runs, max(_RUNS, 2 * most)))

    def add_runs(self, place: Any, visit: Any, slot: np.ndarray, count: int, position: np.ndarray) -> None:
        """Appends a run of settled rows at each pair of a place and a visit, or lengthens the pair's last run where the
        slots follow on it. place, visit: int64 [n], no pair twice; slot, position: int64 [n]; count: of each run."""
        last = np.maximum(self.num_runs[place, visit] - 1, 0)
        ends = self.run_start[place, visit, last] + self.run_count[place, visit, last]
        joins = (ends == slot) & (self.num_runs[place, visit] > 0)
        at = place[joins], visit[joins], last[joins]
        self.run_count[at] += count
        new = ~joins
        place, visit = place[new], visit[new]
        number = self.num_runs[place, visit]
        most = int(number.max(initial=-1)) + 1
        if most > self._size[2]:
            self._resize(self._size[0], self._size[1], 2 * most)
        self.run_start[place, visit, number] = slot[new]
        self.run_count[place, visit, number] = count
        self.run_position[place, visit, number] = position[new]
        self.num_runs[place, visit] += 1

    def _resize(self, places: int, rows: int, runs: int) -> None:
        shapes = {
            (places, self.visits, rows): ("slots", "owns_slot", "has_left"),
            (places, self.visits, runs): ("run_start", "run_count", "run_position"),
            (places, self.visits): ("num_settled", "num_runs", "spare_at", "num_spare"),
            (places,): ("visit", "steps_waited", "row", "token", "decides", "leaves"),
        }
        for shape, names in shapes.items():
            for name in names:
                old = getattr(self, name)
                if old.shape != shape:
                    new = np.zeros(shape, old.dtype)
                    same = tuple(slice(min(sizes)) for sizes in zip(shape, old.shape, strict=True))
                    new[same] = old[same]
                    setattr(self, name, new)
        self._size = (places, rows, runs)


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns for counts (2, 3) the arrays (0, 0, 1, 1, 1) and (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
