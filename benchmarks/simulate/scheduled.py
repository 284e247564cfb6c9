"""prefold's engine step by step: the real scheduler and cache, with computed step times instead of a worker.

A test compares `RowEngine` with it.
"""

from __future__ import annotations

import numpy as np

from prefold.engine.cache import CacheEvents, CacheOptions, CacheReporter, SlotPool
from prefold.engine.schedule.admission import StepLimits
from prefold.engine.schedule.scheduler import Scheduler

from .costs import TILE, StepRows
from .engines import EndedRequest, RowEngine, Stretch
from .requests import SimRequest

__all__ = ["ScheduledEngine"]


class ScheduledEngine(RowEngine):
    """The real `Scheduler` with its `RadixCache`. Token ids have no meaning here."""

    def open(self) -> None:
        self._steps = 0  # clock of the cache
        self.scheduler = Scheduler(
            SlotPool(self.slots),
            max_batch_rows=self.max_batch_rows,
            max_running=self.max_running,
            cache=CacheOptions(),
            clock=lambda: float(self._steps),
        )
        self._reporter = CacheReporter(self.scheduler.tree) if self.reports else None
        self._requests: dict[int, SimRequest] = {}

    def submit(self, request: SimRequest) -> None:
        self.hits.tokens += request.rows
        self._requests[request.key] = request
        self.scheduler.submit(request.key, request.tokens(), limit=request.limit)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def step(self) -> Stretch | None:
        scheduler = self.scheduler
        limits = StepLimits(self.max_batch_rows)
        for _, error in scheduler.admit(limits):
            raise error
        step = scheduler.plan(limits)
        if step is None:
            return None
        message = step.message
        # Number of keys that each row sees, summed over the runs of K/V.
        seen = np.zeros(step.num_rows + 1, np.int64)
        np.add.at(seen, message.run_first, message.run_count)
        np.add.at(seen, message.run_last, -message.run_count)
        seen = np.cumsum(seen)[:-1]
        is_decode = np.zeros(step.num_rows, bool)
        goes_on = [sequence.ready for sequence in step.consumers]
        is_decode[message.read_rows[message.reads[goes_on]]] = True
        counts = np.cumsum(np.concatenate(([0], is_decode)))
        readers = counts[message.run_last] - counts[message.run_first]  # decode rows that see each run
        keys = int((message.run_count * -(-readers // TILE)).sum())
        decode = int(is_decode.sum())
        rows = StepRows(step.num_rows - decode, decode, keys, int(seen[~is_decode].sum()), len(message.read_rows))
        scheduler.begin(step)
        # A token that starts no prompt part, so that outputs never match prompts.
        tokens = [(1 << 31) - 2] * len(step.consumers)
        stops = [len(one.tokens) >= self._requests[one.key].output for one in step.consumers]  # type: ignore[index]
        done = scheduler.commit(step, tokens, stops)
        ended = [EndedRequest(self._requests.pop(one.key), one.cached_tokens or 0) for one in done]  # type: ignore[arg-type]
        self._count(rows.prefill)
        self._steps += 1
        return Stretch(self.cost.seconds(rows), rows.prefill, decode, 1, len(step.consumers), ended)

    def _count(self, prefill: int) -> None:
        stats, hits = self.scheduler.stats, self.hits
        hits.rows_computed += prefill
        hits.first_admission = stats.first_admission_hits + stats.cross_window_hits
        hits.in_step = stats.in_step_hits

    def events(self) -> CacheEvents | None:
        return None if self._reporter is None else self._reporter.drain()
