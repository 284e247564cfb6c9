"""Reader makes images of what users give for them: pixels, pictures, files, paths, addresses."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..text.media import is_picture
from .decode import Allowance, Decoded, Decoder, Limits
from .fetch import MediaHosts
from .image import Image, image_of

DATA_URL = re.compile(r"data:([\w.+/-]*)((?:;[\w.+=-]+)*),", re.ASCII)
FILE_ID = re.compile(r"file-[0-9a-zA-Z_-]+", re.ASCII)
SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):", re.ASCII)
# Nothing that was matched is given back, or white space before another character would take time by its square.
BASE64 = re.compile(r"[A-Za-z0-9+/\s]++={0,2}+\s*+")
# Shorter texts are paths. The smallest image files have more letters than that.
LEAST_BASE64 = 64
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

    def read(self, value: Any, field: str = "image", allowance: Allowance | None = None) -> Decoded:
        """Returns the image that a value stands for: an Image, a picture of Pillow's, an array uint8 [height, width,
        3], the bytes of a file, its path, a data URL, base64, an https address, the id of an uploaded file, or a
        mapping that has one of them. allowance: of the item that the image is part of.

        Raises InputError, with `field` as its field, for what is none of them or is not allowed.
        """
        if isinstance(value, Mapping):
            value = _inner(value, field)
        if isinstance(value, Image):
            return Decoded(value, False)
        data = self.file(value, field)
        if data is not None:
            return self.decoder.decode(data, field, allowance)
        if isinstance(value, np.ndarray):
            return Decoded(_of_array(value, field), False)
        if is_picture(value):
            return Decoded(image_of(value, field), False)
        kind = "None" if value is None else f"of type {type(value).__name__}"
        raise InputError(f"{field!r} is {kind}, no image", field=field, remedy=_GIVE, code="wrong_type")

    def file(self, value: Any, field: str = "image") -> bytes | None:
        """Returns the bytes of the file that a value holds, or says the place of; None for pixels, and for what stands
        for no image. Raises InputError as `read` does."""
        if isinstance(value, Mapping):
            value = _inner(value, field)
        content = content_of(value, field)
        if content is None and isinstance(value, (str, os.PathLike)):
            return self._named(os.fspath(value), field)
        return content

    def _named(self, name: str | bytes, field: str) -> bytes:
        """Returns the bytes of the file whose path, address or id a text is."""
        name = os.fsdecode(name)
        if FILE_ID.fullmatch(name) and not self.paths:
            return self._uploaded(name, field)
        scheme = SCHEME.match(name)
        if scheme is not None and scheme[1].lower() == "https":
            return self.hosts.fetch(name, field, self.decoder.limits.file_bytes)
        if scheme is not None:
            what = f"{field!r} is an address of kind {scheme[1]}:, which is never read"
            raise InputError(what, field=field, remedy=_GIVE, code="image_address")
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
        """Returns the bytes of a file, or more than a file may have."""
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
            what = getattr(error, "strerror", None) or "there is no such file"
            message = f"{field!r} is the path {name[:100]!r}: {what}"
            raise InputError(message, field=field, remedy=_GIVE, code="image_address") from None
        raise InputError(
            f"{field!r} is the path {name[:100]!r}, which is not in {self.folder}",
            field=field,
            remedy="give a path in it, or name another media_folder (--media-folder)",
            code="image_address",
        )


def reader_of(*, folder: Path | None = None, paths: bool = True, hosts: Iterable[str] = (), **limits: Any) -> Reader:
    """Returns a Reader. hosts: their names; limits: those of its decoder that are not as usual."""
    return Reader(Decoder(Limits(**limits)), folder, paths, MediaHosts(frozenset(hosts)))


def content_of(value: Any, field: str = "image") -> bytes | None:
    """Returns the bytes of the file that a value holds itself; None for one that says where the file is, and for
    pixels. Raises InputError for what is no base64, and for a mapping without an image."""
    if isinstance(value, Mapping):
        value = _inner(value, field)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if not isinstance(value, str):
        return None
    if found := DATA_URL.match(value):
        if not found[2].endswith(";base64"):
            message = f"{field!r} is a data URL that is not base64"
            raise InputError(message, field=field, remedy=_GIVE, code="image_format")
        return _decoded64(value[found.end() :], field)
    return _decoded64(value, field) if len(value) >= LEAST_BASE64 and BASE64.fullmatch(value) else None


def _inner(value: Mapping[str, Any], field: str) -> Any:
    """Returns what a mapping holds of an image: OpenAI's {"url": ...} or {"file_id": ...}, Hugging Face's {"bytes":
    ..., "path": ...}."""
    for key in ("bytes", "base64", "url", "path", "image", "file_id"):
        if value.get(key) is not None:
            return value[key]
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
