"""uvicorn's HTTP protocol, with limits on connections and headers that it does not have."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .options import ServeOptions

__all__ = ["protocol_with"]

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\nretry-after: 1\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def protocol_with(options: ServeOptions) -> type[asyncio.Protocol]:
    """Returns the protocol of a server with these options."""

    class LimitedProtocol(HttpToolsProtocol):
        """Closes connections that are too many, those whose headers or trailers are too slow or too large, and those
        that go on sending what no answer waits for."""

        _beside_bytes = 0  # that came since the last byte of a body: headers, trailers, and what parts chunks
        _in_trailers = False
        _slow: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > options.max_connections:
                self._refuse(_BUSY)
            else:
                self._wait_for_request()

        def data_received(self, data: bytes) -> None:
            self._beside_bytes += len(data)
            if not self.transport.is_closing():
                super().data_received(data)
            if self._beside_bytes > options.max_header_bytes:
                self._refuse(_LARGE)
            elif self._is_answered and self.timeout_keep_alive_task is None:
                self._wait_for_request()  # these bytes have ended uvicorn's own waiting

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_trailers = False
            self._wait_for_request()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            self._in_trailers, self._beside_bytes = True, 0
            super().on_headers_complete()

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._in_trailers:  # nobody reads those
                super().on_header(name, value)

        def on_body(self, body: bytes) -> None:
            self._beside_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._beside_bytes = 0
            super().on_message_complete()
            if self._is_answered:  # before its body had come
                self._stop_waiting()
                self.cycle.more_body = False
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        @property
        def _is_answered(self) -> bool:
            return self.cycle is not None and self.cycle.response_complete

        def _wait_for_request(self) -> None:
            """Closes the connection unless the headers of a request have come by then."""
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
                # No second answer to a request, and none within another.
                if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
                    self.transport.write(answer)
                self.transport.close()

    return LimitedProtocol
