"""Image is a decoded picture: its pixels, and a digest of them by which it is known."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import InputError, MissingExtraError
from ..text.media import Pixels

# Modes of Pillow with more than 8 bits a channel. Pillow makes all that is above 255 white when it makes RGB of them.
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
# What the EXIF tag 274 says of how the picture is to be turned: 1, or none, is not at all.
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
        """Returns 16 bytes that say which image this is: a digest of its size and its pixels."""
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
    """Returns a picture of Pillow's as an Image: turned as its EXIF tag says, in RGB, and where it is transparent on
    white, as transformers' image processors see it. field: what errors call it.

    Raises InputError for pictures of more than 8 bits a channel, and for those that Pillow cannot read to their end.
    """
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
    """Returns the pixels of a picture of Pillow's, uint8 [height, width, 3]."""
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
