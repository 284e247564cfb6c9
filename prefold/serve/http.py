"""What every face needs of HTTP: refusals, a client that leaves noticed, JSON and events written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from .options import ServeOptions

T = TypeVar("T")


class Refusal(Exception):
    """An answer that is no result.

    status, headers  of the response
    param, remedy    what of the request is wrong, and what to do about it
    code             a short stable word for machines
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        remedy: str = "",
        code: str = "",
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})


class ClientGone(Exception):
    """The client has closed the connection."""


# -------------------------------------------------------------------------------------------------------- JSON


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not written as JSON")


json_of = msgspec.json.Encoder(enc_hook=_plain).encode


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the response that holds a body as JSON; NumPy arrays in it are lists."""
    return Response(json_of(body), status, headers, "application/json")


# -------------------------------------------------------------------------------------------- clients that leave


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Returns what `work` returns; cancels it and raises ClientGone where the client leaves before. The body must have
    been read."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        return doing.result()
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await doing


# ------------------------------------------------------------------------------------------------------- events


class EventStream(Response):
    """Sends events as they are made, each of them the bytes of one server-sent event.

    The events end when the client leaves, or does not take one for `send_seconds`; where there is none for
    `ping_seconds`, a comment is sent, so that proxies keep the connection.

    left  called where the client has left, or takes nothing any more
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        request: Request,
        options: ServeOptions,
        left: Callable[[], object] = lambda: None,
    ):
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]
        self._events, self._request, self._options, self._left = events, request, options, left

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await unless_gone(self._request, self._write(send))
        except (ClientGone, TimeoutError):
            self._left()

    async def _write(self, send: Any) -> None:
        # An event makes no task and no timer of its own: there is one for each token of each text.
        loop, options = asyncio.get_running_loop(), self._options
        last, is_sending, pings = loop.time(), False, set[asyncio.Task[None]]()
        async with aclosing(self._events), asyncio.timeout(None) as limit:

            async def put(body: bytes, more: bool = True) -> None:
                nonlocal last, is_sending
                last, is_sending = loop.time(), True
                await send({"type": "http.response.body", "body": body, "more_body": more})
                is_sending = False

            def look() -> None:
                nonlocal looking
                now = loop.time()
                if is_sending and now >= last + options.send_seconds:
                    limit.reschedule(now)
                elif not is_sending and now >= last + options.ping_seconds:
                    pings.add(task := asyncio.ensure_future(put(b": ping\n\n")))
                    task.add_done_callback(pings.discard)
                due = last + (options.send_seconds if is_sending else options.ping_seconds)
                looking = loop.call_later(max(1e-3, min(due - now, soon)), look)

            soon = min(options.send_seconds, options.ping_seconds)  # nothing that begins now is due before
            looking = loop.call_later(soon, look)
            try:
                async for event in self._events:
                    await put(event)
                await put(b"", more=False)
            finally:
                looking.cancel()
                for ping in pings:
                    ping.cancel()
