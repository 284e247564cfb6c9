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
        """Closes connections that are too many, and those whose headers are too slow or too large."""

        _header_bytes = 0
        _in_headers = True
        _slow: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > options.max_connections:
                self._refuse(_BUSY)
            else:
                self._slow = self.loop.call_later(options.header_seconds, self._refuse, _SLOW)

        def data_received(self, data: bytes) -> None:
            if self._in_headers:
                self._header_bytes += len(data)
            if not self.transport.is_closing():
                super().data_received(data)
            if self._in_headers and self._header_bytes > options.max_header_bytes:
                self._refuse(_LARGE)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True
            if self._slow is None:
                self._slow = self.loop.call_later(options.header_seconds, self._refuse, _SLOW)

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            self._in_headers, self._header_bytes = False, 0
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _stop_waiting(self) -> None:
            if self._slow is not None:
                self._slow.cancel()
                self._slow = None

        def _refuse(self, answer: bytes) -> None:
            self._stop_waiting()
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

    return LimitedProtocol
