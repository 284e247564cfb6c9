"""What comes of requests, for those that wait for it: texts, and numbers that are read together."""

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
from ..schedule.generate_step import NOBODY
from ..types import Owner, Readout, Request, Result
from .requests import together
from .samples import TextPiece


class Handle:
    """A Handle stands for requests that were submitted together: what comes of them is put here, and it cancels them.

    tokens      of their prompts
    owner       for whom they run
    samples     how many texts are generated of a prompt
    begun_at    time.perf_counter() of the first step that worked for them; None: they wait
    keys        by which the generator knows the requests
    loop        the event loop in which `put` is called; None: the engine's thread calls it
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, tokens: int = 0, owner: Owner = NOBODY, samples: int = 1):
        self.tokens, self.owner, self.samples = tokens, owner, samples
        self.begun_at: float | None = None
        self.keys: list[int] = []
        self.is_cancelled = False

    def put(self, events: Sequence[Any], at: float = 0.0) -> None:
        """Takes pieces of texts, and last the answer, that came at that time.perf_counter(): all that a step gave. It
        neither waits nor raises anything."""
        raise NotImplementedError


class Reply(Handle):
    """A Reply is read in an event loop.

    Pieces that nobody has taken are joined: a reader that is slow holds no more than the texts themselves.

    pieces      that nobody has taken yet, by sample
    gaps        seconds between two pieces of one sample as they came, which nobody has taken yet
    ring        is called where there is something new
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, loop: asyncio.AbstractEventLoop, tokens: int, owner: Owner = NOBODY, samples: int = 1):
        super().__init__(tokens, owner, samples)
        self.loop = loop
        self.pieces: dict[int, TextPiece] = {}
        self.gaps: list[float] = []
        self._came = asyncio.Event()
        self.ring: Callable[[], None] = self._came.set
        self._answer: Any = None
        self._put_at: dict[int, float] = {}  # when the last piece of each sample came

    def put(self, events: Sequence[Any], at: float = 0.0) -> None:
        for event in events:
            if isinstance(event, TextPiece):
                if event.sample in self._put_at:
                    self.gaps.append(at - self._put_at[event.sample])
                self._put_at[event.sample] = at
                before = self.pieces.get(event.sample)
                self.pieces[event.sample] = event if before is None else _joined(before, event)
            elif self._answer is None:
                self._answer = event
        self.ring()

    def taken_gaps(self) -> list[float]:
        """Returns the gaps that came since this was asked last."""
        gaps, self.gaps = self.gaps, []
        return gaps

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    async def answer(self) -> Any:
        """Returns the answer: a list of Generated, or of Results. Raises what went wrong with the request."""
        while self._answer is None:
            await self._came.wait()
            self._came.clear()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


async def events_of(replies: Sequence[Reply]) -> AsyncGenerator[tuple[int, Any]]:
    """Yields (number of a reply, a TextPiece or its answer) as they come; the answer of a reply is its last event.

    Raises what went wrong with one of the requests. Nobody else may read the replies meanwhile.
    """
    came = asyncio.Event()  # one for all, so that none needs a task of its own
    left = set(range(len(replies)))
    rung = dict.fromkeys(left)  # those that have something new, or had it before

    def ring(number: int) -> None:
        rung[number] = None
        came.set()

    for number, reply in enumerate(replies):
        reply.ring = partial(ring, number)
    came.set()
    while left:
        await came.wait()
        came.clear()
        while rung:
            number = next(iter(rung))
            del rung[number]
            reply = replies[number]
            while reply.pieces:
                pieces, reply.pieces = reply.pieces, {}
                for piece in pieces.values():
                    yield number, piece
            if reply.is_answered and number in left:
                left.remove(number)
                yield number, await reply.answer()


def _joined(one: TextPiece, more: TextPiece) -> TextPiece:
    return TextPiece(one.sample, one.text + more.text, one.tokens + more.tokens, more.count)


def send(out: Mapping[Handle, Sequence[Any]]) -> None:
    """Hands every handle its events; those of an event loop in one call into it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Handle, Sequence[Any]]]] = {}
    now = time.perf_counter()
    for handle, events in out.items():
        if handle.loop is not None:
            by_loop.setdefault(handle.loop, []).append((handle, events))
        else:
            handle.put(events, now)
    for loop, mail in by_loop.items():
        with suppress(RuntimeError):  # its loop is closed, and nobody reads there any more
            loop.call_soon_threadsafe(_hand_out, mail, now)


def _hand_out(mail: Sequence[tuple[Handle, Sequence[Any]]], at: float) -> None:
    for handle, events in mail:
        handle.put(events, at)


# As many requests of a reading are open as fill so many steps: what comes later waits for no more than these.
STEPS_OPEN = 2


class Reading:
    """A Reading is what is read of several requests together. All but its making is done by the engine's thread.

    handle    that the results are for
    requests  of which numbers are read
    readout   what is read of each
    results   of the requests, as far as they are there
    again     of each request, whether it is a further read of the prompt before it
    """

    def __init__(self, handle: Handle, requests: Sequence[Request], readout: Readout, *, rows: int, shares: bool):
        """May take long, where there are many tokens: they are sorted, so that neighbours share the most.

        rows    the most rows of a step
        shares  whether requests share rows
        """
        self.handle, self.requests = handle, requests
        self.readout = together(readout, (0 if one.targets is None else len(one.targets) for one in requests))
        self.again = [False, *(_are_twins(*pair) for pair in pairwise(requests))]
        self.results: list[Result | None] = [None] * len(requests)
        self._room = STEPS_OPEN * rows
        sizes = np.array([len(request.tokens) for request in requests], np.int64)
        order, new = np.arange(len(sizes)), sizes
        if shares and sizes.sum() > self._room:
            tokens, offsets = np.concatenate([one.tokens for one in requests]), np.concatenate(([0], np.cumsum(sizes)))
            order = lexsort_sequences(tokens, offsets)
            new = sizes[order] - common_prefix_lengths(tokens, offsets, order)
        self._waiting = list(zip(order.tolist(), new.tolist(), strict=True))[::-1]
        self._open: dict[int, int] = {}  # rows by request

    def next(self) -> int | None:
        """Returns the number of the request that is added next; None while there is no room for it."""
        if not self._waiting or (self._open and self._room <= 0):
            return None
        number, rows = self._waiting.pop()
        self._open[number] = rows
        self._room -= rows
        return number

    def book(self, number: int, result: Result) -> bool:
        """Takes the result of one of the requests; returns whether it was the last."""
        self.results[number] = result
        self._room += self._open.pop(number)
        return not (self._open or self._waiting)


def _are_twins(before: Request, request: Request) -> bool:
    """Returns whether a request is a further read of the prompt before it (see `Window.twins`)."""
    same = before.adapter == request.adapter and before.salt == request.salt
    return same and np.array_equal(before.tokens, request.tokens)
