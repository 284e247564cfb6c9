"""Pixels that were decoded lately, for the tower, which may read them soon after they were looked at for their key."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .image import Image

__all__ = ["RecentImages"]

MEMORY = 64 << 20


class RecentImages:
    """A RecentImages holds the images that were decoded last, up to `memory` bytes of pixels, until the tower takes
    them. Any thread may ask it."""

    def __init__(self, memory: int = MEMORY):
        self._memory, self._bytes = memory, 0
        self._images: OrderedDict[bytes, Image] = OrderedDict()  # by digest of the pixels, the oldest first
        self._lock = threading.Lock()

    def put(self, image: Image) -> None:
        """Holds an image; those go that were put longest ago."""
        with self._lock:
            self._forget(image.digest)
            if image.pixels.nbytes > self._memory:
                return
            self._images[image.digest] = image
            self._bytes += image.pixels.nbytes
            while self._bytes > self._memory:
                self._forget(next(iter(self._images)))

    def take(self, digest: bytes) -> Image | None:
        """Returns the image with this digest, and holds it no more; None: it is not held."""
        with self._lock:
            return self._forget(digest)

    def _forget(self, digest: bytes) -> Image | None:
        image = self._images.pop(digest, None)
        self._bytes -= 0 if image is None else image.pixels.nbytes
        return image
