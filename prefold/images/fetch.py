"""MediaHosts fetches images over https, from hosts that were named, at public addresses only."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from ..errors import InputError

MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
CHUNK = 1 << 16


@dataclass(frozen=True)
class MediaHosts:
    """A MediaHosts knows from which hosts images may be fetched.

    names    of hosts, as they stand in addresses: "example.org" allows no "www.example.org"
    seconds  that one image may take, with its redirects
    resolve  resolve(host, port) -> the addresses of a host, as texts
    context  makes what connections are encrypted with
    """

    names: frozenset[str] = frozenset()
    seconds: float = 10.0
    resolve: Callable[[str, int], Iterable[str]] | None = None
    context: Callable[[], ssl.SSLContext] = ssl.create_default_context

    def fetch(self, url: str, field: str, most_bytes: int) -> bytes:
        """Returns what an https address holds. Raises InputError where its host, or that of a redirect, was not named
        or is not public, and where the file is too large, too slow or not there."""
        deadline = time.monotonic() + self.seconds
        for _ in range(MOST_REDIRECTS + 1):
            host, port, path = self._checked(url, field)
            try:
                status, where, data = self._get(host, port, path, deadline, most_bytes)
            except (OSError, http.client.HTTPException, ValueError) as error:
                slow = isinstance(error, TimeoutError) or time.monotonic() >= deadline
                what = f"did not answer in {self.seconds:g} s" if slow else f"could not be fetched: {error}"
                raise _error(field, f"({host}) {what}", "try again, or give the image itself") from None
            if status in REDIRECTS and where:
                url = urljoin(url, where)
                continue
            if status != 200:
                raise _error(field, f"({host}) was answered with status {status}", "check the address")
            if len(data) > most_bytes:
                raise _error(field, f"({host}) has more than {most_bytes:,} bytes", "give a smaller image")
            return data
        raise _error(field, f"is redirected more than {MOST_REDIRECTS} times", "give the address that it leads to")

    def _checked(self, url: str, field: str) -> tuple[str, int, str]:
        """Returns (host, port, path) of an address that may be asked."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port or 443
        except ValueError:
            raise _error(field, "is no address", "check it") from None
        if parts.scheme != "https" or parts.username is not None:
            raise _error(field, "leads to an address that is not https", "give an https address")
        if host not in self.names:
            known = ", ".join(sorted(self.names))
            remedy = f"the hosts that are allowed: {known}" if known else "give the image itself as a data URL"
            raise _error(
                field, f"is at {host[:100]!r}, from where nothing is fetched",
                remedy + ", or allow the host with images={\"allow_media_host\": [...]} (--allow-media-host)",
            )  # fmt: skip
        if any(ord(letter) < 33 for letter in parts.path + parts.query):
            raise _error(field, "is no address", "check it")
        return host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _get(self, host: str, port: int, path: str, deadline: float, most: int) -> tuple[int, str | None, bytes]:
        """Returns (status, where a redirect leads, body) of an answer."""
        address = self._public(host, port, deadline)
        connection = _Connection(host, port, address, deadline, self.context())
        # However slowly bytes come: each of them would be in time.
        watch = threading.Timer(max(0.0, deadline - time.monotonic()), connection.cut)
        watch.daemon = True
        watch.start()
        try:
            connection.request("GET", path, headers={"User-Agent": "prefold", "Accept": "image/*"})
            answer = connection.getresponse()
            body = bytearray()
            while answer.status == 200 and len(body) <= most:
                chunk = answer.read(CHUNK)
                if not chunk:
                    break
                body += chunk
            _left(deadline)
            return answer.status, answer.getheader("Location"), bytes(body)
        finally:
            watch.cancel()
            connection.close()

    def _public(self, host: str, port: int, deadline: float) -> str:
        """Returns an address of a host, which is then connected to, so that it cannot be another one later. Raises
        OSError unless every address of the host is a public one."""
        asked = ThreadPoolExecutor(1)
        try:
            found = list(asked.submit(self.resolve or _addresses, host, port).result(_left(deadline)))
        finally:
            asked.shutdown(wait=False)
        for address in found:
            known = ipaddress.ip_address(address.split("%")[0])
            inner = getattr(known, "ipv4_mapped", None) or getattr(known, "sixtofour", None)
            if not known.is_global or known.is_multicast or (inner is not None and not inner.is_global):
                raise OSError("its address is not a public one")
        if not found:
            raise OSError("it has no address")
        return found[0]


class _Connection(http.client.HTTPSConnection):
    """Is a connection to one address of a host, with the host's name where certificates are concerned."""

    def __init__(self, host: str, port: int, address: str, deadline: float, context: ssl.SSLContext):
        super().__init__(host, port, context=context)
        self._address, self._deadline, self._tls = address, deadline, context
        self._kept: socket.socket | None = None  # an answer may take `sock` over

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), timeout=_left(self._deadline))
        try:
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise
        self.sock.settimeout(_left(self._deadline))
        self._kept = self.sock

    def cut(self) -> None:
        """Ends the connection under whoever reads from it."""
        with suppress(OSError):
            if self._kept is not None:
                self._kept.shutdown(socket.SHUT_RDWR)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _addresses(host: str, port: int) -> list[str]:
    found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _error(field: str, what: str, remedy: str) -> InputError:
    return InputError(f"{field!r} {what}", field=field, remedy=remedy, code="image_address")
