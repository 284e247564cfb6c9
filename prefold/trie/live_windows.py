"""Makes windows of a stream that goes on: requests come through a feed from the thread that reads them, wait in the
live window, and leave it as an engine has room."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..spec.requests import Asked, Namespace, Request
from .live import Bucket, LiveWindow
from .order import SpooledRequest, encode
from .radix import shared_by
from .repeats import CountedTag, is_repeatable, pack_tags
from .window import Window, Windows, cut_into_windows

See = Callable[[Window], None]

_BOUND = 1 << 16
_POLL = 0.005


class LiveInput(NamedTuple):
    """A LiveInput holds the requests of a stream for an engine.

    feed        the requests that arrive
    max_tokens  of the requests that wait
    rest        returns the windows of further requests, once the feed has ended; None: there are none
    see         is called with each window that is taken
    wants       wants(tag) -> whether a request is still to be sent; None: all are
    asked       what is asked of the requests that do not say otherwise: by it is looked up what an engine holds
    """

    feed: Feed
    max_tokens: int
    rest: Callable[[], Windows] | None = None
    see: See | None = None
    wants: Callable[[bytes], bool] | None = None
    asked: Asked | None = None


class Feed:
    """A Feed passes on the requests of one task as they come, those of a record together. One thread puts, one takes.

    bound      the most tokens in it. The putting thread checks `has_room` first; a longer record is taken whole
    is_hungry  set by the taking thread: engines have room, and no request waits. The reader then passes on all it has
    is_urgent  returns whether other requests wait for the engines, so that the taking thread should stop
    joins      whether a request that equals one without an answer waits for that answer, which `answered` then gives it
               too, and all tags are packed (see `repeats`)

    Neither side holds a lock: a signal may interrupt either anywhere.
    """

    def __init__(self, bound: int = _BOUND, *, is_urgent: Callable[[], bool] = lambda: False, joins: bool = False):
        self.bound = bound
        self.is_hungry = False
        self.has_ended = False
        self._is_urgent = is_urgent
        self._records: deque[tuple[float, Sequence[Sequence[SpooledRequest]]]] = deque()
        self._tokens_put = self._tokens_taken = 0  # tokens, each counted by one side
        self._number = 0
        self._joins = joins
        self._open: dict[SpooledRequest, deque[CountedTag]] = {}  # the requests without an answer, and their repeats
        self._sent: dict[bytes, SpooledRequest] = {}  # the same requests, by tag

    @property
    def has_room(self) -> bool:
        """Returns whether more may be put. For the putting thread, as `put` and `end`."""
        return self._tokens_put - self._tokens_taken < self.bound

    def put(self, requests: Sequence[tuple[Request, bytes]]) -> list[bool]:
        """Passes on the requests of one record with their tags. Returns for each whether it is a new prompt; a further
        read of the prompt before it (see `Window.twins`) stays with that prompt."""
        prompts: list[Sequence[SpooledRequest]] = []
        is_new = []
        last: tuple[Namespace, bytes] | None = None
        joined = False  # whether the first read of the prompt waits for an equal request
        for request, tag in requests:
            encoded = encode(request, tag, self._number)
            is_new.append(request.sampling is not None or encoded[:2] != last)
            last, joined = encoded[:2], joined and not is_new[-1]
            if self._joins:
                counted = CountedTag(tag, encoded.num_tokens if is_new[-1] else 0)
                encoded = encoded._replace(tag=pack_tags(encoded.num_tokens, [counted]))
                if is_repeatable(encoded.options) and self._join(encoded, counted):
                    joined = joined or is_new[-1]
                    continue
            self._number += 1
            begins = is_new[-1] or joined
            prompts.append((encoded,) if begins else (*prompts.pop(), encoded))
            self._tokens_put += encoded.num_tokens if begins else 0
            joined = False
        self.is_hungry = False
        if prompts:
            self._records.append((time.monotonic(), prompts))
        return is_new

    def _join(self, request: SpooledRequest, counted: CountedTag) -> bool:
        """Returns whether a request waits for the answer of an equal one. Otherwise it is one that others may wait
        for."""
        key = request._replace(tag=b"", number=0, media=())
        waiting = self._open.get(key)
        if waiting is not None:
            waiting.append(counted)
            if self._open.get(key) is waiting:
                return True
            try:  # the answer has come meanwhile, and `answered` may have seen this tag or not
                waiting.remove(counted)
            except ValueError:
                return True
        self._open[key], self._sent[request.tag] = deque(), key
        return False

    def answered(self, packed: bytes) -> Iterator[CountedTag]:
        """Yields the tags of the requests that wait for the answer of the request with this tag. For the taking
        thread."""
        key = self._sent.pop(packed, None)
        waiting = None if key is None else self._open.pop(key, None)
        while waiting:
            try:
                counted = waiting.popleft()
            except IndexError:  # taken back
                return
            yield counted

    def end(self) -> None:
        """Declares that no more requests come."""
        self.has_ended = True

    def take(self, timeout: float = 0.0) -> Sequence[Sequence[SpooledRequest]] | None:
        """Returns the reads of each prompt of the next record; None if none comes within `timeout` seconds. For the
        taking thread."""
        deadline = time.monotonic() + timeout
        while not self._records:
            if time.monotonic() >= deadline or self.has_ended:
                return None
            time.sleep(_POLL)
        _, record = self._records.popleft()
        self._tokens_taken += sum(reads[0].num_tokens for reads in record)
        return record

    @property
    def since(self) -> float | None:
        """Returns when the oldest record was put, by time.monotonic(); None if no record waits."""
        try:
            return self._records[0][0]
        except IndexError:
            return None

    @property
    def is_over(self) -> bool:
        """Returns whether the taking thread should stop: no more records come, or other requests wait."""
        ended = self.has_ended  # looked at before the queue, into which nothing is put afterwards
        return (ended and not self._records) or self._is_urgent()


_WAIT = 0.02
_AHEAD = 0.05  # an engine that keeps back its last results gives them after so many seconds without a window


class LiveWindows:
    """A LiveWindows takes the requests of a feed out of a live window, as windows for one engine.

    feed        the source of the requests
    max_tokens  of requests that wait
    most        tokens of a window: about as many as an engine can begin with at once
    share       whether requests share rows; otherwise they leave in order of arrival
    busy        while the engine has so many requests, small buckets wait for more requests
    is_held     is_held(namespace, prefix) -> whether the engine holds its K/V; such buckets leave first
    stopping    called while there is nothing to do; returns whether to end

    The caller counts in `num_answered` the requests whose answers it has.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        max_tokens: int,
        most: int,
        share: bool = True,
        busy: int = 1,
        is_held: Callable[[Hashable, np.ndarray], bool] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ):
        self.feed = feed
        self.num_answered = self.num_taken = 0
        self.is_closed = False
        self._is_held = is_held
        # The queue True has the buckets whose prefix the engine holds.
        holds = is_held or (lambda *prefix: False)
        self.window = LiveWindow(max_tokens=max_tokens, homes=lambda *prefix: (True,) if holds(*prefix) else ())
        self._most, self._share, self._busy, self._stopping = most, share, busy, stopping
        self._pending: deque[Sequence[SpooledRequest]] = deque()  # the rest of a record that did not fit
        self._windows: deque[Window] = deque()
        self._last: SpooledRequest | None = None

    def close(self) -> None:
        """Ends the windows."""
        self.is_closed = True

    @property
    def is_done(self) -> bool:
        """Returns whether there are no more windows."""
        return self.is_closed or (not (self.window or self._pending or self._windows) and self.feed.is_over)

    def __iter__(self) -> Iterator[Window | None]:
        """Yields windows, and None when no request waits while the engine has others to go on with."""
        while not self.is_done:
            window = self._next()
            if window is None and not self._num_open:
                self._wait()
                if self._stopping():
                    return
                window = self._next()
            yield window

    def without_pauses(self, *, ahead: bool) -> Iterator[Window]:
        """Yields windows, and no None. ahead: whether the engine keeps back the last step's results until the next
        window; then this ends when no request has come for a while"""
        began = time.monotonic()
        while not self.is_done:
            window = self._next()
            if window is not None:
                yield window
                began = time.monotonic()
                continue
            self._wait()
            if self._stopping() or (ahead and self._num_open and time.monotonic() - began > _AHEAD):
                return

    @property
    def _num_open(self) -> int:
        return self.num_taken - self.num_answered

    def _wait(self) -> None:
        self.feed.is_hungry = not self.window
        self._take_in(_WAIT)

    def _take_in(self, timeout: float = 0.0) -> None:
        """Moves requests from the feed into the window, as long as there is room."""
        window, now = self.window, time.monotonic()
        while not window.is_full:
            if self._pending:
                reads = self._pending.popleft()
                first = reads[0]
                window.put(first.number, first.tokens, now=now, namespace=first.namespace, payload=reads)
                continue
            if self.feed.is_over or (record := self.feed.take(timeout)) is None:
                break
            timeout = 0.0
            self._pending.extend(record)
        if not window and not self._pending and self.feed.since is None:
            self.feed.is_hungry = True

    def _next(self) -> Window | None:
        if not self._windows:
            self._take_in()
            requests = self._leaving()
            self.num_taken += len(requests)
            self._windows.extend(window_of(requests, share=self._share))
            if self._windows and self._share:
                first, last, self._last = requests[0], self._last, requests[-1]
                if last is not None and last.namespace == first.namespace:  # else they share nothing
                    self._windows[0] = replace(self._windows[0], common=shared_by(last.key, first.key))
        return self._windows.popleft() if self._windows else None

    def _leaving(self) -> list[SpooledRequest]:
        """Returns the requests of the next window, sorted: those of buckets, until there are enough tokens."""
        leaving: list[SpooledRequest] = []
        room = self._most
        while room > 0 and (bucket := self._best()) is not None:
            requests = self.window.take(bucket, room)
            leaving += [request for waiting in requests for request in waiting.payload]
            room -= sum(len(waiting.tokens) for waiting in requests)
        return sorted(leaving, key=lambda request: request[:4]) if self._share else leaving

    def _best(self) -> Bucket | None:
        window = self.window
        if not self._share:
            return window.oldest()
        if (overdue := window.overdue(time.monotonic())) is not None:
            return overdue
        grown = self._num_open >= self._busy
        bucket = window.largest(True, grown=grown) if self._is_held is not None else None
        return bucket or window.largest(grown=grown)


def watched(windows: Iterable[Window | None], see: See | None) -> Iterator[Window | None]:
    """Yields the windows, and calls `see` with each as it is taken."""
    for window in windows:
        if window is not None and see is not None:
            see(window)
        yield window


def window_of(requests: Sequence[SpooledRequest], *, share: bool = True) -> Iterator[Window]:
    """Yields the windows of sorted requests: one for each namespace."""
    return cut_into_windows(requests, max_tokens=1 << 62, is_sorted=share)
