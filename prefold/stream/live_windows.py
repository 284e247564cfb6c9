"""Makes windows of a stream that goes on: requests come through a feed from the thread that reads them, wait in the
live window, and leave it as an engine has room."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..types import Request
from .live import Bucket, LiveWindow
from .order import SpooledRequest, encode
from .window import Window, Windows, cut_into_windows, shared_by

See = Callable[[Window], None]

_BOUND = 1 << 16
_POLL = 0.005


class LiveInput(NamedTuple):
    """A LiveInput holds the requests of a stream for an owner of several engines, which divides them.

    feed        those that come
    max_tokens  of those that wait
    rest        returns the others, once the feed has ended; None: there are none
    see         is shown the windows as they are taken
    wants       takes the tag of a request, and returns whether it is still wanted when it would be sent; None: all are
    """

    feed: Feed
    max_tokens: int
    rest: Callable[[], Windows] | None = None
    see: See | None = None
    wants: Callable[[bytes], bool] | None = None


class Feed:
    """A Feed passes on the requests of one task as they come, those of a record together. One thread puts, one takes.

    bound      tokens that may lie in it. The putting thread looks at `has_room` first; a longer record is
               taken whole
    is_hungry  set by the taking thread: engines have room, and nothing waits. The reader then hands on what it has
    is_urgent  whether others wait for the engines, so that the taking thread should come to an end; `is_over` calls it

    Neither side holds a lock: a signal may interrupt either anywhere.
    """

    def __init__(self, bound: int = _BOUND, *, is_urgent: Callable[[], bool] = lambda: False):
        self.bound = bound
        self.is_hungry = False
        self.has_ended = False
        self._is_urgent = is_urgent
        self._came: deque[tuple[float, Sequence[Sequence[SpooledRequest]]]] = deque()
        self._put = self._taken = 0  # tokens, each counted by one side
        self._number = 0

    # -------------------------------------------------------------------------------- the putting thread

    @property
    def has_room(self) -> bool:
        """Returns whether more may be put."""
        return self._put - self._taken < self.bound

    def put(self, requests: Sequence[tuple[Request, bytes]]) -> list[bool]:
        """Passes on the requests of one record with their tags; returns which are new prompts, as `Spool.add` does.
        Further reads of the prompt before (see `Window.twins`) stay with it."""
        made: list[Sequence[SpooledRequest]] = []
        is_new = []
        last: tuple[str, str, bytes] | None = None
        for request, tag in requests:
            spooled = encode(request, tag, self._number)
            is_new.append(request.sampling is not None or spooled[:3] != last)
            last, self._number = spooled[:3], self._number + 1
            made.append((spooled,) if is_new[-1] else (*made.pop(), spooled))
            self._put += spooled.num_tokens if is_new[-1] else 0
        self.is_hungry = False
        self._came.append((time.monotonic(), made))
        return is_new

    def end(self) -> None:
        """Declares that no more requests come."""
        self.has_ended = True

    # -------------------------------------------------------------------------------- the taking thread

    def take(self, timeout: float = 0.0) -> Sequence[Sequence[SpooledRequest]] | None:
        """Returns the reads of each prompt of the next record; None where none has come within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._came:
            if time.monotonic() >= deadline or self.has_ended:
                return None
            time.sleep(_POLL)
        _, record = self._came.popleft()
        self._taken += sum(reads[0].num_tokens for reads in record)
        return record

    # ----------------------------------------------------------------------------------------- any thread

    @property
    def since(self) -> float | None:
        """Returns when what waits longest was put, by time.monotonic(); None where nothing waits."""
        try:
            return self._came[0][0]
        except IndexError:
            return None

    @property
    def is_over(self) -> bool:
        """Returns whether the taking thread should stop: nothing comes any more, or other requests wait."""
        ended = self.has_ended  # looked at before the queue, into which nothing is put afterwards
        return (ended and not self._came) or self._is_urgent()


_WAIT = 0.02
_AHEAD = 0.05  # a device that computes ahead gives its last results when nothing more is asked of it


class LiveWindows:
    """The requests of a feed as windows for one engine, in one live window.

    feed        where they come from
    max_tokens  of requests that wait
    most        tokens of one window: about what an engine can begin with at once
    share       whether requests share rows; otherwise they leave as they came
    busy        an engine with so many requests lets others wait for more of their kind
    is_held     called with (namespace, prefix): whether the engine holds its K/V; such buckets leave first
    stopping    asked while there is nothing to do: whether to end

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
        # A bucket whose prefix the engine holds is in the queue True.
        held = is_held or (lambda *prefix: False)
        self.window = LiveWindow(max_tokens=max_tokens, homes=lambda *prefix: (True,) if held(*prefix) else ())
        self._most, self._share, self._busy, self._stopping = most, share, busy, stopping
        self._late: deque[Sequence[SpooledRequest]] = deque()  # of a record of which not all had room
        self._made: deque[Window] = deque()
        self._last: SpooledRequest | None = None

    def close(self) -> None:
        """Ends the windows."""
        self.is_closed = True

    @property
    def is_done(self) -> bool:
        """Returns whether there is nothing left to be given."""
        return self.is_closed or (not (self.window or self._late or self._made) and self.feed.is_over)

    def __iter__(self) -> Iterator[Window | None]:
        """Yields windows, and None where nothing is there while the engine has others to go on with."""
        while not self.is_done:
            window = self._next()
            if window is None and not self._num_open:
                self._wait()
                if self._stopping():
                    return
                window = self._next()
            yield window

    def steady(self, *, ahead: bool) -> Iterator[Window]:
        """Yields windows, for a run that takes no None.

        ahead  whether the engine keeps back the last step's results until it is asked for the next: then this ends when
               nothing has come for a while
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
        """Moves what has come into the window, as long as there is room."""
        window, now = self.window, time.monotonic()
        while not window.is_full:
            if self._late:
                reads = self._late.popleft()
                first = reads[0]
                window.put(first.number, first.tokens, now=now, namespace=first.namespace, payload=reads)
                continue
            if self.feed.is_over or (came := self.feed.take(timeout)) is None:
                break
            timeout = 0.0
            self._late.extend(came)
        if not window and not self._late and self.feed.since is None:
            self.feed.is_hungry = True

    def _next(self) -> Window | None:
        if not self._made:
            self._take_in()
            requests = self._leaving()
            self.num_taken += len(requests)
            self._made.extend(window_of(requests, share=self._share))
            if self._made and self._share:
                first, last, self._last = requests[0], self._last, requests[-1]
                if last is not None and last.namespace == first.namespace:  # else it has nothing in common with it
                    self._made[0] = replace(self._made[0], common=shared_by(last.key, first.key))
        return self._made.popleft() if self._made else None

    def _leaving(self) -> list[SpooledRequest]:
        """Returns the requests that leave now, sorted: buckets until there are enough tokens."""
        leaving: list[SpooledRequest] = []
        left = self._most
        while left > 0 and (bucket := self._best()) is not None:
            taken = self.window.take(bucket, left)
            leaving += [request for waiting in taken for request in waiting.payload]
            left -= sum(len(waiting.tokens) for waiting in taken)
        return sorted(leaving, key=lambda request: request[:4]) if self._share else leaving

    def _best(self) -> Bucket | None:
        window = self.window
        if not self._share:
            return window.oldest()
        if (pressed := window.pressed(time.monotonic())) is not None:
            return pressed
        grown = self._num_open >= self._busy
        held = window.largest(True, grown=grown) if self._is_held is not None else None
        return held or window.largest(grown=grown)


def window_of(requests: Sequence[SpooledRequest], *, share: bool = True) -> Iterator[Window]:
    """Yields the windows of sorted requests: one for each adapter and salt."""
    return cut_into_windows(requests, max_tokens=1 << 62, is_sorted=share)
