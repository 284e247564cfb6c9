"""Numeric runs: windows of requests become steps of one row stream, and every request gets its result.

A window that shares little is computed as with sharing "full" or "off", by what both were measured to take.
Windows of which only last rows are read may be read in the slots of the KV store instead.
"""

from __future__ import annotations

import _thread
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from ..prefix import common_prefix_lengths, lexsort_sequences
from ..schedule.parts import hooks
from ..schedule.prefill import PlannedStep, PrefillScheduler
from ..schedule.steps import StepResult
from ..stream import Window
from ..types import Readout, Request, Result, Sharing
from ..worker.protocol import Ticket, Worker
from .loop import EngineLoop
from .meter import Meter, StepBudget, StepInfo
from .requests import adapter_number, can_probe, check_first, no_readout

T = TypeVar("T")

# Streams are numbered over all engines of a process: engines may have one worker together.
_NUMBERS = itertools.count()


def run_stream(
    worker: Worker,
    windows: Iterable[Window],
    readout: Readout,
    *,
    sharing: Sharing,
    choice: SharingChoice | None = None,
    budget: StepBudget,
    meter: Meter,
    stopping: Callable[[], bool] = lambda: False,
    loop: EngineLoop,
) -> Iterator[tuple[bytes, Result]]:
    """Yields (tag, result) of every request when the step that ends it has been computed.

    With sharing "full" the windows must be consecutive pieces of one stream (`Spool.windows`). Steps are planned, and
    prepared by the worker, in a thread while others run.

    choice     with sharing "full": says which windows run as with "off"; None: none
    stopping   called after every step: once it returns True, no more steps are begun
    loop       has the thread in which the worker is asked for steps, and the parts of the engine
    """
    run = _StreamRun(worker, readout, sharing, choice, budget, meter, loop)
    # Wherever Ctrl-C falls, the worker forgets the stream after the last of its steps.
    end = weakref.finalize(run, loop.post, worker.forget, run.number)
    begun: deque[_Begun] = deque()
    try:
        for work in _ahead(run.work(windows)):
            for step in run.begin(work):
                begun.append(step)
                while len(begun) >= worker.facts.depth:
                    yield from run.finish(begun.popleft())
            if stopping():
                break
        while begun:
            yield from run.finish(begun.popleft())
    finally:
        end()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A _Prepared is a step that has been planned, and what the worker has prepared for it."""

    scheduler: PrefillScheduler
    results: _WindowResults
    planned: PlannedStep
    prepared: Any


@dataclass(frozen=True, slots=True)
class _Begun:
    """A _Begun is a step that the worker was given."""

    results: _WindowResults
    planned: PlannedStep
    ticket: Ticket
    started: float


class _StreamRun:
    """A _StreamRun is one stream on its way through a worker."""

    def __init__(
        self,
        worker: Worker,
        readout: Readout,
        sharing: Sharing,
        choice: SharingChoice | None,
        budget: StepBudget,
        meter: Meter,
        loop: EngineLoop,
    ):
        self._call, self._using = loop.call, hooks(loop.parts, "using")
        self.number = next(_NUMBERS)
        self._worker, self._readout, self._sharing = worker, readout, sharing
        self._choice = choice
        self._budget, self._meter = budget, meter

    def work(self, windows: Iterable[Window]) -> Iterator[_Prepared]:
        """Yields every step of every window, prepared."""
        follows = False
        for window in windows:
            started = time.perf_counter()
            lengths = np.where(window.twins, 0, np.diff(window.offsets))
            if self._readout.kind == "first":
                window = first_tokens(window)
            counts = {"requests": int(np.count_nonzero(lengths)), "tokens": int(lengths.sum())}
            unique = unique_tokens(window)
            self._meter.add(**counts, unique_tokens=unique)
            sharing = self._sharing
            choice = self._choice if sharing == "full" else None
            if choice is not None:
                sharing = choice.choose(unique, window.num_tokens)
                if unique <= choice.threshold * window.num_tokens:
                    choice = None  # what such windows take says nothing about the others
            scheduler = PrefillScheduler(
                window,
                self._readout,
                sharing=sharing,
                max_batch_rows=self._budget.rows,
                follows=follows,
                stream=self.number,
                adapter=adapter_number(self._worker.facts, window.adapter),
            )
            follows = sharing == "full"  # the others leave no path
            told = None if choice is None else partial(choice.note, sharing)
            results = _WindowResults(window, self._readout, lengths, told)
            while (planned := scheduler.plan(self._budget.rows)) is not None:  # it falls when memory runs out
                scheduler.commit(planned)
                prepared = self._worker.prepare(planned.message)
                self._meter.add(seconds={"plan": time.perf_counter() - started})
                yield _Prepared(scheduler, results, planned, prepared)
                started = time.perf_counter()

    def begin(self, work: _Prepared) -> Iterator[_Begun]:
        """Starts a step and yields it; where memory is too small for it, starts its halves one after the other."""
        left = [(work.planned, work.prepared)]
        while left:
            planned, prepared = left.pop()
            started = time.perf_counter()
            rows = planned.stop - planned.start
            ticket = self._call(partial(self._start, planned, rows, prepared))
            if ticket is None:
                left += [(half, None) for half in reversed(work.scheduler.halves(planned))]
            else:
                yield _Begun(work.results, planned, ticket, started)

    def _start(self, planned: PlannedStep, rows: int, prepared: Any) -> Ticket | None:
        with ExitStack() as stack:
            for using in self._using:
                stack.enter_context(using(planned.message.tokens))
            return self._budget.start(self._worker, planned.message, rows, prepared)

    def finish(self, step: _Begun) -> Iterator[tuple[bytes, Result]]:
        """Waits for a step, counts it, and yields the results that it completes."""
        result, planned, message = self._call(step.ticket.result), step.planned, step.planned.message
        seconds = time.perf_counter() - step.started
        self._meter.add(
            rows_computed=message.num_rows,
            steps=1,
            path_rows_peak=len(message.keep),
            seconds={"model": seconds, "compile": self._worker.compile_seconds()},
        )
        if self._meter.is_heard:
            lengths = step.results.lengths[planned.done]
            done, tokens = int(np.count_nonzero(lengths)), int(lengths.sum())
            self._meter.tell(StepInfo(message.num_rows, message.path, done, tokens, step.started, seconds))
        if step.results.told is not None:
            step.results.told(message.num_rows, seconds)
        yield from step.results.take(planned, result)


class _WindowResults:
    """Gathers a window's read-outs; targets of one request may be read in several steps.

    lengths  int64 [B]: tokens of each prompt, as the user sees them; 0 of a second read of the same prompt
    told     is told the rows and seconds of each step; None: nobody is
    """

    def __init__(
        self, window: Window, readout: Readout, lengths: np.ndarray, told: Callable[[int, float], None] | None
    ):
        self.window, self.lengths, self.told = window, lengths, told
        self._pairs = readout.kind == "logprobs"
        columns = () if readout.top is None else (2 + 2 * readout.top,)
        self._values = np.empty((len(window.targets), *columns), np.float32)
        self._greedy = np.empty(len(window.targets), bool)

    def take(self, step: PlannedStep, result: StepResult) -> Iterator[tuple[bytes, Result]]:
        """Takes what a step has read, and yields (tag, result) of the requests that end with it."""
        window = self.window
        if not self._pairs:
            values = result.values[step.done_reads]
            for sequence, value in zip(step.done.tolist(), values, strict=True):
                yield window.tags[sequence], Result(value)
            return
        self._values[step.targets] = result.values
        self._greedy[step.targets] = result.greedy
        for sequence in step.done.tolist():
            targets = slice(window.target_offsets[sequence], window.target_offsets[sequence + 1])
            yield window.tags[sequence], Result(self._values[targets].copy(), self._greedy[targets].copy())


def unique_tokens(window: Window) -> int:
    """Returns how many rows this window adds to the stream when it is shared in full, however it is run."""
    if window.is_sorted:
        return window.unique_tokens
    order = lexsort_sequences(window.tokens, window.offsets)
    return window.num_tokens - int(common_prefix_lengths(window.tokens, window.offsets, order).sum())


def first_tokens(window: Window) -> Window:
    """Returns the window with every prompt cut to its first token: in a causal model its row sees nothing else.

    Raises InputError for a prompt that begins with an image, whose first row sees all of the image.
    """
    tokens = window.tokens[window.offsets[:-1]]
    check_first(tokens)
    return replace(
        window,
        tokens=tokens,
        offsets=np.arange(window.num_requests + 1, dtype=np.int64),
        # The row is computed again where two windows share it, once a window at most.
        common=min(window.common, 1),
    )


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields the items of an iterator, each made in a thread while the one before is in use.

    The two sides meet at queues written in C. Where Ctrl-C falls within a lock of the `threading` module, another error
    would come in its place, or the lock would stay closed.
    """
    wanted: SimpleQueue[bool] = SimpleQueue()
    made: SimpleQueue[tuple[T | None, BaseException | None] | None] = SimpleQueue()

    def make() -> None:
        while wanted.get():
            try:
                made.put((next(items, None), None))
            except BaseException as error:
                made.put((None, error))
        made.put(None)  # the last word

    thread = None
    try:
        thread = _thread.start_new_thread(make, ())
        wanted.put(True)
        while (came := made.get()) is not None:
            item, error = came
            if error is not None:
                raise error
            if item is None:
                return
            wanted.put(True)
            yield item
    finally:
        wanted.put(False)
        # Nobody makes anything of a run that is over.
        while thread is not None and made.get() is not None:
            pass


# How much less a step counts than the one after it.
KEPT = 0.9
# The part of the time that may be lost by trying the way that seems to take longer, and windows between two tries.
LOST, BETWEEN = 0.01, 16


class SharingChoice:
    """A SharingChoice says how a window is computed: one whose unique tokens are at most the threshold share of its
    tokens with "full"; another with "full" too, until "off" has been measured to take less time for all of its tokens
    than "full" for the unique ones.

    Now and then the other way is tried, so seldom that by all that is known it costs at most LOST of the time. It may
    be asked from any thread.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._sums: dict[Sharing, tuple[float, float]] = {"full": (0.0, 0.0), "off": (0.0, 0.0)}  # (rows, seconds)
        self._windows, self._tried_at = 0, -BETWEEN
        self._spent = self._lost = 0.0  # seconds that windows should have taken, and that tries should have cost
        self._lock = threading.Lock()

    def choose(self, unique: int, tokens: int) -> Sharing:
        """Returns how a window is computed that has so many unique tokens, of so many."""
        if unique <= self.threshold * tokens:
            return "full"
        with self._lock:
            self._windows += 1
            full, off = self._seconds("full", unique), self._seconds("off", tokens)
            if full is None:
                return "full"
            if off is None:  # a row as long as with the other
                off = max(full, full * tokens / unique)
            self._spent += min(full, off)
            better, other = ("off", "full") if off < full else ("full", "off")
            lost = self._lost + abs(full - off)
            if self._windows - self._tried_at < BETWEEN or lost > LOST * self._spent:
                return better  # type: ignore[return-value]
            self._lost, self._tried_at = lost, self._windows
            return other  # type: ignore[return-value]

    def note(self, sharing: Sharing, rows: int, seconds: float) -> None:
        """Takes note of a step of a window that shares little."""
        with self._lock:
            before = self._sums[sharing]
            self._sums[sharing] = KEPT * before[0] + rows, KEPT * before[1] + seconds

    def _seconds(self, sharing: Sharing, rows: int) -> float | None:
        total, seconds = self._sums[sharing]
        return seconds / total * rows if total else None


Probes = Iterator[list[tuple[tuple[Window, int], Request]] | None]


class ProbeWindows:
    """Parts windows into those of which last rows are read, of prompts of at most `slots` tokens, and all others.

    has_ended  whether there are no more of either
    """

    def __init__(self, windows: Iterable[Window | None], readout: Readout, slots: int):
        self.has_ended = False
        self._windows, self._readout, self._slots = iter(windows), readout, slots
        self._next: Window | None = None  # was taken, and is of the other kind
        self._was_parted = False  # whether some of the window that was taken last went to the slots
        self._put_off: dict[Window, list[int]] = {}  # with the places of the requests that the slots had no room for

    def probes(self) -> Probes:
        """Yields the requests of each window, tagged (window, place in it), and None for None, until others come."""
        while not (self.has_ended or self._put_off):
            window = self._take()
            if window is None:
                if not self.has_ended:
                    yield None
                continue
            fits = self._fits(window)
            if fits.all():
                yield _tagged(window)
                continue
            self._was_parted = bool(fits.any())
            self._next = window.take(np.flatnonzero(~fits)) if self._was_parted else window
            if self._was_parted:
                yield _tagged(window.take(np.flatnonzero(fits)))
            return

    def put_off(self, window: Window, number: int) -> None:
        """Takes back a request of a window for which the slots have no room after all: it is one of the others."""
        self._put_off.setdefault(window, []).append(number)

    def others(self) -> Iterator[Window]:
        """Yields the others, one after the other, until there is none."""
        while (window := self._take()) is not None:
            if self._fits(window).any():
                self._next = window
                break
            yield window
        put_off, self._put_off = self._put_off, {}
        for window, numbers in put_off.items():
            yield window.take(np.array(sorted(numbers)))

    def _take(self) -> Window | None:
        window, self._next = self._next, None
        if window is None:
            try:
                window = next(self._windows)
            except StopIteration:
                self.has_ended = True
            if window is not None and self._was_parted:
                # What it has in common with the one before may be the path of a prompt that went to the slots.
                window = replace(window, common=0)
            self._was_parted = False
        return window

    def _fits(self, window: Window) -> np.ndarray:
        """Returns which requests of a window are read at last rows and have room in the slots, bool [B]."""
        is_probe = can_probe(self._readout, np.diff(window.target_offsets))
        return (np.diff(window.offsets) <= self._slots) & is_probe


def _tagged(window: Window) -> list[tuple[tuple[Window, int], Request]]:
    return [((window, number), window.request(number)) for number in range(window.num_requests)]


def last_rows(windows: Iterable[Window | None], readout: Readout) -> Probes:
    """Yields what ProbeWindows yields, of windows of which all are read at last rows.

    Raises InputError for a read-out of other rows: where rows leave, there are none of these.
    """
    for window in windows:
        if window is None:
            yield None
            continue
        if not can_probe(readout, np.diff(window.target_offsets)):
            raise no_readout(readout)
        yield _tagged(window)
