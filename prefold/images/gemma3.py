"""Images of Gemma 3: one tile each, and with pan and scan more tiles that are crops of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from .image import Image
from .processor import BILINEAR, Layout, Processor, picture_of, resampling, resized
from .tower_config import TowerConfig

BEGIN, ROW, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Gemma3Processor(Processor):
    """A Gemma3Processor makes the tiles of images as Gemma 3 wants them."""

    placeholder, image_token = BEGIN, ROW
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
        return frozenset((BEGIN, ROW, END))

    @property
    def tile_size(self) -> tuple[int, int]:
        return self._size

    def layout(self, height: int, width: int) -> Layout:
        """Returns what a prompt has in place of an image of this size: the whole image, then its crops, if any."""
        tile = f"\n\n{BEGIN}{ROW * self.rows_per_tile}{END}\n\n"
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
