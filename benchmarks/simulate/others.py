"""Other engines and other ways to give out work, put into the simulator's tables under names of their own; among them
ours with one of its parts left out, to see what the part is worth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from prefold.cluster.online import Assignment, Dispatcher
from prefold.stream.live import Bucket

from . import policies  # noqa: F401  # other systems' policies are put into their table
from .blocks import BlockEngine
from .cases import ENGINES, FEEDERS, streamed
from .daft import DaftProvider
from .fleet import Feeder, ListFeeder
from .requests import SimRequest
from .scheduled import ScheduledEngine

__all__ = ["PARTS", "SharedQueue"]


class _NoRuns(Dispatcher):
    """A replica looks for the best bucket each time, and does not go on with the one that it has begun."""

    def _best_for(self, replica: Hashable, now: float) -> Bucket | None:
        self._runs.pop(replica, None)
        return super()._best_for(replica, now)


class _NoShares(Dispatcher):
    """At the end of the input a replica takes all that it has room for."""

    def _assign(self, bucket: Bucket, replica: Hashable, share: int | None) -> Assignment:
        return super()._assign(bucket, replica, None)


class _NoCopies(Dispatcher):
    """What a replica holds is left to it, however much it has to do."""

    def _holders(self, replica: Hashable) -> list[tuple[float, Hashable]]:
        return []


PARTS: dict[str, type[Dispatcher]] = {"runs": _NoRuns, "shares": _NoShares, "copies": _NoCopies}


class SharedQueue(Feeder):
    """One queue: a replica takes the next `batch` requests whenever so many fit into its `in_flight`. With both alike
    it is naive batching: the next batch begins when the last one is done.

    nodes  each has a queue of its own, with an equal part of the requests
    """

    def __init__(self, requests: Sequence[SimRequest], *, batch: int, in_flight: int, nodes: int = 1):
        super().__init__()
        size = len(requests)
        self._left = [deque(requests[i * size // nodes : (i + 1) * size // nodes]) for i in range(nodes)]
        self._batch, self._most = batch, in_flight

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given = []
        for replica, count in self.in_flight.items():
            left = self._left[replica % len(self._left)]
            while left and count + self._batch <= self._most:
                batch = [left.popleft() for _ in range(min(self._batch, len(left)))]
                count += len(batch)
                given.append((replica, batch))
            self.in_flight[replica] = count
        return given


def _static(setup, cost, requests, there):
    """Returns a feeder that gives each replica an equal part of the requests, as they come."""
    size, count = len(requests), setup.replicas
    return ListFeeder([requests[i * size // count : (i + 1) * size // count] for i in range(count)])


ENGINES.update({"prefold-steps": ScheduledEngine, "vllm": BlockEngine})
FEEDERS.update({
    "static": _static,
    "batches": lambda setup, cost, requests, there: SharedQueue(requests, batch=512, in_flight=512),
    "bucketing": lambda setup, cost, requests, there: DaftProvider(requests, setup.replicas),
})  # fmt: skip
for _part, _kind in PARTS.items():
    FEEDERS[f"stream without {_part}"] = lambda *known, kind=_kind: streamed(*known, kind=kind)
