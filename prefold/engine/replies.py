"""What comes of requests, for readers that wait in event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ..schedule.generate_step import NOBODY
from ..types import Owner
from .samples import TextPiece

__all__ = ["Reply", "events_of", "send"]


class Reply:
    """What comes of one request, or of numbers that are read together, for one reader in an event loop: pieces of
    texts, and last the answer.

    Pieces that nobody has taken are joined: a reader that is slow holds no more than the texts themselves.

    tokens      of its prompts
    owner       for whom it runs
    begun_at    time.perf_counter() of the first step that worked for it; None: it waits
    keys        by which the generator knows what it was asked
    pieces      that nobody has taken yet, by sample
    came        is set where there is something new
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, tokens: int, owner: Owner = NOBODY):
        self.loop, self.tokens, self.owner = loop, tokens, owner
        self.begun_at: float | None = None
        self.keys: list[int] = []
        self.is_cancelled = False
        self.pieces: dict[int, TextPiece] = {}
        self.came = asyncio.Event()
        self._answer: Any = None

    def put(self, events: Sequence[Any]) -> None:
        """Takes pieces and answers; called in the reader's event loop."""
        for event in events:
            if isinstance(event, TextPiece):
                before = self.pieces.get(event.sample)
                self.pieces[event.sample] = event if before is None else _joined(before, event)
            elif self._answer is None:
                self._answer = event
        self.came.set()

    @property
    def is_answered(self) -> bool:
        return self._answer is not None

    async def answer(self) -> Any:
        """Returns the answer: a list of Generated, or of Results. Raises what went wrong with the request."""
        while self._answer is None:
            await self.came.wait()
            self.came.clear()
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


async def events_of(replies: Sequence[Reply]) -> AsyncGenerator[tuple[int, Any]]:
    """Yields (number of a reply, a TextPiece or its answer) as they come; the answer of a reply is its last event.

    Raises what went wrong with one of the requests. Nobody else may read the replies meanwhile.
    """
    came = asyncio.Event()  # one for all, so that none needs a task of its own
    came.set()
    for reply in replies:
        reply.came = came
    left = dict(enumerate(replies))
    while left:
        await came.wait()
        came.clear()
        for number, reply in list(left.items()):
            while reply.pieces:
                pieces, reply.pieces = reply.pieces, {}
                for piece in pieces.values():
                    yield number, piece
            if reply.is_answered:
                del left[number]
                yield number, await reply.answer()


def _joined(one: TextPiece, more: TextPiece) -> TextPiece:
    return TextPiece(one.sample, one.text + more.text, one.tokens + more.tokens)


def send(out: Mapping[Reply, Sequence[Any]]) -> None:
    """Hands every reply its events, in one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Reply, Sequence[Any]]]] = {}
    for reply, events in out.items():
        by_loop.setdefault(reply.loop, []).append((reply, events))
    for loop, mail in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_hand_out, mail)


def _hand_out(mail: Sequence[tuple[Reply, Sequence[Any]]]) -> None:
    for reply, events in mail:
        reply.put(events)
