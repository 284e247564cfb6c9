"""The replicas of a fleet, and the messages between them and the driver.

A host runs requests and reports answers. In the driver, one thread per replica reads the host's reports.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..engine.cache import CacheEvents
from ..engine.meter import StepInfo
from ..engine.requests import LAST_ROW_KINDS
from ..errors import InputError, JobError, PrefoldError
from ..spec.requests import GenerationStats, Readout, Request, Sharing, Stats
from ..trie import Window
from ..trie.order import SpooledRequest, decode_options

T = TypeVar("T")

RESTARTS = 3  # maximum number of restarts of a replica without an answer in between
LONGEST_WAIT = 0.5  # maximum seconds that `Host.report` waits for news
_GUESSED_OUTPUT = 256  # expected length of an output without max_tokens, in tokens
_TAG = struct.Struct("<QQ")  # number of the lease, place of the request in its source


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Facts of a ready replica. The replicas of a fleet must agree in `identity`."""

    # Everything that results depend on: versions, weights, dtype.
    identity: dict[str, str] = field(default_factory=dict)
    max_rows: int = 4096  # maximum number of rows of a step
    max_running: int = 256  # maximum number of sequences that run at once
    at_once: int = 0  # maximum number of prompts that are read together; 0: the prompts of a step
    is_server: bool = False  # other clients may use the replica too, so only the number of our requests is bounded
    dies_of_requests: bool = True  # if the replica is lost, its requests may be the reason
    dtype: str = ""  # the compute dtype
    cache_rows: int = 0  # rows that fit in the KV store; 0: unknown
    reports_cache: bool = False  # the replica can report the events of its cache
    reserves_output: bool = False  # the replica reserves memory for the longest possible output of a request
    steps_overlap: bool = False  # steps overlap, so their seconds must not be added up


@dataclass(frozen=True, slots=True)
class RunCall:
    """The options with which requests run. A replica runs requests of one call at a time."""

    readout: Readout
    sharing: Sharing = "full"
    max_batch_rows: int | None = None
    text: bool = False  # whether the replica's own tokenizer converts tokens to text
    # Whether requests arrive as a stream. Last rows are then read in the KV store, and the replica reports the events
    # of its cache.
    online: bool = False

    @property
    def in_slots(self) -> bool:
        """Return whether requests run in the KV store."""
        generates, kind = self.readout.kind == "tokens", self.readout.kind
        return generates or (self.online and self.sharing == "full" and (kind in LAST_ROW_KINDS or kind == "logprobs"))


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """The event that a replica has loaded its model."""

    facts: ReplicaFacts


@dataclass(slots=True)
class ReplicaReport:
    """The news of a replica since its last report."""

    answers: list[tuple[int, int, Any]] = field(default_factory=list)  # (number of the lease, place, answer)
    # The steps of the engine. `started_at` is in seconds before the report. Servers and vLLM report a step per answer.
    steps: list[StepInfo] = field(default_factory=list)
    stats: Stats | None = None  # the counters of its engine since the last report
    events: CacheEvents | None = None  # the events of its cache since the last report
    failure: Exception | None = None  # the error after which its engine cannot continue
    is_at_work: bool = False  # the replica makes progress that no other field shows

    @property
    def shows_progress(self) -> bool:
        """Return whether the replica made progress: a step, a change of its cache, or `is_at_work`."""
        return bool(self.steps or self.events is not None or self.is_at_work)


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The event that a replica is gone. Its requests have no answers."""

    reason: str
    returns: bool = False  # the replica will come back
    died: bool = True  # the replica ended, perhaps because of a request. False: only messages to or from it were lost


class ReplicaDown(Exception):
    """Raised if a replica cannot be reached or used. The fields are as in ReplicaLost."""

    def __init__(self, reason: str, *, returns: bool = True, died: bool = True):
        super().__init__(reason)
        self.returns, self.died = returns, died


def in_words(error: BaseException) -> str:
    """Return the message of an error for the user. The message of a foreign error starts with its type."""
    is_plain = isinstance(error, (PrefoldError, ReplicaDown))
    return str(error) if is_plain else f"{type(error).__name__}: {error}"


ReplicaEvent = ReplicaReady | ReplicaReport | ReplicaLost


def cannot_ask(backend: str, option: str, without: str) -> InputError:
    """Return the error for an option of a request that a backend lacks.

    Args:
        without: how to run the model instead
    """
    remedy = f"leave it out, or run the model {without}"
    return InputError(f"{backend} cannot be asked for {option}", field=option, remedy=remedy, code="unsupported")


def generation_stats(prompt: int, generated: int, cached: int) -> Stats:
    """Return the Stats of one answer.

    Args:
        prompt: tokens of the prompt
        generated: generated tokens
        cached: tokens of the prompt that were cached
    """
    rows = prompt - cached
    generation = GenerationStats(
        generated_tokens=generated, prefill_rows=rows, decode_rows=generated, first_admission_hits=cached
    )
    return Stats(tokens=prompt + generated, rows_computed=rows + generated, requests=1, steps=1, generation=generation)


def expected_limit(request: SpooledRequest) -> int:
    """Return the maximum number of tokens that a request generates.

    Without max_tokens this is a guess. For embeddings and scores it is 0.
    """
    sampling, _ = decode_options(request.options)
    if sampling is None:
        return 0
    return (_GUESSED_OUTPUT if sampling.max_tokens is None else sampling.max_tokens) * sampling.n


def tag_of(number: int, place: int) -> bytes:
    """Return the tag of a request in a lease's windows."""
    return _TAG.pack(number, place)


def place_of(tag: bytes) -> tuple[int, int]:
    """Return (number of the lease, place of the request) from a tag of `tag_of`."""
    number, place = _TAG.unpack(tag)
    return number, place


def requests_of(windows: Sequence[Window]) -> Iterator[tuple[int, int, Any]]:
    """Yield (number of the lease, place, Request) of every request."""
    for window in windows:
        for number, tag in enumerate(window.tags):
            yield *place_of(tag), window.request(number)


class Host(ABC):
    """The computing side of a replica: it runs windows of requests.

    Any thread may call the methods, but only one thread calls `report`.
    """

    facts: ReplicaFacts

    def __init__(self) -> None:
        self._report = ReplicaReport()
        self._changed = threading.Condition()

    @abstractmethod
    def begin(self, call: RunCall) -> None:
        """Start a run of requests of this call. The run before it ends."""

    def hold(self, pictures: list[Any], dropped: list[int]) -> None:
        """Store images for later windows, and drop other images by their first ids.

        Raise JobError if the model accepts only text.
        """
        raise JobError("these replicas accept only text; remove the images")

    @abstractmethod
    def give(self, windows: list[Window]) -> None:
        """Accept windows of the run."""

    @abstractmethod
    def end(self) -> None:
        """End the run. Requests without an answer are dropped."""

    def report_anew(self) -> None:  # noqa: B027  # most hosts report no cache
        """Make the next report contain all rows of the cache."""

    @abstractmethod
    def close(self) -> None:
        """End the run and the processes that compute."""

    def report(self, wait: float = LONGEST_WAIT) -> ReplicaReport:
        """Return the news since the last report. Wait for news, at most `wait` seconds."""
        with self._changed:
            self._changed.wait_for(self._has_news, wait)
            self._report, report = ReplicaReport(), self._report
            self._complete(report)
        now = time.perf_counter()
        report.steps = [replace(step, started_at=now - step.started_at) for step in report.steps]
        return report

    def _has_news(self) -> bool:
        report = self._report
        return bool(report.answers or report.steps or report.failure or report.is_at_work)

    def _complete(self, report: ReplicaReport) -> None:  # noqa: B027  # most hosts add nothing
        """Add news to a report that are only read when the report is made."""

    def _fail(self, error: Exception) -> None:
        """Report the error after which the host cannot continue."""
        with self._changed:
            self._report.failure = self._report.failure or error
            self._changed.notify()


class AsyncHost(Host):
    """A host for another system that computes.

    An event loop in a thread sends requests to it, a bounded number at a time.

    Args:
        name: the name of the thread
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._call: RunCall | None = None
        self._run = 0  # the number of the run; answers to earlier runs are dropped
        self._waiting: deque[tuple[int, int, Request]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _refusal(self, call: RunCall) -> str:
        """Return why runs of this kind are impossible; "" if they are possible."""

    @abstractmethod
    def _num_to_ask(self, call: RunCall) -> int:
        """Return how many waiting requests to send together now; 0 if enough are in flight."""

    @abstractmethod
    async def _ask(self, call: RunCall, requests: list[Request]) -> tuple[list[Any], Stats]:
        """Return the answers to requests, and the counters. Raise InputError for options that the system lacks."""

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
        """End all tasks. Raise TimeoutError if the loop hangs."""
        if self._thread.is_alive():
            self._spawn(self._leave()).result(10)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ------------------------------------------------------------------------------------------ in the thread

    async def _leave(self) -> None:
        self._call = None  # else the end of each cancelled task starts a waiting request, and nothing ends that task
        self._waiting.clear()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)

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
        """Send waiting requests while there is free capacity."""
        while self._waiting and (call := self._call) is not None and (count := self._num_to_ask(call)):
            requests = [self._waiting.popleft() for _ in range(count)]
            task = self._loop.create_task(self._answer(call, self._run, requests))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._fill()

    async def _answer(self, call: RunCall, run: int, requests: list[tuple[int, int, Request]]) -> None:
        started = time.perf_counter()
        try:
            answers, stats = await self._ask(call, [request for _, _, request in requests])
        except InputError as error:
            answers, stats = [error] * len(requests), Stats(requests=len(requests))
        except Exception as error:
            self._fail(error)
            return
        if run != self._run:
            return
        seconds = time.perf_counter() - started
        step = StepInfo(stats.rows_computed, 0, len(requests), stats.tokens, started, seconds, len(requests))
        with self._changed:
            self._report.answers += [(lease, place, a) for (lease, place, _), a in zip(requests, answers, strict=True)]
            self._report.steps.append(step)
            self._report.stats = stats + (self._report.stats or Stats())
            self._changed.notify()


class Replicas:
    """The replicas of a fleet. One thread per replica creates its host and reads its reports.

    After `start`, any thread calls `tell(name, event)`: first with ReplicaReady, then with reports. If the replica is
    gone it calls with ReplicaLost, and again with ReplicaReady when the replica is back. Orders reach a replica in the
    order of the calls. Only `close` waits for a replica.

    Args:
        makes: {name: function that creates the host}; called again after a host was killed or failed
        killed: the `ReplicaLost.reason` of a killed host
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
        """Start the threads that create the hosts.

        Args:
            tell: receives the name and the events of each replica
        """
        self._tell = tell
        for name in self.names:
            self._threads.append(threading.Thread(target=self._serve, args=(name,), name="prefold-host", daemon=True))
            self._threads[-1].start()

    def order(self, name: str, method: str, *arguments: Any) -> None:
        """Call `begin`, `hold`, `give`, `end` or `report_anew` of a replica's host, if it is ready."""
        if (host := self._hosts.get(name)) is not None:
            getattr(host, method)(*arguments)

    def kill(self, name: str) -> None:
        """End a replica that hangs or failed. `ReplicaLost` follows."""
        with self._lock:
            self._hosts.pop(name, None)  # its thread notices, and closes the host

    def close(self) -> None:
        """End all replicas."""
        with self._lock:
            self.is_closed = True
            self._hosts.clear()
        for thread in self._threads:
            thread.join(30)

    def _serve(self, name: str) -> None:
        """Create a host and forward its reports. Create another host after it was killed or failed."""
        host: Host | None = None
        returns = True
        while returns and not self.is_closed:
            try:
                if host is None:
                    host = self._makes[name]()
                self._pass_on(name, host)
                down = ReplicaDown(self._killed)
            except ReplicaDown as error:
                down = error
            except Exception as error:
                action = "start" if host is None else "report"
                down = ReplicaDown(f"it cannot {action}: {in_words(error)}", returns=host is not None)
            self._restarts[name] -= 1
            returns = down.returns and self._restarts[name] >= 0
            self._hosts.pop(name, None)
            reason = str(down)
            if host is not None and (down.died or not returns or self.is_closed):
                try:
                    host.close()
                except Exception as error:
                    reason += f", and did not end cleanly: {in_words(error)}"
                host = None
            if not self.is_closed:
                self._tell(name, ReplicaLost(reason, returns, down.died))

    def _pass_on(self, name: str, host: Host) -> None:
        """Report that a host is ready, and forward its reports until it is killed.

        Raise ReplicaDown when it is lost.
        """
        with self._lock:
            if self.is_closed:
                return
            self._hosts[name] = host
        self._tell(name, ReplicaReady(host.facts))
        while self._hosts.get(name) is host:
            report = host.report(LONGEST_WAIT)
            if self._hosts.get(name) is not host:
                return
            if report.answers:
                self._restarts[name] = RESTARTS
            down = report.failure if isinstance(report.failure, ReplicaDown) else None
            report.failure = None if down is not None else report.failure
            self._tell(name, report)
            if down is not None:
                raise down
