"""Images of Idefics3 and SmolVLM: cut into a grid of square tiles, and one more tile of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..checkpoint.settings import Settings
from .image import Image
from .processor import LANCZOS, Layout, Processor, picture_of, resampling, resized
from .tower_config import TowerConfig

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
