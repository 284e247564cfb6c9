"""Reads images from the values that users give: arrays, Pillow images, files, paths, and addresses of allowed hosts."""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np

from ...errors import InputError
from ...text.media import is_picture
from .decode import DecodeBudget, DecodedImage, Decoder, Image, Limits, image_of

MOST_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
CHUNK = 1 << 16


@dataclass(frozen=True)
class MediaHosts:
    """A MediaHosts fetches images from an allowlist of hosts.

    names    of hosts, as they stand in addresses: "example.org" allows no "www.example.org"
    seconds  that one image may take, with its redirects
    resolve  resolve(host, port) -> the IP addresses of a host, as texts
    context  returns the SSL context of connections
    """

    names: frozenset[str] = frozenset()
    seconds: float = 10.0
    resolve: Callable[[str, int], Iterable[str]] | None = None
    context: Callable[[], ssl.SSLContext] = ssl.create_default_context

    def fetch(self, url: str, field: str, most_bytes: int) -> bytes:
        """Returns the content of an https address. Raises InputError if its host, or that of a redirect, is not allowed
        or not public, or if the file is too large, too slow or missing."""
        deadline = time.monotonic() + self.seconds
        for _ in range(MOST_REDIRECTS + 1):
            host, port, path = self._checked(url, field)
            try:
                status, location, data = self._get(host, port, path, deadline, most_bytes)
            except (OSError, http.client.HTTPException, ValueError) as error:
                slow = isinstance(error, TimeoutError) or time.monotonic() >= deadline
                problem = f"did not answer in {self.seconds:g} s" if slow else f"could not be fetched: {error}"
                raise _error(field, f"({host}) {problem}", "try again, or give the image itself") from None
            if status in REDIRECTS and location:
                url = urljoin(url, location)
                continue
            if status != 200:
                raise _error(field, f"({host}) was answered with status {status}", "check the address")
            if len(data) > most_bytes:
                raise _error(field, f"({host}) has more than {most_bytes:,} bytes", "give a smaller image")
            return data
        raise _error(field, f"is redirected more than {MOST_REDIRECTS} times", "give the address that it leads to")

    def _checked(self, url: str, field: str) -> tuple[str, int, str]:
        """Returns (host, port, path) of an address. Raises InputError unless it may be fetched."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port or 443
        except ValueError:
            raise _error(field, "is no address", "check it") from None
        if parts.scheme != "https" or parts.username is not None:
            raise _error(field, "leads to an address that is not https", "give an https address")
        if host not in self.names:
            allowed = ", ".join(sorted(self.names))
            remedy = f"the hosts that are allowed: {allowed}" if allowed else "give the image itself as a data URL"
            raise _error(
                field, f"is at {host[:100]!r}, from where nothing is fetched",
                remedy + ", or allow the host with images={\"allow_media_host\": [...]} (--allow-media-host)",
            )  # fmt: skip
        if any(ord(letter) < 33 for letter in parts.path + parts.query):
            raise _error(field, "is no address", "check it")
        return host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _get(self, host: str, port: int, path: str, deadline: float, most: int) -> tuple[int, str | None, bytes]:
        """Returns (status, address of a redirect, body) of an answer."""
        address = self._public(host, port, deadline)
        connection = _PinnedConnection(host, port, address, deadline, self.context())
        # Timeouts of a socket start anew with each byte, and so bound no slow answer.
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
            _seconds_left(deadline)
            return answer.status, answer.getheader("Location"), bytes(body)
        finally:
            watch.cancel()
            connection.close()

    def _public(self, host: str, port: int, deadline: float) -> str:
        """Returns the IP address of a host to connect to: no later lookup can lead elsewhere. Raises OSError unless
        every address of the host is public."""
        resolver = ThreadPoolExecutor(1)
        try:
            addresses = list(resolver.submit(self.resolve or _addresses, host, port).result(_seconds_left(deadline)))
        finally:
            resolver.shutdown(wait=False)
        for address in addresses:
            parsed = ipaddress.ip_address(address.split("%")[0])
            inner = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None)
            if not parsed.is_global or parsed.is_multicast or (inner is not None and not inner.is_global):
                raise OSError("its address is not a public one")
        if not addresses:
            raise OSError("it has no address")
        return addresses[0]


class _PinnedConnection(http.client.HTTPSConnection):
    """A _PinnedConnection connects to one IP address, and checks the certificate for the host's name."""

    def __init__(self, host: str, port: int, address: str, deadline: float, context: ssl.SSLContext):
        super().__init__(host, port, context=context)
        self._address, self._deadline, self._tls = address, deadline, context
        self._socket: socket.socket | None = None  # an answer may take `sock` over

    def connect(self) -> None:
        plain = socket.create_connection((self._address, self.port), timeout=_seconds_left(self._deadline))
        try:
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise
        self.sock.settimeout(_seconds_left(self._deadline))
        self._socket = self.sock

    def cut(self) -> None:
        """Ends the connection, and with it a read in another thread."""
        with suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)


def _seconds_left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _addresses(host: str, port: int) -> list[str]:
    entries: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


def _error(field: str, problem: str, remedy: str) -> InputError:
    return InputError(f"{field!r} {problem}", field=field, remedy=remedy, code="image_address")


DATA_URL = re.compile(r"data:([\w.+/-]*)((?:;[\w.+=-]+)*),", re.ASCII)
FILE_ID = re.compile(r"file-[0-9a-zA-Z_-]+", re.ASCII)
SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):", re.ASCII)
# Possessive quantifiers: with backtracking, white space before another character would take quadratic time.
BASE64 = re.compile(r"[A-Za-z0-9+/\s]++={0,2}+\s*+")
LEAST_BASE64 = 64  # shorter texts are paths; no image file is so small
_GIVE = "give a path, bytes, a data URL (data:image/png;base64,...), a PIL image or an array"


@dataclass(frozen=True)
class Reader:
    """A Reader reads images.

    decoder  decodes files
    folder   where paths are looked up: nothing outside of it is read. None: paths are read as they are
    paths    whether paths are read at all
    hosts    from which https addresses are fetched; none by default
    files    returns the path of an uploaded file by its id, or None where there is none; None: there are no such files
    """

    decoder: Decoder = field(default_factory=Decoder)
    folder: Path | None = None
    paths: bool = True
    hosts: MediaHosts = field(default_factory=MediaHosts)
    files: Callable[[str], Path | None] | None = None

    def read(self, value: Any, field: str = "image", budget: DecodeBudget | None = None) -> DecodedImage:
        """Returns the image of a value: an Image, a Pillow image, an array uint8 [height, width, 3], the bytes of a
        file, its path, a data URL, base64, an https address, the id of an uploaded file, or a mapping that has one of
        them. budget: that of the image's item. Raises InputError, with `field` as its field, for other values, and for
        those that are not allowed."""
        source, _ = self.source(value, field)
        return DecodedImage(source, False) if isinstance(source, Image) else self.decoder.decode(source, field, budget)

    def source(self, value: Any, field: str = "image") -> tuple[bytes | Image, Any]:
        """Returns the content of an image value, and a value from which the content can be read again. The content is
        the bytes of the image's file, or an Image where the value has pixels. The second is the content itself, or the
        value where it names a file or address. Raises InputError as `read` does."""
        image: bytes | Image | None
        inner = _inner(value, field)
        if isinstance(inner, Image):
            image = inner
        elif isinstance(inner, np.ndarray):
            image = _of_array(inner, field)
        elif is_picture(inner):
            image = image_of(inner, field)
        else:
            image = content_of(inner, field)
        if image is not None:
            return image, image
        if isinstance(inner, (str, os.PathLike)):
            return self._named(os.fspath(inner), field), value
        kind = "None" if inner is None else f"of type {type(inner).__name__}"
        raise InputError(f"{field!r} is {kind}, no image", field=field, remedy=_GIVE, code="wrong_type")

    def _named(self, name: str | bytes, field: str) -> bytes:
        """Returns the bytes of the file with this path, address or id."""
        name = os.fsdecode(name)
        if FILE_ID.fullmatch(name) and not self.paths:
            return self._uploaded(name, field)
        scheme = SCHEME.match(name)
        if scheme is not None and scheme[1].lower() == "https":
            return self.hosts.fetch(name, field, self.decoder.limits.file_bytes)
        if scheme is not None:
            message = f"{field!r} is an address of kind {scheme[1]}:, which is never read"
            raise InputError(message, field=field, remedy=_GIVE, code="image_address")
        return self._path(name, field)

    def _uploaded(self, name: str, field: str) -> bytes:
        path = None if self.files is None else self.files(name)
        try:
            if path is None:
                raise FileNotFoundError
            return self._content(path)
        except OSError:
            raise InputError(
                f"{field!r} is the id {name!r} of an uploaded file, and there is none with it",
                field=field,
                remedy="upload the image (POST /v1/files, purpose vision), or give it as a data URL",
                code="not_found",
            ) from None

    def _content(self, path: Path) -> bytes:
        """Returns the bytes of a file; of one that is too large one byte more than the limit."""
        with open(path, "rb") as file:
            return file.read(self.decoder.limits.file_bytes + 1)

    def _path(self, name: str, field: str) -> bytes:
        if not self.paths:
            raise InputError(
                f"{field!r} is a path, and paths are not read here",
                field=field,
                remedy="give the image itself as a data URL (data:image/png;base64,...), or in a job the folder of the "
                "images as media_folder (--media-folder)",
                code="image_address",
            )
        path, is_inside = Path(name), True
        try:
            if self.folder is not None:
                root = self.folder.resolve()
                path = (root / path).resolve()  # links are followed, and must not lead outside
                is_inside = path.is_relative_to(root)
            if is_inside:
                if not path.is_file():
                    raise FileNotFoundError
                return self._content(path)
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle: a RuntimeError before Python 3.13
            reason = getattr(error, "strerror", None) or "there is no such file"
            message = f"{field!r} is the path {name[:100]!r}: {reason}"
            raise InputError(message, field=field, remedy=_GIVE, code="image_address") from None
        raise InputError(
            f"{field!r} is the path {name[:100]!r}, which is not in {self.folder}",
            field=field,
            remedy="give a path in it, or name another media_folder (--media-folder)",
            code="image_address",
        )


def reader_of(*, folder: Path | None = None, paths: bool = True, hosts: Iterable[str] = (), **limits: Any) -> Reader:
    """Returns a Reader. hosts: the names of allowed hosts; limits: fields of its decoder's Limits"""
    return Reader(Decoder(Limits(**limits)), folder, paths, MediaHosts(frozenset(hosts)))


def content_of(value: Any, field: str = "image") -> bytes | None:
    """Returns the bytes of the file that a value contains; None where it names the place of a file. Raises InputError
    for invalid base64."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if not isinstance(value, str):
        return None
    if header := DATA_URL.match(value):
        if not header[2].endswith(";base64"):
            message = f"{field!r} is a data URL that is not base64"
            raise InputError(message, field=field, remedy=_GIVE, code="image_format")
        return _decoded64(value[header.end() :], field)
    return _decoded64(value, field) if len(value) >= LEAST_BASE64 and BASE64.fullmatch(value) else None


def _inner(value: Any, field: str) -> Any:
    """Returns the image value inside a mapping: OpenAI's {"url": ...} or {"file_id": ...}, Hugging Face's {"bytes":
    ..., "path": ...}; other values as they are."""
    if not isinstance(value, Mapping):
        return value
    for key in ("bytes", "base64", "url", "path", "image", "file_id"):
        if value.get(key) is not None:
            return _inner(value[key], field)
    raise InputError(f"{field!r} has neither a url nor bytes", field=field, remedy=_GIVE, code="missing_field")


def _of_array(value: np.ndarray, field: str) -> Image:
    try:
        return Image(np.array(value, order="C"))  # a copy: its owner may write into the array while a request waits
    except ValueError as error:
        raise InputError(f"{field!r}: {error}", field=field, remedy=_GIVE, code="wrong_type") from None


def _decoded64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{field!r} is not base64", field=field, remedy=_GIVE, code="image_format") from None
