"""Replicas from the inside, which run what they are given and report what came of it, and those of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import Field, fields, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..cache import CacheEvents, CacheReporter
from ..checkpoint.identity import model_identity
from ..engine.meter import StepInfo
from ..errors import InputError, JobError
from ..stream import Window
from ..stream.window import shared_by
from ..types import GenerationStats, Request, Stats
from .replicas import (
    LONGEST_WAIT,
    RESTARTS,
    ReplicaDown,
    ReplicaEvent,
    ReplicaFacts,
    ReplicaLost,
    ReplicaReady,
    ReplicaReport,
    Replicas,
    RunCall,
    in_words,
    place_of,
    requests_of,
)

T = TypeVar("T")


class Host(ABC):
    """A host runs what it is given. Any thread may call it, `report` one at a time."""

    facts: ReplicaFacts

    def __init__(self) -> None:
        self._report = ReplicaReport()
        self._changed = threading.Condition()

    @abstractmethod
    def begin(self, call: RunCall) -> None:
        """Begins a run; the one before it ends."""

    def hold(self, pictures: list[Any], gone: list[int]) -> None:
        """Holds the images of windows that come next, and others no more, by their first ids. Raises JobError where
        the model takes text alone."""
        raise JobError("these replicas take text alone; leave out the images")

    @abstractmethod
    def give(self, windows: list[Window]) -> None:
        """Takes in windows for the run."""

    @abstractmethod
    def end(self) -> None:
        """Ends the run; what has not been answered is dropped."""

    def retell(self) -> None:  # noqa: B027  # most have nothing to tell
        """The next report tells anew of all that the cache holds."""

    @abstractmethod
    def close(self) -> None:
        """Ends the run, and what computes."""

    def report(self, wait: float = LONGEST_WAIT) -> ReplicaReport:
        """Returns what was done since the last report; waits a little where nothing was done."""
        with self._changed:
            self._changed.wait_for(self._has_news, wait)
            self._report, report = ReplicaReport(), self._report
            self._complete(report)
        now = time.perf_counter()
        report.steps = [replace(step, started=now - step.started) for step in report.steps]
        return report

    def _has_news(self) -> bool:
        report = self._report
        return bool(report.answers or report.steps or report.failure or report.is_at_work)

    def _complete(self, report: ReplicaReport) -> None:  # noqa: B027  # most have nothing to add
        """Adds to a report what is looked at when it is made."""

    def _fail(self, error: Exception) -> None:
        """Reports why nothing more can be done."""
        with self._changed:
            self._report.failure = self._report.failure or error
            self._changed.notify()


class AsyncHost(Host):
    """A host that has others compute: an event loop in a thread asks them, a bounded number of requests at a time.

    name  of the thread
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._call: RunCall | None = None
        self._run = 0  # number of the run: what belongs to an earlier one is dropped
        self._waiting: deque[tuple[int, int, Request]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _refusal(self, call: RunCall) -> str:
        """Returns why nothing of the kind can be asked; "" where it can."""

    @abstractmethod
    def _num_to_ask(self, call: RunCall) -> int:
        """Returns how many of those that wait are asked for together now; 0 where enough is under way."""

    @abstractmethod
    async def _ask(self, call: RunCall, requests: list[Request]) -> tuple[list[Any], Stats]:
        """Returns the answers to some requests, and what was counted. Raises InputError for what cannot be asked."""

    def begin(self, call: RunCall) -> None:
        if reason := self._refusal(call):
            self._fail(JobError(reason))
        else:
            self._loop.call_soon_threadsafe(self._begin, call)

    def give(self, windows: list[Window]) -> None:
        self._loop.call_soon_threadsafe(self._give, list(requests_of(windows)))

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._begin, None)

    def close(self) -> None:
        self._cancel()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def _cancel(self) -> None:
        """Ends all that is under way. Raises TimeoutError where the loop hangs."""
        if self._thread.is_alive():
            self._begun(self._leave()).result(10)

    def _begun(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begins some work in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ------------------------------------------------------------------------------------------ in the thread

    async def _leave(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=5)

    def _begin(self, call: RunCall | None) -> None:
        self._call, self._run = call, self._run + 1
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    def _give(self, requests: list[tuple[int, int, Request]]) -> None:
        if self._call is not None:
            self._waiting += requests
            self._fill()

    def _fill(self) -> None:
        """Asks for what waits, as far as there is room."""
        while self._waiting and (call := self._call) is not None and (count := self._num_to_ask(call)):
            some = [self._waiting.popleft() for _ in range(count)]
            task = self._loop.create_task(self._answer(call, self._run, some))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fill()

    async def _answer(self, call: RunCall, run: int, some: list[tuple[int, int, Request]]) -> None:
        started = time.perf_counter()
        try:
            answers, stats = await self._ask(call, [request for _, _, request in some])
        except InputError as error:
            answers, stats = [error] * len(some), Stats(requests=len(some))
        except Exception as error:
            self._fail(error)
            return
        if run != self._run:
            return
        seconds = time.perf_counter() - started
        step = StepInfo(stats.rows_computed, 0, len(some), stats.tokens, started, seconds, len(some))
        with self._changed:
            self._report.answers += [(lease, place, a) for (lease, place, _), a in zip(some, answers, strict=True)]
            self._report.steps.append(step)
            self._report.stats = stats + (self._report.stats or Stats())
            self._changed.notify()


# A replica whose device computes ahead ends its engine's run when no lease has come for so long: only then the last
# step's results are taken.
_IDLE_SECONDS = 0.05


class _HostRun:
    """One run on its way: its call, the windows that wait, and how many requests are under way."""

    def __init__(self, call: RunCall):
        self.call = call
        self.windows: SimpleQueue[Window | None] = SimpleQueue()
        self.has_ended = False
        self.open = 0
        self._last: tuple[Any, bytes] = (None, b"")  # adapter and salt, and tokens, of the last request

    def give(self, window: Window) -> None:
        """Takes in a window, which goes on with the path that the one before leaves as far as they share it."""
        (before, last), namespace = self._last, (window.adapter, window.salt)
        common = shared_by(last, window.tokens[: window.offsets[1]].tobytes()) if before == namespace else 0
        self._last = namespace, window.tokens[window.offsets[-2] :].tobytes()
        self.windows.put(replace(window, common=common))

    def end(self) -> None:
        self.has_ended = True
        self.windows.put(None)

    def taken(self, *, in_slots: bool, timeout: float | None) -> Iterator[Window | None]:
        """Yields windows as they come, until the run ends. In slots it yields None where no window is there while
        requests are running; a row stream ends when no window has come for `timeout` seconds."""
        while not self.has_ended:
            try:
                window = self.windows.get(block=not (in_slots and self.open), timeout=None if in_slots else timeout)
            except Empty:
                if not in_slots:
                    return
                yield None
                continue
            if window is None:
                return
            self.open += window.num_requests
            yield window


class ReplicaHost(Host):
    """Runs what it is given on the engine of an LLM (or of another object with an `engine`)."""

    def __init__(self, llm: Any, facts: ReplicaFacts):
        super().__init__()
        self.facts = facts
        self._engine, self._tokenizer = llm.engine, getattr(llm, "tokenizer", None)
        self._counted = self._engine.stats + Stats()
        inputs = getattr(llm, "images", None)
        self._pictures = None if inputs is None else inputs.from_driver()
        self._runs: SimpleQueue[_HostRun | None] = SimpleQueue()
        self._run: _HostRun | None = None
        self._tells_anew = False
        threading.Thread(target=self._work, name="prefold-replica", daemon=True).start()

    def begin(self, call: RunCall) -> None:
        self.end()
        if self._pictures is not None:
            self._pictures.clear()
        self._run = _HostRun(call)
        self._runs.put(self._run)

    def hold(self, pictures: list[Any], gone: list[int]) -> None:
        assert self._pictures is not None, "the model takes text alone"
        self._pictures.hold(pictures, gone)

    def give(self, windows: list[Window]) -> None:
        if self._run is not None:
            for window in windows:
                self._run.give(window if self._pictures is None else self._pictures.own(window))

    def end(self) -> None:
        if self._run is not None:
            self._run.end()
            self._run = None

    def retell(self) -> None:
        self._tells_anew = True

    def close(self) -> None:
        self.end()
        self._runs.put(None)

    def _complete(self, report: ReplicaReport) -> None:
        if report.steps or report.answers:
            # The engine's own counters are not reset: a step that is on its way would count into the old ones.
            counted, self._counted = self._counted, self._engine.stats + Stats()
            report.stats = _since(self._counted, counted)

    def _work(self) -> None:
        while (run := self._runs.get()) is not None:
            try:
                self._serve(run)
            except BaseException as error:
                self._fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                return

    def _serve(self, run: _HostRun) -> None:
        call, engine = run.call, self._engine
        how: dict[str, Any] = {"sharing": call.sharing, "on_step": self._step, "stopping": lambda: run.has_ended}
        if call.readout.kind != "tokens":
            how["max_batch_rows"] = call.max_batch_rows
        depth = getattr(getattr(engine, "worker", None), "facts", None)
        timeout = None if getattr(depth, "depth", 1) == 1 else _IDLE_SECONDS
        with self._cache_watched(call.online and call.in_slots and call.sharing == "full"):
            while not run.has_ended:
                windows = run.taken(in_slots=call.in_slots, timeout=timeout)
                if call.readout.kind == "tokens":
                    results = engine.generate(windows, self._tokenizer if call.text else None, **how)
                else:
                    results = engine.run(windows, call.readout, cache_prefill=call.in_slots or None, **how)
                with closing(results):
                    for tag, answer in results:
                        run.open -= 1
                        with self._changed:
                            self._report.answers.append((*place_of(tag), answer))
                            self._changed.notify()
                        if run.has_ended:
                            return

    @contextmanager
    def _cache_watched(self, wanted: bool) -> Iterator[None]:
        """Returns a context within which reports tell what the cache holds, where that is wanted. The reporter belongs
        to the engine's thread, as the cache does."""
        if not (wanted and self.facts.reports_cache):
            yield
            return
        engine = self._engine
        reporter: CacheReporter = engine.look(lambda books: CacheReporter(books.tree, epoch=time.time_ns()))
        self._tells_anew = True  # the driver that began this run knows of nothing
        try:
            with engine.meter.heard_by(partial(self._tell_cache, reporter)):
                yield
        finally:
            engine.call(reporter.close)

    def _tell_cache(self, reporter: CacheReporter, step: StepInfo) -> None:
        events = reporter.snapshot() if self._tells_anew else reporter.drain()
        self._tells_anew = False
        if events is None:
            return
        if self._pictures is not None:
            events = self._pictures.told(events)
        with self._changed:
            self._report.events = _joined(self._report.events, events)

    def _step(self, step: StepInfo) -> None:
        with self._changed:
            self._report.steps.append(step)
            self._changed.notify()


def _joined(before: CacheEvents | None, events: CacheEvents) -> CacheEvents:
    """Returns all events, where the later ones follow; otherwise the later ones, which begin anew."""
    if before is None or events.first != before.first + len(before.events):
        return events
    return replace(before, events=before.events + events.events)


def _since(now: Stats, before: Stats) -> Stats:
    """Returns what was counted between two times; of peaks those until now."""
    counts = _difference(now, before, fields(now)[:-2])
    seconds = {part: spent - before.seconds.get(part, 0.0) for part, spent in now.seconds.items()}
    generation = now.generation
    if generation is not None and before.generation is not None:
        generation = GenerationStats(**_difference(generation, before.generation, fields(generation)))
    return Stats(**counts, seconds=seconds, generation=generation)


def _difference(now: object, before: object, of: Sequence[Field[Any]]) -> dict[str, int]:
    names = [field.name for field in of]
    return {n: getattr(now, n) - (0 if n.endswith("_peak") else getattr(before, n)) for n in names}


def facts_of(llm: Any) -> ReplicaFacts:
    """Returns what a replica says of an LLM."""
    import torch

    from .. import __version__

    identity = {
        "prefold": __version__,
        "torch": torch.__version__,
        "weights": model_identity(llm.checkpoint)["digest"],
        "dtype": str(llm.dtype).removeprefix("torch."),
        "adapters": ", ".join(llm.engine.adapters),
    }
    engine = llm.engine
    generation = engine.options.generation
    return ReplicaFacts(
        identity,
        engine.max_batch_rows,
        generation.max_running,
        dtype=identity["dtype"],
        cache_rows=engine.worker.kv_slots(generation.kv_memory, engine.worker.facts.slot_bytes),
        reports_cache=True,
        reserves_output=generation.reserve_output,
    )


class LocalReplicas(Replicas):
    """Replicas with a thread each.

    makes   makes the host of each, in its thread; again where it was killed
    killed  why a host is lost that was killed
    """

    def __init__(self, makes: Mapping[str, Callable[[], Host]], *, killed: str = "it was killed"):
        self.names = tuple(makes)
        self.is_closed = False
        self._makes, self._killed = makes, killed
        self._hosts: dict[str, Host] = {}
        self._restarts = dict.fromkeys(makes, RESTARTS)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, tell: Callable[[str, ReplicaEvent], None]) -> None:
        self._tell = tell
        for name in self.names:
            self._threads.append(threading.Thread(target=self._serve, args=(name,), name="prefold-local", daemon=True))
            self._threads[-1].start()

    def order(self, name: str, method: str, *arguments: Any) -> None:
        if (host := self._hosts.get(name)) is not None:
            getattr(host, method)(*arguments)

    def kill(self, name: str) -> None:
        with self._lock:
            self._hosts.pop(name, None)  # the thread that serves it sees that, and ends it

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._hosts.clear()
        for thread in self._threads:
            thread.join(30)

    def _serve(self, name: str) -> None:
        """Makes a host and passes on its reports; makes another where it was killed, or has failed."""
        while not self.is_closed:
            try:
                host = self._makes[name]()
            except Exception as error:
                self._tell(name, ReplicaLost(_after("it cannot start: ", error)))
                return
            with self._lock:
                if not self.is_closed:
                    self._hosts[name] = host
            reason = self._killed
            try:
                self._pass_on(name, host)
            except Exception as error:
                reason = _after("it cannot report: ", error)
            self._hosts.pop(name, None)
            try:
                host.close()
            except Exception as error:
                reason += f", and did not end as it should: {in_words(error)}"
            if not self.is_closed:
                self._restarts[name] -= 1
                self._tell(name, ReplicaLost(reason, returns=self._restarts[name] >= 0))
                if self._restarts[name] < 0:
                    return

    def _pass_on(self, name: str, host: Host) -> None:
        """Tells that a host is ready, and of its reports until it is killed."""
        if not self.is_closed:
            self._tell(name, ReplicaReady(host.facts))
        while self._hosts.get(name) is host:
            report = host.report(LONGEST_WAIT)
            if self._hosts.get(name) is not host:
                break
            if report.answers:
                self._restarts[name] = RESTARTS
            down = report.failure if isinstance(report.failure, ReplicaDown) else None
            report.failure = None if down is not None else report.failure
            self._tell(name, report)
            if down is not None:
                raise down


def _after(words: str, error: Exception) -> str:
    return in_words(error) if isinstance(error, ReplicaDown) else words + in_words(error)
