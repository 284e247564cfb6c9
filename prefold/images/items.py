"""Images in items: where they stand, how they are read, and the rows that prompts have in their place."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import InputError
from ..prefix import MEDIA_BASE
from ..stream.tempfiles import Blob, BlobStore
from ..text import Tokenizer
from ..text.media import ImageIds, Picture, too_long
from ..text.tokenizer import Escaping
from ..types import Medium, within
from .config import TowerConfig
from .decode import Allowance, Image
from .processor import Processor, load_processor
from .reading import Reader, reader_of
from .sending import HeldPictures
from .table import MediaTable

T = TypeVar("T")
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
    def of(cls, image: Image, animated: bool = False) -> Seen:
        return cls(image.height, image.width, image.digest, animated)


class Recent(Generic[T]):
    """A Recent is a least-recently-used cache, whose values' sizes sum to `most` at most. Any thread may use it."""

    def __init__(self, most: int, size: Callable[[T], int] = lambda value: 1):
        self._most, self._size, self._held = most, size, 0
        self._values: OrderedDict[bytes, T] = OrderedDict()  # the value first that was put or asked for longest ago
        self._lock = threading.Lock()

    def get(self, key: bytes) -> T | None:
        """Returns the value with this key; None: it is not held."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: bytes, value: T) -> None:
        """Stores a value, and evicts the values that were used longest ago where room is short."""
        with self._lock:
            self._forget(key)
            if (size := self._size(value)) <= self._most:
                self._values[key] = value
                self._held += size
                while self._held > self._most:
                    self._forget(next(iter(self._values)))

    def take(self, key: bytes) -> T | None:
        """Returns the value with this key, and holds it no more; None: it is not held."""
        with self._lock:
            return self._forget(key)

    def _forget(self, key: bytes) -> T | None:
        value = self._values.pop(key, None)
        self._held -= 0 if value is None else self._size(value)
        return value


def recent_images(memory: int = MEMORY) -> Recent[Image]:
    """Returns what holds the images that were decoded last, by the digests of their pixels, until the tower takes them.
    memory: bytes of pixels"""
    return Recent(memory, lambda image: image.pixels.nbytes)


@dataclass(eq=False)
class Loading:
    """A Loading reads an image again when a tower is to see it.

    value   its file's content, where that is to be read, or its pixels
    digest  of its pixels, which must be the same again
    tiles   how many it has
    recent  has them yet, where it was decoded lately
    """

    processor: Processor
    reader: Reader
    value: Any
    digest: bytes
    tiles: int
    recent: Recent[Image]

    def image(self) -> Image:
        """Returns the image. Raises InputError where it is not the same as before, or cannot be read any more."""
        image = self.recent.take(self.digest)
        if image is None:
            image = self.reader.read(self.value.read() if isinstance(self.value, Blob) else self.value).image
        if image.digest != self.digest:
            message = "the image has changed since it was first read"
            raise InputError(message, field="image", remedy="leave it as it is until the answer is there")
        return image

    def put_away(self, shelf: BlobStore) -> None:
        """Puts the content of its file on a shelf, where it has one."""
        if isinstance(self.value, bytes):
            self.value = shelf.put(self.value)

    def __call__(self) -> np.ndarray:
        """Returns its tiles, float32 [tiles, 3, height, width]. Raises InputError as `image` does."""
        return self.processor.tiles(self.image())


def image_inputs(
    checkpoint: Checkpoint, tower: TowerConfig, tokenizer: Tokenizer | None, table: MediaTable | None, **how: Any
) -> ImageInputs | None:
    """Returns what reads the images of a checkpoint with this tower; None for one without a tokenizer. table: None for
    one of its own; how: as of `reader_of`"""
    if tokenizer is None:
        return None
    table = MediaTable() if table is None else table
    return ImageInputs(load_processor(checkpoint, tower, tokenizer), tokenizer, table, reader_of(**how))


@dataclass(frozen=True)
class ImageInputs:
    """An ImageInputs reads the images of items, and gives them their place in prompts.

    table    knows images by the ids of their rows
    most     images that one item may have
    recent   holds pixels that were decoded lately
    files    knows what was found in the files that were decoded last, so that a file which comes again, as in each
             prompt of a record or each record of a job, is not decoded again
    shelf    holds the files of images that came within items
    seconds  that decoding all images of an item may take; None: each may take what the decoder allows
    namespace  outside of which nothing of these images is shared, not even where they are read from; "": none
    """

    processor: Processor
    tokenizer: Tokenizer
    table: MediaTable
    reader: Reader = field(default_factory=Reader)
    most: int = 64
    recent: Recent[Image] = field(default_factory=recent_images)
    files: Recent[Seen] = field(default_factory=lambda: Recent(FILES))
    shelf: BlobStore = field(default_factory=BlobStore)
    seconds: float | None = None
    namespace: str = ""

    def read_by(self, **how: Any) -> ImageInputs:
        """Returns these inputs with another reader, as of `reader_of`."""
        return replace(self, reader=reader_of(**how))

    def for_strangers(self, files: Callable[[str], Path | None] | None = None, namespace: str = "") -> ImageInputs:
        """Returns these inputs for clients who must not read this machine's files by path, nor occupy the decoder for
        longer with many images than with a single image. files: returns the path of a file that a client uploaded, by
        its id; namespace: that of the clients."""
        reader = replace(self.reader, paths=False, folder=None, files=files)
        return replace(self, reader=reader, seconds=reader.decoder.limits.seconds, namespace=namespace)

    def from_driver(self) -> HeldPictures:
        """Returns a holder for the images that the driver of a fleet sends to this replica."""
        return HeldPictures(self.table, self.processor)

    @cached_property
    def escaping(self) -> Escaping:
        """Returns an encoder of texts in which image tokens that users write stay plain text."""
        return self.tokenizer.escaping_only(self.processor.special)

    def read(self, given: Sequence[tuple[Any, str]]) -> list[Picture]:
        """Returns the images of an item. given: (what stands for an image, its field) of each.

        Raises InputError for the first that cannot be read, and for too many.
        """
        if len(given) > self.most:
            field = given[self.most][1]
            message = f"there are {len(given)} images; {self.most} are allowed"
            raise InputError(message, field=field, remedy="give fewer", code="image_count")
        allowance = None if self.seconds is None else Allowance(self.seconds)
        return [self._picture(value, field, allowance) for value, field in given]

    def _picture(self, value: Any, field: str, allowance: Allowance | None) -> Picture:
        # Of a file no pixels are held for long: they take ten times its memory.
        source, again = self.reader.source(value, field)
        seen = Seen.of(source) if isinstance(source, Image) else self._seen(source, field, allowance)
        tiles = self.processor.layout(seen.height, seen.width).tiles
        load = Loading(self.processor, self.reader, again, seen.digest, tiles, self.recent)
        return Picture((seen.height, seen.width), self.processor.key(seen.digest), load, field, seen.animated)

    def _seen(self, data: bytes, field: str, allowance: Allowance | None) -> Seen:
        """Returns what is known of the image in a file, which is decoded where it was not lately."""
        # Outside of the namespace nobody may learn, by the time that it takes, that a file was there before.
        digest = hashlib.blake2b(f"{self.namespace}\0".encode("utf-8", "surrogatepass"), digest_size=16)
        digest.update(data)
        seen = self.files.get(key := digest.digest())
        if seen is None:
            decoded = self.reader.decoder.decode(data, field, allowance)
            self.recent.put(decoded.image.digest, decoded.image)
            self.files.put(key, seen := Seen.of(decoded.image, decoded.animated))
        return seen

    def encode(
        self, text: str, pictures: Sequence[Picture], salt: str, field: str, escaping: Escaping | None = None
    ) -> tuple[np.ndarray, tuple[Medium, ...]]:
        """Returns the ids of a text, int32 [n], with the rows of an image in place of each placeholder, and the media
        whose rows they are. escaping: by which the text was shielded.

        Raises InputError where there are not as many placeholders as images.
        """
        processor = self.processor
        expanded = processor.expand(text, [picture.size for picture in pictures])
        ids = (escaping or self.escaping).encode(expanded)
        salt = within(self.namespace, salt)
        media = tuple(self._medium(picture, salt) for picture in pictures)
        at = np.flatnonzero(ids == processor.image_token_id)
        rows = np.concatenate([np.empty(0, np.int32), *(medium.ids for medium in media)])
        if len(at) != len(rows):
            raise InputError(
                f"{field!r} has {len(at)} tokens {processor.image_token} for {len(rows)} rows of images",
                field=field,
                remedy="leave these tokens out of the chat template",
                code="image_count",
            )
        ids[at] = rows
        return ids, media

    def _medium(self, picture: Picture, salt: str) -> Medium:
        """Returns the medium of an image for requests of this salt."""
        load = picture.load
        rows, span = load.processor.rows_per_tile, load.processor.span
        medium = self.table.medium(picture.key, tiles=load.tiles, rows_per_tile=rows, span=span, load=load, salt=salt)
        if medium.load is load:  # else the image is read from where it was given before
            load.put_away(self.shelf)
        return medium

    def encode_pictured(self, text: str, pictures: Sequence[Picture], field: str, salt: str = "") -> ImageIds:
        """Returns the ids of a text with images; no special tokens are put around it. A text without placeholders comes
        behind its images."""
        placeholder = self.processor.placeholder
        text = text if placeholder in text else placeholder * len(pictures) + text
        return ImageIds.of(*self.encode(text, pictures, salt, field))

    def media_of(self, tokens: np.ndarray, field: str) -> tuple[Medium, ...]:
        """Returns the media that have rows among these ids. Raises InputError where an image is there in part only:
        it was cut with the text."""
        media = tuple(self.table.find(tokens[tokens >= MEDIA_BASE]))
        for medium in media:
            if not np.isin(medium.ids, tokens).all():
                raise too_long(field)
        return media

    def wants_parts(self, template: str) -> bool:
        """Whether a chat template takes contents as lists of parts only, and no texts."""
        return "is string" not in template and re.search(r"\[.type.\]|\.type\b", template) is not None
