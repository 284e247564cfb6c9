"""Coroutines that wait for an engine's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from ..engine.calls import TOKENS
from ..engine.handles import Handle
from ..engine.protocol import Engine
from ..engine.samples import TextPiece
from ..engine.schedule.generate_step import NO_OWNER
from ..spec.requests import Generated, Owner, Request
from ..text import Tokenizer


class ResponseStream(Handle):
    """A Handle for reading the events of a request in an event loop.

    Unread pieces of text are joined, so that a slow client costs no more memory than its text.

    Attributes:
        pieces: {sample: unread text}.
        gaps: Seconds between consecutive pieces of one sample, since the last `take_gaps`.
        ring: Called after each event.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tokens: int, owner: Owner = NO_OWNER, samples: int = 1):
        super().__init__(tokens, owner, samples)
        self.post = loop.call_soon_threadsafe
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
        """Return the gaps since the last call, and reset them."""
        gaps, self.gaps = self.gaps, []
        return gaps

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    async def answer(self) -> Any:
        """Wait for the answer, a list of Generated or of Result, and return it. Raise the error of the request."""
        while self._answer is None:
            await self._has_event.wait()
            self._has_event.clear()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


async def events_of(streams: Sequence[ResponseStream]) -> AsyncGenerator[tuple[int, Any]]:
    """Yield (index of a stream, TextPiece or answer) as events arrive. The answer is the last event of its stream.

    Raise the error of a request. No other coroutine may read the streams at the same time.
    """
    has_event = asyncio.Event()  # shared by all streams, so that a stream needs no task
    unanswered = set(range(len(streams)))
    ready = dict.fromkeys(unanswered)  # streams to check: first all, then those with new events

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


async def astream(
    engine: Engine, request: Request, tokenizer: Tokenizer | None, *, text: bool = True
) -> AsyncIterator[TextPiece | list[Generated]]:
    """Yield the pieces of an answer as they arrive, and last the list of its samples.

    Without `text` it yields only the samples. If the caller stops early or is cancelled, the request is cancelled.
    Raise InputError if the request cannot run.
    """
    response = ResponseStream(asyncio.get_running_loop(), len(request.tokens))
    try:
        await asyncio.to_thread(engine.submit, [request], TOKENS, response, tokenizer, text=text)
        async with aclosing(events_of([response])) as events:
            async for _, event in events:
                yield event
    finally:
        engine.cancel(response)


def _joined(first: TextPiece, second: TextPiece) -> TextPiece:
    return TextPiece(first.sample, first.text + second.text, first.tokens + second.tokens, second.count)
