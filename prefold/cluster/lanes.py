"""Requests that are submitted to a fleet. The requests of one call (see `RunCall`) form a stream of the fleet's run.

The run has its own thread, which starts with the first request. A job has precedence: the run ends when its open
requests are answered, and the next run starts after the job. The lease book decides which replica gets which requests.
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

_WINDOW = 1 << 20  # maximum number of tokens of one call that wait for replicas
_CLOSING_SECONDS = 10.0
_CLOSED = "the fleet was closed"


@dataclass(eq=False, slots=True)
class _Group:
    """Requests that were submitted together."""

    handle: Handle
    call: RunCall
    pieces: bool  # put the text of each sample into the handle before the answer
    tags: list[bytes]  # one tag per request
    results: list[Any]  # answers in the order of the requests; None for an open request
    open: int  # number of requests without an answer

    def events(self, number: int, answer: Any) -> list[Any]:
        """Record the answer of request `number`, and return the events for the handle.

        An error or an answer with generated tokens is returned at once. For other read-outs, return [] until the last
        answer, then one event with all results.
        """
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
    """The requests that are submitted to a fleet, and the thread that runs them.

    A lane is the stream of all submitted requests with one `RunCall`, which the fleet leases to replicas in parts.

    Args:
        run: runs the requests of `streams`. It receives `stopping`, and yields (tag, answer) like `Fleet.run`.
        wake: makes the run look for new requests at once

    Attributes:
        groups: {handle: group} of the groups with open requests
        open: {tag: (group, number in the group)} of the requests without an answer
    """

    def __init__(self, run: Callable[[Callable[[], bool]], Iterator[tuple[bytes, Any]]], wake: Callable[[], None]):
        self._run, self._wake = run, wake
        self._streams: dict[RunCall, LiveInput] = {}
        self.groups: dict[Handle, _Group] = {}
        self.open: dict[bytes, tuple[_Group, int]] = {}
        self._numbers = itertools.count()
        self._failure: Exception | None = None  # the answer to all later requests; None: the fleet accepts requests
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._turn = threading.Lock()  # held while a job or submitted requests run
        self._num_runs = 0  # number of jobs that run or wait

    # ---------------------------------------------------------------------------------------------- any thread

    def submit(self, call: RunCall, requests: Sequence[Request], handle: Handle, *, pieces: bool) -> None:
        """Queue requests. Put their answers into `handle`.

        Args:
            pieces: put the text of each sample into the handle before the answer
        """
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
                is_first = feed.since is None  # False: the run was woken already and has not read the feed yet
                try:
                    feed.put(list(zip(requests, tags, strict=True)))
                    if is_first:
                        self._wake()
                except Exception as error:  # a request is malformed
                    self._forget(group)
                    failure = error
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="prefold-lanes", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if failure is not None:
            send({handle: [failure]})
        if handle.is_cancelled:  # by another thread, before the requests were added
            self.cancel(handle)

    def cancel(self, *handles: Handle) -> None:
        """Cancel requests. Unsent requests are not computed; answers to sent requests are dropped."""
        with self._changed:
            for handle in handles:
                handle.is_cancelled = True
                if handle in self.groups:
                    self._forget(self.groups[handle])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Keep submitted requests from running inside the `with` block.

        On entry, wait until the run has answered the requests that it has read. Other requests wait until the block
        ends.
        """
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
        """End the thread, and answer all requests with an error."""
        self.fail(PrefoldError(_CLOSED), for_ever=True)
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSING_SECONDS)

    def _forget(self, group: _Group) -> None:
        del self.groups[group.handle]
        for tag in group.tags:
            self.open.pop(tag, None)

    def fail(self, error: Exception, call: RunCall | None = None, *, for_ever: bool = False) -> None:
        """Answer the open requests of `call` with an error, or all open requests if `call` is None.

        A request that waits in a feed is dropped when it is about to be sent.

        Args:
            for_ever: answer all later requests with this error too
        """
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
        """Run requests until the fleet is closed or has no replica left."""
        while self._wait_for_requests():
            try:
                with self._turn:
                    for tag, answer in self._run(self._has_ended):
                        self._take(tag, answer)
            except FleetError as error:  # no replica is left
                self.fail(error, for_ever=True)
            except Exception as error:
                reason = error if isinstance(error, PrefoldError) else JobError(f"the fleet failed: {error!r}")
                self.fail(reason)

    def _wait_for_requests(self) -> bool:
        """Wait until a request waits and no job waits or runs. Return False if the fleet failed or was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended() or next(self.streams(), None) is not None)
            return not self._has_ended()

    def _has_ended(self) -> bool:
        return self._failure is not None

    def streams(self) -> Iterator[tuple[RunCall, LiveInput]]:
        """Yield (call, stream) for each call with waiting requests. Yield nothing if a job waits or runs."""
        for call, stream in () if self.gives_way else tuple(self._streams.items()):
            if stream.feed.since is not None:
                yield call, stream

    @property
    def gives_way(self) -> bool:
        """Return True if the run must end because a job waits or runs.

        If False, the run continues even without requests, because only a run handles events of replicas.
        """
        return self._num_runs > 0

    def _take(self, tag: bytes, answer: Any) -> None:
        with self._changed:
            entry = self.open.pop(tag, None)
            if entry is None:  # the request was cancelled
                return
            group, number = entry
            events = group.events(number, answer)
            if events:
                self._forget(group)
        if group.handle.begun_at is None:
            group.handle.begun_at = time.perf_counter()
        if events:
            send({group.handle: events})
