"""What a checkpoint does to an image before its tower sees it: tiles of one size, and their place in a prompt.

`layout` says which tiles an image becomes and what a prompt has in its place; it reads the image's size and no pixels.
`tiles` computes them. Both do as the image processors of transformers do that use Pillow, to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint, read_object
from ..checkpoint.settings import Settings
from ..errors import CheckpointError, InputError, UnsupportedModelError
from ..text import Tokenizer
from .config import TowerConfig, tower_settings
from .decode import Image, pillow

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


# Tokens of Gemma 3.
IMAGE_BEGIN, IMAGE_ROW, IMAGE_END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Gemma3Processor(Processor):
    """A Gemma3Processor makes the tiles of images as Gemma 3 wants them."""

    placeholder, image_token = IMAGE_BEGIN, IMAGE_ROW
    own: Mapping[str, Any] = {
        "do_resize": True,
        "size": {"height": 224, "width": 224},
        "resample": BILINEAR,
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }

    def __init__(self, tower: TowerConfig, settings: Mapping[str, Any], image_token_id: int = 0):
        super().__init__(tower, settings, image_token_id)
        if not self.settings.flag("do_resize"):
            raise UnsupportedModelError(f"{self.settings.file}: do_resize is false, but tiles must be of one size")
        size = self.settings.settings("size")
        self._size = size.size("height"), size.size("width")
        self.resample = resampling(self.settings)
        self.scans = self.settings.flag("do_pan_and_scan")
        self.least = self.settings.size("pan_and_scan_min_crop_size")
        self.most = self.settings.size("pan_and_scan_max_num_crops")
        self.ratio = self.settings.number("pan_and_scan_min_ratio_to_activate")

    @property
    def special(self) -> frozenset[str]:
        return frozenset((IMAGE_BEGIN, IMAGE_ROW, IMAGE_END))

    @property
    def tile_size(self) -> tuple[int, int]:
        return self._size

    def layout(self, height: int, width: int) -> Layout:
        """Returns what a prompt has in place of an image of this size: the whole image, then its crops, if any."""
        tile = f"\n\n{IMAGE_BEGIN}{IMAGE_ROW * self.rows_per_tile}{IMAGE_END}\n\n"
        crops = len(self.crops(height, width))
        if not crops:
            return Layout(tile, 1)
        more = " ".join([tile] * crops)
        text = f"Here is the original image {tile} and here are some crops to help you see better {more}"
        return Layout(text, 1 + crops)

    def crops(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
        """Returns the crops of an image that is much longer than wide, or wider than long: (left, top, right, bottom)
        of each."""
        if not self.scans:
            return []
        longer, shorter = max(height, width), min(height, width)
        if longer / shorter < self.ratio:
            return []
        count = min(math.floor(longer / self.least), math.floor(longer / shorter + 0.5))
        count = min(self.most, max(2, count))
        step = math.ceil(longer / count)
        if min(step, shorter) < self.least:
            return []
        places = [(first, min(longer, first + step)) for first in range(0, min(longer, count * step), step)]
        if width >= height:
            return [(first, 0, last, height) for first, last in places]
        return [(0, first, width, last) for first, last in places]

    def cut(self, image: Image) -> list[Any]:
        whole = picture_of(image)
        crops = [whole.crop(box) for box in self.crops(image.height, image.width)]
        return [resized(picture, *self._size, self.resample) for picture in (whole, *crops)]


# Tokens of Idefics3 and SmolVLM.
ROW, BORDER, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
# Pixels of the longest side that an image is made no longer than.
LONGEST = 4096


class Idefics3Processor(Processor):
    """An Idefics3Processor makes the tiles of images as Idefics3 and SmolVLM want them."""

    placeholder, image_token = ROW, ROW
    own: Mapping[str, Any] = {
        "do_resize": True,
        "size": {"longest_edge": 4 * 364},
        "resample": LANCZOS,
        "do_image_splitting": True,
        "max_image_size": {"longest_edge": 364},
        "do_pad": True,
    }

    def __init__(self, tower: TowerConfig, settings: Mapping[str, Any], image_token_id: int = 0):
        super().__init__(tower, settings, image_token_id)
        self.resizes, self.splits = self.settings.flag("do_resize"), self.settings.flag("do_image_splitting")
        self.resample = resampling(self.settings)
        self.tile = self.settings.settings("max_image_size").size("longest_edge")
        self.size = self.settings.settings("size")
        if self.resizes and not self.size.get("longest_edge"):
            self.size.size("height"), self.size.size("width")

    @property
    def special(self) -> frozenset[str]:
        most = math.ceil(LONGEST / self.tile)
        places = (f"<row_{i + 1}_col_{j + 1}>" for i in range(most) for j in range(most))
        return frozenset((ROW, BORDER, WHOLE, *places))

    @property
    def tile_size(self) -> tuple[int, int]:
        return self.tile, self.tile

    def layout(self, height: int, width: int) -> Layout:
        """Returns what a prompt has in place of an image of this size: the tiles of each row of the grid, named by
        their place, and the whole."""
        down, across = self.grid(*self._sizes(height, width)[-1])
        rows = ROW * self.rows_per_tile
        whole = f"{BORDER}{WHOLE}{rows}{BORDER}"
        if not down:
            return Layout(whole, 1)
        lines = ("".join(f"{BORDER}<row_{i + 1}_col_{j + 1}>{rows}" for j in range(across)) + "\n" for i in range(down))
        return Layout("".join(lines) + "\n" + whole, down * across + 1)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns how many tiles lie below each other, and side by side, in an image that was made to fit; (0, 0) where
        it is one tile."""
        if not self.splits or (height <= self.tile and width <= self.tile):
            return 0, 0
        return height // self.tile, width // self.tile

    def cut(self, image: Image) -> list[Any]:
        picture = picture_of(image)
        for height, width in self._sizes(image.height, image.width)[1:]:
            picture = resized(picture, height, width, self.resample)
        down, across = self.grid(picture.height, picture.width)
        if not down:
            return [picture]
        tile = self.tile
        boxes = [(j * tile, i * tile, (j + 1) * tile, (i + 1) * tile) for i in range(down) for j in range(across)]
        return [*(picture.crop(box) for box in boxes), resized(picture, tile, tile, self.resample)]

    def _sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Returns the sizes, (height, width), that an image of this size has one after the other until it is cut."""
        sizes = [(height, width)]
        if self.resizes:
            sizes.append(_longest(height, width, self.size))
        sizes.append(_whole_tiles(*sizes[-1], self.tile) if self.splits else (self.tile, self.tile))
        return sizes


def _longest(height: int, width: int, size: Settings) -> tuple[int, int]:
    """Returns the size that an image is first brought to: its longest side as asked for, the other one even."""
    longest = size.get("longest_edge")
    if not longest:
        return size.size("height"), size.size("width")
    longest, ratio = size.size("longest_edge"), width / height
    if width >= height:
        width = longest
        height = int(width / ratio)
        height += height % 2
    else:
        height = longest
        width = int(height * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > LONGEST:
        width, height = LONGEST, int(LONGEST / ratio)
    elif height > width and height > LONGEST:
        height, width = LONGEST, int(LONGEST * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Returns the size with both sides rounded up to whole tiles, the longer one first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width


KINDS: dict[str, type[Processor]] = {"gemma3": Gemma3Processor, "idefics3": Idefics3Processor}
# Where transformers keeps the settings: since version 5 inside the first file, before in the second.
NESTED, ALONE = "processor_config.json", "preprocessor_config.json"


def load_processor(checkpoint: Checkpoint, tower: TowerConfig, tokenizer: Tokenizer | None) -> Processor:
    """Returns what makes tiles of images for the tower of this checkpoint.

    tokenizer: the checkpoint's. Without one there are no prompts in which an image could stand, so only the tiles of
    the processor work. Raises CheckpointError where the tokenizer has no image token, or where the settings do not fit
    the tower.
    """
    kind = KINDS[tower.kind]
    image_token_id = 0 if tokenizer is None else tokenizer.token_id(kind.image_token)
    if image_token_id is None:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.name} has no token {kind.image_token!r}, by which prompts show images; "
            "use the tokenizer that belongs to the tower"
        )
    settings = _settings(checkpoint, tower)
    processor = kind(tower, settings, image_token_id)
    size = tower.image_size
    made = processor.tile_size
    if made != (size, size):
        raise CheckpointError(
            f"{settings.file} makes tiles of {made[0]} x {made[1]} pixels; the tower of {checkpoint.name} takes "
            f"{size} x {size}"
        )
    return processor


def _settings(checkpoint: Checkpoint, tower: TowerConfig) -> Settings:
    """Returns the settings of the checkpoint's images; without a file of them those that fit the tower."""
    size = tower.image_size
    if checkpoint.mmproj is not None:
        return tower_settings(checkpoint.mmproj)
    nested = read_object(checkpoint, NESTED)
    if isinstance(nested.get("image_processor"), dict):
        return Settings(nested["image_processor"], str(checkpoint.file(NESTED)), "image_processor.")
    alone = read_object(checkpoint, ALONE)
    if alone:
        return Settings(alone, str(checkpoint.file(ALONE)))
    sizes = {"size": {"height": size, "width": size}}
    if tower.kind == "idefics3":
        sizes = {"size": {"longest_edge": 4 * size}, "max_image_size": {"longest_edge": size}}
    return Settings(sizes, str(checkpoint.path or checkpoint.name))
