"""Row streams: windows of requests become steps of one stream, and each request gets the values of its rows."""

from __future__ import annotations

import _thread
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from ..spec.requests import Readout, Result, Sharing
from ..trie import Window, common_prefix_lengths, lexsort_sequences
from .loop import EngineLoop
from .meter import StepBudget, StepInfo
from .requests import adapter_number, check_logits
from .schedule.parts import hooks, stream_scheduler
from .schedule.steps import StepResult
from .schedule.windows import PlannedStep, StreamPlanner
from .worker import Ticket, Worker

T = TypeVar("T")

# Streams are numbered per process, not per engine, because several engines may share a worker.
_NUMBERS = itertools.count()


def run_stream(
    engine: EngineLoop,
    worker: Worker,
    windows: Iterable[Window],
    readout: Readout,
    *,
    sharing: Sharing,
    budget: StepBudget,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[bytes, Result]]:
    """Yield (tag, result) of every request when the step that ends it is computed.

    With sharing "full", the windows must be consecutive pieces of one stream (`Spool.windows`). A thread plans the next
    step, and the worker prepares it, while earlier steps run.

    `engine` starts the steps in its thread. `stopping` is called after every step; once it returns True, no more steps
    start.
    """
    run = _StreamRun(engine, worker, readout, sharing, budget)
    # If Ctrl-C comes at any time, even before the `try` below, the worker still forgets the stream after its last step.
    end = weakref.finalize(run, engine.post, worker.forget, run.number)
    in_flight: deque[_StartedStep] = deque()
    try:
        for prepared in _ahead(run.prepare(windows)):
            for step in run.begin(prepared):
                in_flight.append(step)
                while len(in_flight) >= worker.facts.depth:
                    yield from run.finish(in_flight.popleft())
            if stopping():
                break
        while in_flight:
            yield from run.finish(in_flight.popleft())
    finally:
        engine.post(worker.forget, run.number)
        end.detach()


@dataclass(frozen=True, slots=True)
class _PreparedStep:
    """A planned step with the tensors that the worker has prepared."""

    scheduler: StreamPlanner
    results: _WindowResults
    plan: PlannedStep
    message: Any


@dataclass(frozen=True, slots=True)
class _StartedStep:
    """A step that the worker has started."""

    results: _WindowResults
    plan: PlannedStep
    ticket: Ticket
    started_at: float


@dataclass(eq=False)
class _StreamRun:
    """One stream during its run on a worker."""

    engine: EngineLoop
    worker: Worker
    readout: Readout
    sharing: Sharing
    budget: StepBudget

    def __post_init__(self) -> None:
        self._using = hooks(self.engine.parts, "using")
        self._take_result = hooks(self.engine.parts, "take_result")
        self._make_scheduler = stream_scheduler(self.engine.parts)
        self.number = next(_NUMBERS)

    def prepare(self, windows: Iterable[Window]) -> Iterator[_PreparedStep]:
        """Plan and prepare the steps of every window, and yield them."""
        check_logits(self.worker.facts, self.readout.kind)
        follows = False
        for window in windows:
            started_at = time.perf_counter()
            lengths = np.where(window.twins, 0, np.diff(window.offsets))
            counts = {"requests": int(np.count_nonzero(lengths)), "tokens": int(lengths.sum())}
            self.engine.meter.add(**counts, unique_tokens=unique_tokens(window))
            scheduler = self._make_scheduler(
                window,
                self.readout,
                sharing=self.sharing,
                max_batch_rows=self.budget.rows,
                follows=follows,
                stream=self.number,
                adapter=adapter_number(self.worker.facts, window.namespace.adapter),
            )
            follows = self.sharing == "full"  # "off" and "mlp" leave no path behind
            results = _WindowResults(window, self.readout, lengths)
            while (step := scheduler.plan(self.budget.rows)) is not None:  # the budget shrinks when memory runs out
                scheduler.commit(step)
                message = self.worker.prepare(step.message)
                self.engine.meter.add(seconds={"plan": time.perf_counter() - started_at})
                yield _PreparedStep(scheduler, results, step, message)
                started_at = time.perf_counter()

    def begin(self, step: _PreparedStep) -> Iterator[_StartedStep]:
        """Start a step and yield it. If memory is too small, start its halves one after the other."""
        pending = [(step.plan, step.message)]
        while pending:
            plan, message = pending.pop()
            started_at = time.perf_counter()
            ticket = self.engine.call(partial(self._start, plan, message))
            if ticket is None:
                pending += [(half, None) for half in reversed(step.scheduler.halves(plan))]
            else:
                yield _StartedStep(step.results, plan, ticket, started_at)

    def _start(self, plan: PlannedStep, message: Any) -> Ticket | None:
        with ExitStack() as stack:
            for using in self._using:
                stack.enter_context(using(plan.message.tokens))
            return self.budget.start(self.worker, plan.message, plan.stop - plan.start, message)

    def finish(self, step: _StartedStep) -> Iterator[tuple[bytes, Result]]:
        """Wait for a step, count it, and yield the results that it completes."""
        result, plan, message = step.ticket.result(), step.plan, step.plan.message
        for take in self._take_result:
            take(result)
        seconds = time.perf_counter() - step.started_at
        spent = {"model": seconds, "compile": self.worker.compile_seconds()}
        counts = {"rows_computed": message.num_rows, "path_rows_peak": len(message.keep)}
        self.engine.meter.add(seconds=spent, steps=1, **counts)
        if self.engine.meter.has_listeners:
            lengths = step.results.lengths[plan.requests]
            requests, tokens = int(np.count_nonzero(lengths)), int(lengths.sum())
            info = StepInfo(message.num_rows, message.path, requests, tokens, step.started_at, seconds)
            self.engine.meter.notify(info)
        yield from step.results.take(plan, result)


class _WindowResults:
    """Collects the values of a window; the targets of one request may be read in several steps.

    `lengths` int64 [B] are the tokens of each prompt, 0 for a twin.
    """

    def __init__(self, window: Window, readout: Readout, lengths: np.ndarray):
        self.window, self.lengths = window, lengths
        self._pairs = readout.kind == "logprobs"
        columns = () if readout.top is None else (2 + 2 * readout.top,)
        self._values = np.empty((len(window.targets), *columns), np.float32)
        self._greedy = np.empty(len(window.targets), bool)

    def take(self, step: PlannedStep, result: StepResult) -> Iterator[tuple[bytes, Result]]:
        """Store the values of a step, and yield (tag, result) of the requests that end with it."""
        window = self.window
        if not self._pairs:
            values = result.values[step.request_reads]
            for sequence, value in zip(step.requests.tolist(), values, strict=True):
                yield window.tags[sequence], Result(value)
            return
        self._values[step.targets] = result.values
        self._greedy[step.targets] = result.greedy
        for sequence in step.requests.tolist():
            targets = slice(window.target_offsets[sequence], window.target_offsets[sequence + 1])
            yield window.tags[sequence], Result(self._values[targets].copy(), self._greedy[targets].copy())


def unique_tokens(window: Window) -> int:
    """Return how many rows this window adds to a stream with sharing "full", whatever sharing it runs with."""
    if window.is_sorted:
        return window.unique_tokens
    order = lexsort_sequences(window.tokens, window.offsets)
    return window.num_tokens - int(common_prefix_lengths(window.tokens, window.offsets, order).sum())


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items of an iterator, while a thread computes the next item in advance.

    The two sides use queues written in C. With locks of the `threading` module, Ctrl-C inside a lock could raise a
    different error, or leave the lock held.
    """
    orders: SimpleQueue[bool] = SimpleQueue()  # True: compute the next item; False: end
    outcomes: SimpleQueue[tuple[T | None, BaseException | None] | None] = SimpleQueue()  # None: the thread has ended

    def make() -> None:
        while orders.get():
            try:
                outcomes.put((next(items, None), None))
            except BaseException as error:
                outcomes.put((None, error))
        outcomes.put(None)

    thread = None
    try:
        thread = _thread.start_new_thread(make, ())
        orders.put(True)
        while (outcome := outcomes.get()) is not None:
            item, error = outcome
            if error is not None:
                raise error
            if item is None:
                return
            orders.put(True)
            yield item
    finally:
        orders.put(False)
        # Wait for the thread's end, so that it plans no further step of a run that has ended.
        while thread is not None and outcomes.get() is not None:
            pass
