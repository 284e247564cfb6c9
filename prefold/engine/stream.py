"""Row streams: windows of requests become steps of one stream, and every request gets the numbers that are read of it.

A window whose requests share little is computed with sharing "full" or "off", whichever has been measured to be faster.
`SlotWindows` splits off the requests that are read in the slots of the KV store instead.
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
from ..schedule.parts import hooks, stream_scheduler
from ..schedule.prefill import PlannedStep, PrefillScheduler
from ..schedule.steps import StepResult
from ..stream import Window
from ..types import Readout, Request, Result, Sharing
from ..worker.protocol import Ticket, Worker
from .clock import Fit
from .loop import EngineLoop
from .meter import StepBudget, StepInfo
from .requests import adapter_number, check_first, reads_last_rows

T = TypeVar("T")

# Streams are numbered over all engines of a process, because several engines may share a worker.
_NUMBERS = itertools.count()


def run_stream(
    engine: EngineLoop,
    worker: Worker,
    windows: Iterable[Window],
    readout: Readout,
    *,
    sharing: Sharing,
    choice: SharingChoice | None = None,
    budget: StepBudget,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[bytes, Result]]:
    """Yields (tag, result) of every request when the step that ends it has been computed.

    With sharing "full" the windows must be consecutive pieces of one stream (`Spool.windows`). The next step is
    planned, and prepared by the worker, in a thread while the steps before it run.

    engine    starts the steps in its thread
    choice    with sharing "full": decides which windows run with "off"; None: none do
    stopping  called after every step: once it returns True, no more steps are begun
    """
    run = _StreamRun(engine, worker, readout, sharing, choice, budget)
    # Wherever Ctrl-C falls, even into the last lines here, the worker forgets the stream after the last of its steps.
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
    """A _PreparedStep is a planned step with the tensors that the worker has prepared for it."""

    scheduler: PrefillScheduler
    results: _WindowResults
    plan: PlannedStep
    message: Any


@dataclass(frozen=True, slots=True)
class _StartedStep:
    """A _StartedStep is a step that the worker has started."""

    results: _WindowResults
    plan: PlannedStep
    ticket: Ticket
    started_at: float


@dataclass(eq=False)
class _StreamRun:
    """A _StreamRun is one stream on its way through a worker."""

    engine: EngineLoop
    worker: Worker
    readout: Readout
    sharing: Sharing
    choice: SharingChoice | None
    budget: StepBudget

    def __post_init__(self) -> None:
        self._using = hooks(self.engine.parts, "using")
        self._make_scheduler = stream_scheduler(self.engine.parts)
        self.number = next(_NUMBERS)

    def prepare(self, windows: Iterable[Window]) -> Iterator[_PreparedStep]:
        """Plans and prepares the steps of every window, and yields them."""
        follows = False
        for window in windows:
            started_at = time.perf_counter()
            lengths = np.where(window.twins, 0, np.diff(window.offsets))
            if self.readout.kind == "first":
                window = first_tokens(window)
            counts = {"requests": int(np.count_nonzero(lengths)), "tokens": int(lengths.sum())}
            unique = unique_tokens(window)
            self.engine.meter.add(**counts, unique_tokens=unique)
            sharing = self.sharing
            choice = self.choice if sharing == "full" else None
            if choice is not None:
                sharing = choice.choose(unique, window.num_tokens)
                if unique <= choice.threshold * window.num_tokens:
                    choice = None  # the times of windows that share much say nothing about the others
            scheduler = self._make_scheduler(
                window,
                self.readout,
                sharing=sharing,
                max_batch_rows=self.budget.rows,
                follows=follows,
                stream=self.number,
                adapter=adapter_number(self.worker.facts, window.adapter),
            )
            follows = sharing == "full"  # "off" and "mlp" leave no path behind
            on_step = None if choice is None else partial(choice.note, sharing)
            results = _WindowResults(window, self.readout, lengths, on_step)
            while (step := scheduler.plan(self.budget.rows)) is not None:  # the budget falls when memory runs out
                scheduler.commit(step)
                message = self.worker.prepare(step.message)
                self.engine.meter.add(seconds={"plan": time.perf_counter() - started_at})
                yield _PreparedStep(scheduler, results, step, message)
                started_at = time.perf_counter()

    def begin(self, step: _PreparedStep) -> Iterator[_StartedStep]:
        """Starts a step and yields it. If memory is too small for the step, starts its halves one after the other."""
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
        """Waits for a step, counts it, and yields the results that it completes."""
        result, plan, message = self.engine.call(step.ticket.result), step.plan, step.plan.message
        seconds = time.perf_counter() - step.started_at
        spent = {"model": seconds, "compile": self.worker.compile_seconds()}
        counts = {"rows_computed": message.num_rows, "path_rows_peak": len(message.keep)}
        self.engine.meter.add(seconds=spent, steps=1, **counts)
        if self.engine.meter.has_listeners:
            lengths = step.results.lengths[plan.requests]
            requests, tokens = int(np.count_nonzero(lengths)), int(lengths.sum())
            info = StepInfo(message.num_rows, message.path, requests, tokens, step.started_at, seconds)
            self.engine.meter.notify(info)
        if step.results.on_step is not None:
            step.results.on_step(message.num_rows, seconds)
        yield from step.results.take(plan, result)


class _WindowResults:
    """A _WindowResults gathers the numbers read of a window; the targets of one request may be read in several steps.

    lengths  int64 [B]: tokens of each prompt, as the user sees them; 0 for a second read of the same prompt
    on_step  called with the rows and the seconds of each step; None: not called
    """

    def __init__(
        self, window: Window, readout: Readout, lengths: np.ndarray, on_step: Callable[[int, float], None] | None
    ):
        self.window, self.lengths, self.on_step = window, lengths, on_step
        self._pairs = readout.kind == "logprobs"
        columns = () if readout.top is None else (2 + 2 * readout.top,)
        self._values = np.empty((len(window.targets), *columns), np.float32)
        self._greedy = np.empty(len(window.targets), bool)

    def take(self, step: PlannedStep, result: StepResult) -> Iterator[tuple[bytes, Result]]:
        """Takes the numbers of a step, and yields (tag, result) of the requests that end with it."""
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
    """Returns how many rows this window adds to the stream with sharing "full", whatever sharing it runs with."""
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
    """Yields the items of an iterator; a thread makes the next item while the consumer works on the last one.

    The two sides meet at queues written in C. If Ctrl-C fell within a lock of the `threading` module, another error
    would take its place, or the lock would stay closed.
    """
    orders: SimpleQueue[bool] = SimpleQueue()  # True: make the next item; False: end
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
        # Wait for the thread's end, so that it plans no further step of a run that is over.
        while thread is not None and outcomes.get() is not None:
            pass


# The weight of a step's measurement is this share of the weight of the next step's.
DECAY = 0.9
# The share of the time that may be lost by trying the slower sharing again, and the windows between two tries.
MAX_LOST, TRY_INTERVAL = 0.01, 16


class SharingChoice:
    """A SharingChoice decides with which sharing a window is computed.

    A window whose unique tokens are at most the threshold share of its tokens is computed with "full". So is any other
    window, until "off" has been measured to take less time for all of its tokens than "full" for the unique ones. Now
    and then the slower sharing is tried again, so seldom that it costs at most MAX_LOST of the time. Any thread may
    call it.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._times = {"full": Fit(DECAY), "off": Fit(DECAY)}  # seconds and rows of steps
        self._windows, self._tried_at = 0, -TRY_INTERVAL
        self._all_seconds = self._lost_seconds = 0.0  # seconds: expected of all windows, and lost by tries
        self._lock = threading.Lock()

    def choose(self, unique: int, tokens: int) -> Sharing:
        """Returns the sharing of a window with so many unique tokens, of so many tokens."""
        if unique <= self.threshold * tokens:
            return "full"
        with self._lock:
            self._windows += 1
            full, off = self._seconds("full", unique), self._seconds("off", tokens)
            if full is None:
                return "full"
            if off is None:  # not measured yet: suppose that a row takes as long as with "full"
                off = max(full, full * tokens / unique)
            self._all_seconds += min(full, off)
            better, other = ("off", "full") if off < full else ("full", "off")
            loss = self._lost_seconds + abs(full - off)
            if self._windows - self._tried_at < TRY_INTERVAL or loss > MAX_LOST * self._all_seconds:
                return better  # type: ignore[return-value]
            self._lost_seconds, self._tried_at = loss, self._windows
            return other  # type: ignore[return-value]

    def note(self, sharing: Sharing, rows: int, seconds: float) -> None:
        """Records a step of a window that shares little."""
        with self._lock:
            self._times[sharing].note(seconds, rows)

    def _seconds(self, sharing: Sharing, rows: int) -> float | None:
        times = self._times[sharing]
        return times.ratio * rows if times.count else None


TaggedRequests = Iterator[list[tuple[tuple[Window, int], Request]] | None]


class SlotWindows:
    """A SlotWindows splits windows into requests that are read in the slots of the KV store, which are those of last
    rows of at most `slots` tokens, and all others, which run as a row stream. Its two iterators are used in turn.

    has_ended  whether all windows have been taken
    """

    def __init__(self, windows: Iterable[Window | None], readout: Readout, slots: int):
        self.has_ended = False
        self._windows, self._readout, self._slots = iter(windows), readout, slots
        self._next: Window | None = None  # taken, and left for the other iterator
        self._was_split = False  # whether a part of the window that was taken last went to the slots
        self._put_off: dict[Window, list[int]] = {}  # numbers of the requests that found no room in the slots

    def in_slots(self) -> TaggedRequests:
        """Yields the requests of each window, tagged with (window, number in the window), until a request must run
        in the stream. A window of None means that no input is waiting, and is passed on."""
        while not (self.has_ended or self._put_off):
            window = self._take()
            if window is None:
                if not self.has_ended:
                    yield None
                continue
            fits = self._fits(window)
            if fits.all():
                yield with_tags(window)
                continue
            self._was_split = bool(fits.any())
            self._next = window.take(np.flatnonzero(~fits)) if self._was_split else window
            if self._was_split:
                yield with_tags(window.take(np.flatnonzero(fits)))
            return

    def put_off(self, window: Window, number: int) -> None:
        """Takes back a request that found no room in the slots; `in_stream` yields it."""
        self._put_off.setdefault(window, []).append(number)

    def in_stream(self) -> Iterator[Window]:
        """Yields windows of the other requests, until a window has requests for the slots."""
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
            if window is not None and self._was_split:
                # The path in common with the window before may be that of a prompt that went to the slots.
                window = replace(window, common=0)
            self._was_split = False
        return window

    def _fits(self, window: Window) -> np.ndarray:
        """Returns which requests of a window are read at last rows and fit into the slots, bool [B]."""
        of_last_rows = reads_last_rows(self._readout, np.diff(window.target_offsets))
        return (np.diff(window.offsets) <= self._slots) & of_last_rows


def with_tags(window: Window) -> list[tuple[tuple[Window, int], Request]]:
    """Return the requests of a window, each tagged with (window, number in the window)."""
    return [((window, number), window.request(number)) for number in range(window.num_requests)]
