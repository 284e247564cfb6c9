"""HTTP for all dialects: error responses, disconnects, bodies within limits, JSON and events, allowed hosts."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..spec.server import LOOPBACK, ServerSpec
from .keys import Tenant

T = TypeVar("T")


class Refusal(Exception):
    """An error response.

    Attributes:
        param: the wrong field of the request
        code: a short stable word for programs
        headers: additional headers of the response

    The message ends with `remedy`, which says how to correct the request.
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
    """Return a response with a body as JSON. NumPy arrays become lists."""
    return Response(json_of(body), status, headers, "application/json")


# --------------------------------------------------------------------------------------- clients that disconnect


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientGone.

    The request's body must have been read.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
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
    """A response that sends server-sent events as they are made. Each item of `events` is the bytes of one event.

    The stream ends early if the client disconnects or reads too slowly (see `run.py`). After `ping_seconds` without an
    event it sends a comment, so that proxies keep the connection open.

    Args:
        on_disconnect: called when the stream ends early
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        request: Request,
        options: ServerSpec,
        on_disconnect: Callable[[], object] = lambda: None,
    ):
        super().__init__(None, 200, {"cache-control": "no-store", "x-accel-buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]
        self._events, self._request, self._options, self._on_disconnect = events, request, options, on_disconnect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await unless_gone(self._request, self._write(send))
        except ClientGone:
            self._on_disconnect()

    async def _write(self, send: Any) -> None:
        # There is an event for each token of each text, so an event must not start a task or a timer.
        loop, every = asyncio.get_running_loop(), self._options.ping_seconds
        last = loop.time()

        async def put(body: bytes, more: bool = True) -> None:
            nonlocal last
            last = loop.time()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def ping() -> None:
            while True:
                await asyncio.sleep(max(1e-3, last + every - loop.time()))
                if loop.time() >= last + every:
                    await put(b": ping\n\n")

        pinging = asyncio.ensure_future(ping())
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    await put(event)
            pinging.cancel()
            await put(b"", more=False)
        finally:
            pinging.cancel()


# ------------------------------------------------------------------------------------------------------ bodies


_CLOSING = {"connection": "close"}
_decode = msgspec.json.Decoder().decode


class Bodies:
    """A reader of request bodies. It bounds the bytes of all bodies in memory that are being received."""

    def __init__(self, options: ServerSpec):
        self._options = options
        self._sizes: Counter[str | None] = Counter()  # {tenant: bytes being received}
        self.num_bytes = 0

    async def json(self, request: Request, tenant: Tenant) -> tuple[dict[str, Any], int]:
        """Return (the JSON object in a request's body, the size of the body in bytes).

        Raise Refusal for an invalid body and ClientGone if the client disconnects.
        """
        body = await self.read(request, tenant)
        try:
            value = _decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            message = f"the body is not valid JSON: {error}"
            raise Refusal(400, message, remedy="send a JSON object", code="invalid_json") from None
        if not isinstance(value, dict):
            message = f"the body is not a JSON object but {type(value).__name__}"
            raise Refusal(400, message, remedy="send an object", code="invalid_json")
        return value, len(body)

    async def read(self, request: Request, tenant: Tenant) -> bytes:
        """Return the body of a request.

        Raise Refusal if the body is too large (413) or too slow (408), or if too many bytes are being received (429).
        Raise ClientGone if the client disconnects.
        """
        options = self._options
        too_large = Refusal(
            413,
            f"the body is larger than {options.max_body_bytes} bytes",
            remedy="send less at once",
            code="body_too_large",
            headers=_CLOSING,
        )
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > options.max_body_bytes:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(options.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > options.max_body_bytes:
                        raise too_large
                    totals = self.num_bytes + len(part), self._sizes[tenant.name] + len(part)
                    if totals[0] > options.max_receiving_bytes or totals[1] > options.most_of_one_tenant:
                        message = "the bodies of too many requests are being received"
                        headers, code = {"retry-after": "1"} | _CLOSING, "rate_limit_exceeded"
                        raise Refusal(429, message, remedy="send the request again", code=code, headers=headers)
                    self.num_bytes, self._sizes[tenant.name] = totals
                    parts.append(part)
        except TimeoutError:
            message = f"the body did not arrive within {options.body_seconds:g} seconds"
            raise Refusal(408, message, remedy="send it faster", code="timeout", headers=_CLOSING) from None
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            received = sum(map(len, parts))
            self.num_bytes -= received
            self._sizes[tenant.name] -= received
            if not self._sizes[tenant.name]:
                del self._sizes[tenant.name]
        return b"".join(parts)


# ------------------------------------------------------------------------------------------------- foreign pages
#
# A page of any site can send requests to this machine. If the site's name is made to resolve to this address (DNS
# rebinding), the page can read the answers too. Browsers reveal such a page by two headers: Host is the name that the
# request is sent to, and Origin is the site of the page.


class Hosts:
    """The allowlist of host names: names that requests may be sent to, and sites whose pages may send requests.

    A server without keys on an address that other machines reach accepts any name, unless `allowed_hosts` lists some.
    Containers, proxies and domains reach the server by names that it cannot know.
    """

    def __init__(self, options: ServerSpec):
        names = (*LOOPBACK, options.host, socket.gethostname(), *options.allowed_hosts)
        self._names = {plain(name) for name in names}
        self._is_any_name_right = not (options.is_local or options.allowed_hosts)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise Refusal (403) for a request to an unknown name or from a page of another site.

        Args:
            headers: (name in lower case, value) of each header
        """
        host = origin = None
        for name, value in headers:
            if name == b"host" and host is None:
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origin = value.decode("latin-1").lower()
        # A name can be made to resolve to this address; an address cannot.
        if host and not self._is_any_name_right and not (name_of(host) in self._names or is_address(name_of(host))):
            remedy = "use its IP address, or start it with --allowed-host and this name"
            raise Refusal(403, f"this server is not {host!r:.100}", remedy=remedy, code="unknown_host")
        if origin is not None:
            site = origin.partition("://")[2]
            name_of_site = name_of(site)  # "" for a local file or a page that hides its site: never allowed
            if not name_of_site or (site != host and name_of_site not in self._names):
                message = f"pages of {origin!r:.100} may not send requests to this server"
                allow = "start it with --allowed-host and the name of their host"
                remedy = allow if name_of_site else "open the page from a host, as http://HOST, not as a file"
                raise Refusal(403, message, remedy=remedy, code="foreign_origin")


def plain(name: str) -> str:
    """Return a host name in the form for comparisons: lower case, without a final dot."""
    return name.lower().removesuffix(".")


def name_of(host: str) -> str:
    """Return the name or address of a host that may have a port, in the form of `plain`; "" if it is invalid."""
    try:
        return plain(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
