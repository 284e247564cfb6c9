"""Prepare images for a checkpoint's tower: cut them into tiles of one size, and make their text in a prompt.

`layout` needs only an image's size: it says how the image is cut and which text replaces it in a prompt. `tiles` cuts
it. Both equal the Pillow image processors of transformers, bit for bit.
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

from ...checkpoint import Checkpoint, read_object
from ...checkpoint.settings import Settings
from ...errors import CheckpointError, InputError, UnsupportedModelError
from ...text import Tokenizer
from .config import TowerConfig, tile_settings, tower_settings
from .decode import Image, pillow

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers of filters
SETTINGS: Mapping[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# Settings that change no pixel.
WITHOUT_EFFECT = {
    "_processor_class", "auto_map", "data_format", "default_to_square", "device", "disable_grouping",
    "do_convert_rgb", "feature_extractor_type", "image_processor_type", "image_seq_len", "image_seq_length",
    "input_data_format", "model_input_names", "num_fps", "processor_class", "return_row_col_info", "return_tensors",
    "size_divisor", "vision_encoder_max_size", "video_sampling",
}  # fmt: skip
# Settings that would change pixels if other settings turned them on.
NOT_ASKED = {"crop_size", "do_center_crop", "pad_size"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How an image of one size is cut into tiles, and its text in a prompt."""

    text: str  # text that replaces the image in a prompt, with the image token once per row
    sizes: Sequence[tuple[int, int]] = ()  # (height, width): the image is resized to each of these in turn, then cut
    boxes: Sequence[tuple[int, int, int, int]] = ()  # (left, top, right, bottom) of pieces, which are further tiles
    rows: int | None = None  # rows per tile; None: as for all tiles of the tower

    @property
    def tiles(self) -> int:
        """Return the number of tiles of the image."""
        return 1 + len(self.boxes)


class Processor(ABC):
    """Makes the tiles of images by the settings of one checkpoint.

    Attributes:
        placeholder: the text that chat templates write for an image
        image_token: the token for one row of an image in a Layout's text
        image_token_id: the id of `image_token`
        special: the special tokens of images; in users' texts they are plain text
        own_settings: the family's settings beside SETTINGS, with their defaults
        whole_first: the tile of the whole image comes before the tiles of its pieces, not after them
        tile_size: height and width of every tile; None: a tile has the last of its layout's sizes
    """

    placeholder: str
    image_token: str
    special: frozenset[str]
    own_settings: Mapping[str, Any]
    whole_first: bool
    tile_size: tuple[int, int] | None

    def __init__(self, tower: TowerConfig, settings: Mapping[str, Any], image_token_id: int = 0):
        """Read the settings of an image processor's file. Raise UnsupportedModelError for an unknown setting."""
        self.tower, self.image_token_id = tower, image_token_id
        stored = Settings.of(settings)
        defaults = {**SETTINGS, **self.own_settings}
        self.settings = Settings(
            {key: value if stored.get(key) is None else stored[key] for key, value in defaults.items()}, stored.file
        )
        without_effect = WITHOUT_EFFECT if stored.get("do_center_crop") else WITHOUT_EFFECT | NOT_ASKED
        for key in sorted(stored.keys() - defaults - without_effect):
            if stored[key] is not None and not (key in NOT_ASKED and not stored[key]):
                raise UnsupportedModelError(f"{stored.file}: prefold does not know the image setting {key}")
        # Pillow's number of the filter.
        self.resample = self.settings.size("resample", least=0, most=5)

    @property
    def span(self) -> bool:
        """Return whether the rows of a tile form one span."""
        return self.tower.span

    @property
    def rows_per_tile(self) -> int:
        """Return the number of rows per tile, or the maximum if tiles differ in size."""
        return self.tower.rows

    @cached_property
    def identity(self) -> bytes:
        """Return a digest of the processing and of the tower's shape, 16 bytes."""
        content = json.dumps([type(self).__name__, dict(self.settings), repr(self.tower)], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).digest()

    def key(self, digest: bytes) -> bytes:
        """Return the key of an image's rows, 16 bytes: a digest of its pixels' digest and of all processing."""
        return hashlib.blake2b(self.identity + digest, digest_size=16).digest()

    @abstractmethod
    def layout(self, height: int, width: int) -> Layout:
        """Return the layout of an image of this size."""

    def check(self, name: str) -> None:
        """Raise CheckpointError unless the tower accepts these tiles.

        Args:
            name: name of the checkpoint, for the error
        """
        size = self.tower.image_size
        if self.tile_size is not None and self.tile_size != (size, size):
            height, width = self.tile_size
            raise CheckpointError(
                f"{self.settings.file} makes tiles of {height} x {width} pixels; the tower of {name} takes {size} x "
                f"{size}"
            )

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Return a text with each placeholder replaced by its image's layout text.

        Raise InputError if the numbers of placeholders and images differ.

        Args:
            sizes: (height, width) of each image, in order
        """
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(sizes):
            raise InputError(
                f"there are {len(sizes)} images for {len(pieces) - 1} places in the text ({self.placeholder})",
                field="images",
                remedy="give one image for each place",
                code="image_count",
            )
        layouts = [self.layout(*size).text for size in sizes]
        return pieces[0] + "".join(layout + piece for layout, piece in zip(layouts, pieces[1:], strict=True))

    def tiles(self, image: Image) -> np.ndarray:
        """Return the tiles of an image as the tower reads them, float32 [tiles, 3, height, width]."""
        layout, picture = self.layout(image.height, image.width), pillow().fromarray(image.pixels)
        for size in layout.sizes:
            picture = self._resized(picture, size)
        pieces = [picture.crop(box) for box in layout.boxes]
        tile_size = self.tile_size or layout.sizes[-1]
        tiles = np.empty((layout.tiles, 3, *tile_size), np.float32)
        for piece, out in zip((picture, *pieces) if self.whole_first else (*pieces, picture), tiles, strict=True):
            pixels = np.asarray(self._resized(piece, tile_size))
            for colour in range(3):
                np.take(self._table[colour], pixels[:, :, colour], out=out[colour])
        return tiles

    def _resized(self, picture: Any, size: tuple[int, int]) -> Any:
        return picture.resize(size[::-1], resample=self.resample)

    @cached_property
    def _table(self) -> np.ndarray:
        """Return the tower's input for each value of a pixel, float32 [3, 256]."""
        settings = self.settings
        numbers = np.arange(256).astype(np.float32)
        if settings.flag("do_rescale"):
            numbers = (np.arange(256).astype(np.float64) * settings.number("rescale_factor")).astype(np.float32)
        if not settings.flag("do_normalize"):
            return np.tile(numbers, (3, 1))
        mean, std = (np.array(three(settings, key), np.float32) for key in ("image_mean", "image_std"))
        return (numbers[None] - mean[:, None]) / std[:, None]


def three(settings: Settings, key: str) -> list[float]:
    """Return a setting's number for each colour. A single number counts for all three."""
    value = settings[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value] * 3
    fits = isinstance(value, (list, tuple)) and len(value) == 3
    if not fits or not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in value):
        raise settings.wrong(key, "three numbers, one a colour")
    if key == "image_std" and not all(value):
        raise settings.wrong(key, "three numbers that are not 0")
    return list(value)


# Tokens of Gemma 3.
IMAGE_BEGIN, IMAGE_ROW, IMAGE_END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Gemma3Processor(Processor):
    """Makes tiles for Gemma 3."""

    placeholder, image_token, whole_first = IMAGE_BEGIN, IMAGE_ROW, True
    special = frozenset((IMAGE_BEGIN, IMAGE_ROW, IMAGE_END))
    own_settings: Mapping[str, Any] = {
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
            raise UnsupportedModelError(f"{self.settings.file}: do_resize is false, but all tiles must have one size")
        size = self.settings.settings("size")
        self.tile_size = size.size("height"), size.size("width")
        self.scans = self.settings.flag("do_pan_and_scan")
        self.least = self.settings.size("pan_and_scan_min_crop_size")
        self.most = self.settings.size("pan_and_scan_max_num_crops")
        self.ratio = self.settings.number("pan_and_scan_min_ratio_to_activate")

    def layout(self, height: int, width: int) -> Layout:
        tile = f"\n\n{IMAGE_BEGIN}{IMAGE_ROW * self.rows_per_tile}{IMAGE_END}\n\n"
        crops = self._crops(height, width)
        if not crops:
            return Layout(tile)
        more = " ".join([tile] * len(crops))
        text = f"Here is the original image {tile} and here are some crops to help you see better {more}"
        return Layout(text, boxes=crops)

    def _crops(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
        """Return the crops of an elongated image, as (left, top, right, bottom)."""
        longer, shorter = max(height, width), min(height, width)
        if not self.scans or longer / shorter < self.ratio:
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


# Tokens of Idefics3 and SmolVLM.
ROW, BORDER, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
LONGEST = 4096  # pixels: the maximum longest side of a resized image


class Idefics3Processor(Processor):
    """Makes tiles for Idefics3 and SmolVLM."""

    placeholder, image_token, whole_first = ROW, ROW, False
    own_settings: Mapping[str, Any] = {
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
        self.tile = self.settings.settings("max_image_size").size("longest_edge")
        self.tile_size = self.tile, self.tile
        self.size = self.settings.settings("size")
        if self.resizes and not self.size.get("longest_edge"):
            self.size.size("height"), self.size.size("width")
        most = range(1, math.ceil(LONGEST / self.tile) + 1)
        self.special = frozenset((ROW, BORDER, WHOLE, *(f"<row_{i}_col_{j}>" for i in most for j in most)))

    def layout(self, height: int, width: int) -> Layout:
        sizes, rows, tile = self._sizes(height, width), ROW * self.rows_per_tile, self.tile
        whole = f"{BORDER}{WHOLE}{rows}{BORDER}"
        height, width = sizes[-1]
        if not self.splits or (height <= tile and width <= tile):
            return Layout(whole, sizes)
        down, across = range(height // tile), range(width // tile)
        lines = ("".join(f"{BORDER}<row_{i + 1}_col_{j + 1}>{rows}" for j in across) + "\n" for i in down)
        boxes = [(j * tile, i * tile, (j + 1) * tile, (i + 1) * tile) for i in down for j in across]
        return Layout("".join(lines) + "\n" + whole, sizes, boxes)

    def _sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the sizes (height, width) to which an image is resized in turn before it is cut."""
        sizes = []
        if self.resizes:
            height, width = _longest(height, width, self.size)
            sizes.append((height, width))
        if not self.splits:
            return [*sizes, (self.tile, self.tile)]
        # Round both sides up to whole tiles, the longer one first.
        tile = self.tile
        height, width = _with_longest(height, width, math.ceil(max(height, width) / tile) * tile)
        return [*sizes, (math.ceil(height / tile) * tile, math.ceil(width / tile) * tile)]


def _longest(height: int, width: int, size: Settings) -> tuple[int, int]:
    """Return the first size to which an image is resized: the settings fix its longest side, and the other is even."""
    if not size.get("longest_edge"):
        return size.size("height"), size.size("width")
    longest = size.size("longest_edge")
    height, width = _with_longest(height, width, longest)
    # Make the other side even, and limit the longest to LONGEST.
    height, width = (height, width + width % 2) if height > width else (height + height % 2, width)
    height, width = max(height, 1), max(width, 1)
    if max(height, width) > LONGEST:
        height, width = _with_longest(height, width, LONGEST)
    return max(height, 1), max(width, 1)


def _with_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size scaled to this longer side, with the other side rounded down."""
    ratio = width / height
    return (int(longest / ratio), longest) if width >= height else (longest, int(longest * ratio))


# Tokens of Gemma 4.
BEFORE, GEMMA4_ROW, BEHIND = "<|image>", "<|image|>", "<image|>"


class Gemma4Processor(Processor):
    """Makes tiles for Gemma 4: an image keeps its aspect ratio, and becomes as many squares of patches as allowed."""

    placeholder, image_token, whole_first, tile_size = GEMMA4_ROW, GEMMA4_ROW, True, None
    special = frozenset((BEFORE, GEMMA4_ROW, BEHIND))
    own_settings: Mapping[str, Any] = {
        "do_resize": True,
        "do_normalize": False,
        "image_mean": [0.0, 0.0, 0.0],
        "image_std": [1.0, 1.0, 1.0],
        "resample": BICUBIC,
        "patch_size": 16,
        "max_soft_tokens": 280,
        "pooling_kernel_size": 3,
        "size": None,
    }

    def __init__(self, tower: TowerConfig, settings: Mapping[str, object], image_token_id: int = 0):
        super().__init__(tower, settings, image_token_id)
        if not self.settings.flag("do_resize"):
            raise UnsupportedModelError(f"{self.settings.file}: do_resize is false, but tiles must have whole squares")
        self.patch, self.merge = self.settings.size("patch_size"), self.settings.size("pooling_kernel_size")
        self.most, self.square = self.settings.size("max_soft_tokens"), self.merge * self.patch

    def check(self, name: str) -> None:
        tower, file = self.tower, self.settings.file
        wanted = {"patch_size": tower.patch_size, "pooling_kernel_size": tower.merge}
        for key, value in wanted.items():
            if self.settings[key] != value:
                raise CheckpointError(f"{file}: {key} is {self.settings[key]}, but the tower of {name} has {value}")
        if self.most > tower.rows:
            raise CheckpointError(
                f"{file}: max_soft_tokens is {self.most}, but vision_soft_tokens_per_image in config.json is only "
                f"{tower.rows}; set it to {self.most} too"
            )

    def layout(self, height: int, width: int) -> Layout:
        down, across = self._squares(height, width)
        rows = down * across
        text = f"{BEFORE}{GEMMA4_ROW * rows}{BEHIND}"
        return Layout(text, [(down * self.square, across * self.square)], rows=rows)

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of squares of an image (from top to bottom, from left to right)."""
        factor = math.sqrt(self.most * self.merge**2 * self.patch**2 / (height * width))
        down, across = (math.floor(factor * side / self.square) for side in (height, width))
        if down and across:
            return down, across
        # A very elongated image is one square wide or high.
        if across:
            return 1, min(math.floor(width / height), self.most)
        if down:
            return min(math.floor(height / width), self.most), 1
        return 1, 1


KINDS: dict[str, type[Processor]] = {
    "gemma3": Gemma3Processor,
    "idefics3": Idefics3Processor,
    "gemma4": Gemma4Processor,
}
# Files with the settings: since version 5 transformers nests them in the first, earlier versions wrote the second.
NESTED, ALONE = "processor_config.json", "preprocessor_config.json"


def load_processor(checkpoint: Checkpoint, tower: TowerConfig, tokenizer: Tokenizer | None) -> Processor:
    """Return the Processor of a checkpoint.

    Raise CheckpointError if the tokenizer has no image token, or if the settings do not fit the tower.

    Args:
        tokenizer: the checkpoint's tokenizer; None: the Processor can only cut images into tiles
    """
    kind = KINDS[tower.kind]
    image_token_id = 0 if tokenizer is None else tokenizer.token_id(kind.image_token)
    if image_token_id is None:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.name} has no token {kind.image_token!r}, which prompts need for images; "
            "use the tokenizer that belongs to the tower"
        )
    settings = _settings(checkpoint, tower)
    processor = kind(tower, settings, image_token_id)
    processor.check(checkpoint.name)
    return processor


def _settings(checkpoint: Checkpoint, tower: TowerConfig) -> Settings:
    """Return the checkpoint's settings of the image processor, or, without a file, settings that fit the tower."""
    if checkpoint.mmproj is not None:
        return tower_settings(checkpoint.mmproj)
    nested = read_object(checkpoint, NESTED)
    if isinstance(nested.get("image_processor"), dict):
        return Settings(nested["image_processor"], str(checkpoint.file(NESTED)), "image_processor.")
    alone = read_object(checkpoint, ALONE)
    if alone:
        return Settings(alone, str(checkpoint.file(ALONE)))
    sizes = tile_settings(tower.kind, tower.image_size, 4 * tower.image_size)
    return Settings(sizes, str(checkpoint.path or checkpoint.name))
