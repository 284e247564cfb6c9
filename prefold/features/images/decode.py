"""Decode image files in a subprocess, so that a file that crashes a decoder crashes only that process.

The subprocess runs `main` of this module. A request is a file; the answer is an object and the pixels, or an object
with an error (`subprocesses.py`). Only Pillow's decoders of four formats run, within limits on pixels and memory.
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from ...errors import InputError, MissingExtraError
from ...text.media import Pixels
from ...text.subprocesses import Subprocess, SubprocessEnded, answer_all, limit_process

# Pillow's modes with more than 8 bits per channel. In RGB, Pillow turns all values above 255 into white.
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
# The EXIF tag of the picture's orientation, and its value for "upright".
ORIENTATION, UPRIGHT = 0x0112, 1


@dataclass(frozen=True, eq=False)
class Image(Pixels):
    """Pixels, uint8 [height, width, 3] in the order red, green, blue. Images with equal pixels are equal."""

    pixels: np.ndarray

    def __post_init__(self) -> None:
        pixels = self.pixels
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise ValueError(f"pixels are {pixels.dtype} {list(pixels.shape)}; they must be uint8 [height, width, 3]")

    @property
    def height(self) -> int:
        return self.pixels.shape[0]

    @property
    def width(self) -> int:
        return self.pixels.shape[1]

    @cached_property
    def digest(self) -> bytes:
        """Return a digest of the size and the pixels, 16 bytes."""
        digest = hashlib.blake2b(f"{self.height} {self.width} ".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.pixels))
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Image({self.width} x {self.height})"  # never the pixels, because representations are logged


def pillow() -> ModuleType:
    """Return the module PIL.Image. Raise MissingExtraError if Pillow is not installed."""
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision", "reading images") from error
    return PIL.Image


def image_of(picture: Any, field: str = "image") -> Image:
    """Return a Pillow image as transformers' image processors see it: upright, RGB, transparent parts on white.

    Raise InputError for more than 8 bits per channel, and for files that Pillow cannot read to the end.

    Args:
        field: name of the image's field in errors
    """
    try:
        return Image(_pixels_of(picture, field))
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Pillow raises many types for damaged files
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{field!r} is a damaged {picture.format or 'picture'}: {reason}",
            field=field,
            remedy="give the whole file",
            code="image_damaged",
        ) from error


def _pixels_of(picture: Any, field: str) -> np.ndarray:
    """Return the pixels of a Pillow image, uint8 [height, width, 3]."""
    library = pillow()
    if picture.mode in DEEP_MODES:
        raise InputError(
            f"{field!r} has more than 8 bits a channel (Pillow's mode {picture.mode}), and all values above 255 would "
            "become white",
            field=field,
            remedy="save it with 8 bits a channel",
            code="image_depth",
        )
    if picture.getexif().get(ORIENTATION, UPRIGHT) != UPRIGHT:
        from PIL import ImageOps

        picture = ImageOps.exif_transpose(picture)
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = library.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = library.alpha_composite(white, picture)
    return np.array(picture.convert("RGB"))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one image file and its decoding."""

    file_bytes: int = 20_000_000
    pixels: int = 64_000_000  # height times width, checked before anything is decoded
    seconds: float = 10.0  # decoding time
    memory: int = 2 << 30  # bytes of the decoding process


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """The image of a file."""

    image: Image
    animated: bool  # the file has more frames; this is the first


@dataclass(slots=True)
class DecodeBudget:
    """The decoding time for all files of one item together. Waiting for the decoder does not count."""

    seconds: float
    seconds_left: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds_left = self.seconds


class Decoder:
    """Decodes JPEG, PNG, WebP and GIF files, one at a time. Any thread may call it and waits for its turn.

    The subprocess starts with the first file, and again after a file has ended it.
    """

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self.helper = Subprocess("prefold.features.images.decode", [str(self.limits.pixels), str(self.limits.memory)])

    def decode(self, data: bytes, field: str = "image", budget: DecodeBudget | None = None) -> DecodedImage:
        """Return the image of a file.

        Raise InputError if the file is too large, of another format, damaged or ends the decoder, and if the budget is
        used up. Raise MissingExtraError if Pillow is not installed.

        Args:
            field: name of the image's field in errors
            budget: shared by all files of one item
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
            others = budget is not None and budget.seconds_left < limits.seconds  # earlier files used a part of it
            try:
                answer, pixels = self._ask(data, budget)
            except SubprocessEnded:
                if budget is not None and others and budget.seconds_left <= 0:
                    problem = f"and the images before it could not be decoded in {budget.seconds:g} s"
                    raise _error(field, problem, "give fewer or smaller images", "image_too_large") from None
                problem = f"could not be decoded in {limits.seconds:g} s, or ended the decoder"
                raise _error(field, problem, "save it again with another program", "image_damaged") from None
        if "error" in answer:
            raise _error(field, answer["error"], answer["remedy"], answer["code"])
        shape = answer["height"], answer["width"], 3
        return DecodedImage(Image(np.frombuffer(pixels, np.uint8).reshape(shape)), answer["animated"])

    def close(self) -> None:
        """End the subprocess. The next file starts another."""
        with self._lock:
            self.helper.end()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, data: bytes, budget: DecodeBudget | None) -> tuple[dict[str, Any], bytearray]:
        """Return the subprocess's answer to a file."""
        seconds = self.limits.seconds if budget is None else min(self.limits.seconds, budget.seconds_left)
        if seconds <= 0:  # else a fast answer would still be accepted
            raise SubprocessEnded
        self.helper.start()
        began = time.monotonic()
        try:
            return self.helper.ask(data, seconds)
        finally:
            if budget is not None:
                budget.seconds_left -= time.monotonic() - began


def _error(field: str, problem: str, remedy: str, code: str) -> InputError:
    return InputError(f"{field!r} {problem}", field=field, remedy=remedy, code=code)


FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
# First bytes of files of other formats.
OTHERS = (
    (b"BM", "a BMP"), (b"II*\x00", "a TIFF"), (b"MM\x00*", "a TIFF"), (b"%PDF", "a PDF"), (b"8BPS", "a PSD"),
    (b"\x00\x00\x01\x00", "an ICO"), (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000"), (b"\x1a\x45\xdf\xa3", "a video"),
    (b"PK\x03\x04", "a ZIP"),
)  # fmt: skip


def answer(data: bytes, most_pixels: int) -> tuple[dict[str, Any], bytes]:
    """Return ({"height", "width", "animated"}, the pixels) of a file, or ({"error", "remedy", "code"}, b"")."""
    try:
        picture = pillow().open(io.BytesIO(data), formats=FORMATS)
    except Exception:  # Pillow raises many types for damaged files
        return _refused(f"is {_kind(data)}", "give a JPEG, PNG, WebP or GIF", "image_format")
    width, height = picture.size
    if width * height > most_pixels:
        problem = f"has {width} x {height} pixels, more than {most_pixels:,}"
        return _refused(problem, "make it smaller, or allow more with media_pixels (--media-pixels)", "image_too_large")
    try:
        image = image_of(picture)
    except InputError as error:
        return {"error": error.message.removeprefix("'image' "), "remedy": error.remedy, "code": error.code}, b""
    facts = {"height": image.height, "width": image.width, "animated": _animated(picture)}
    return facts, image.pixels.tobytes()


def _refused(error: str, remedy: str, code: str) -> tuple[dict[str, Any], bytes]:
    return {"error": error, "remedy": remedy, "code": code}, b""


def _kind(data: bytes) -> str:
    """Return the format of a file that no decoder accepts, by its first bytes."""
    start = data[:1024].lstrip()
    if not data:
        return "empty"
    if start.startswith((b"<svg", b"<?xml", b"<!DOCTYPE svg")) or b"<svg" in start:
        return "an SVG, a drawing without pixels" if b"<svg" in data[:65536] else "XML"
    if data[4:8] == b"ftyp":
        return "an AVIF, HEIC or a video"
    if start[:1] == b"<":
        return "HTML"
    kind = next((name for first, name in OTHERS if data.startswith(first)), None)
    return kind or "not an image, or its beginning is damaged"


def _animated(picture: Any) -> bool:
    """Return whether a picture has more than one frame. A second picture that some phones append to a JPEG is none."""
    try:
        return picture.format in ("GIF", "WEBP", "PNG") and bool(getattr(picture, "is_animated", False))
    except Exception:  # the second frame is damaged, so there is one
        return True


def main(argv: list[str], source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until `source` ends.

    Args:
        argv: maximum pixels of an image, maximum bytes of memory
    """
    most_pixels, memory = map(int, argv)
    library = pillow()
    library.MAX_IMAGE_PIXELS = None  # `answer` checks the pixels before anything is decoded
    library.init()
    warnings.simplefilter("ignore")
    limit_process(memory)

    def answered(data: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            return answer(data, most_pixels)
        except MemoryError:
            return _refused(f"takes more than {memory / 2**20:.0f} MiB to decode", "make it smaller", "image_too_large")

    answer_all(answered, source, sink)
