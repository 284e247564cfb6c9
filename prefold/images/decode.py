"""Decoder makes Images out of files, in a process of its own: whatever a file does to a decoder, it does it there."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InputError
from ..subprocesses import Ended, Subprocess
from .image import Image, pillow


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits bound what one image file may cost.

    file_bytes  of the file
    pixels      height times width, which is read before anything is decoded
    seconds     that decoding may take
    memory      bytes that the decoding process may have
    """

    file_bytes: int = 20_000_000
    pixels: int = 64_000_000
    seconds: float = 10.0
    memory: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Decoded:
    """A Decoded is an image out of a file. animated: whether the file has more frames, of which this is the first."""

    image: Image
    animated: bool


@dataclass(slots=True)
class Allowance:
    """An Allowance is the time that the files of one item have together.

    seconds  of decoding, not of waiting for one's turn
    left     of them
    """

    seconds: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.seconds


class Decoder:
    """A Decoder decodes files of JPEG, PNG, WebP and GIF, one at a time; calls from several threads wait for each
    other. Its process starts with the first file, and again where a file has ended it."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._helper = Subprocess("prefold.images.decoding", [str(self.limits.pixels), str(self.limits.memory)])

    def decode(self, data: bytes, field: str = "image", allowance: Allowance | None = None) -> Decoded:
        """Returns the image of a file. field: what errors call it; allowance: of the item that the file is part of.

        Raises InputError for a file that is too large, of another kind, damaged, or that a decoder fails on, also where
        nothing is left of the allowance, and MissingExtraError where Pillow is not installed.
        """
        pillow()
        limits = self.limits
        if len(data) > limits.file_bytes:
            raise _error(
                field,
                f"has {len(data):,} bytes, more than {limits.file_bytes:,}",
                "make it smaller, or allow more with media_bytes (--media-bytes)",
                "image_too_large",
            )
        with self._lock:
            others = allowance is not None and allowance.left < limits.seconds  # have taken some of it
            try:
                said, pixels = self._asked(data, allowance)
            except Ended:
                if allowance is not None and others and allowance.left <= 0:
                    what = f"and the images before it could not be decoded in {allowance.seconds:g} s"
                    raise _error(field, what, "give fewer or smaller images", "image_too_large") from None
                what = f"could not be decoded in {limits.seconds:g} s, or ended the decoder"
                raise _error(field, what, "save it again with another program", "image_damaged") from None
        if "error" in said:
            raise _error(field, said["error"], said["remedy"], said["code"])
        shape = said["height"], said["width"], 3
        return Decoded(Image(np.frombuffer(pixels, np.uint8).reshape(shape)), said["animated"])

    def close(self) -> None:
        """Ends the process; the next file starts another."""
        with self._lock:
            self._helper.end()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _asked(self, data: bytes, allowance: Allowance | None) -> tuple[dict[str, Any], bytearray]:
        """Returns what the process answers to a file."""
        seconds = self.limits.seconds if allowance is None else min(self.limits.seconds, allowance.left)
        if seconds <= 0:  # a process that is quick could answer even so
            raise Ended
        self._helper.start()
        began = time.monotonic()
        try:
            return self._helper.ask(data, seconds)
        finally:
            if allowance is not None:
                allowance.left -= time.monotonic() - began


def _error(field: str, what: str, remedy: str, code: str) -> InputError:
    return InputError(f"{field!r} {what}", field=field, remedy=remedy, code=code)
