"""The source of requests that come as a stream: they wait in a live window until a replica is to have them.

The `Dispatcher` decides which leave, and for which replica. No I/O, no clock: the time is handed in. A replica with
room goes on with the bucket that it has begun, so that its cache needs to hold few prefixes at a time; then it takes of
the buckets that it holds the prefix of, then of those that no replica holds, most tokens first; of one that another
replica holds only where waiting for that takes longer than computing the prefix again. When nothing comes any more,
none takes more than lets all end at the same time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..stream import Window
from ..stream.live import Bucket, LiveWindow, Waiting
from ..stream.live_windows import window_of
from ..stream.order import SpooledRequest
from ..types import Generated
from .leases import Answered, Lease, Places, Source
from .replicas import ReplicaFacts, RunCall, expected_limit, tag_of
from .router import BestStart, Policy, Prompt, ReplicaLoad, Router, Speed

_SHORT = 0.25  # a replica of whose backlog so much is free will soon be short of work
_HALVINGS = 12
_OVERDUE = 2  # a request that has waited for so many times the age bound goes before larger buckets


@dataclass(frozen=True, eq=False, slots=True)
class Assignment:
    """Requests that a replica is to be given. prefix: leading tokens that they all share."""

    replica: Hashable
    requests: list[Waiting]
    prefix: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Says how much a replica may be sent.

    backlog   rows of prompts and outputs that it may have been sent and not ended: about what its KV store holds, and
              what it can look ahead by
    requests  how many of them; None: any number
    at_once   requests that leave together for it; None: any number
    busy      with so many requests it has enough to do to let others wait for more of their kind
    reserves  whether it sets room aside for the longest output that a request may have: then that counts in place of
              what is expected
    """

    backlog: int
    requests: int | None = None
    at_once: int | None = None
    busy: int = 1
    reserves: bool = False


@dataclass(slots=True)
class _Run:
    """The bucket that a replica has begun; left: requests that it may still take of it before it looks for others."""

    bucket: Bucket
    left: int


@dataclass(frozen=True, slots=True)
class _Ends:
    """When replicas end, in seconds from now, and of each how long it takes for a request, and its speed."""

    seconds: float
    replicas: dict[Hashable, tuple[float, Speed]]

    def share(self, replica: Hashable, load: ReplicaLoad) -> int:
        """Returns how many requests a replica can still do until then."""
        each, speed = self.replicas[replica]
        return int((self.seconds - load.seconds_at(speed)) / each + 1e-6)


class Dispatcher:
    """The live window and the router together.

    router   which replica holds which rows, and what each was sent
    window   options of `LiveWindow`
    limit_of the payload of a request -> tokens of its output at most
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
        """A replica takes work."""
        self.limits[replica] = limits

    def leave(self, replica: Hashable) -> None:
        """A replica takes no more work."""
        self.limits.pop(replica, None)
        self._runs.pop(replica, None)

    def room(self, replica: Hashable) -> int:
        """Returns how many rows a replica may still be sent."""
        load, limits = self.router.load(replica), self.limits[replica]
        if limits.requests is not None and load.requests >= limits.requests:
            return 0
        return limits.backlog - load.prefill_rows - (load.limits if limits.reserves else load.decode_rows)

    def dispatch(self, now: float) -> list[Assignment]:
        """Returns what leaves the window now. It is booked in the router as sent; the caller sends it."""
        orders: list[Assignment] = []
        ends: _Ends | None = None
        free = {replica: None for replica in self.limits if self.room(replica) > 0}  # in the order in which they came
        while len(self.window) and free:
            if self._by_prefix:
                replica = min(free, key=self.router.seconds_to_wait)
                bucket = self._best_for(replica, now)
                if bucket is None:
                    del free[replica]
                    continue
            else:
                is_idle = any(not self._is_busy(replica) for replica in free)
                bucket = self.window.pressed(now) or self.window.largest(grown=not is_idle)
                if bucket is None:
                    break
                replica = self.router.choose(self._prompt(bucket), free)
            if ends is None and self._by_prefix and self.window.is_closed:
                ends = self._ends()
            share = None if ends is None else ends.share(replica, self.router.load(replica))
            if share is not None and share < 1:
                del free[replica]
                continue
            orders.append(self._give(bucket, replica, share))
            if self.room(replica) <= 0:
                del free[replica]
        return orders

    def _best_for(self, replica: Hashable, now: float) -> Bucket | None:
        """Returns the bucket that a replica should go on with; None where it is better to wait for more to come."""
        window, run = self.window, self._runs.get(replica)
        if run is not None:
            bucket = window.now(run.bucket) if run.left > 0 else None
            if bucket is not None:
                return bucket
            del self._runs[replica]
        pressed = None if window.is_closed else window.pressed(now)
        if pressed is not None and window.pressed(now - (_OVERDUE - 1) * window.max_age) is not None:
            homes = self.router.holders(pressed.namespace, pressed.prefix)
            if not homes or replica in homes:
                return pressed
        grown = self._is_busy(replica)
        bucket = window.largest(replica, grown=grown) or window.largest(grown=grown) or pressed
        if bucket is not None:
            return bucket
        if self.room(replica) < _SHORT * self.limits[replica].backlog:
            return None  # it has enough to do, and more of its kind may come
        speed = self.router.load(replica).speed
        for wait, holder in self._holders(replica):
            bucket = window.largest(holder, grown=grown)
            if bucket is None:
                continue
            again = len(bucket.prefix) * speed.prefill
            if wait <= self.router.seconds_to_wait(replica) + again:
                return None  # who holds the others has less to do
            return bucket
        return None

    def _is_busy(self, replica: Hashable) -> bool:
        return self.router.load(replica).requests >= self.limits[replica].busy

    def _holders(self, replica: Hashable) -> list[tuple[float, Hashable]]:
        """Returns (seconds to wait, replica) of the others of whose prefixes buckets wait, those with most to do first.
        One that takes no work lets wait for ever."""
        holders = []
        for holder in self.window.queues:
            if holder is not None and holder != replica:
                holders.append((self.router.seconds_to_wait(holder) if holder in self.limits else math.inf, holder))
        return sorted(holders, key=lambda pair: -pair[0])

    def _ends(self) -> _Ends:
        """Returns when replicas end if each takes its share of all that waits, which is taken to be like what is under
        way."""
        loads = [self.router.load(replica) for replica in self.limits]
        requests = max(1, sum(load.requests for load in loads))
        prefill = sum(load.prefill_rows for load in loads) / requests
        decode = sum(load.decode_rows for load in loads) / requests
        known = [load.speed for load in loads if load.speed.is_measured]
        if known:  # of one that has not been measured, what the others do
            mean = Speed(*np.mean([(speed.prefill, speed.decode) for speed in known], axis=0).tolist())
        speeds = [load.speed if load.speed.is_measured or not known else mean for load in loads]
        each = np.array([max(1e-9, prefill * speed.prefill + decode * speed.decode) for speed in speeds])
        waits = np.array([load.seconds_at(speed) for load, speed in zip(loads, speeds, strict=True)])
        # Until the time t the replicas that are free before can do sum((t - wait) / each) requests; the more take part
        # the earlier they end, as long as they are free before that.
        order = np.argsort(waits)
        rates, done = np.cumsum(1 / each[order]), np.cumsum(waits[order] / each[order])
        low = float(((len(self.window) + done) / rates).min())
        high = low + float(each.max())
        for _ in range(_HALVINGS):  # a little later, as requests are not divided
            middle = (low + high) / 2
            if np.maximum(0, (middle - waits) // each).sum() >= len(self.window):
                high = middle
            else:
                low = middle
        return _Ends(high, dict(zip(self.limits, zip(each.tolist(), speeds, strict=True), strict=True)))

    def _give(self, bucket: Bucket, replica: Hashable, share: int | None) -> Assignment:
        """Gives a replica of a bucket what it has room for, and at most its share."""
        prompt = self._prompt(bucket)
        held = self.router.matched(prompt).get(replica, 0)
        mean = bucket.tokens / bucket.requests
        room = max(0, self.room(replica) - (len(bucket.prefix) - held))
        first = next(self.window.requests_of(bucket))
        limit = self._limit_of(first.payload)
        output = limit if self.limits[replica].reserves else self.router.expected_output(limit)
        count = room / max(1.0, mean - len(bucket.prefix) + output)
        limits, has = self.limits[replica], self.router.load(replica).requests
        if limits.requests is not None:
            count = min(count, limits.requests - has)
        if limits.at_once is not None:
            count = min(count, limits.at_once)
        if share is not None:
            count = min(count, share)
        run = self._runs.setdefault(replica, _Run(bucket, bucket.requests))
        requests = self.window.take(bucket, int(count * mean))
        run.bucket, run.left = bucket, run.left - len(requests)
        for waiting in requests:
            limit = self._limit_of(waiting.payload)
            sent = Prompt(waiting.tokens, limit, waiting.namespace, len(bucket.prefix))
            self.router.send(waiting.key, sent, replica)
        return Assignment(replica, requests, len(bucket.prefix))

    @staticmethod
    def _prompt(bucket: Bucket) -> Prompt:
        return Prompt(np.asarray(bucket.prefix), namespace=bucket.namespace)


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt that has come, and those of its reads that have no answer, by number. key: the number of its first."""

    key: int
    left: dict[int, SpooledRequest]

    @property
    def first(self) -> SpooledRequest:
        return next(iter(self.left.values()))

    @property
    def namespace(self) -> tuple[str | None, str]:
        return (self.first.adapter or None, self.first.salt)


class OnlineSource(Source):
    """Holds the requests of a stream; a place is the request's number of arrival.

    call        what is asked of every request
    max_tokens  of requests that wait
    warm_start  whether the stream is the beginning of a job that is divided later: replicas look ahead less
    see         is shown the windows that are sent
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
        **window: Any,
    ):
        self.router = Router(policy)
        self.dispatcher = Dispatcher(self.router, limit_of=_limit_of, max_tokens=max_tokens, **window)
        self.window = self.dispatcher.window
        self._call, self._warm_start, self._see = call, warm_start, see
        self._limits: dict[str, Limits] = {}
        self._is_closed = False
        self._late: deque[_Prompt] = deque()  # the window was full when they came, or they come back
        self._prompts: dict[int, _Prompt] = {}  # by the numbers of the reads that have no answer

    @property
    def num_left(self) -> int:
        return len(self._prompts)

    def join(self, replica: str, facts: ReplicaFacts, now: float) -> None:
        # What reads bucket by bucket holds nothing afterwards, and reports that.
        reports = facts.reports_cache or not self._call.in_slots
        self.router.join(replica, capacity=facts.cache_rows or None, reports=reports)
        self._limits[replica] = limits_of(facts, self._call, warm_start=self._warm_start)

    def leave(self, replica: str) -> None:
        if self._limits.pop(replica, None) is not None:
            self.router.leave(replica)
            self.dispatcher.leave(replica)

    # ------------------------------------------------------------------------------------------------- coming

    def put(self, reads: Sequence[SpooledRequest], now: float) -> None:
        """Takes the reads of a prompt that has come."""
        prompt = _Prompt(reads[0].number, {read.number: read for read in reads})
        self._prompts.update(dict.fromkeys(prompt.left, prompt))
        self._late.append(prompt)
        self._fill_window(now)

    def close(self) -> None:
        """Nothing comes any more but what lost replicas had: nothing waits for others any longer."""
        self._is_closed = True
        self.window.close()

    @property
    def is_full(self) -> bool:
        """Returns whether no more should be put."""
        return self.window.is_full or len(self._late) > 0

    @property
    def num_waiting(self) -> int:
        """Returns how many prompts wait to leave."""
        return len(self.window) + len(self._late)

    def room(self) -> int:
        """Returns how many rows replicas could be sent now beyond what waits, a step of each at most."""
        takers = self._takers()
        free = sum(min(max(0, self.dispatcher.room(name)), facts.max_rows) for name, facts in takers.items())
        return max(0, free - self.window.num_tokens)

    def _takers(self) -> dict[str, ReplicaFacts]:
        """Returns the replicas that take requests now, which the dispatcher then knows."""
        takers = self.book.takers
        self.dispatcher.limits = {name: self._limits[name] for name in takers}
        return takers

    def _fill_window(self, now: float) -> None:
        while self._late and not self.window.is_full:
            prompt = self._late.popleft()
            options = {"now": now, "payload": prompt, "returns": self._is_closed}
            self.window.put(prompt.key, prompt.first.tokens, namespace=prompt.namespace, **options)

    # ------------------------------------------------------------------------------------------------ leaving

    def take(self, now: float) -> Iterator[tuple[str, list[int]]]:
        while self.num_waiting:
            self._takers()
            self._fill_window(now)
            leaving = self.dispatcher.dispatch(now)
            for order in leaving:
                yield str(order.replica), [number for waiting in order.requests for number in waiting.payload.left]
            if not leaving or not self._late:
                return

    def resend(self, replica: str, prompts: Sequence[Places]) -> None:
        for number, *_ in prompts:
            prompt = self._prompts[number]
            sent = Prompt(prompt.first.tokens, _limit_of(prompt), prompt.namespace)
            self.router.send(prompt.key, sent, replica)

    def windows(self, lease: Lease) -> list[Window]:
        requests = sorted((self._prompts[number].left[number] for number in lease.places), key=lambda read: read[:4])
        windows = []
        for window in window_of(requests, share=self._call.sharing == "full"):
            windows.append(replace(window, tags=[tag_of(lease.number, place) for place in window.numbers.tolist()]))
            if self._see is not None:
                self._see(windows[-1])
        return windows

    # ---------------------------------------------------------------------------------------- what comes back

    def answered(self, replica: str, answers: Mapping[int, Any], now: float) -> list[Answered]:
        fresh = []
        for number, answer in answers.items():
            prompt = self._prompts.pop(number)
            request = prompt.left.pop(number)
            fresh.append((request.tag, 0 if prompt.left else request.num_tokens, answer))
            if not prompt.left:
                self.router.end(prompt.key, **_rows_of(answer))
        return fresh

    def prompts(self, places: Sequence[int]) -> list[Places]:
        return [tuple(prompt.left) for prompt in dict.fromkeys(self._prompts[number] for number in places)]

    def num_begun(self, facts: ReplicaFacts, prompts: Sequence[Places]) -> int:
        return 2 * facts.max_running if self._call.readout.kind == "tokens" else len(prompts)

    def put_back(self, prompts: Sequence[Places]) -> None:
        self._late += [self._prompts[number] for number, *_ in prompts]

    def give_up(self, places: Places) -> list[bytes]:
        return [self._prompts.pop(number).left.pop(number).tag for number in places]


def _limit_of(prompt: _Prompt) -> int:
    return expected_limit(prompt.first)


def limits_of(facts: ReplicaFacts, call: RunCall, *, warm_start: bool = False) -> Limits:
    """Returns how much a replica may be sent: what keeps it at work until the next of its answers is taken."""
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
    """Returns what an answer says of the rows that it took, for `Router.end`."""
    if isinstance(answer, list) and answer and isinstance(answer[0], Generated):
        return {"output_rows": sum(len(sample.tokens) for sample in answer), "cached_rows": answer[0].cached_tokens}
    if isinstance(answer, Exception):
        return {"output_rows": None}
    return {"output_rows": 0}
