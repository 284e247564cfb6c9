"""Bind the address, load the model in a thread, serve, and drain after a signal.

uvicorn lacks limits on connections, headers and slow clients. The protocol class here adds them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import JobError
from ..spec.server import ServerSpec
from .app import make_app
from .http import Refusal
from .metrics import AccessLog
from .state import AppState

TAKEN_BYTES = 1 << 14  # a client must read at least this much within `send_seconds`
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\nretry-after: 1\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_WRONG = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _RefusedRequest(Exception):
    """Raised for a request head that is refused. The argument is the response's bytes."""


def protocol_with(options: ServerSpec, refused: Callable[[int], object]) -> type[asyncio.Protocol]:
    """Return the protocol class of a server.

    Args:
        refused: receives the status of each response that the protocol itself sends
    """

    class LimitedProtocol(HttpToolsProtocol):
        """uvicorn's HTTP protocol with limits.

        The protocol closes a connection in these cases:

        - there are more than `max_connections` connections
        - headers or trailers are too large, or do not arrive in time
        - the end of the body is ambiguous in the headers
        - the client sends more bytes after the response has ended, or does not read the response
        """

        _head_bytes = 0  # received since the last byte of a body: headers, trailers, chunk sizes
        _in_trailers = False
        _slow: asyncio.TimerHandle | None = None
        _not_taking: asyncio.TimerHandle | None = None
        _unsent = 0  # bytes in the write buffer when `_not_taking` was set

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > options.max_connections:
                self._refuse(_BUSY)
            else:
                self._wait_for_request()

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            if not self.transport.is_closing():
                self._unset_keepalive_if_required()
                self._parse(data)
            if self._head_bytes > options.max_header_bytes:
                self._refuse(_LARGE)
            elif self._is_answered and self.timeout_keep_alive_task is None:
                self._wait_for_request()  # these bytes ended uvicorn's keep-alive timer

        def _parse(self, data: bytes) -> None:
            """Parse received bytes.

            Offers to upgrade the protocol are ignored (RFC 9110, 7.8). The parser would not read the body of such a
            request, so the head is parsed again without the offer.
            """
            rest = data
            while rest:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as offer:
                    headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
                    version = self.parser.get_http_version().encode()
                    head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, headers)
                    rest = head + rest[offer.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                except httptools.HttpParserError as error:
                    refused = error.__context__
                    self._refuse(refused.args[0] if isinstance(refused, _RefusedRequest) else _WRONG)
                    return

        @property
        def _is_offer(self) -> bool:
            """Return whether the request offers an upgrade and will be parsed again."""
            return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

        def _check_head(self) -> None:
            """Raise _RefusedRequest for a head that is too large or ambiguous.

            A proxy in front of the server might parse an ambiguous head differently, and then see other requests on the
            connection (request smuggling).
            """
            if (
                len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
                > options.max_header_bytes
            ):
                raise _RefusedRequest(_LARGE)
            codings = [value for name, value in self.headers if name == b"transfer-encoding"]
            if codings and (
                [header.strip().lower() for header in codings] != [b"chunked"]
                or self.parser.get_http_version() != "1.1"
            ):
                raise _RefusedRequest(_WRONG)
            if self.parser.get_method() == b"CONNECT":
                raise _RefusedRequest(_WRONG)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_trailers = False
            self._wait_for_request()

        def on_headers_complete(self) -> None:
            if self._is_offer:
                return
            self._check_head()
            self._stop_waiting()
            self._in_trailers, self._head_bytes = True, 0
            super().on_headers_complete()

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._in_trailers:  # trailers are not read
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            if self._is_offer:
                return
            self._head_bytes = 0
            super().on_message_complete()
            if self._is_answered:  # the response ended before the request's body
                self._stop_waiting()
                self.cycle.more_body = False
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def pause_writing(self) -> None:
            super().pause_writing()
            self._look_later()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._not_taking is not None:
                self._not_taking.cancel()
                self._not_taking = None

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._look_later()  # uvicorn closes only after the unsent rest of a response

        def _look_later(self) -> None:
            if self._not_taking is None:
                self._unsent = self.transport.get_write_buffer_size()
                self._not_taking = self.loop.call_later(options.send_seconds, self._look)

        def _look(self) -> None:
            """Abort the connection if the client has read too little. Closing it would wait for the rest to be sent."""
            self._not_taking = None
            if self._unsent - self.transport.get_write_buffer_size() < TAKEN_BYTES:
                self.transport.abort()
            else:
                self._look_later()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            if self._not_taking is not None:
                self._not_taking.cancel()
            super().connection_lost(exc)

        @property
        def _is_answered(self) -> bool:
            return self.cycle is not None and self.cycle.response_complete

        def _wait_for_request(self) -> None:
            """Close the connection unless the headers of a request arrive within `header_seconds`."""
            if self._slow is None and not self.transport.is_closing():
                self._slow = self.loop.call_later(options.header_seconds, self._refuse, _SLOW)

        def _stop_waiting(self) -> None:
            if self._slow is not None:
                self._slow.cancel()
                self._slow = None

        def _refuse(self, answer: bytes) -> None:
            self._stop_waiting()
            if not self.transport.is_closing():
                cycle = self.cycle
                # Send no second response to a request, and none in the middle of another response.
                if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
                    self.transport.write(answer)
                    refused(int(answer[9:12]))
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            super().send_400_response(msg)
            refused(400)

    return LimitedProtocol


_log = logging.getLogger("prefold.serve")
CLOSE_SECONDS = 5  # after draining, clients have this long to read the rest of their responses


def run(load: Callable[[], Any], options: ServerSpec) -> None:
    """Serve until the process is told to end. See `prefold.serve.serve`."""
    options.check()
    stamp = "" if sys.stderr is not None and sys.stderr.isatty() else "%(asctime)s "
    logging.basicConfig(format=f"{stamp}prefold: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z", level=logging.WARNING)
    for name in ("prefold.serve", "prefold.access"):
        logging.getLogger(name).setLevel(logging.INFO)
    if options.access_log == "json":  # lines are plain JSON objects, without a time stamp in front
        plain, access = logging.StreamHandler(), logging.getLogger("prefold.access")
        plain.setFormatter(logging.Formatter("%(message)s"))
        access.addHandler(plain)
        access.propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else each invalid HTTP request adds a line
    sys.setswitchinterval(1e-3)  # a request should not wait 5 ms for the GIL while a step is planned in Python
    state = AppState(options)
    bound = bind(options)
    server = Server(state, bound)
    loading = threading.Thread(target=server.load, args=(load,), name="prefold-load", daemon=True)
    server.say(f"listening on {server.url}; the model is being loaded")
    loading.start()
    server.run_bound()
    if state.handler is not None:
        state.handler.llm.close()
    if server.error is not None:
        raise server.error


def bind(options: ServerSpec) -> socket.socket:
    """Return a socket that listens on the address. Raise JobError if that fails."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((options.host, options.port))
        bound.listen(2048)
    except OSError as error:
        message = f"cannot listen on {options.host}:{options.port}: {error.strerror or error}"
        raise JobError(f"{message}; choose another address with --host and --port (--port 0: a free port)") from None
    bound.setblocking(False)
    return bound


class Server(uvicorn.Server):
    """uvicorn's server on a bound socket, with loading, draining and reloading of keys.

    Attributes:
        error: why the model could not be loaded; None if it was
    """

    def __init__(self, state: AppState, bound: socket.socket):
        self.state, self.bound = state, bound
        self.error: BaseException | None = None
        self.bound_at = host, port = bound.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        app, options, logs = make_app(state), state.options, None
        if options.access_log != "off":
            logs = AccessLog(app, as_json=options.access_log == "json", probes=options.access_log_probes)
        config = uvicorn.Config(
            logs or app,
            http=protocol_with(options, logs.refused if logs else lambda status: None),
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing reads the client's address
            timeout_keep_alive=30,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            backlog=2048,
        )
        super().__init__(config)
        self._asked_to_end = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def say(self, line: str) -> None:
        _log.info(line)

    def load(self, load: Callable[[], Any]) -> None:
        """Load the model. If that fails, end the server."""
        started_at = time.perf_counter()
        try:
            llm = load()
            # The loaded objects stay. Each search of them for garbage would stop all threads for 0.1 s.
            gc.collect()
            gc.freeze()
            self.state.ready(llm)
        except BaseException as error:
            self.error, self.state.status = error, "failed"
            self.should_exit = True
            return
        self.say(f"ready after {time.perf_counter() - started_at:.1f} s: {', '.join(self.state.names)} on {self.url}")
        if passes := getattr(llm, "passes", ""):
            self.say(passes)

    def run_bound(self) -> None:
        """Serve until told to end, then close the state."""
        self.run(sockets=[self.bound])
        self.state.close()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, self.reload_keys)
        await super().serve(sockets)

    def reload_keys(self) -> None:
        """Read the file of keys again. If it is invalid, keep the present keys and log the error."""
        try:
            self.state.reload_keys()
            self.say("the API keys have been reloaded")
        except JobError as error:
            self.say(f"{error}; the API keys stay as they were")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        self._asked_to_end += 1
        if self._asked_to_end > 1 or self._loop is None:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.ensure_future(self.drain())

    async def drain(self) -> None:
        """Refuse new requests, wait at most `drain_seconds` for running ones, then end the server."""
        if self.state.status != "failed":
            self.state.status = "draining"
        if self.state.batches is not None:
            self.state.batches.begin_to_stop()
        until = time.monotonic() + self.state.options.drain_seconds
        if self.state.busy:
            self.say(f"draining: {self.state.busy} requests, {self.state.options.drain_seconds:g} s at most")
        while self.state.busy and time.monotonic() < until:
            await asyncio.sleep(0.05)
        outcome = f"{self.state.busy} requests are cancelled" if self.state.busy else "all requests have been answered"
        self.say(f"the server ends; {outcome}")
        if self.state.handler is not None:
            message, remedy = "the server is being shut down", "send the request to another"
            self.state.handler.give_up(Refusal(503, message, remedy=remedy, code="unavailable"))
        self.should_exit = True
