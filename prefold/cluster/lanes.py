"""Requests that are submitted to a fleet one by one: those of one call (see `RunCall`) are a stream of the fleet's run.

The run has a thread, which begins with the first request. A job goes before it: the run then ends when all that it has
is answered, and the next one begins after the job. Which stream's requests are sent to which replica, the lease book
decides.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..engine.handles import Handle, send
from ..engine.samples import TextPiece
from ..errors import FleetError, JobError, PrefoldError
from ..spec.requests import Generated, Request
from ..trie import Feed, LiveInput
from .replicas import RunCall

_WINDOW = 1 << 20  # tokens of a call that wait for replicas
_CLOSING_SECONDS = 10.0
_CLOSED = "the fleet was closed"


@dataclass(eq=False, slots=True)
class _Group:
    """A _Group is a list of requests that were submitted together.

    pieces  whether the text of each sample is put into the handle before the answer
    tags    of its requests
    open    how many of them have no answer
    """

    handle: Handle
    call: RunCall
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
        if self.call.readout.kind != "tokens":
            return [] if self.open else [self.results]
        return [*(map(_piece, itertools.count(), answer) if self.pieces else ()), answer]


def _piece(number: int, sample: Generated) -> TextPiece:
    logprobs = sample.logprobs or [None] * len(sample.tokens)
    tokens = tuple(zip(sample.tokens, logprobs, strict=True))
    return TextPiece(number, sample.text or "", tokens, len(sample.tokens))


class Lanes:
    """A Lanes runs the requests that are submitted to a fleet.

    run   runs the requests of `streams`: takes `stopping`, and yields answers as `Fleet.run` does
    wake  lets the run look for new requests at once
    """

    def __init__(self, run: Callable[[Callable[[], bool]], Iterator[tuple[bytes, Any]]], wake: Callable[[], None]):
        self._run, self._wake = run, wake
        self._streams: dict[RunCall, LiveInput] = {}
        self.groups: dict[Handle, _Group] = {}
        self.open: dict[bytes, tuple[_Group, int]] = {}  # the requests without an answer, by tag
        self._numbers = itertools.count()
        self._failure: Exception | None = None  # with which requests are answered that come from now on
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held by what runs
        self._num_runs = 0  # runs of jobs that have their turn or wait for it

    # ---------------------------------------------------------------------------------------------- any thread

    def submit(self, call: RunCall, requests: Sequence[Request], handle: Handle, *, pieces: bool) -> None:
        """Takes requests, whose answer is put into the handle. pieces: see `_Group`"""
        with self._changed:
            failure = self._failure
            if failure is None:
                tags = [next(self._numbers).to_bytes(8, "little") for _ in requests]
                group = _Group(handle, call, pieces, tags, [None] * len(tags), len(tags))
                self.groups[handle] = group
                self.open.update((tag, (group, number)) for number, tag in enumerate(tags))
                if call not in self._streams:
                    feed = Feed(is_urgent=lambda: self.gives_way)
                    self._streams[call] = LiveInput(feed, _WINDOW, wants=self.open.__contains__)
                feed = self._streams[call].feed
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
        """Returns a context in which no submitted requests run. Entering it waits until those that the run has are
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
        self.fail(PrefoldError(_CLOSED), for_ever=True)
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSING_SECONDS)

    def _forget(self, group: _Group) -> None:
        del self.groups[group.handle]
        for tag in group.tags:
            self.open.pop(tag, None)

    def fail(self, error: Exception, call: RunCall | None = None, *, for_ever: bool = False) -> None:
        """Answers the requests of a call with an error; None: all requests. Those that wait in feeds are dropped when
        they are to be sent. for_ever: also all requests that come"""
        with self._changed:
            if for_ever and self._failure is None:
                self._failure = error
            groups = [group for group in self.groups.values() if call in (None, group.call)]
            for group in groups:
                self._forget(group)
            self._changed.notify_all()
        send({group.handle: [error] for group in groups})

    # ---------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        """Runs requests, until the fleet is closed or has no replica left."""
        while self._wait_for_requests():
            try:
                with self._turn:
                    for tag, answer in self._run(self._has_ended):
                        self._take(tag, answer)
            except FleetError as error:  # no replica is left
                self.fail(error, for_ever=True)
            except Exception as error:
                reason = error if isinstance(error, PrefoldError) else JobError(f"the fleet has failed: {error!r}")
                self.fail(reason)

    def _wait_for_requests(self) -> bool:
        """Returns True once there are requests and no job runs; False if no more are to run."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended() or next(self.streams(), None) is not None)
            return not self._has_ended()

    def _has_ended(self) -> bool:
        return self._failure is not None

    def streams(self) -> Iterator[tuple[RunCall, LiveInput]]:
        """Yields the calls whose requests wait, with the streams of these requests; none if the run gives way."""
        for call, stream in () if self.gives_way else tuple(self._streams.items()):
            if stream.feed.since is not None:
                yield call, stream

    @property
    def gives_way(self) -> bool:
        """Returns whether the run should come to its end, because a job waits. Otherwise it goes on without requests:
        only a run hears of replicas."""
        return self._num_runs > 0

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
