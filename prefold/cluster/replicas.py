"""What passes between a fleet and its replicas, and the replicas: a host runs what it is given and reports what came of
it, and a thread listens to each.
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

from ..cache import CacheEvents
from ..engine.meter import StepInfo
from ..engine.requests import PROBED
from ..errors import InputError, JobError, PrefoldError
from ..stream import Window
from ..stream.order import SpooledRequest, decode_options
from ..types import GenerationStats, Readout, Request, Sharing, Stats

T = TypeVar("T")

RESTARTS = 3  # of a replica that has answered nothing since
LONGEST_WAIT = 0.5  # seconds that a report waits for something to be done
_GUESSED_OUTPUT = 256  # tokens, where a request does not say how many it may have
_TAG = struct.Struct("<QQ")  # number of the lease, place of the request in the order


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica says of itself when it is ready. Replicas of a fleet must agree in `identity`.

    identity          names what results depend on (versions, weights, dtype), {what: value}
    max_rows          rows of a step, at most
    max_running       sequences that run at once, at most
    at_once           prompts that it reads at once; 0: a step's
    is_server         whether others may use it too, so that only the number of its requests is bounded
    dies_of_requests  whether a request may be why it is lost
    dtype             what it computes in
    cache_rows        rows that its KV store holds; 0: not known
    reports_cache     whether it tells what its cache holds, where it is asked to
    reserves_output   whether it sets room aside for the longest output that a request may have
    steps_overlap     whether the seconds of its steps overlap: its speed is then what it does in the time that passes
    """

    identity: dict[str, str] = field(default_factory=dict)
    max_rows: int = 4096
    max_running: int = 256
    at_once: int = 0
    is_server: bool = False
    dies_of_requests: bool = True
    dtype: str = ""
    cache_rows: int = 0
    reports_cache: bool = False
    reserves_output: bool = False
    steps_overlap: bool = False


@dataclass(frozen=True, slots=True)
class RunCall:
    """What is asked of every request of a run.

    text       whether generated tokens are made text of; a replica has a tokenizer of its own
    online     whether requests come as a stream: where last rows are read, they are read in the KV store, and the
               replica tells what its cache holds
    """

    readout: Readout
    sharing: Sharing = "full"
    max_batch_rows: int | None = None
    text: bool = False
    online: bool = False

    @property
    def in_slots(self) -> bool:
        """Returns whether requests run in the KV store."""
        generates, kind = self.readout.kind == "tokens", self.readout.kind
        return generates or (self.online and self.sharing == "full" and (kind in PROBED or kind == "logprobs"))


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """Says that a replica has loaded its model."""

    facts: ReplicaFacts


@dataclass(slots=True)
class ReplicaReport:
    """What a replica did since its last report.

    answers     (number of the lease, place of the request, what it gave), what it gave as `results_of` yields it
    steps       of its engine, `started` in seconds before the report; of a server and of vLLM the requests that ended
    stats       of its engine, to be added up
    failure     why its engine cannot go on
    events      of its cache since the last report
    is_at_work  whether it says that it makes progress beyond that
    """

    answers: list[tuple[int, int, Any]] = field(default_factory=list)
    steps: list[StepInfo] = field(default_factory=list)
    stats: Stats | None = None
    events: CacheEvents | None = None
    failure: Exception | None = None
    is_at_work: bool = False

    @property
    def shows_progress(self) -> bool:
        """Returns whether the replica got on: it has done a step, its cache has changed, or it says so."""
        return bool(self.steps or self.events is not None or self.is_at_work)


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """Says that a replica is gone, with everything it had.

    returns  whether it comes back
    died     whether it has ended, perhaps of what it ran; otherwise only what it was asked and said was lost on the way
    """

    reason: str
    returns: bool = False
    died: bool = True


class ReplicaDown(Exception):
    """Says why a replica cannot be reached, or used: what it had is lost. The others are as of ReplicaLost."""

    def __init__(self, reason: str, *, returns: bool = True, died: bool = True):
        super().__init__(reason)
        self.returns, self.died = returns, died


def in_words(error: BaseException) -> str:
    """Returns what a person should know of an error."""
    is_plain = isinstance(error, (PrefoldError, ReplicaDown))
    return str(error) if is_plain else f"{type(error).__name__}: {error}"


ReplicaEvent = ReplicaReady | ReplicaReport | ReplicaLost


def cannot_ask(whom: str, what: str, without: str) -> InputError:
    """Returns the error of a request for what a server, or vLLM, lacks. without: what to leave out, in words."""
    remedy = f"leave it out, or run the model {without}"
    return InputError(f"{whom} cannot be asked for {what}", field=what, remedy=remedy, code="unsupported")


def generation_stats(prompt: int, made: int, cached: int) -> Stats:
    """Returns what is counted for a prompt of which so many tokens were cached, and the tokens that were made of it."""
    rows = prompt - cached
    generation = GenerationStats(
        generated_tokens=made, prefill_rows=rows, decode_rows=made, first_admission_hits=cached
    )
    return Stats(tokens=prompt + made, rows_computed=rows + made, requests=1, steps=1, generation=generation)


def expected_limit(request: SpooledRequest) -> int:
    """Returns how many tokens may be generated for a request: a guess where it does not say, 0 for one that is read."""
    sampling, _ = decode_options(request.options)
    if sampling is None:
        return 0
    return (_GUESSED_OUTPUT if sampling.max_tokens is None else sampling.max_tokens) * sampling.n


def tag_of(number: int, place: int) -> bytes:
    """Returns the tag of a request in a lease's windows."""
    return _TAG.pack(number, place)


def place_of(tag: bytes) -> tuple[int, int]:
    """Returns (number of the lease, place of the request) of a request by `tag_of`."""
    number, place = _TAG.unpack(tag)
    return number, place


def requests_of(windows: Sequence[Window]) -> Iterator[tuple[int, int, Any]]:
    """Yields (number of the lease, place, Request) of every request."""
    for window in windows:
        for number, tag in enumerate(window.tags):
            yield *place_of(tag), window.request(number)


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


class Replicas:
    """The replicas of a fleet, each a host that a thread makes and listens to.

    makes   makes the host of each, by name; again where it was killed, or has failed
    killed  why a host is lost that was killed

    After `start` they are told of by `tell(name, event)`, from any thread: ReplicaReady, then reports, and ReplicaLost
    when one is gone; and ReplicaReady again when it is back. What was asked of a replica reaches it in that order.
    A fleet takes a replica for hung when none of its reports has shown progress for too long. No method but `close`
    waits for a replica.
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
        """Begins to make the hosts."""
        self._tell = tell
        for name in self.names:
            self._threads.append(threading.Thread(target=self._serve, args=(name,), name="prefold-host", daemon=True))
            self._threads[-1].start()

    def order(self, name: str, method: str, *arguments: Any) -> None:
        """Calls `begin`, `hold`, `give`, `end` or `retell` of the host of a replica that is ready."""
        if (host := self._hosts.get(name)) is not None:
            getattr(host, method)(*arguments)

    def kill(self, name: str) -> None:
        """Ends a replica that hangs, or has failed. `ReplicaLost` follows."""
        with self._lock:
            self._hosts.pop(name, None)  # the thread that serves it sees that, and ends it

    def close(self) -> None:
        """Ends all replicas."""
        with self._lock:
            self.is_closed = True
            self._hosts.clear()
        for thread in self._threads:
            thread.join(30)

    def _serve(self, name: str) -> None:
        """Makes a host and passes on its reports; makes another where it was killed, or has failed."""
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
                what = "start" if host is None else "report"
                down = ReplicaDown(f"it cannot {what}: {in_words(error)}", returns=host is not None)
            self._restarts[name] -= 1
            returns = down.returns and self._restarts[name] >= 0
            self._hosts.pop(name, None)
            reason = str(down)
            if host is not None and (down.died or not returns or self.is_closed):
                try:
                    host.close()
                except Exception as error:
                    reason += f", and did not end as it should: {in_words(error)}"
                host = None
            if not self.is_closed:
                self._tell(name, ReplicaLost(reason, returns, down.died))

    def _pass_on(self, name: str, host: Host) -> None:
        """Tells that a host is ready, and of its reports until it is killed. Raises ReplicaDown where it is lost."""
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
