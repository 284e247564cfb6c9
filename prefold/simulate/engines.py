"""What stands for a replica's engine in the simulator: it takes requests, and says what each of its steps does.

`RowEngine` is our engine: the rules of the real scheduler on (prefix, length) in place of tokens, for large fleets.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from ..cache import CacheEvents
from ..cache.events import EventLog, Removed, RowsStored
from ..engine.step_size import StepSize
from ..errors import InputError
from .costs import TILE, StepCost, StepRows
from .requests import SimRequest

# The most rows of a step where none are asked for.
MOST_ROWS = 8192


@dataclass(slots=True)
class Hits:
    """Counts tokens of prompts, each where it was found.

    asked            of all requests, each once
    first_admission  there when the request was first admitted
    in_step          shared with a request that was admitted in the same step
    computed         rows of prompts that were computed, again ones included
    """

    asked: int = 0
    first_admission: int = 0
    in_step: int = 0
    computed: int = 0

    def add(self, other: Hits) -> None:
        """Adds what another engine of the same kind has counted."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def rates(self) -> dict[str, float]:
        """Returns the counters of what was found as shares of the tokens asked for."""
        asked = max(1, self.asked)
        return {"first_admission": self.first_admission / asked, "in_step": self.in_step / asked}


class Ended(NamedTuple):
    """A request that has ended; cached: tokens of its prompt that were not computed for it."""

    request: SimRequest
    cached: int


class Stretch(NamedTuple):
    """One step, or several alike. `running` sequences took part."""

    seconds: float
    prefill: int
    decode: int
    steps: int
    running: int
    ended: Sequence[Ended] = ()


class _Node:
    """A part of a path. mark: all its rows are computed once so many rows of prompts are."""

    __slots__ = ("children", "mark", "number", "parent", "rows", "running", "users")

    def __init__(self, parent: _Node | None, number: int, rows: int):
        self.parent, self.number, self.rows = parent, number, rows
        self.children: dict[int, _Node] = {}
        self.users = 0  # sequences that run
        self.mark = 0
        self.running = 0  # of them, those that decode


class _RowSequence:
    __slots__ = ("cached", "leaf", "mark", "request")

    def __init__(self, request: SimRequest):
        self.request = request
        self.leaf: _Node
        self.mark = 0
        self.cached = 0


class RowEngine:
    """The rules of `GenerateScheduler` with room set aside for each output, on parts instead of tokens: prompts are
    computed first come first, each part once; a part stays until its room is needed, the one used longest ago first.
    Steps in which no sequence comes or goes are one stretch, so time depends on requests, not on tokens.

    cost                         of its steps
    max_batch_rows, max_running  of a step; None: as many rows as it finds to be fast, as a real engine does
    slots                        rows that its KV store holds; None: what memory holds
    reports                      whether events are kept for a router
    reserves                     whether it sets room aside for the longest output that a request may have
    """

    reserves = True

    def __init__(
        self,
        cost: StepCost,
        *,
        max_batch_rows: int | None = 2048,
        max_running: int = 256,
        slots: int | None = None,
        reports: bool = False,
    ):
        self.cost, self.reports = cost, reports
        self.size = StepSize() if max_batch_rows is None else None
        self.max_batch_rows = self._most = MOST_ROWS if max_batch_rows is None else max_batch_rows
        self.max_running = min(max_running, self._most)
        self.slots = cost.kv_rows if slots is None else slots
        self.hits = Hits()
        self.open()

    def open(self) -> None:
        """Begins with an empty KV store."""
        self.free = self.slots
        self._root = _Node(None, 0, 0)
        self._waiting: deque[_RowSequence] = deque()
        self._prefilling: deque[_RowSequence] = deque()
        self._decoding: list[tuple[int, int, _RowSequence]] = []  # heap of (last step, number, sequence)
        self._evictable: OrderedDict[_Node, None] = OrderedDict()
        self._evictable_rows = 0
        self._queued = self._done = 0  # rows of prompts, ever
        self._steps = 0  # decode steps, ever
        self._number = 0
        self._is_stuck = False  # there is no room for the sequence that waits first, before another ends
        self._shared_keys = 0  # rows of parts that decoding sequences read, each once for a tile of them
        self._tail_keys = 0  # rows of outputs that they read
        self._log = EventLog() if self.reports else None

    def submit(self, request: SimRequest) -> None:
        if request.rows + request.limit - 1 > self.slots:
            raise InputError(
                f"request {request.key} needs the K/V of {request.rows + request.limit - 1} rows, the KV store holds "
                f"{self.slots}",
                field="max_tokens",
                remedy="name a machine with more memory",
            )
        self.hits.asked += request.rows
        self._waiting.append(_RowSequence(request))

    @property
    def num_waiting(self) -> int:
        """Returns how many sequences were not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Returns how many sequences were."""
        return len(self._decoding) + len(self._prefilling)

    def step(self) -> Stretch | None:
        """Runs the next step, or several alike; returns None when no sequence waits or runs."""
        size = self.size
        if size is None:
            return self._step()
        if not self.num_running and not self.num_waiting:
            size.reset()
        self.max_batch_rows = size.rows(self._most, self.num_waiting, self.num_running)
        stretch = self._step()
        if stretch is not None:
            steps = stretch.steps
            decode = stretch.decode // steps
            size.note(
                stretch.prefill // steps, decode, stretch.seconds / steps, max_rows=self._most,
                waiting=self.num_waiting,
                began=stretch.running - decode, ended=len(stretch.ended),
                tokens=sum(one.request.output for one in stretch.ended), steps=steps,
            )  # fmt: skip
        return stretch

    def _step(self) -> Stretch | None:
        if self._waiting and not self._is_stuck:
            self._admit()
        running = len(self._decoding)
        if not running and not self._prefilling:
            return None
        budget = self.max_batch_rows - running
        prefill = min(budget, self._queued - self._done)
        if prefill or self._prefilling:
            return self._mixed(prefill, running)
        # No sequence waits that there is room for, so nothing changes before the first of those that decode ends.
        count = self._decoding[0][0] - self._steps
        keys = self._shared_keys + self._tail_keys
        first = self.cost.seconds(StepRows(0, running, keys, 0, running))
        last = self.cost.seconds(StepRows(0, running, keys + running * (count - 1), 0, running))
        self._steps += count
        self._tail_keys += running * count
        return Stretch((first + last) / 2 * count, 0, running * count, count, running, self._end())

    def _mixed(self, prefill: int, running: int) -> Stretch:
        prefilling = self._prefilling
        # (row, key) pairs of the prompts' rows: they lie behind half of those who wait for them, on average.
        pairs = prefill * prefilling[0].request.rows // 2 if prefilling else 0
        done = self._done = self._done + prefill
        self.hits.computed += prefill
        ready = []
        while prefilling and prefilling[0].mark <= done:
            ready.append(prefilling.popleft())
        keys = self._shared_keys + self._tail_keys
        seconds = self.cost.seconds(StepRows(prefill, running, keys, pairs, running + len(ready)))
        self._steps += 1
        self._tail_keys += running + len(ready)  # a row for each token that was made
        for sequence in ready:
            self._number += 1
            heapq.heappush(self._decoding, (self._steps + sequence.request.output - 1, self._number, sequence))
            node = sequence.leaf
            while node.parent is not None:
                if node.running % TILE == 0:
                    self._shared_keys += node.rows
                node.running += 1
                node = node.parent
        return Stretch(seconds, prefill, running, 1, running + len(ready), self._end())

    def _end(self) -> Sequence[Ended]:
        decoding, steps = self._decoding, self._steps
        if not decoding or decoding[0][0] > steps:
            return ()
        ended = []
        self._is_stuck = False
        while decoding and decoding[0][0] <= steps:
            _, _, sequence = heapq.heappop(decoding)
            request = sequence.request
            self._tail_keys -= request.output
            self.free += request.limit - 1
            node = sequence.leaf
            while node.parent is not None:
                node.running -= 1
                if node.running % TILE == 0:
                    self._shared_keys -= node.rows
                node.users -= 1
                if not node.users:
                    self._evictable_rows += node.rows
                    if not node.children:
                        self._evictable[node] = None
                node = node.parent
            ended.append(Ended(request, sequence.cached))
        return ended

    def _admit(self) -> None:
        waiting = self._waiting
        running = self.num_running
        while waiting and running < self.max_running:
            if self._queued - self._done >= self.max_batch_rows - running:
                return
            request = waiting[0].request
            node, depth = self._root, 0
            fresh, kept = request.rows, 0  # rows to compute; rows of the path that would be evictable
            for number, rows in request.path:
                child = node.children.get(number)
                if child is None:
                    break
                node, depth = child, depth + 1
                fresh -= rows
                if not child.users:
                    kept += rows
            need = fresh + request.limit - 1
            if need > self.free + self._evictable_rows - kept:
                self._is_stuck = True
                return
            self._enter(waiting.popleft(), node, depth)
            running += 1
            if need > self.free:
                self._evict(need - self.free)
            self.free -= need

    def _enter(self, sequence: _RowSequence, node: _Node, depth: int) -> None:
        path, hits = sequence.request.path, self.hits
        above = node
        while above.parent is not None:
            if not above.users:
                self._evictable_rows -= above.rows
                self._evictable.pop(above, None)
            above.users += 1
            if above.mark > self._done:
                hits.in_step += above.rows
            else:
                hits.first_admission += above.rows
            sequence.cached += above.rows
            above = above.parent
        for number, rows in path[depth:]:
            child = node.children[number] = _Node(node, number, rows)
            self._evictable.pop(node, None)
            child.users = 1
            self._queued += rows
            child.mark = self._queued
            if self._log is not None:
                above_key = None if node.parent is None else node.number
                self._log.add(RowsStored(number, above_key, np.full(rows, number, np.int32)))
            node = child
        sequence.leaf = node
        sequence.mark = node.mark
        self._prefilling.append(sequence)

    def _evict(self, rows: int) -> None:
        while rows > 0:
            node, _ = self._evictable.popitem(last=False)
            above = node.parent
            assert above is not None
            del above.children[node.number]
            if not above.children and not above.users and above.parent is not None:
                self._evictable[above] = None
                self._evictable.move_to_end(above, last=False)
            self._evictable_rows -= node.rows
            self.free += node.rows
            rows -= node.rows
            if self._log is not None:
                self._log.add(Removed(node.number))

    def events(self) -> CacheEvents | None:
        return None if self._log is None else self._log.drain()
