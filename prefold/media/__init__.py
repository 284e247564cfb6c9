"""Images: decoded pixels, the tiles that a model's tower sees, and what a prompt has in their place.

It never imports torch. Pillow is imported when an image is first read.
"""

from __future__ import annotations

from .decode import Decoded, Decoder, Limits
from .image import Image, image_of
from .load import load_processor
from .processor import Layout, Processor
from .tower_config import TowerConfig

__all__ = ["Decoded", "Decoder", "Image", "Layout", "Limits", "Processor", "TowerConfig", "image_of", "load_processor"]
