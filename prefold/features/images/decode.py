"""Decodes image files in a subprocess, so that a file that breaks a decoder breaks that process alone.

The subprocess runs `main` of this module. A request to it is a file; its answer is an object and the pixels, or an
object with an error (`subprocesses.py`). Only Pillow's decoders of four formats read a file, within limits on pixels
and memory.
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

# Modes of Pillow with more than 8 bits a channel. Pillow turns all values above 255 into white in RGB.
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
# The EXIF tag of how the picture is to be turned, and its value for "not at all".
ORIENTATION, UPRIGHT = 0x0112, 1


@dataclass(frozen=True, eq=False)
class Image(Pixels):
    """An Image is pixels, uint8 [height, width, 3]: red, green and blue. Two images with equal pixels are equal."""

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
        """Returns a digest of the size and the pixels, 16 bytes."""
        digest = hashlib.blake2b(f"{self.height} {self.width} ".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.pixels))
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Image({self.width} x {self.height})"  # never the pixels: representations are logged


def pillow() -> ModuleType:
    """Returns the module PIL.Image. Raises MissingExtraError where Pillow is not installed."""
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingExtraError("pillow", "vision", "reading images") from error
    return PIL.Image


def image_of(picture: Any, field: str = "image") -> Image:
    """Returns a Pillow image as an Image, as transformers' image processors see it: turned as its EXIF tag says, in
    RGB, on white where it is transparent. field: its name in errors. Raises InputError for more than 8 bits a channel,
    and for files that Pillow cannot read to their end."""
    try:
        return Image(_pixels_of(picture, field))
    except (InputError, MemoryError):
        raise
    except Exception as error:  # of many kinds, by what is broken
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{field!r} is a damaged {picture.format or 'picture'}: {reason}",
            field=field,
            remedy="give the whole file",
            code="image_damaged",
        ) from error


def _pixels_of(picture: Any, field: str) -> np.ndarray:
    """Returns the pixels of a Pillow image, uint8 [height, width, 3]."""
    library = pillow()
    if picture.mode in DEEP_MODES:
        raise InputError(
            f"{field!r} has more than 8 bits a channel (Pillow's mode {picture.mode}), of which only the darkest 256 "
            "values would be told apart",
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
class DecodedImage:
    """A DecodedImage is the image of a file. animated: whether the file has more frames, of which this is the first"""

    image: Image
    animated: bool


@dataclass(slots=True)
class DecodeBudget:
    """A DecodeBudget is the decoding time of all files of one item together; waiting for the decoder does not count."""

    seconds: float
    seconds_left: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds_left = self.seconds


class Decoder:
    """A Decoder decodes files of JPEG, PNG, WebP and GIF, one at a time; calls from several threads wait for each
    other. Its process starts with the first file, and again where a file has ended it."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self.helper = Subprocess("prefold.features.images.decode", [str(self.limits.pixels), str(self.limits.memory)])

    def decode(self, data: bytes, field: str = "image", budget: DecodeBudget | None = None) -> DecodedImage:
        """Returns the image of a file. field: its name in errors; budget: that of the file's item.

        Raises InputError for a file that is too large, of another kind, damaged, or that a decoder fails on, and when
        the budget is used up; MissingExtraError where Pillow is not installed.
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
            others = budget is not None and budget.seconds_left < limits.seconds  # have taken some of it
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
        """Ends the process; the next file starts another."""
        with self._lock:
            self.helper.end()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, data: bytes, budget: DecodeBudget | None) -> tuple[dict[str, Any], bytearray]:
        """Returns the answer of the subprocess to a file."""
        seconds = self.limits.seconds if budget is None else min(self.limits.seconds, budget.seconds_left)
        if seconds <= 0:  # or a quick answer would still count
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
# What files of other kinds begin with.
OTHERS = (
    (b"BM", "a BMP"), (b"II*\x00", "a TIFF"), (b"MM\x00*", "a TIFF"), (b"%PDF", "a PDF"), (b"8BPS", "a PSD"),
    (b"\x00\x00\x01\x00", "an ICO"), (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000"), (b"\x1a\x45\xdf\xa3", "a video"),
    (b"PK\x03\x04", "a ZIP"),
)  # fmt: skip


def answer(data: bytes, most_pixels: int) -> tuple[dict[str, Any], bytes]:
    """Returns ({"height", "width", "animated"}, the pixels) of a file, or ({"error", "remedy", "code"}, no bytes)."""
    try:
        picture = pillow().open(io.BytesIO(data), formats=FORMATS)
    except Exception:  # of many kinds, by what is broken
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
    """Returns the kind of a file that no decoder takes, judged by its first bytes."""
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
    return kind or "no image, or one whose beginning is damaged"


def _animated(picture: Any) -> bool:
    """Returns whether a picture has more than one frame. The second picture that some phones append to a JPEG is
    none."""
    try:
        return picture.format in ("GIF", "WEBP", "PNG") and bool(getattr(picture, "is_animated", False))
    except Exception:  # the second frame is damaged; there is one
        return True


def main(argv: list[str], source: BinaryIO, sink: BinaryIO) -> None:
    """Answers requests until `source` ends. argv: the most pixels of an image, and bytes of memory."""
    most_pixels, memory = map(int, argv)
    library = pillow()
    library.MAX_IMAGE_PIXELS = None  # the limit here is checked before anything is decoded
    library.init()
    warnings.simplefilter("ignore")
    limit_process(memory)

    def answered(data: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            return answer(data, most_pixels)
        except MemoryError:
            return _refused(f"takes more than {memory / 2**20:.0f} MiB to decode", "make it smaller", "image_too_large")

    answer_all(answered, source, sink)
