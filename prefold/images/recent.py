"""What was decoded lately: pixels, for the tower, which may read them soon after they were looked at for their key, and
what was found in files, for those that come again."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

from .decode import Decoded
from .image import Image

MEMORY = 64 << 20
FILES = 4096


@dataclass(frozen=True, slots=True)
class Seen:
    """A Seen is what is known of an image without its pixels: its size, their digest, and whether it is the first frame
    of several."""

    height: int
    width: int
    digest: bytes
    animated: bool

    @classmethod
    def of(cls, decoded: Decoded) -> Seen:
        """Returns what is known of an image that was decoded."""
        image = decoded.image
        return cls(image.height, image.width, image.digest, decoded.animated)


class RecentFiles:
    """A RecentFiles knows what was found in the `most` files that were decoded last, so that one that comes again, as
    in each prompt of a record or each record of a job, is not decoded again. Any thread may ask it."""

    def __init__(self, most: int = FILES):
        self._most = most
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()  # the least recently used one first
        self._lock = threading.Lock()

    @staticmethod
    def key(data: bytes, namespace: str) -> bytes:
        """Returns by what a file is known. namespace: outside of which nobody may learn, by the time that it takes,
        that it was there before."""
        digest = hashlib.blake2b(f"{namespace}\0".encode("utf-8", "surrogatepass"), digest_size=16)
        digest.update(data)
        return digest.digest()

    def get(self, key: bytes) -> Seen | None:
        """Returns what was found in a file; None: it was not decoded lately."""
        with self._lock:
            if key in self._seen:
                self._seen.move_to_end(key)
            return self._seen.get(key)

    def put(self, key: bytes, seen: Seen) -> None:
        """Notes what was found in a file."""
        with self._lock:
            self._seen[key] = seen
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)


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
