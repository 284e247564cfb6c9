"""What the rows of generated tokens have at each visit, of all sequences that run, in arrays.

Sequences that generate go on a row at a time, many of them in one step. What they have lies side by side, so that a
step is drafted, laid out and booked for all of them at once. Seen by itself, a tail is a node like others: TailNode.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cache.tree import Node
from .cache import NodeVisit, Prefix, VisitNode

# Of a row that no criterion lets leave.
NEVER = 1 << 30
_PLACES, _ROWS, _RUNS = 8, 32, 8  # that there is room for at first


class OutputRows:
    """An OutputRows holds what the tails of running sequences have; each has a place in its arrays.

    slots, owned, left   [places, visits, rows]: as of NodeVisit
    done                 int64 [places, visits]: as of NodeVisit
    run_start, run_count, run_position   int64 [places, visits, runs]: the settled rows as runs of neighbouring slots
    num_runs             int64 [places, visits]
    spare_at, num_spare  int64 [places, visits]: the first of the slots claimed for rows to come, and how many they are
    visit                int64 [places]: the visit that the sequence's rows come to next
    waited               int64 [places]: for how many steps the sequence has waited
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
        self.owned, self.left = (np.zeros((0, visits, _ROWS), bool) for _ in range(2))
        self.run_start, self.run_count, self.run_position = (np.zeros((0, visits, _RUNS), np.int64) for _ in range(3))
        self.done, self.num_runs, self.spare_at, self.num_spare = (np.zeros((0, visits), np.int64) for _ in range(4))
        self.visit, self.waited, self.row, self.token, self.decides, self.leaves = (
            np.zeros(0, np.int64) for _ in range(6)
        )

    def take(self) -> int:
        """Returns a place, where nothing is yet."""
        if not self._free:
            places, rows, runs = self._size
            self._resize(max(_PLACES, 2 * places), rows, runs)
            self._free = list(range(self._size[0] - 1, places - 1, -1))
        place = self._free.pop()
        self.row[place] = -1
        return place

    def release(self, place: int) -> None:
        """Takes a place back, and the room that nobody else needs where its tail was among the longest."""
        rows = int(self.row[place]) + 1
        for array in (self.slots, self.owned, self.left):
            array[place, :, :rows] = 0
        for array in (self.done, self.num_runs, self.num_spare):
            array[place] = 0
        self.visit[place], self.waited[place], self.row[place] = 0, 0, -1
        self._free.append(place)
        if self._size[1] > _ROWS and 4 * rows > self._size[1]:
            self._shrink()

    def room_for(self, rows: int) -> None:
        """Lets every tail have so many rows."""
        places, now, runs = self._size
        if rows > now:
            self._resize(places, max(rows, 2 * now), runs)

    def _shrink(self) -> None:
        """Gives room back where all tails need a quarter of it at most; then they have twice what they need."""
        places, rows, runs = self._size
        longest, most = int(self.row.max()) + 1, int(self.num_runs.max())
        if 4 * longest <= rows:
            self._resize(places, max(_ROWS, 2 * longest), min(runs, max(_RUNS, 2 * most)))

    def add_runs(self, place: Any, visit: Any, slot: np.ndarray, count: int, position: np.ndarray) -> None:
        """Adds runs of settled rows, each behind those of its place and visit, and joins it with the last of them where
        it goes on there. place, visit: int64 [n], no pair twice; slot, position: int64 [n]; count: of each run."""
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
            (places, self.visits, rows): ("slots", "owned", "left"),
            (places, self.visits, runs): ("run_start", "run_count", "run_position"),
            (places, self.visits): ("done", "num_runs", "spare_at", "num_spare"),
            (places,): ("visit", "waited", "row", "token", "decides", "leaves"),
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


def _rows(name: str) -> Any:
    return property(lambda visit: visit.of(name, len(visit.tail)))


def _runs(name: str) -> Any:
    return property(lambda visit: visit.of(name)[: visit.of("num_runs")].tolist() if visit.is_placed else [])


class TailVisit(NodeVisit):
    """A TailVisit is what the rows of a tail have at one visit; it lies in the arrays of an OutputRows while the tail
    has a place there.

    t  which visit it is, from 0
    """

    __slots__ = ("t", "tail")

    slots, owned, left = _rows("slots"), _rows("owned"), _rows("left")
    starts, counts, positions = _runs("run_start"), _runs("run_count"), _runs("run_position")

    def __init__(self, tail: TailNode, prefix: Prefix):
        self.node = self.tail = tail
        self.prefix, self.users, self.t = prefix, 0, len(prefix) - 1

    @property
    def is_placed(self) -> bool:
        """Returns whether the tail has a place."""
        return self.tail.place is not None

    def of(self, name: str, size: int = 0) -> np.ndarray:
        """Returns what one of the arrays has of this visit; where the tail has no place, zeros."""
        array: np.ndarray = getattr(self.tail.outputs, name)
        return array[self.tail.place, self.t] if self.is_placed else np.zeros(size, array.dtype)

    @property
    def done(self) -> int:  # type: ignore[override]
        return int(self.of("done")) if self.is_placed else 0

    @done.setter
    def done(self, done: int) -> None:
        self.tail.outputs.done[self.tail.place, self.t] = done

    @property
    def spare(self) -> np.ndarray:
        return np.arange(self.of("num_spare")) + self.of("spare_at") if self.is_placed else np.zeros(0, np.int64)

    def make_room(self) -> None:
        self.tail.outputs.room_for(len(self.tail))

    def _join(self, slot: int, count: int, position: int) -> None:
        numbers = (self.tail.place, self.t, slot, position)
        place, visit, slots, positions = (np.array([number]) for number in numbers)
        self.tail.outputs.add_runs(place, visit, slots, count, positions)

    def give_up(self) -> np.ndarray:
        slots = np.concatenate((self.slots[self.owned], self.spare))
        if self.tail.place is not None:
            outputs, at = self.tail.outputs, (self.tail.place, self.t)
            for name in ("slots", "owned", "left"):
                getattr(outputs, name)[at][: len(self.tail)] = 0
            for name in ("done", "num_runs", "num_spare"):
                getattr(outputs, name)[at] = 0
        self._gave_up(len(slots))
        return slots


class TailNode(VisitNode):
    """A TailNode is the VisitNode of the tokens that a sequence has made.

    outputs  where what it has at each visit lies
    place    its place there, while the sequence runs; or None
    """

    __slots__ = ("outputs", "place")

    def __init__(self, parent: Node, tokens: list[int], start: int, outputs: OutputRows):
        super().__init__(parent, tokens, start)
        self.outputs = outputs
        self.place: int | None = None

    def visit(self, prefix: Prefix) -> NodeVisit:
        visit = self.visits.get(prefix)
        if visit is None:
            visit = self.visits[prefix] = TailVisit(self, prefix)
        return visit

    def find_place(self) -> None:
        """Gives it a place."""
        self.place = self.outputs.take()
        self.outputs.room_for(len(self))

    def give_up(self) -> np.ndarray:
        slots = super().give_up()
        if self.place is not None:
            self.outputs.release(self.place)
            self.place = None
        return slots
