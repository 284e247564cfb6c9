"""Answers in events: what the engine gives becomes an API's events, and these become bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from .asking import Asking
from .desk import TaskOrder
from .http import EventStream, json_of, unless_gone
from .site import refusal_of

Event = dict[str, Any]


class Events(Protocol):
    """Makes the events of one response."""

    def begin(self, prompts: list[Event]) -> Iterator[Event]: ...
    def piece(self, item: int, sample: int, text: str, tokens: list[Event], count: int) -> Iterator[Event]: ...
    def end(self, item: int, result: Event) -> Iterator[Event]: ...
    def last(self) -> Iterator[Event]: ...
    def failed(self, status: int, message: str, code: str, param: str | None) -> Event: ...


def named(event: Event) -> bytes:
    """Returns an event as it is sent with its "type" as its name."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_of(event))


def unnamed(event: Event) -> bytes:
    """Returns an event as it is sent without a name."""
    return b"data: %b\n\n" % json_of(event)


def _joined(write: Callable[[Event], bytes], make: Callable[..., Iterator[Event]], *what: Any) -> bytes:
    """Returns the events that are made of something, as they are sent."""
    return b"".join(map(write, make(*what)))


async def in_events(
    asking: Asking,
    order: TaskOrder,
    made: Events,
    write: Callable[[Event], bytes] = named,
    *,
    mark: bytes = b"",
) -> EventStream:
    """Returns the response that answers an order in events. What is wrong with the request is raised before.

    mark  sent behind all events
    """
    events = _events(asking, order, made, write, mark)
    await unless_gone(asking.request, anext(events))
    return EventStream(events, asking.request, asking.site.options, asking.site.metrics.cancelled.inc)


async def _events(
    asking: Asking,
    order: TaskOrder,
    made: Events,
    write: Callable[[Event], bytes],
    mark: bytes,
) -> AsyncGenerator[bytes]:
    """Yields nothing once the request has been taken, and then what is sent. A stream that fails ends with an error."""
    started = False
    try:
        async with aclosing(asking.desk.stream(order, asking.num_bytes)) as answers:
            async for event in answers:
                if not started:
                    started = True
                    yield b""
                    body = _joined(write, made.begin, *event)
                elif len(event) == 5:
                    body = _joined(write, made.piece, *event)
                else:
                    end = partial(_joined, write, made.end, *event)
                    body = await asking.desk.written(asking.tenant.owner, [event[1]], end)
                if body:
                    yield body
        if body := b"".join(map(write, made.last())):
            yield body
    except Exception as wrong:
        if not started:
            raise
        refusal, message = refusal_of(asking.site, wrong)
        yield write(made.failed(refusal.status, message, refusal.code, refusal.param))
    if mark:
        yield mark
