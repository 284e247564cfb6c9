"""Who generates together, and what stays the same while nobody comes or goes: routes, and the slots of prompts."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..cache.tree import Node
from .sequence import Routed
from .steps import PRELUDE
from .tails import Tails


class Crew:
    """A Crew is what stays the same while the same sequences run and none of them has a prompt to compute.

    sequences  by route, and depth-first
    place      int64 [n]: of their tails
    start      int64 [n]: the position of the first row of each tail
    limit      int64 [n]: as of Running
    route      int64 [n]: the number of each one's route
    criteria   float64 [n, 2]: as of VisitStep
    length     int64 [n]: how many visits each one's route has
    units      int64 [routes, visits]: the blocks of each route
    rest       int64 [routes, visits]: how many visits to blocks come after each
    seen       int64 [routes, visits, visits]: which visit's slot the second visit sees of a row that left after the
               first; -1: none, or none of a visit between them
    has_accounts   whether the slots of any count for somebody
    made       of each that is plain: after how many visits the rows of its tail left, as of Decided; of others None
    """

    def __init__(self, running: Collection[Routed], tails: Tails, visits: int):
        self.tails, self.most = tails, visits
        numbers: dict[tuple[int, ...], int] = {}
        for sequence in running:
            numbers.setdefault(tuple(sequence.route), len(numbers))
        order = _depth_first(running)
        self.sequences = sorted(order, key=lambda one: numbers[tuple(one.route)])
        self.route = np.array([numbers[tuple(one.route)] for one in self.sequences], np.int64)
        self.place = np.array([one.tail.place for one in self.sequences], np.int64)
        self.start = np.array([one.leaf.stop for one in self.sequences], np.int64)
        self.limit = np.array([one.limit for one in self.sequences], np.int64)
        self.has_accounts = any(one.tail.account is not None for one in self.sequences)
        self.criteria = np.array([one.criteria for one in self.sequences], np.float64)
        self.made = [one.decided.tails.setdefault(one.sample, []) if one.is_plain else None for one in self.sequences]
        size = (len(numbers), visits)
        self.units, self.rest = np.full(size, PRELUDE - 2, np.int64), np.zeros(size, np.int64)
        self.seen = np.full((*size, visits), -1, np.int64)
        for number, route in enumerate(numbers):
            blocks = np.array([unit >= 0 for unit in route], np.int64)
            self.units[number, : len(route)] = route
            self.rest[number, : len(route)] = blocks[::-1].cumsum()[::-1] - blocks
            for left in range(len(route)):
                last = {unit: at for at, unit in enumerate(route[: left + 1])}
                for at in range(left + 1, len(route)):
                    if route[at] not in last:
                        break
                    self.seen[number, left, at] = last[route[at]]
        self.length = np.array([len(route) for route in numbers], np.int64)[self.route]
        self.has_prelude = self.units[:, 0] == PRELUDE
        self._tables: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

    def prompts(self, route: int, visit: int) -> tuple[np.ndarray, ...]:
        """Returns the runs of slots that are seen of prompts at a visit of a route: the start, count and position of
        each, and the numbers of the first sequence that sees it and of the one behind the last."""
        found = self._tables.get((route, visit))
        if found is None:
            runs: list[tuple[int, int, int, int, int]] = []
            first_of, *_, last_of = np.flatnonzero(self.route == route).repeat(2).tolist()
            prefix = self.sequences[first_of].prefixes[visit]
            open_nodes: list[tuple[Node, int, int]] = []  # (node, its first run, the run behind its last)
            for number in range(first_of, last_of + 2):
                path = self.sequences[number].leaf.path() if number <= last_of else []
                same = 0
                while same < min(len(path), len(open_nodes)) and open_nodes[same][0] is path[same]:
                    same += 1
                for _, first, stop in open_nodes[same:]:
                    for at in range(first, stop):
                        runs[at] = (*runs[at][:4], number)
                del open_nodes[same:]
                for node in path[same:]:
                    there, first = node.visits[prefix], len(runs)  # type: ignore[attr-defined]
                    runs += [
                        (start, count, position, number, number)
                        for start, count, position in zip(there.starts, there.counts, there.positions, strict=True)
                    ]
                    open_nodes.append((node, first, len(runs)))
            table = np.array(runs, np.int64).reshape(-1, 5)
            found = self._tables[route, visit] = tuple(np.ascontiguousarray(column) for column in table.T)
        return found


def _depth_first(running: Collection[Routed]) -> list[Routed]:
    """Returns sequences in an order in which those below one node lie side by side."""
    below: dict[Node, dict[Node, None]] = {}
    at: dict[Node, list[Routed]] = {}
    tops: dict[Node, None] = {}
    for sequence in running:
        node = sequence.leaf
        at.setdefault(node, []).append(sequence)
        while node.parent is not None:
            children = below.setdefault(node.parent, {})
            is_new = node not in children
            children[node] = None
            if not is_new:
                break
            node = node.parent
        else:
            tops[node] = None
    order: list[Routed] = []
    stack = list(reversed(tops))
    while stack:
        node = stack.pop()
        order += at.get(node, ())
        stack += reversed(below.get(node, {}))
    return order
