"""Windows from requests that are still arriving.

One thread reads requests and puts them into a `Feed`. The engine's thread moves them to a live window, and takes
windows from there when the engine has free capacity.
"""

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
    """Requests that are still arriving, for an engine."""

    feed: Feed
    max_tokens: int  # the most tokens that may wait
    rest: Callable[[], Windows] | None = None  # the windows of further requests, read after the feed's end
    see: See | None = None  # called with each window that the engine gets
    wants: Callable[[bytes], bool] | None = None  # wants(tag): True if the request must still run; None: all must
    asked: Asked | None = None  # the default question; the cache lookup needs it to know which rows count as held


class Feed:
    """A queue of one task's requests between two threads: one puts, the other takes.

    All requests of a record arrive together. Neither thread holds a lock, because a signal may interrupt either of
    them anywhere.

    Args:
        bound: The most tokens in the feed. The putting thread checks `has_room` first; a larger record is accepted.
        is_urgent: Returns True if other requests wait for the engines, so that the taking thread should stop.
        joins: Join equal requests: a request that equals an unanswered one gets that answer, through `answered`. All
            tags are then packed (see `repeats`).

    Attributes:
        is_hungry: The taking thread sets it when engines are idle and no request waits. The reader then puts all
            requests that it has.
    """

    def __init__(self, bound: int = _BOUND, *, is_urgent: Callable[[], bool] = lambda: False, joins: bool = False):
        self.bound = bound
        self.is_hungry = False
        self.has_ended = False
        self._is_urgent = is_urgent
        self._records: deque[tuple[float, Sequence[Sequence[SpooledRequest]]]] = deque()
        self._tokens_put = self._tokens_taken = 0  # each is written by one thread only
        self._number = 0
        self._joins = joins
        self._open: dict[SpooledRequest, deque[CountedTag]] = {}  # unanswered requests and the tags that wait
        self._sent: dict[bytes, SpooledRequest] = {}  # tag -> key in `_open`

    @property
    def has_room(self) -> bool:
        """True if more requests may be put. Only for the putting thread, like `put` and `end`."""
        return self._tokens_put - self._tokens_taken < self.bound

    def put(self, requests: Sequence[tuple[Request, bytes]]) -> list[bool]:
        """Put the requests of one record, each with its tag.

        Return a list with True for each request that is a new prompt. A twin (another read of the previous prompt, see
        `Window.twins`) stays with its prompt.
        """
        prompts: list[Sequence[SpooledRequest]] = []
        is_new = []
        last: tuple[Namespace, bytes] | None = None
        joined = False  # the first read of the prompt waits for an equal request
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
        """Return True if the request now waits for the answer of an equal one; if not, later ones may wait for it."""
        key = request._replace(tag=b"", number=0, media=())
        waiting = self._open.get(key)
        if waiting is not None:
            waiting.append(counted)
            if self._open.get(key) is waiting:
                return True
            try:  # the answer came meanwhile, and `answered` may have yielded this tag already
                waiting.remove(counted)
            except ValueError:
                return True
        self._open[key], self._sent[request.tag] = deque(), key
        return False

    def answered(self, packed: bytes) -> Iterator[CountedTag]:
        """Yield the tags that wait for the answer of the request with this tag. Only for the taking thread."""
        key = self._sent.pop(packed, None)
        waiting = None if key is None else self._open.pop(key, None)
        while waiting:
            try:
                counted = waiting.popleft()
            except IndexError:  # `_join` removed the last tag meanwhile
                return
            yield counted

    def end(self) -> None:
        """Declare that no more requests come."""
        self.has_ended = True

    def take(self, timeout: float = 0.0) -> Sequence[Sequence[SpooledRequest]] | None:
        """Return the next record, as one list of reads per prompt. Only for the taking thread.

        Return None if no record comes within `timeout` seconds.
        """
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
        """When the oldest record was put, by time.monotonic(); None if no record waits."""
        try:
            return self._records[0][0]
        except IndexError:
            return None

    @property
    def is_over(self) -> bool:
        """True if the taking thread should stop: no more records come, or other requests wait."""
        ended = self.has_ended  # read this first: after `end` nothing is put, so an empty queue then stays empty
        return (ended and not self._records) or self._is_urgent()


_WAIT = 0.02
_AHEAD = 0.05  # an engine that holds back its last results returns them after this many seconds without a window


class LiveWindows:
    """The windows of one engine, taken from a feed through a live window.

    The caller adds to `num_answered` when requests are answered.

    Args:
        feed: The source of the requests.
        max_tokens: The most tokens that may wait.
        most: Tokens of a window: about as many as an engine can start at once.
        share: Share rows between requests. If False, requests leave in order of arrival.
        busy: Small buckets wait for more requests while the engine runs at least this many.
        is_held: is_held(namespace, prefix) -> True if the engine's cache holds the prefix; such buckets leave first.
        stopping: Called while no request waits; returns True to end the windows.
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
        # The queue True contains the buckets with a prefix in the engine's cache.
        holds = is_held or (lambda *prefix: False)
        self.window = LiveWindow(max_tokens=max_tokens, homes=lambda *prefix: (True,) if holds(*prefix) else ())
        self._most, self._share, self._busy, self._stopping = most, share, busy, stopping
        self._pending: deque[Sequence[SpooledRequest]] = deque()  # the prompts of a record that did not fit
        self._windows: deque[Window] = deque()
        self._last: SpooledRequest | None = None

    def close(self) -> None:
        """End the windows."""
        self.is_closed = True

    @property
    def is_done(self) -> bool:
        """True if there are no more windows."""
        return self.is_closed or (not (self.window or self._pending or self._windows) and self.feed.is_over)

    def __iter__(self) -> Iterator[Window | None]:
        """Yield windows, and None when no window is ready but the engine still has requests to run."""
        while not self.is_done:
            window = self._next()
            if window is None and not self._num_open:
                self._wait()
                if self._stopping():
                    return
                window = self._next()
            yield window

    def without_pauses(self, *, ahead: bool) -> Iterator[Window]:
        """Yield windows, never None.

        With `ahead`, the engine holds back the results of a step until the next window. The windows then end when no
        request has come for a while.
        """
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
        """Move requests from the feed into the window until the window is full or no request is ready."""
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
                if last is not None and last.namespace == first.namespace:
                    self._windows[0] = replace(self._windows[0], common=shared_by(last.key, first.key))
        return self._windows.popleft() if self._windows else None

    def _leaving(self) -> list[SpooledRequest]:
        """Take the requests of the next window: bucket after bucket until there are enough tokens, then sorted."""
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
    """Yield the windows and call `see` with each window (not None) before it is yielded."""
    for window in windows:
        if window is not None and see is not None:
            see(window)
        yield window


def window_of(requests: Sequence[SpooledRequest], *, share: bool = True) -> Iterator[Window]:
    """Yield the windows of sorted requests, one per namespace."""
    return cut_into_windows(requests, max_tokens=1 << 62, is_sorted=share)
