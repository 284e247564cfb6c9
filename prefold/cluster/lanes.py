"""Requests that are submitted to a fleet one by one: those that are read in one way are a lane, and run as one stream.

The lanes take turns, in a thread that begins with the first request. A run of a job goes before all of them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..engine.handles import Handle, send
from ..engine.samples import TextPiece
from ..errors import FleetError, JobError, PrefoldError
from ..spec.requests import Generated, Readout, Request, Sharing
from ..trie import Feed, LiveInput

_WINDOW = 1 << 20  # tokens that wait for replicas
_TURN = 1.0  # seconds after which the requests of a lane make room for those of another
_CLOSING_SECONDS = 10.0
_CLOSED = "the fleet was closed"


class Lane(NamedTuple):
    """A Lane is what the requests of one run have in common. text: whether replicas make texts of tokens"""

    readout: Readout
    sharing: Sharing
    text: bool


@dataclass(eq=False, slots=True)
class _Group:
    """A _Group is a list of requests that were submitted together.

    pieces  whether the text of each sample is put into the handle before the answer
    tags    of its requests
    open    how many of them have no answer
    """

    handle: Handle
    lane: Lane
    pieces: bool
    tags: list[bytes]
    results: list[Any]
    open: int

    def events(self, number: int, answer: Any) -> list[Any]:
        """Takes the answer of a request; returns the events of the handle: none while others are open."""
        self.results[number] = answer
        self.open -= 1
        if isinstance(answer, Exception):
            return [answer]
        if self.lane.readout.kind != "tokens":
            return [] if self.open else [self.results]
        return [*(map(_piece, itertools.count(), answer) if self.pieces else ()), answer]


def _piece(number: int, sample: Generated) -> TextPiece:
    logprobs = sample.logprobs or [None] * len(sample.tokens)
    tokens = tuple(zip(sample.tokens, logprobs, strict=True))
    return TextPiece(number, sample.text or "", tokens, len(sample.tokens))


class Lanes:
    """A Lanes runs the requests that are submitted to a fleet.

    run   runs the requests of a lane: takes (lane, LiveInput, stopping), and yields answers as `Fleet.run` does
    wake  lets the run look for new requests at once
    """

    def __init__(
        self,
        run: Callable[[Lane, LiveInput, Callable[[], bool]], Iterator[tuple[bytes, Any]]],
        wake: Callable[[], None],
    ):
        self._run, self._wake = run, wake
        self._feeds: dict[Lane, Feed] = {}
        self.groups: dict[Handle, _Group] = {}
        self.open: dict[bytes, tuple[_Group, int]] = {}  # the requests without an answer, by tag
        self._numbers = itertools.count()
        self._failure: Exception | None = None  # with which requests are answered that come from now on
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held by what runs
        self._num_runs = 0  # runs that have their turn or wait for it, beside those of lanes
        self._began = 0.0  # when the run of a lane did

    # ---------------------------------------------------------------------------------------------- any thread

    def submit(self, lane: Lane, requests: Sequence[Request], handle: Handle, *, pieces: bool) -> None:
        """Takes requests, whose answer is put into the handle. pieces: see `_Group`"""
        with self._changed:
            failure = self._failure
            if failure is None:
                tags = [next(self._numbers).to_bytes(8, "little") for _ in requests]
                group = _Group(handle, lane, pieces, tags, [None] * len(tags), len(tags))
                self.groups[handle] = group
                self.open.update((tag, (group, number)) for number, tag in enumerate(tags))
                if lane not in self._feeds:
                    self._feeds[lane] = Feed(is_urgent=partial(self._is_over, lane))
                feed = self._feeds[lane]
                is_first = feed.since is None  # otherwise the run has not even seen the requests before
                try:
                    feed.put(list(zip(requests, tags, strict=True)))
                    if is_first:
                        self._wake()
                except Exception as error:  # a request is not well-formed
                    self._forget(group)
                    failure = error
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="prefold-lanes", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if failure is not None:
            send({handle: [failure]})
        if handle.is_cancelled:  # by another thread, before the requests were entered
            self.cancel(handle)

    def cancel(self, *handles: Handle) -> None:
        """Gives requests up: those that no replica has are not computed, and the answers of others are dropped."""
        with self._changed:
            for handle in handles:
                handle.is_cancelled = True
                if handle in self.groups:
                    self._forget(self.groups[handle])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Returns a context in which no lane runs. Entering it waits until the requests that replicas have are
        answered."""
        self._count(1)
        self._wake()
        try:
            with self._turn:
                yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self._num_runs += change
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, and answers all requests with an error."""
        self._fail(PrefoldError(_CLOSED), for_ever=True)
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSING_SECONDS)

    def _forget(self, group: _Group) -> None:
        del self.groups[group.handle]
        for tag in group.tags:
            self.open.pop(tag, None)

    def _fail(self, error: Exception, lane: Lane | None = None, *, for_ever: bool = False) -> None:
        """Answers the requests of a lane with an error; None: those of all lanes. Nobody wants those that wait in feeds
        any more. for_ever: also all requests that come"""
        with self._changed:
            if for_ever and self._failure is None:
                self._failure = error
            groups = [group for group in self.groups.values() if lane in (None, group.lane)]
            for group in groups:
                self._forget(group)
            self._changed.notify_all()
        send({group.handle: [error] for group in groups})

    # ---------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        """Runs the requests of one lane after the other."""
        while (lane := self._next_lane()) is not None:
            try:
                with self._turn:
                    self._began = time.monotonic()
                    source = LiveInput(self._feeds[lane], _WINDOW, wants=self.open.__contains__)
                    for tag, answer in self._run(lane, source, self._has_ended):
                        self._take(tag, answer)
            except FleetError as error:  # no replica is left
                self._fail(error, for_ever=True)
            except Exception as error:
                reason = error if isinstance(error, PrefoldError) else JobError(f"the fleet has failed: {error!r}")
                self._fail(reason, lane)

    def _next_lane(self) -> Lane | None:
        """Waits for requests, and returns the lane that has its turn; None: there are no more turns."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended() or (self._asked_for() and not self._num_runs))
            if self._has_ended():
                return None
            lane = self._asked_for()[0]
            self._feeds[lane] = self._feeds.pop(lane)  # the others come first next time
            return lane

    def _has_ended(self) -> bool:
        return self._failure is not None

    def _asked_for(self) -> list[Lane]:
        return [lane for lane, feed in tuple(self._feeds.items()) if feed.since is not None]

    def _is_over(self, lane: Lane) -> bool:
        """Returns whether the run of a lane should come to its end, because others wait. Otherwise it goes on without
        requests: only a run hears of replicas."""
        if self._num_runs:
            return True
        return time.monotonic() - self._began > _TURN and any(other != lane for other in self._asked_for())

    def _take(self, tag: bytes, answer: Any) -> None:
        with self._changed:
            entry = self.open.pop(tag, None)
            if entry is None:  # it was cancelled
                return
            group, number = entry
            events = group.events(number, answer)
            if events:
                self._forget(group)
        if group.handle.begun_at is None:
            group.handle.begun_at = time.perf_counter()
        if events:
            send({group.handle: events})
