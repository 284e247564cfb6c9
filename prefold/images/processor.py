"""What a checkpoint does to an image before its tower sees it: tiles of one size, and their place in a prompt.

`layout` says which tiles an image becomes and what a prompt has in its place; it reads the image's size and no pixels.
`tiles` computes them. Both do as the image processors of transformers do that use Pillow, to the last bit.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..checkpoint.settings import Settings
from ..errors import InputError, UnsupportedModelError
from .image import Image, pillow
from .tower_config import TowerConfig

BILINEAR, LANCZOS = 2, 1  # of Pillow
SETTINGS: Mapping[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# What files of settings have beside what is read here, and what changes no pixel.
WITHOUT_EFFECT = {
    "_processor_class", "auto_map", "data_format", "default_to_square", "device", "disable_grouping",
    "do_convert_rgb", "feature_extractor_type", "image_processor_type", "image_seq_len", "image_seq_length",
    "input_data_format", "model_input_names", "num_fps", "processor_class", "return_row_col_info", "return_tensors",
    "size_divisor", "vision_encoder_max_size", "video_sampling",
}  # fmt: skip
# What would change pixels, and is in files without being asked for.
NOT_ASKED = {"crop_size", "do_center_crop", "pad_size"}


@dataclass(frozen=True, slots=True)
class Layout:
    """A Layout is what a prompt has in place of an image.

    text   the text, in which the image token stands once for each row of the image
    tiles  how many tiles the image becomes
    """

    text: str
    tiles: int


class Processor(ABC):
    """A Processor makes the tiles of images, by the settings of one checkpoint.

    placeholder     what chat templates write in place of an image
    image_token     what a Layout's text has once for each row
    image_token_id  the id that a tokenizer makes of it
    """

    placeholder: str
    image_token: str
    # Keys that a family reads beside those of SETTINGS, and what they are where a file does not say.
    own: Mapping[str, Any]

    def __init__(self, tower: TowerConfig, settings: Mapping[str, Any], image_token_id: int = 0):
        """Reads the settings of an image processor's file. Raises UnsupportedModelError for one that is not known."""
        self.tower, self.image_token_id = tower, image_token_id
        found = Settings.of(settings)
        known = {**SETTINGS, **self.own}
        self.settings = Settings(
            {key: value if found.get(key) is None else found[key] for key, value in known.items()}, found.file
        )
        unknown = sorted(
            key
            for key, value in found.items()
            if value is not None
            and key not in known
            and key not in WITHOUT_EFFECT
            and not (key in NOT_ASKED and (not value or not found.get("do_center_crop")))
        )
        if unknown:
            raise UnsupportedModelError(f"{found.file}: the setting {unknown[0]} of the images is not known")

    @property
    def span(self) -> bool:
        """Whether the rows of a tile are one span."""
        return self.tower.span

    @property
    def rows_per_tile(self) -> int:
        """Returns how many rows a tile becomes."""
        return self.tower.rows

    @cached_property
    def identity(self) -> bytes:
        """Returns 16 bytes that say how images are processed, and for which shape of tower."""
        content = json.dumps([type(self).__name__, dict(self.settings), repr(self.tower)], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).digest()

    def key(self, digest: bytes) -> bytes:
        """Returns the 16 bytes by which the rows of an image are known: of its pixels' digest, and of all that is done
        to them."""
        return hashlib.blake2b(self.identity + digest, digest_size=16).digest()

    @property
    @abstractmethod
    def tile_size(self) -> tuple[int, int]:
        """Returns the height and width of every tile."""

    @abstractmethod
    def layout(self, height: int, width: int) -> Layout:
        """Returns what a prompt has in place of an image of this size."""

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Returns a text with what stands for an image in place of each placeholder. sizes: (height, width) of each
        image, in order. Raises InputError where there are not as many placeholders as images."""
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(sizes):
            raise InputError(
                f"there are {len(sizes)} images for {len(pieces) - 1} places in the text ({self.placeholder})",
                field="images",
                remedy="give one image a place",
                code="image_count",
            )
        layouts = [self.layout(*size).text for size in sizes]
        return pieces[0] + "".join(layout + piece for layout, piece in zip(layouts, pieces[1:], strict=True))

    @property
    @abstractmethod
    def special(self) -> frozenset[str]:
        """Returns the special tokens of images: where a user writes one of them, it is text."""

    @abstractmethod
    def cut(self, image: Image) -> list[Any]:
        """Returns the tiles of an image as pictures of Pillow's, in the order of their rows."""

    def tiles(self, image: Image) -> np.ndarray:
        """Returns the numbers that the tower reads of an image, float32 [tiles, 3, height, width]."""
        table = self._table
        tiles = [np.asarray(tile) for tile in self.cut(image)]
        found = np.empty((len(tiles), 3, *tiles[0].shape[:2]), np.float32)
        for tile, out in zip(tiles, found, strict=True):
            for colour in range(3):
                np.take(table[colour], tile[:, :, colour], out=out[colour])
        return found

    @cached_property
    def _table(self) -> np.ndarray:
        """Returns what each value of a pixel becomes, float32 [3, 256]: there are no more than these, so they are
        computed once."""
        settings = self.settings
        values = np.arange(256, dtype=np.uint8)
        if settings.flag("do_rescale"):
            numbers = (values.astype(np.float64) * settings.number("rescale_factor")).astype(np.float32)
        else:
            numbers = values.astype(np.float32)
        if not settings.flag("do_normalize"):
            return np.tile(numbers, (3, 1))
        mean, std = (np.array(three(settings, key), np.float32) for key in ("image_mean", "image_std"))
        return (numbers[None] - mean[:, None]) / std[:, None]


def three(settings: Settings, key: str) -> list[float]:
    """Returns a number for each colour; one number is that of all three."""
    value = settings[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value] * 3
    fits = isinstance(value, (list, tuple)) and len(value) == 3
    if not fits or not all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value):
        raise settings.wrong(key, "three numbers, one a colour")
    if key == "image_std" and not all(value):
        raise settings.wrong(key, "three numbers that are not 0")
    return list(value)


def resampling(settings: Settings) -> int:
    """Returns the number by which Pillow knows the filter `resample`."""
    return settings.size("resample", least=0, most=5)


def resized(picture: Any, height: int, width: int, resample: int) -> Any:
    """Returns a picture of Pillow's in another size."""
    return picture.resize((width, height), resample=resample)


def picture_of(image: Image) -> Any:
    """Returns an image as a picture of Pillow's."""
    return pillow().fromarray(image.pixels)
