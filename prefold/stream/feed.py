"""The feed: requests on their way from the thread that reads them to the one that gives them to engines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..types import Request
from .order import SpooledRequest, encode
from .window import Window, Windows

See = Callable[[Window], None]

_BOUND = 1 << 16
_POLL = 0.005


class LiveInput(NamedTuple):
    """Holds the requests of a stream for an owner of several engines, which divides them.

    feed        those that come
    max_tokens  of those that wait
    rest        returns the others, once the feed has ended; None: there are none
    see         is shown the windows as they are taken
    """

    feed: Feed
    max_tokens: int
    rest: Callable[[], Windows] | None = None
    see: See | None = None


class Feed:
    """Passes on the requests of one task as they come, those of a record together. One thread puts, one takes.

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
            one = encode(request, tag, self._number)
            is_new.append(request.sampling is not None or one[:3] != last)
            last, self._number = one[:3], self._number + 1
            made.append((one,) if is_new[-1] else (*made.pop(), one))
            self._put += one.num_tokens if is_new[-1] else 0
        self.is_hungry = False
        self._came.append((time.monotonic(), made))
        return is_new

    def end(self) -> None:
        """Nothing comes any more."""
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
