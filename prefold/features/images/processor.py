"""Prepares images for a checkpoint's tower: cuts them into tiles of one size, and gives them their place in a prompt.

`layout` says from an image's size alone how it is cut and what text stands for it in a prompt; `tiles` cuts it. Both
equal the Pillow image processors of transformers, to the last bit.
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

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # of Pillow
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
# Settings that would change pixels, and stand in files that do not turn them on.
NOT_ASKED = {"crop_size", "do_center_crop", "pad_size"}


@dataclass(frozen=True, slots=True)
class Layout:
    """A Layout says how an image of one size is cut into tiles, and what text stands for it.

    text   its place in a prompt, with the image token once for each row
    sizes  (height, width) to which the image is resized before it is cut, one after the other
    boxes  (left, top, right, bottom) of its pieces; each becomes a tile beside the tile of the whole image
    rows   how many rows a tile becomes; None: as many as all tiles do
    """

    text: str
    sizes: Sequence[tuple[int, int]] = ()
    boxes: Sequence[tuple[int, int, int, int]] = ()
    rows: int | None = None

    @property
    def tiles(self) -> int:
        """Returns how many tiles the image becomes."""
        return 1 + len(self.boxes)


class Processor(ABC):
    """A Processor makes the tiles of images, by the settings of one checkpoint.

    placeholder     the text that chat templates write for an image
    image_token     the token that stands for a row of an image in a Layout's text
    image_token_id  its id
    special         the special tokens of images, which are plain text where a user writes them
    own_settings    settings that a family reads beside SETTINGS, with their defaults
    whole_first     whether the tile of the whole image comes before those of its pieces, or behind them
    tile_size       height and width of every tile; None: a tile is of the last of its layout's sizes
    """

    placeholder: str
    image_token: str
    special: frozenset[str]
    own_settings: Mapping[str, Any]
    whole_first: bool
    tile_size: tuple[int, int] | None

    def __init__(self, tower: TowerConfig, settings: Mapping[str, Any], image_token_id: int = 0):
        """Reads the settings of an image processor's file. Raises UnsupportedModelError for a setting that is not
        known."""
        self.tower, self.image_token_id = tower, image_token_id
        stored = Settings.of(settings)
        defaults = {**SETTINGS, **self.own_settings}
        self.settings = Settings(
            {key: value if stored.get(key) is None else stored[key] for key, value in defaults.items()}, stored.file
        )
        without_effect = WITHOUT_EFFECT if stored.get("do_center_crop") else WITHOUT_EFFECT | NOT_ASKED
        for key in sorted(stored.keys() - defaults - without_effect):
            if stored[key] is not None and not (key in NOT_ASKED and not stored[key]):
                raise UnsupportedModelError(f"{stored.file}: the setting {key} of the images is not known")
        # The number by which Pillow knows the filter.
        self.resample = self.settings.size("resample", least=0, most=5)

    @property
    def span(self) -> bool:
        """Returns whether the rows of a tile are one span."""
        return self.tower.span

    @property
    def rows_per_tile(self) -> int:
        """Returns how many rows a tile becomes, or at most becomes."""
        return self.tower.rows

    @cached_property
    def identity(self) -> bytes:
        """Returns a digest of the processing and of the tower's shape, 16 bytes."""
        content = json.dumps([type(self).__name__, dict(self.settings), repr(self.tower)], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).digest()

    def key(self, digest: bytes) -> bytes:
        """Returns the key of an image's rows, 16 bytes: a digest of its pixels' digest and of all that is done to
        them."""
        return hashlib.blake2b(self.identity + digest, digest_size=16).digest()

    @abstractmethod
    def layout(self, height: int, width: int) -> Layout:
        """Returns the Layout of an image of this size."""

    def check(self, name: str) -> None:
        """Raises CheckpointError unless the tower takes these tiles. name: of the checkpoint"""
        size = self.tower.image_size
        if self.tile_size is not None and self.tile_size != (size, size):
            height, width = self.tile_size
            raise CheckpointError(
                f"{self.settings.file} makes tiles of {height} x {width} pixels; the tower of {name} takes "
                f"{size} x {size}"
            )

    def expand(self, text: str, sizes: Sequence[tuple[int, int]]) -> str:
        """Returns a text with an image's layout text in place of each placeholder. sizes: (height, width) of each
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

    def tiles(self, image: Image) -> np.ndarray:
        """Returns the tiles of an image as the tower reads them, float32 [tiles, 3, height, width]."""
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
        """Returns the tower's input for each value of a pixel, float32 [3, 256]."""
        settings = self.settings
        numbers = np.arange(256).astype(np.float32)
        if settings.flag("do_rescale"):
            numbers = (np.arange(256).astype(np.float64) * settings.number("rescale_factor")).astype(np.float32)
        if not settings.flag("do_normalize"):
            return np.tile(numbers, (3, 1))
        mean, std = (np.array(three(settings, key), np.float32) for key in ("image_mean", "image_std"))
        return (numbers[None] - mean[:, None]) / std[:, None]


def three(settings: Settings, key: str) -> list[float]:
    """Returns a setting's number for each colour; a single number counts for all three."""
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
    """A Gemma3Processor makes the tiles of images as Gemma 3 wants them."""

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
            raise UnsupportedModelError(f"{self.settings.file}: do_resize is false, but tiles must be of one size")
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
        """Returns the crops of an image that is much longer than wide, or wider than long."""
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
LONGEST = 4096  # pixels of the longest side of a resized image


class Idefics3Processor(Processor):
    """An Idefics3Processor makes the tiles of images as Idefics3 and SmolVLM want them."""

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
        """Returns the sizes to which an image is resized before it is cut, one after the other."""
        sizes = []
        if self.resizes:
            height, width = _longest(height, width, self.size)
            sizes.append((height, width))
        if not self.splits:
            return [*sizes, (self.tile, self.tile)]
        # Both sides are rounded up to whole tiles, the longer one first.
        tile = self.tile
        height, width = _with_longest(height, width, math.ceil(max(height, width) / tile) * tile)
        return [*sizes, (math.ceil(height / tile) * tile, math.ceil(width / tile) * tile)]


def _longest(height: int, width: int, size: Settings) -> tuple[int, int]:
    """Returns the size to which an image is resized first: its longest side as the settings say, the other even."""
    if not size.get("longest_edge"):
        return size.size("height"), size.size("width")
    longest = size.size("longest_edge")
    height, width = _with_longest(height, width, longest)
    # The other side is made even, and the longest no longer than LONGEST.
    height, width = (height, width + width % 2) if height > width else (height + height % 2, width)
    height, width = max(height, 1), max(width, 1)
    if max(height, width) > LONGEST:
        height, width = _with_longest(height, width, LONGEST)
    return max(height, 1), max(width, 1)


def _with_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Returns the size with its longer side so long, and the other rounded down."""
    ratio = width / height
    return (int(longest / ratio), longest) if width >= height else (longest, int(longest * ratio))


# Tokens of Gemma 4.
BEFORE, GEMMA4_ROW, BEHIND = "<|image>", "<|image|>", "<image|>"


class Gemma4Processor(Processor):
    """A Gemma4Processor makes the tiles of images as Gemma 4 wants them: an image keeps its shape, and becomes as many
    squares of patches as it may have."""

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
            raise UnsupportedModelError(f"{self.settings.file}: do_resize is false, but tiles must be of whole squares")
        self.patch, self.merge = self.settings.size("patch_size"), self.settings.size("pooling_kernel_size")
        self.most, self.square = self.settings.size("max_soft_tokens"), self.merge * self.patch

    def check(self, name: str) -> None:
        tower, file = self.tower, self.settings.file
        wanted = {"patch_size": tower.patch_size, "pooling_kernel_size": tower.merge}
        for key, value in wanted.items():
            if self.settings[key] != value:
                raise CheckpointError(f"{file}: {key} is {self.settings[key]}; the tower of {name} has {value}")
        if self.most > tower.rows:
            raise CheckpointError(
                f"{file}: max_soft_tokens is {self.most}; set vision_soft_tokens_per_image, which is {tower.rows}, to "
                f"{self.most} in config.json too"
            )

    def layout(self, height: int, width: int) -> Layout:
        down, across = self._squares(height, width)
        rows = down * across
        text = f"{BEFORE}{GEMMA4_ROW * rows}{BEHIND}"
        return Layout(text, [(down * self.square, across * self.square)], rows=rows)

    def _squares(self, height: int, width: int) -> tuple[int, int]:
        """Returns how many squares an image has from top to bottom, and across."""
        factor = math.sqrt(self.most * self.merge**2 * self.patch**2 / (height * width))
        down, across = (math.floor(factor * side / self.square) for side in (height, width))
        if down and across:
            return down, across
        # Of an image that is much longer than wide, or wider than long, one side is a single square.
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
# Where transformers keeps the settings: since version 5 inside the first file, before in the second.
NESTED, ALONE = "processor_config.json", "preprocessor_config.json"


def load_processor(checkpoint: Checkpoint, tower: TowerConfig, tokenizer: Tokenizer | None) -> Processor:
    """Returns the Processor of a checkpoint. tokenizer: the checkpoint's; without it only the tiles work. Raises
    CheckpointError if the tokenizer has no image token, or if the settings do not fit the tower."""
    kind = KINDS[tower.kind]
    image_token_id = 0 if tokenizer is None else tokenizer.token_id(kind.image_token)
    if image_token_id is None:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.name} has no token {kind.image_token!r}, by which prompts show images; "
            "use the tokenizer that belongs to the tower"
        )
    settings = _settings(checkpoint, tower)
    processor = kind(tower, settings, image_token_id)
    processor.check(checkpoint.name)
    return processor


def _settings(checkpoint: Checkpoint, tower: TowerConfig) -> Settings:
    """Returns the settings of the checkpoint's image processor; without a file, settings that fit the tower."""
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
