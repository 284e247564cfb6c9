"""Handles of submitted requests, which receive their pieces of text and answers; and groups of requests for numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ..prefix import common_prefix_lengths, lexsort_sequences
from ..schedule.generate_step import NO_OWNER
from ..types import Owner, Readout, Request, Result
from .requests import joint_readout
from .samples import TextPiece


class Handle:
    """A Handle stands for requests that were submitted together: it receives their events, and can cancel them.

    tokens    how many tokens their prompts have
    owner     the tenant and the class that they run for
    samples   how many texts are generated for a prompt
    begun_at  time.perf_counter() of the first step that served them; None while they wait
    keys      the generator's keys of the requests
    loop      the event loop in which `put` is called; None: the engine's thread calls it
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, tokens: int = 0, owner: Owner = NO_OWNER, samples: int = 1):
        self.tokens, self.owner, self.samples = tokens, owner, samples
        self.begun_at: float | None = None
        self.keys: list[int] = []
        self.is_cancelled = False

    def put(self, events: Sequence[Any], at: float = 0.0) -> None:
        """Takes the events of one step: pieces of text, and after the last of them the answer. Neither waits nor
        raises.

        at  time.perf_counter() after the step
        """
        raise NotImplementedError


class ResponseStream(Handle):
    """A ResponseStream is a Handle whose events are read in an event loop.

    Pieces of text that wait to be read are joined, so that a slow client costs no more memory than its text.

    pieces  the pieces of text that wait to be read, by sample
    gaps    seconds between two pieces of one sample, since `take_gaps` was called last
    ring    called when an event has come
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, loop: asyncio.AbstractEventLoop, tokens: int, owner: Owner = NO_OWNER, samples: int = 1):
        super().__init__(tokens, owner, samples)
        self.loop = loop
        self.pieces: dict[int, TextPiece] = {}
        self.gaps: list[float] = []
        self._has_event = asyncio.Event()
        self.ring: Callable[[], None] = self._has_event.set
        self._answer: Any = None
        self._last_put: dict[int, float] = {}  # when the last piece of each sample came

    def put(self, events: Sequence[Any], at: float = 0.0) -> None:
        for event in events:
            if isinstance(event, TextPiece):
                if event.sample in self._last_put:
                    self.gaps.append(at - self._last_put[event.sample])
                self._last_put[event.sample] = at
                before = self.pieces.get(event.sample)
                self.pieces[event.sample] = event if before is None else _joined(before, event)
            elif self._answer is None:
                self._answer = event
        self.ring()

    def take_gaps(self) -> list[float]:
        """Returns the gaps since the last call."""
        gaps, self.gaps = self.gaps, []
        return gaps

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    async def answer(self) -> Any:
        """Waits for the answer, and returns it: a list of Generated or of Results. Raises the error of the request."""
        while self._answer is None:
            await self._has_event.wait()
            self._has_event.clear()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


async def events_of(streams: Sequence[ResponseStream]) -> AsyncGenerator[tuple[int, Any]]:
    """Yields (number of a stream, its TextPiece or its answer) as events come; the last event of a stream is its
    answer.

    Raises the error of a request. No other coroutine may read the streams meanwhile.
    """
    has_event = asyncio.Event()  # one event for all streams, so that none needs a task of its own
    unanswered = set(range(len(streams)))
    ready = dict.fromkeys(unanswered)  # the streams to look at: at first all, later those that rang

    def ring(number: int) -> None:
        ready[number] = None
        has_event.set()

    for number, stream in enumerate(streams):
        stream.ring = partial(ring, number)
    has_event.set()
    while unanswered:
        await has_event.wait()
        has_event.clear()
        while ready:
            number = next(iter(ready))
            del ready[number]
            stream = streams[number]
            while stream.pieces:
                pieces, stream.pieces = stream.pieces, {}
                for piece in pieces.values():
                    yield number, piece
            if stream.is_answered and number in unanswered:
                unanswered.remove(number)
                yield number, await stream.answer()


def _joined(first: TextPiece, second: TextPiece) -> TextPiece:
    return TextPiece(first.sample, first.text + second.text, first.tokens + second.tokens, second.count)


def send(events_by_handle: Mapping[Handle, Sequence[Any]]) -> None:
    """Hands every handle its events, with a single call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Handle, Sequence[Any]]]] = {}
    now = time.perf_counter()
    for handle, events in events_by_handle.items():
        if handle.loop is not None:
            by_loop.setdefault(handle.loop, []).append((handle, events))
        else:
            handle.put(events, now)
    for loop, mail in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so nothing reads its streams any more
            loop.call_soon_threadsafe(_hand_out, mail, now)


def _hand_out(mail: Sequence[tuple[Handle, Sequence[Any]]], at: float) -> None:
    for handle, events in mail:
        handle.put(events, at)


# So many steps' worth of a group's requests are open at once: requests that come later wait for no more than these.
STEPS_OPEN = 2


class ReadGroup:
    """A ReadGroup is a list of requests for numbers that were submitted together, and enter the generator bit by bit.
    After it is made, only the engine's thread uses it.

    handle    receives the results
    requests  the requests
    readout   what is read of each
    results   the result of each request; None while it is open
    again     for each request, whether it is a further read of the prompt before it
    """

    def __init__(self, handle: Handle, requests: Sequence[Request], readout: Readout, *, rows: int, shares: bool):
        """Sorts the requests so that neighbours share the most rows; with many tokens that takes long.

        rows    the most rows of a step
        shares  whether requests share rows
        """
        self.handle, self.requests = handle, requests
        self.readout = joint_readout(
            readout, (0 if request.targets is None else len(request.targets) for request in requests)
        )
        self.again = [False, *(_are_twins(*pair) for pair in pairwise(requests))]
        self.results: list[Result | None] = [None] * len(requests)
        self._room = STEPS_OPEN * rows
        sizes = np.array([len(request.tokens) for request in requests], np.int64)
        order, new = np.arange(len(sizes)), sizes
        if shares and sizes.sum() > self._room:
            tokens = np.concatenate([request.tokens for request in requests])
            offsets = np.concatenate(([0], np.cumsum(sizes)))
            order = lexsort_sequences(tokens, offsets)
            new = sizes[order] - common_prefix_lengths(tokens, offsets, order)
        self._waiting = list(zip(order.tolist(), new.tolist(), strict=True))[::-1]
        self._open: dict[int, int] = {}  # rows by request

    def next(self) -> int | None:
        """Returns the number of the request that is entered next; None while there is no room for it."""
        if not self._waiting or (self._open and self._room <= 0):
            return None
        number, rows = self._waiting.pop()
        self._open[number] = rows
        self._room -= rows
        return number

    def book(self, number: int, result: Result) -> bool:
        """Takes the result of a request; returns whether it was the last."""
        self.results[number] = result
        self._room += self._open.pop(number)
        return not (self._open or self._waiting)


def _are_twins(before: Request, request: Request) -> bool:
    """Returns whether a request is a further read of the prompt before it (see `Window.twins`)."""
    same_namespace = before.adapter == request.adapter and before.salt == request.salt
    return same_namespace and np.array_equal(before.tokens, request.tokens)
