"""Read images from users' values: arrays, Pillow images, files, paths, and addresses of allowed hosts."""

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
    """Fetches images from an allowlist of hosts.

    Attributes:
        names: hosts as written in addresses; "example.org" does not allow "www.example.org"
        seconds: time limit for one image, including redirects
        resolve: resolve(host, port) -> IP addresses of a host, as strings
        context: returns the SSL context of connections
    """

    names: frozenset[str] = frozenset()
    seconds: float = 10.0
    resolve: Callable[[str, int], Iterable[str]] | None = None
    context: Callable[[], ssl.SSLContext] = ssl.create_default_context

    def fetch(self, url: str, field: str, most_bytes: int) -> bytes:
        """Return the content of an https address.

        Raise InputError if its host or a redirect's host is not allowed or not public, or if the file is too large, too
        slow or missing.
        """
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
        raise _error(field, f"is redirected more than {MOST_REDIRECTS} times", "give the final address")

    def _checked(self, url: str, field: str) -> tuple[str, int, str]:
        """Return (host, port, path) of an address. Raise InputError unless it may be fetched."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port or 443
        except ValueError:
            raise _error(field, "is not a valid address", "check the address") from None
        if parts.scheme != "https" or parts.username is not None:
            raise _error(field, "has an address that is not https", "give an https address")
        if host not in self.names:
            allowed = ", ".join(sorted(self.names))
            remedy = f"use one of these hosts: {allowed}" if allowed else "give the image itself as a data URL"
            raise _error(
                field, f"is at {host[:100]!r}, which is not an allowed host",
                remedy + ", or allow the host with images={\"allow_media_host\": [...]} (--allow-media-host)",
            )  # fmt: skip
        if any(ord(letter) < 33 for letter in parts.path + parts.query):
            raise _error(field, "is not a valid address", "check the address")
        return host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _get(self, host: str, port: int, path: str, deadline: float, most: int) -> tuple[int, str | None, bytes]:
        """Return (status, address of a redirect or None, body) of an answer."""
        address = self._public(host, port, deadline)
        connection = _PinnedConnection(host, port, address, deadline, self.context())
        # A socket's timeout restarts with each byte. Only this timer bounds a slow answer.
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
        """Return the host's IP address to connect to. Raise OSError unless every address of the host is public.

        Connecting to this address prevents a second lookup from leading elsewhere.
        """
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
    """A connection to one fixed IP address that checks the certificate for the host's name."""

    def __init__(self, host: str, port: int, address: str, deadline: float, context: ssl.SSLContext):
        super().__init__(host, port, context=context)
        self._address, self._deadline, self._tls = address, deadline, context
        self._socket: socket.socket | None = None  # kept here, because an answer may take `sock` over

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
        """End the connection, including a read in another thread."""
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
# Possessive quantifiers: with backtracking, spaces before an invalid character would need quadratic time.
BASE64 = re.compile(r"[A-Za-z0-9+/\s]++={0,2}+\s*+")
LEAST_BASE64 = 64  # shorter texts are paths, because no image file is so small
_GIVE = "give a path, bytes, a data URL (data:image/png;base64,...), a PIL image or an array"


@dataclass(frozen=True)
class Reader:
    """Reads images.

    Attributes:
        decoder: decodes files
        folder: paths are relative to this folder, and nothing outside is read. None: no such limit
        paths: paths are allowed at all
        hosts: https addresses are fetched from these hosts; by default from none
        files: returns the path of an uploaded file by its id, or None for an unknown id. None: no uploads
    """

    decoder: Decoder = field(default_factory=Decoder)
    folder: Path | None = None
    paths: bool = True
    hosts: MediaHosts = field(default_factory=MediaHosts)
    files: Callable[[str], Path | None] | None = None

    def read(self, value: Any, field: str = "image", budget: DecodeBudget | None = None) -> DecodedImage:
        """Return the image of a value. Raise InputError, with `field`, for other or forbidden values.

        Args:
            value: an Image, a Pillow image, an array uint8 [height, width, 3], the bytes of a file, its path, a data
                URL, base64, an https address, the id of an uploaded file, or a mapping that has one of these
            field: its name in errors
            budget: shared by all images of one item
        """
        source, _ = self.source(value, field)
        return DecodedImage(source, False) if isinstance(source, Image) else self.decoder.decode(source, field, budget)

    def source(self, value: Any, field: str = "image") -> tuple[bytes | Image, Any]:
        """Return (the content of an image value, a value from which it can be read again).

        The content is the bytes of the image's file, or an Image if the value has pixels. The second value is the
        content itself, or the path or address if the value is one. Raise InputError as `read` does.
        """
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
        raise InputError(f"{field!r} is {kind}, not an image", field=field, remedy=_GIVE, code="wrong_type")

    def _named(self, name: str | bytes, field: str) -> bytes:
        """Return the bytes of the file with this path, address or id."""
        name = os.fsdecode(name)
        if FILE_ID.fullmatch(name) and not self.paths:
            return self._uploaded(name, field)
        scheme = SCHEME.match(name)
        if scheme is not None and scheme[1].lower() == "https":
            return self.hosts.fetch(name, field, self.decoder.limits.file_bytes)
        if scheme is not None:
            message = f"{field!r} is a {scheme[1]}: address, which is never read"
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
                f"{field!r} is the id {name!r}, but no uploaded file has this id",
                field=field,
                remedy="upload the image (POST /v1/files, purpose vision), or give it as a data URL",
                code="not_found",
            ) from None

    def _content(self, path: Path) -> bytes:
        """Return the bytes of a file. If it is too large, read one byte more than the limit."""
        with open(path, "rb") as file:
            return file.read(self.decoder.limits.file_bytes + 1)

    def _path(self, name: str, field: str) -> bytes:
        if not self.paths:
            raise InputError(
                f"{field!r} is a path, but paths are not read here",
                field=field,
                remedy="give the image itself as a data URL (data:image/png;base64,...), or, in a job, the folder of "
                "the images as media_folder (--media-folder)",
                code="image_address",
            )
        path, is_inside = Path(name), True
        try:
            if self.folder is not None:
                root = self.folder.resolve()
                path = (root / path).resolve()  # follows links, which must not lead outside
                is_inside = path.is_relative_to(root)
            if is_inside:
                if not path.is_file():
                    raise FileNotFoundError
                return self._content(path)
        except (OSError, RuntimeError, ValueError) as error:  # circular links: a RuntimeError before Python 3.13
            reason = getattr(error, "strerror", None) or "there is no such file"
            message = f"{field!r} is the path {name[:100]!r}: {reason}"
            raise InputError(message, field=field, remedy=_GIVE, code="image_address") from None
        raise InputError(
            f"{field!r} is the path {name[:100]!r}, which is not in {self.folder}",
            field=field,
            remedy="give a path in this folder, or name another media_folder (--media-folder)",
            code="image_address",
        )


def reader_of(*, folder: Path | None = None, paths: bool = True, hosts: Iterable[str] = (), **limits: Any) -> Reader:
    """Return a Reader.

    Args:
        hosts: names of allowed hosts
        limits: fields of the decoder's Limits
    """
    return Reader(Decoder(Limits(**limits)), folder, paths, MediaHosts(frozenset(hosts)))


def content_of(value: Any, field: str = "image") -> bytes | None:
    """Return the bytes of a file that are part of a value, or None if the value is a path or address.

    Raise InputError for invalid base64.
    """
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
    """Return the image value inside a mapping, and other values unchanged.

    Mappings are OpenAI's {"url": ...} or {"file_id": ...} and Hugging Face's {"bytes": ..., "path": ...}.
    """
    if not isinstance(value, Mapping):
        return value
    for key in ("bytes", "base64", "url", "path", "image", "file_id"):
        if value.get(key) is not None:
            return _inner(value[key], field)
    raise InputError(f"{field!r} has neither a url nor bytes", field=field, remedy=_GIVE, code="missing_field")


def _of_array(value: np.ndarray, field: str) -> Image:
    try:
        return Image(np.array(value, order="C"))  # a copy: the caller may change the array while a request waits
    except ValueError as error:
        raise InputError(f"{field!r}: {error}", field=field, remedy=_GIVE, code="wrong_type") from None


def _decoded64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{field!r} is not base64", field=field, remedy=_GIVE, code="image_format") from None
