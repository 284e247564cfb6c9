"""A replica's engine in the simulator. It accepts requests, and returns the work and the time of each step.

`RowEngine` applies the rules of the real scheduler to parts of prompts instead of tokens, for large fleets.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from prefold.engine.cache import CacheEvents
from prefold.engine.cache.events import EventLog, RowsRemoved, RowsStored
from prefold.errors import InputError

from .costs import TILE, StepCost, StepRows
from .requests import SimRequest

MOST_ROWS = 8192  # rows of a step without max_batch_rows


@dataclass(slots=True)
class Hits:
    """Counters of prompt tokens."""

    tokens: int = 0  # of all requests, counted once per request
    first_admission: int = 0  # cached when the request was first admitted
    in_step: int = 0  # shared with a request that was admitted in the same step
    rows_computed: int = 0  # computed prompt rows, recomputed rows included

    def add(self, other: Hits) -> None:
        """Add the counters of another engine."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def rates(self) -> dict[str, float]:
        """Return the tokens that were not computed for their request, as shares of all prompt tokens."""
        tokens = max(1, self.tokens)
        return {"first_admission": self.first_admission / tokens, "in_step": self.in_step / tokens}


class EndedRequest(NamedTuple):
    """A request that has ended."""

    request: SimRequest
    cached_tokens: int  # prompt tokens that were not computed for this request


class Stretch(NamedTuple):
    """A step, or several equal steps, of `num_running` sequences."""

    seconds: float
    prefill: int
    decode: int
    steps: int
    num_running: int
    ended_requests: Sequence[EndedRequest] = ()


class _Node:
    """A part of a path. Its rows are computed when the engine has computed `mark` prompt rows in total."""

    __slots__ = ("children", "mark", "num_running", "number", "parent", "rows", "users")

    def __init__(self, parent: _Node | None, number: int, rows: int):
        self.parent, self.number, self.rows = parent, number, rows
        self.children: dict[int, _Node] = {}
        self.users = 0  # running sequences
        self.mark = 0
        self.num_running = 0  # decoding sequences


class _RowSequence:
    __slots__ = ("cached_tokens", "leaf", "mark", "request")

    def __init__(self, request: SimRequest):
        self.request = request
        self.leaf: _Node
        self.mark = 0
        self.cached_tokens = 0


class RowEngine:
    """The rules of `Scheduler`, with slots reserved for each output, applied to parts of prompts instead of tokens.

    Prompts are computed in order of arrival, each part once. Parts are evicted when their slots are needed, the least
    recently used first. Steps between which no sequence starts or ends form one stretch. So the time of a simulation
    depends on the number of requests, not on the number of tokens.

    Args:
        cost: Times of a step.
        max_batch_rows: Rows of a step; None: MOST_ROWS.
        slots: Rows in the KV store; None: as many as fit in memory.
        reports: Whether to record cache events for a router.

    Attributes:
        reserves: Whether slots are reserved for the maximum output of a request.
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
        self.max_batch_rows = MOST_ROWS if max_batch_rows is None else max_batch_rows
        self.max_running = min(max_running, self.max_batch_rows)
        self.slots = cost.kv_rows if slots is None else slots
        self.hits = Hits()
        self.open()

    def open(self) -> None:
        """Start with an empty KV store."""
        self.free = self.slots
        self._root = _Node(None, 0, 0)
        self._waiting: deque[_RowSequence] = deque()
        self._prefilling: deque[_RowSequence] = deque()
        self._decoding: list[tuple[int, int, _RowSequence]] = []  # heap of (last step, number, sequence)
        self._evictable: OrderedDict[_Node, None] = OrderedDict()
        self._evictable_rows = 0
        self._queued = self._done = 0  # prompt rows since the start
        self._steps = 0  # decode steps since the start
        self._number = 0
        self._is_stuck = False  # whether the first waiting sequence does not fit until another ends
        self._shared_keys = 0  # K/V rows of parts that decode rows read, counted once per tile
        self._tail_keys = 0  # K/V rows of outputs that decode rows read
        self._log = EventLog() if self.reports else None

    def submit(self, request: SimRequest) -> None:
        if request.rows + request.limit - 1 > self.slots:
            raise InputError(
                f"request {request.key} needs the K/V of {request.rows + request.limit - 1} rows, the KV store holds "
                f"{self.slots}",
                field="max_tokens",
                remedy="name a machine with more memory",
            )
        self.hits.tokens += request.rows
        self._waiting.append(_RowSequence(request))

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for admission."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of sequences that have been admitted and have not ended."""
        return len(self._decoding) + len(self._prefilling)

    def step(self) -> Stretch | None:
        """Run the next step, or several equal ones; return None if no sequence waits or runs."""
        if self._waiting and not self._is_stuck:
            self._admit()
        running = len(self._decoding)
        if not running and not self._prefilling:
            return None
        budget = self.max_batch_rows - running
        prefill = min(budget, self._queued - self._done)
        if prefill or self._prefilling:
            return self._mixed(prefill, running)
        # No waiting sequence fits, so nothing changes until the first decoding sequence ends.
        count = self._decoding[0][0] - self._steps
        keys = self._shared_keys + self._tail_keys
        first = self.cost.seconds(StepRows(0, running, keys, 0, running))
        last = self.cost.seconds(StepRows(0, running, keys + running * (count - 1), 0, running))
        self._steps += count
        self._tail_keys += running * count
        return Stretch((first + last) / 2 * count, 0, running * count, count, running, self._end())

    def _mixed(self, prefill: int, running: int) -> Stretch:
        prefilling = self._prefilling
        # (row, key) pairs: on average a prompt row sees half of its prompt.
        pairs = prefill * prefilling[0].request.rows // 2 if prefilling else 0
        done = self._done = self._done + prefill
        self.hits.rows_computed += prefill
        ready = []
        while prefilling and prefilling[0].mark <= done:
            ready.append(prefilling.popleft())
        keys = self._shared_keys + self._tail_keys
        seconds = self.cost.seconds(StepRows(prefill, running, keys, pairs, running + len(ready)))
        self._steps += 1
        self._tail_keys += running + len(ready)  # a row for each new token
        for sequence in ready:
            self._number += 1
            heapq.heappush(self._decoding, (self._steps + sequence.request.output - 1, self._number, sequence))
            node = sequence.leaf
            while node.parent is not None:
                if node.num_running % TILE == 0:
                    self._shared_keys += node.rows
                node.num_running += 1
                node = node.parent
        return Stretch(seconds, prefill, running, 1, running + len(ready), self._end())

    def _end(self) -> Sequence[EndedRequest]:
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
                node.num_running -= 1
                if node.num_running % TILE == 0:
                    self._shared_keys -= node.rows
                node.users -= 1
                if not node.users:
                    self._evictable_rows += node.rows
                    if not node.children:
                        self._evictable[node] = None
                node = node.parent
            ended.append(EndedRequest(request, sequence.cached_tokens))
        return ended

    def _admit(self) -> None:
        waiting = self._waiting
        running = self.num_running
        while waiting and running < self.max_running:
            if self._queued - self._done >= self.max_batch_rows - running:
                return
            request = waiting[0].request
            node, depth = self._root, 0
            fresh, pinned = request.rows, 0  # rows to compute; rows of the path that stop being evictable
            for number, rows in request.path:
                child = node.children.get(number)
                if child is None:
                    break
                node, depth = child, depth + 1
                fresh -= rows
                if not child.users:
                    pinned += rows
            need = fresh + request.limit - 1
            if need > self.free + self._evictable_rows - pinned:
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
            sequence.cached_tokens += above.rows
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
                self._log.add(RowsRemoved(node.number))

    def events(self) -> CacheEvents | None:
        return None if self._log is None else self._log.drain()
