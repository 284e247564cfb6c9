"""The online source: requests that arrive as a stream wait in a live window until a replica gets them.

The `Dispatcher` decides which requests leave the window, and for which replica. It does no I/O, and the caller passes
the time. A replica with free capacity chooses in this order:

1. the bucket that it has started, so its cache needs only few prefixes at a time
2. the largest bucket whose prefix it has
3. the largest bucket whose prefix no replica has
4. a bucket whose prefix another replica has, if waiting for that replica takes longer than computing the prefix again

When the input has ended, each replica gets only as many requests as let all replicas finish together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..spec.requests import Generated, Namespace
from ..trie import Window
from ..trie.live import Bucket, LiveWindow, WaitingRequest
from ..trie.live_windows import window_of
from ..trie.order import SpooledRequest
from .leases import Answered, Lease, Places, Source
from .replicas import ReplicaFacts, RunCall, expected_limit, tag_of
from .router import BestStart, Policy, Prompt, ReplicaLoad, Router, Speed

_SHORT = 0.25  # a replica with this share of its backlog free will soon run out of work
_HALVINGS = 12
_OVERDUE = 2  # a request that has waited this many times the age bound goes before larger buckets


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """Requests for a replica."""

    replica: Hashable
    requests: list[WaitingRequest]
    prefix: int  # number of leading tokens that all these requests share


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the open work of a replica."""

    # Maximum number of open rows of prompts and outputs: about the capacity of its KV store, plus some to look ahead.
    backlog: int
    requests: int | None = None  # maximum number of open requests; None: no limit
    at_once: int | None = None  # maximum number of requests of an assignment; None: no limit
    busy: int = 1  # a replica with this many requests is busy: buckets may wait for more requests with their prefix
    reserves: bool = False  # the replica reserves memory for the longest output, which then counts as expected


@dataclass(slots=True)
class _Run:
    """The bucket that a replica has started."""

    bucket: Bucket
    num_remaining: int  # number of further requests of the bucket before the replica chooses again


@dataclass(frozen=True, slots=True)
class _Ends:
    """The time at which all replicas end."""

    seconds: float  # seconds from now until all replicas end
    replicas: dict[Hashable, tuple[float, Speed]]  # {replica: (seconds per request, speed)}

    def share(self, replica: Hashable, load: ReplicaLoad) -> int:
        """Return how many more requests a replica can answer within `seconds` from now."""
        seconds, speed = self.replicas[replica]
        return int((self.seconds - load.seconds_at(speed)) / seconds + 1e-6)


class Dispatcher:
    """The assignment of a live window's requests to replicas, with a router.

    Args:
        router: has the rows and the open requests of each replica
        limit_of: returns the maximum number of output tokens for the payload of a request
        window: options of `LiveWindow`

    Attributes:
        limits: the Limits of each replica that accepts work
    """

    def __init__(self, router: Router, *, limit_of: Any = lambda payload: 0, **window: Any):
        self.router = router
        self._limit_of = limit_of
        self._by_prefix = isinstance(router.policy, BestStart)
        homes = {"homes": router.holders} if self._by_prefix else {}
        self.window = LiveWindow(**window, **homes)
        self.limits: dict[Hashable, Limits] = {}
        self._runs: dict[Hashable, _Run] = {}

    def join(self, replica: Hashable, limits: Limits) -> None:
        """Record that a replica accepts work."""
        self.limits[replica] = limits

    def leave(self, replica: Hashable) -> None:
        """Record that a replica accepts no more work."""
        self.limits.pop(replica, None)
        self._runs.pop(replica, None)

    def room(self, replica: Hashable) -> int:
        """Return how many more rows a replica may be sent."""
        load, limits = self.router.load(replica), self.limits[replica]
        if limits.requests is not None and load.requests >= limits.requests:
            return 0
        return limits.backlog - load.prefill_rows - (load.limits if limits.reserves else load.decode_rows)

    def dispatch(self, now: float) -> list[Assignment]:
        """Return the requests that leave the window now. The router books them as sent; the caller sends them."""
        assignments: list[Assignment] = []
        ends: _Ends | None = None
        free = {replica: None for replica in self.limits if self.room(replica) > 0}  # in the order in which they joined
        while len(self.window) and free:
            if self._by_prefix:
                replica = min(free, key=self.router.seconds_to_wait)
                bucket = self._best_for(replica, now)
                if bucket is None:
                    del free[replica]
                    continue
            else:
                is_idle = any(not self._is_busy(replica) for replica in free)
                bucket = self.window.overdue(now) or self.window.largest(grown=not is_idle)
                if bucket is None:
                    break
                replica = self.router.choose(self._prompt(bucket), free)
            if ends is None and self._by_prefix and self.window.is_closed:
                ends = self._ends()
            share = None if ends is None else ends.share(replica, self.router.load(replica))
            if share is not None and share < 1:
                del free[replica]
                continue
            assignments.append(self._assign(bucket, replica, share))
            if self.room(replica) <= 0:
                del free[replica]
        return assignments

    def _best_for(self, replica: Hashable, now: float) -> Bucket | None:
        """Return the bucket that a replica should continue with; None if it should wait for more requests."""
        window, run = self.window, self._runs.get(replica)
        if run is not None:
            bucket = window.current(run.bucket) if run.num_remaining > 0 else None
            if bucket is not None:
                return bucket
            del self._runs[replica]
        overdue = None if window.is_closed else window.overdue(now)
        if overdue is not None and window.overdue(now - (_OVERDUE - 1) * window.max_age) is not None:
            homes = self.router.holders(overdue.namespace, overdue.prefix)
            if not homes or replica in homes:
                return overdue
        grown = self._is_busy(replica)
        bucket = window.largest(replica, grown=grown) or window.largest(grown=grown) or overdue
        if bucket is not None:
            return bucket
        if self.room(replica) < _SHORT * self.limits[replica].backlog:
            return None  # it has enough work, and more requests with its prefixes may arrive
        speed = self.router.load(replica).speed
        for wait, holder in self._holders(replica):
            bucket = window.largest(holder, grown=grown)
            if bucket is None:
                continue
            seconds_again = len(bucket.prefix) * speed.prefill
            if wait <= self.router.seconds_to_wait(replica) + seconds_again:
                return None  # the holder will be free sooner
            return bucket
        return None

    def _is_busy(self, replica: Hashable) -> bool:
        return self.router.load(replica).requests >= self.limits[replica].busy

    def _holders(self, replica: Hashable) -> list[tuple[float, Hashable]]:
        """Return (seconds to wait, replica) of the other replicas that have prefixes of waiting buckets, busiest first.

        The seconds are infinite for a replica that accepts no work.
        """
        holders = []
        for holder in self.window.queues:
            if holder is not None and holder != replica:
                holders.append((self.router.seconds_to_wait(holder) if holder in self.limits else math.inf, holder))
        return sorted(holders, key=lambda pair: -pair[0])

    def _ends(self) -> _Ends:
        """Return when all replicas end if each gets its share of the waiting requests.

        Waiting requests are assumed to resemble the open ones.
        """
        loads = [self.router.load(replica) for replica in self.limits]
        requests = max(1, sum(load.requests for load in loads))
        prefill = sum(load.prefill_rows for load in loads) / requests
        decode = sum(load.decode_rows for load in loads) / requests
        measured = [load.speed for load in loads if load.speed.is_measured]
        if measured:  # replicas without a measured speed are assumed to have the mean
            mean = Speed(*np.mean([(speed.prefill, speed.decode) for speed in measured], axis=0).tolist())
        speeds = [load.speed if load.speed.is_measured or not measured else mean for load in loads]
        request_seconds = np.array([max(1e-9, prefill * speed.prefill + decode * speed.decode) for speed in speeds])
        waits = np.array([load.seconds_at(speed) for load, speed in zip(loads, speeds, strict=True)])
        # Until time t, the replicas that are free before t can answer sum((t - wait) / seconds per request) requests.
        # The end is the least t at which the replicas that are free first can answer all requests.
        order = np.argsort(waits)
        rates, starts = np.cumsum(1 / request_seconds[order]), np.cumsum(waits[order] / request_seconds[order])
        low = float(((len(self.window) + starts) / rates).min())
        high = low + float(request_seconds.max())
        for _ in range(_HALVINGS):  # the end is slightly later, because requests cannot be divided
            middle = (low + high) / 2
            if np.maximum(0, (middle - waits) // request_seconds).sum() >= len(self.window):
                high = middle
            else:
                low = middle
        return _Ends(high, dict(zip(self.limits, zip(request_seconds.tolist(), speeds, strict=True), strict=True)))

    def _assign(self, bucket: Bucket, replica: Hashable, share: int | None) -> Assignment:
        """Assign requests of a bucket to a replica: as many as fit, and at most its share."""
        prompt = self._prompt(bucket)
        held_rows = self.router.matched_rows(prompt).get(replica, 0)
        mean = bucket.tokens / bucket.requests
        room = max(0, self.room(replica) - (len(bucket.prefix) - held_rows))
        first = next(self.window.requests_of(bucket))
        limit = self._limit_of(first.payload)
        output = limit if self.limits[replica].reserves else self.router.expected_output(limit)
        count = room / max(1.0, mean - len(bucket.prefix) + output)
        limits, open_requests = self.limits[replica], self.router.load(replica).requests
        if limits.requests is not None:
            count = min(count, limits.requests - open_requests)
        if limits.at_once is not None:
            count = min(count, limits.at_once)
        if share is not None:
            count = min(count, share)
        run = self._runs.setdefault(replica, _Run(bucket, bucket.requests))
        requests = self.window.take(bucket, int(count * mean))
        run.bucket, run.num_remaining = bucket, run.num_remaining - len(requests)
        for waiting in requests:
            limit = self._limit_of(waiting.payload)
            prompt_sent = Prompt(waiting.tokens, limit, waiting.namespace, len(bucket.prefix))
            self.router.send(waiting.key, prompt_sent, replica)
        return Assignment(replica, requests, len(bucket.prefix))

    @staticmethod
    def _prompt(bucket: Bucket) -> Prompt:
        return Prompt(np.asarray(bucket.prefix), namespace=bucket.namespace)


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt of the stream."""

    key: int  # the number of its first read
    unanswered: dict[int, SpooledRequest]  # {number: read} of its open reads

    @property
    def first(self) -> SpooledRequest:
        return next(iter(self.unanswered.values()))

    @property
    def namespace(self) -> Namespace:
        return self.first.namespace


class OnlineSource(Source):
    """The requests of a stream. A place is a request's number of arrival.

    Args:
        call: the run's read-out and options
        max_tokens: maximum number of tokens of waiting requests
        warm_start: whether the stream is the start of a job that is divided later; replicas then look ahead less
        see: receives the windows that are sent
        wants: returns whether the request with a tag is still wanted
        window: options of the live window
    """

    def __init__(
        self,
        call: RunCall,
        *,
        max_tokens: int,
        warm_start: bool = False,
        policy: Policy | None = None,
        see: Callable[[Window], None] | None = None,
        wants: Callable[[bytes], bool] | None = None,
        **window: Any,
    ):
        self.router = Router(policy)
        self.dispatcher = Dispatcher(self.router, limit_of=_limit_of, max_tokens=max_tokens, **window)
        self.window = self.dispatcher.window
        self.call, self._warm_start, self._on_window, self._wants = call, warm_start, see, wants
        self._limits: dict[str, Limits] = {}
        self._is_closed = False
        self.queued: deque[_Prompt] = deque()  # prompts that found the window full, and prompts of lost replicas
        self.prompt_of: dict[int, _Prompt] = {}  # {number of an open read: its prompt}

    @property
    def num_unanswered(self) -> int:
        return len(self.prompt_of)

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        # A replica that computes bucket by bucket has no rows afterwards, and reports that.
        reports = facts.reports_cache or not self.call.in_slots
        self.router.join(replica, capacity=facts.cache_rows or None, reports=reports)
        self._limits[replica] = limits_of(facts, self.call, warm_start=self._warm_start)

    def leave(self, replica: str) -> None:
        if self._limits.pop(replica, None) is not None:
            self.router.leave(replica)
            self.dispatcher.leave(replica)

    # ----------------------------------------------------------------------------------------------- waiting

    def put(self, reads: Sequence[SpooledRequest], now: float) -> None:
        """Add the reads of a new prompt."""
        prompt = _Prompt(reads[0].number, {read.number: read for read in reads})
        self.prompt_of.update(dict.fromkeys(prompt.unanswered, prompt))
        self.queued.append(prompt)
        self._fill_window(now)

    def close(self) -> None:
        """End the input. No bucket waits for further requests, though requests of lost replicas may come back."""
        self._is_closed = True
        self.window.close()

    @property
    def is_full(self) -> bool:
        """Return whether no more prompts should be put."""
        return self.window.is_full or len(self.queued) > 0

    @property
    def num_waiting(self) -> int:
        """Return how many prompts wait to be sent."""
        return len(self.window) + len(self.queued)

    @property
    def has_waiting(self) -> bool:
        return self.num_waiting > 0

    def room(self) -> int:
        """Return how many rows replicas could be sent in addition to the waiting rows.

        Each replica counts at most one step.
        """
        replicas = self._free_replicas()
        free = sum(min(max(0, self.dispatcher.room(name)), facts.max_rows) for name, facts in replicas.items())
        return max(0, free - self.window.num_tokens)

    def _free_replicas(self) -> dict[str, ReplicaFacts]:
        """Return the replicas that accept requests now, and tell the dispatcher."""
        replicas = self.book.free_replicas(self)
        self.dispatcher.limits = {name: self._limits[name] for name in replicas}
        return replicas

    def _fill_window(self, now: float) -> None:
        while self.queued and not self.window.is_full:
            prompt = self.queued.popleft()
            options = {"now": now, "payload": prompt, "returns": self._is_closed}
            self.window.put(prompt.key, prompt.first.tokens, namespace=prompt.namespace, **options)

    # ----------------------------------------------------------------------------------------------- sending

    def take(self, now: float) -> Iterator[tuple[str, list[int]]]:
        while self.num_waiting:
            self._free_replicas()
            self._fill_window(now)
            assignments = self.dispatcher.dispatch(now)
            for assigned in assignments:
                if self._wants is not None:
                    self._drop_unwanted(assigned.requests, self._wants)
                numbers = [number for waiting in assigned.requests for number in waiting.payload.unanswered]
                if numbers:
                    yield str(assigned.replica), numbers
            if not assignments or not self.queued:
                return

    def _drop_unwanted(self, requests: Iterable[WaitingRequest], wants: Callable[[bytes], bool]) -> None:
        """Forget the reads that are no longer wanted."""
        for prompt in (waiting.payload for waiting in requests):
            for number, request in list(prompt.unanswered.items()):
                if not wants(request.tag):
                    del self.prompt_of[number], prompt.unanswered[number]
            if not prompt.unanswered:
                self.router.end(prompt.key, output_rows=None)

    def resend(self, replica: str, prompts: Sequence[Places]) -> None:
        for number, *_ in prompts:
            prompt = self.prompt_of[number]
            sent = Prompt(prompt.first.tokens, _limit_of(prompt), prompt.namespace)
            self.router.send(prompt.key, sent, replica)

    def windows(self, lease: Lease) -> list[Window]:
        requests = sorted(
            (self.prompt_of[number].unanswered[number] for number in lease.places), key=lambda read: read[:4]
        )
        windows = []
        for window in window_of(requests, share=self.call.sharing == "full"):
            windows.append(replace(window, tags=[tag_of(lease.number, place) for place in window.numbers.tolist()]))
            if self._on_window is not None:
                self._on_window(windows[-1])
        return windows

    # ----------------------------------------------------------------------------------------------- answers

    def answered(self, replica: str, answers: Mapping[int, Any], now: float) -> list[Answered]:
        fresh = []
        for number, answer in answers.items():
            prompt = self.prompt_of.pop(number)
            request = prompt.unanswered.pop(number)
            fresh.append((request.tag, 0 if prompt.unanswered else request.num_tokens, answer))
            if not prompt.unanswered:
                self.router.end(prompt.key, **_rows_of(answer))
        return fresh

    def prompts(self, places: Sequence[int]) -> list[Places]:
        return [tuple(prompt.unanswered) for prompt in dict.fromkeys(self.prompt_of[number] for number in places)]

    def num_begun(self, facts: ReplicaFacts, prompts: Sequence[Places]) -> int:
        return 2 * facts.max_running if self.call.readout.kind == "tokens" else len(prompts)

    def put_back(self, prompts: Sequence[Places]) -> None:
        self.queued += [self.prompt_of[number] for number, *_ in prompts]

    def give_up(self, places: Places) -> list[bytes]:
        return [self.prompt_of.pop(number).unanswered.pop(number).tag for number in places]


def _limit_of(prompt: _Prompt) -> int:
    return expected_limit(prompt.first)


def limits_of(facts: ReplicaFacts, call: RunCall, *, warm_start: bool = False) -> Limits:
    """Return how much work a replica may have: enough to keep it busy until its next answer is handled."""
    if facts.is_server and call.readout.kind != "tokens":
        return Limits(1 << 62, 2 * facts.at_once, facts.at_once, facts.at_once)
    if not call.in_slots:
        return Limits((2 if warm_start else 3) * facts.max_rows, busy=1)
    running = facts.max_running
    rows = max(4 * facts.max_rows, facts.cache_rows + facts.cache_rows // 4) if facts.cache_rows else 1 << 62
    if call.readout.kind != "tokens":
        return Limits(min(rows, 3 * facts.max_rows), busy=1)
    requests = running if warm_start else running + running // 2
    return Limits(rows, requests, max(1, running // 8), max(1, running // 2), facts.reserves_output)


def _rows_of(answer: Any) -> dict[str, int | None]:
    """Return the rows of an answer as arguments of `Router.end`."""
    if isinstance(answer, list) and answer and isinstance(answer[0], Generated):
        return {"output_rows": sum(len(sample.tokens) for sample in answer), "cached_rows": answer[0].cached_tokens}
    if isinstance(answer, Exception):
        return {"output_rows": None}
    return {"output_rows": 0}
