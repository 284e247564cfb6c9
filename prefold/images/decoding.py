"""What runs in the process that decodes image files, which `decode.Decoder` starts.

A request is a file; an answer is an object and, where that has a height and a width, the pixels (`subprocesses.py`).
Nothing else is believed about a file than what Pillow's decoders for four formats say, within limits on pixels and
memory.
"""

from __future__ import annotations

import io
import warnings
from typing import Any, BinaryIO

from ..errors import InputError
from ..subprocesses import answer_all, limit_process
from .image import image_of, pillow

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
# What files of other kinds begin with.
OTHERS = (
    (b"BM", "a BMP"), (b"II*\x00", "a TIFF"), (b"MM\x00*", "a TIFF"), (b"%PDF", "a PDF"), (b"8BPS", "a PSD"),
    (b"\x00\x00\x01\x00", "an ICO"), (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000"), (b"\x1a\x45\xdf\xa3", "a video"),
    (b"PK\x03\x04", "a ZIP"),
)  # fmt: skip


def answer(data: bytes, most_pixels: int) -> tuple[dict[str, Any], bytes]:
    """Returns what is said of a file, and its pixels: {"height", "width", "animated"}, or {"error", "remedy", "code"}
    and no pixels."""
    try:
        picture = pillow().open(io.BytesIO(data), formats=FORMATS)
    except Exception:  # of many kinds, by what is broken
        return _refused(f"is {_kind(data)}", "give a JPEG, PNG, WebP or GIF", "image_format")
    width, height = picture.size
    if width * height > most_pixels:
        what = f"has {width} x {height} pixels, more than {most_pixels:,}"
        return _refused(what, "make it smaller, or allow more with media_pixels (--media-pixels)", "image_too_large")
    try:
        image = image_of(picture)
    except InputError as error:
        return {"error": error.message.removeprefix("'image' "), "remedy": error.remedy, "code": error.code}, b""
    said = {"height": image.height, "width": image.width, "animated": _animated(picture)}
    return said, image.pixels.tobytes()


def _refused(error: str, remedy: str, code: str) -> tuple[dict[str, Any], bytes]:
    return {"error": error, "remedy": remedy, "code": code}, b""


def _kind(data: bytes) -> str:
    """Returns what a file is that no decoder takes, as far as its first bytes say."""
    start = data[:1024].lstrip()
    if not data:
        return "empty"
    if start.startswith((b"<svg", b"<?xml", b"<!DOCTYPE svg")) or b"<svg" in start:
        return "an SVG, a drawing without pixels" if b"<svg" in data[:65536] else "XML"
    if data[4:8] == b"ftyp":
        return "an AVIF, HEIC or a video"
    if start[:1] == b"<":
        return "HTML"
    known = next((name for first, name in OTHERS if data.startswith(first)), None)
    return known or "no image, or one whose beginning is damaged"


def _animated(picture: Any) -> bool:
    """Whether a picture has more than one frame. Some phones put a second picture behind a JPEG, which is none."""
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
