"""The online source: requests that come as a stream wait in a live window until a replica gets them.

The `Dispatcher` decides which requests leave the window, and for which replica. It does no I/O, and the caller passes
the time. A replica with room goes on with the bucket that it has begun, so that its cache needs to hold few prefixes at
a time. Then it takes buckets whose prefix it holds, then buckets whose prefix no replica holds, those with the most
tokens first. It takes a bucket whose prefix another replica holds only if waiting for that replica takes longer than
computing the prefix again. When the input has ended, each replica takes only as much as lets all of them end together.
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

_SHORT = 0.25  # a replica with this share of its backlog free will soon be short of work
_HALVINGS = 12
_OVERDUE = 2  # a request that has waited for this many times the age bound goes before larger buckets


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """An Assignment is a list of requests for a replica. prefix: how many leading tokens they all share."""

    replica: Hashable
    requests: list[WaitingRequest]
    prefix: int


@dataclass(frozen=True, slots=True)
class Limits:
    """A Limits says how much a replica may be sent.

    backlog   the most rows of prompts and outputs that it may have been sent and not answered: about as many as its KV
              store holds, and some to look ahead
    requests  the most requests that it may have been sent and not answered; None: any number
    at_once   the most requests of an assignment; None: any number
    busy      with this many requests it is busy, and buckets may wait for more requests with their prefix
    reserves  whether it sets room aside for the longest output that a request may have, which then counts in place of
              the expected output
    """

    backlog: int
    requests: int | None = None
    at_once: int | None = None
    busy: int = 1
    reserves: bool = False


@dataclass(slots=True)
class _Run:
    """A _Run is the bucket that a replica has begun. num_remaining: how many more of its requests the replica may take
    before it chooses again."""

    bucket: Bucket
    num_remaining: int


@dataclass(frozen=True, slots=True)
class _Ends:
    """An _Ends says in how many seconds all replicas end, and for each of them its seconds for a request and its
    speed."""

    seconds: float
    replicas: dict[Hashable, tuple[float, Speed]]

    def share(self, replica: Hashable, load: ReplicaLoad) -> int:
        """Returns how many more requests a replica can answer until then."""
        seconds, speed = self.replicas[replica]
        return int((self.seconds - load.seconds_at(speed)) / seconds + 1e-6)


class Dispatcher:
    """A Dispatcher assigns the requests of a live window to replicas by means of a router.

    router    knows which replica holds which rows, and which requests each was sent
    window    options of `LiveWindow`
    limit_of  takes the payload of a request, and returns the most tokens of its output
    limits    the Limits of each replica that takes work
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
        """Records that a replica takes work."""
        self.limits[replica] = limits

    def leave(self, replica: Hashable) -> None:
        """Records that a replica takes no more work."""
        self.limits.pop(replica, None)
        self._runs.pop(replica, None)

    def room(self, replica: Hashable) -> int:
        """Returns how many more rows a replica may be sent."""
        load, limits = self.router.load(replica), self.limits[replica]
        if limits.requests is not None and load.requests >= limits.requests:
            return 0
        return limits.backlog - load.prefill_rows - (load.limits if limits.reserves else load.decode_rows)

    def dispatch(self, now: float) -> list[Assignment]:
        """Returns the requests that leave the window now. The router books them as sent; the caller sends them."""
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
        """Returns the bucket that a replica should go on with; None if it should wait for more requests."""
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
            return None  # it has enough work, and more requests with its prefixes may come
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
        """Returns (seconds to wait, replica) of the other replicas that hold prefixes of waiting buckets, the
        busiest first. For a replica that takes no work the seconds are infinite."""
        holders = []
        for holder in self.window.queues:
            if holder is not None and holder != replica:
                holders.append((self.router.seconds_to_wait(holder) if holder in self.limits else math.inf, holder))
        return sorted(holders, key=lambda pair: -pair[0])

    def _ends(self) -> _Ends:
        """Returns when all replicas end if each takes its share of the waiting requests, which are supposed to be
        like the requests that replicas work on."""
        loads = [self.router.load(replica) for replica in self.limits]
        requests = max(1, sum(load.requests for load in loads))
        prefill = sum(load.prefill_rows for load in loads) / requests
        decode = sum(load.decode_rows for load in loads) / requests
        measured = [load.speed for load in loads if load.speed.is_measured]
        if measured:  # replicas without a measured speed are supposed to have the mean
            mean = Speed(*np.mean([(speed.prefill, speed.decode) for speed in measured], axis=0).tolist())
        speeds = [load.speed if load.speed.is_measured or not measured else mean for load in loads]
        request_seconds = np.array([max(1e-9, prefill * speed.prefill + decode * speed.decode) for speed in speeds])
        waits = np.array([load.seconds_at(speed) for load, speed in zip(loads, speeds, strict=True)])
        # Until the time t, the replicas that are free before t can answer sum((t - wait) / each) requests. The end is
        # the least t at which some number of replicas, those free first, can answer all requests.
        order = np.argsort(waits)
        rates, starts = np.cumsum(1 / request_seconds[order]), np.cumsum(waits[order] / request_seconds[order])
        low = float(((len(self.window) + starts) / rates).min())
        high = low + float(request_seconds.max())
        for _ in range(_HALVINGS):  # a little later, since requests are whole
            middle = (low + high) / 2
            if np.maximum(0, (middle - waits) // request_seconds).sum() >= len(self.window):
                high = middle
            else:
                low = middle
        return _Ends(high, dict(zip(self.limits, zip(request_seconds.tolist(), speeds, strict=True), strict=True)))

    def _assign(self, bucket: Bucket, replica: Hashable, share: int | None) -> Assignment:
        """Assigns requests of a bucket to a replica: as many as it has room for, and at most its share."""
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
    """A _Prompt is a prompt of the stream. key: the number of its first read; unanswered: its open reads, by number."""

    key: int
    unanswered: dict[int, SpooledRequest]

    @property
    def first(self) -> SpooledRequest:
        return next(iter(self.unanswered.values()))

    @property
    def namespace(self) -> Namespace:
        return self.first.namespace


class OnlineSource(Source):
    """An OnlineSource holds the requests of a stream; a place is a request's number of arrival.

    call        the run's read-out and options
    max_tokens  the most tokens of waiting requests
    warm_start  whether the stream is the beginning of a job that is divided later: replicas look ahead less
    see         called with the windows that are sent
    wants       takes the tag of a request that is to be sent, and returns whether it is still wanted
    window      options of the live window
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
        self.queued: deque[_Prompt] = deque()  # prompts for which the window was full, or that lost replicas had
        self.prompt_of: dict[int, _Prompt] = {}  # by the numbers of their open reads

    @property
    def num_unanswered(self) -> int:
        return len(self.prompt_of)

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        # A replica that computes bucket by bucket holds no rows afterwards, and reports that.
        reports = facts.reports_cache or not self.call.in_slots
        self.router.join(replica, capacity=facts.cache_rows or None, reports=reports)
        self._limits[replica] = limits_of(facts, self.call, warm_start=self._warm_start)

    def leave(self, replica: str) -> None:
        if self._limits.pop(replica, None) is not None:
            self.router.leave(replica)
            self.dispatcher.leave(replica)

    # ----------------------------------------------------------------------------------------------- waiting

    def put(self, reads: Sequence[SpooledRequest], now: float) -> None:
        """Adds the reads of a new prompt."""
        prompt = _Prompt(reads[0].number, {read.number: read for read in reads})
        self.prompt_of.update(dict.fromkeys(prompt.unanswered, prompt))
        self.queued.append(prompt)
        self._fill_window(now)

    def close(self) -> None:
        """Ends the input: no bucket waits for further requests, though requests of lost replicas may come back."""
        self._is_closed = True
        self.window.close()

    @property
    def is_full(self) -> bool:
        """Returns whether no more prompts should be put."""
        return self.window.is_full or len(self.queued) > 0

    @property
    def num_waiting(self) -> int:
        """Returns how many prompts wait to be sent."""
        return len(self.window) + len(self.queued)

    @property
    def has_waiting(self) -> bool:
        return self.num_waiting > 0

    def room(self) -> int:
        """Returns how many rows replicas could be sent beside those that wait; each replica counts at most one step."""
        replicas = self._free_replicas()
        free = sum(min(max(0, self.dispatcher.room(name)), facts.max_rows) for name, facts in replicas.items())
        return max(0, free - self.window.num_tokens)

    def _free_replicas(self) -> dict[str, ReplicaFacts]:
        """Returns the replicas that take requests now, and tells the dispatcher of them."""
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
        """Forgets those of the requests that nobody wants any more."""
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
    """Returns how much a replica may be sent: enough to keep it at work until the next of its answers is taken."""
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
    """Returns the rows that an answer took, as arguments of `Router.end`."""
    if isinstance(answer, list) and answer and isinstance(answer[0], Generated):
        return {"output_rows": sum(len(sample.tokens) for sample in answer), "cached_rows": answer[0].cached_tokens}
    if isinstance(answer, Exception):
        return {"output_rows": None}
    return {"output_rows": 0}
