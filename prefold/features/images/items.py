"""Read the images of items and put their rows into prompts."""

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

from ...checkpoint import Checkpoint
from ...errors import InputError
from ...spec.requests import Medium, within
from ...text import Tokenizer
from ...text.media import ImageIds, Picture, too_long
from ...text.tokenizer import EscapingEncoder
from ...trie import MEDIA_BASE
from ...trie.tempfiles import Blob, BlobStore
from .config import TowerConfig
from .decode import DecodeBudget, Image
from .processor import Processor, load_processor
from .reading import Reader, reader_of
from .sending import ReplicaImages
from .table import MediaTable

T = TypeVar("T")
MEMORY = 64 << 20
FILES = 4096


@dataclass(frozen=True, slots=True)
class ImageSummary:
    """An image without its pixels."""

    height: int
    width: int
    digest: bytes  # digest of the pixels
    animated: bool  # the image is the first of several frames

    @classmethod
    def of(cls, image: Image, animated: bool = False) -> ImageSummary:
        return cls(image.height, image.width, image.digest, animated)


class LRUCache(Generic[T]):
    """A least-recently-used cache of values with at most the total size `most`. Any thread may use it."""

    def __init__(self, most: int, size: Callable[[T], int] = lambda value: 1):
        self._most, self._size, self._used = most, size, 0
        self._values: OrderedDict[bytes, T] = OrderedDict()  # the least recently used value first
        self._lock = threading.Lock()

    def get(self, key: bytes) -> T | None:
        """Return the value of this key, or None."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: bytes, value: T) -> None:
        """Store a value, and evict the least recently used values if the cache is full."""
        with self._lock:
            self._forget(key)
            if (size := self._size(value)) <= self._most:
                self._values[key] = value
                self._used += size
                while self._used > self._most:
                    self._forget(next(iter(self._values)))

    def take(self, key: bytes) -> T | None:
        """Remove the value of this key and return it, or None."""
        with self._lock:
            return self._forget(key)

    def _forget(self, key: bytes) -> T | None:
        value = self._values.pop(key, None)
        self._used -= 0 if value is None else self._size(value)
        return value


def image_cache(memory: int = MEMORY) -> LRUCache[Image]:
    """Return a cache of recently decoded images, by digests of their pixels.

    Args:
        memory: bytes of pixels
    """
    return LRUCache(memory, lambda image: image.pixels.nbytes)


@dataclass(eq=False)
class ImageLoader:
    """Reads an image again when the tower needs its tiles.

    Attributes:
        value: the content of its file, a place to read it from, or its pixels
        digest: digest of the image's pixels; reading the image again must return the same pixels
        tiles: number of tiles
        rows: rows per tile
        recent: cache of recently decoded images
    """

    processor: Processor
    reader: Reader
    value: Any
    digest: bytes
    tiles: int
    rows: int
    recent: LRUCache[Image]

    def image(self) -> Image:
        """Return the image. Raise InputError if it has changed or cannot be read any more."""
        image = self.recent.take(self.digest)
        if image is None:
            image = self.reader.read(self.value.read() if isinstance(self.value, Blob) else self.value).image
        if image.digest != self.digest:
            message = "the image has changed since it was first read"
            raise InputError(message, field="image", remedy="do not change it before the answer arrives")
        return image

    def store_in(self, blobs: BlobStore) -> None:
        """Move the content of its file, if it has one, into a blob store."""
        if isinstance(self.value, bytes):
            self.value = blobs.put(self.value)

    def __call__(self) -> np.ndarray:
        """Return its tiles, float32 [tiles, 3, height, width]. Raise InputError as `image` does."""
        return self.processor.tiles(self.image())


def image_inputs(
    checkpoint: Checkpoint, tower: TowerConfig, tokenizer: Tokenizer | None, table: MediaTable | None, **options: Any
) -> ImageInputs | None:
    """Return the ImageInputs of a checkpoint with this tower, or None without a tokenizer.

    Args:
        table: None for a new one
        options: as for `reader_of`
    """
    if tokenizer is None:
        return None
    table = MediaTable() if table is None else table
    return ImageInputs(load_processor(checkpoint, tower, tokenizer), tokenizer, table, reader_of(**options))


@dataclass(frozen=True)
class ImageInputs:
    """Reads the images of items and puts them into prompts.

    Attributes:
        table: finds images by the ids of their rows
        most: maximum number of images of one item
        recent: cache of recently decoded images
        files: summaries of recently decoded files. A file that occurs again, in a prompt or in a job, is not decoded
            again
        blobs: stores the files of images that were part of items
        seconds: decoding time for all images of an item together; None: each image has the decoder's limit
        salt_prefix: images are shared only with requests of the same prefix, not even when they are read; "": with all
    """

    processor: Processor
    tokenizer: Tokenizer
    table: MediaTable
    reader: Reader = field(default_factory=Reader)
    most: int = 64
    recent: LRUCache[Image] = field(default_factory=image_cache)
    files: LRUCache[ImageSummary] = field(default_factory=lambda: LRUCache(FILES))
    blobs: BlobStore = field(default_factory=BlobStore)
    seconds: float | None = None
    salt_prefix: str = ""

    def with_reader(self, **options: Any) -> ImageInputs:
        """Return these inputs with another reader. Options are as for `reader_of`."""
        return replace(self, reader=reader_of(**options))

    def for_clients(self, files: Callable[[str], Path | None] | None = None, salt_prefix: str = "") -> ImageInputs:
        """Return these inputs for clients of a server.

        Clients cannot read this machine's files by path. All images of an item together may use the decoder for as long
        as one image.

        Args:
            files: returns the path of an uploaded file by its id
            salt_prefix: prefix of the salts of the clients' requests
        """
        reader = replace(self.reader, paths=False, folder=None, files=files)
        return replace(self, reader=reader, seconds=reader.decoder.limits.seconds, salt_prefix=salt_prefix)

    def replica_images(self) -> ReplicaImages:
        """Return a ReplicaImages for the images that the driver of a fleet sends to this replica."""
        return ReplicaImages(self.table, self.processor)

    @cached_property
    def escaping(self) -> EscapingEncoder:
        """Return an encoder that encodes image tokens in users' texts as plain text."""
        return self.tokenizer.escaping_only(self.processor.special)

    def read(self, values: Sequence[tuple[Any, str]]) -> list[Picture]:
        """Return the images of an item. Raise InputError for too many images or the first unreadable one.

        Args:
            values: (value, name of its field) of each image
        """
        if len(values) > self.most:
            field = values[self.most][1]
            message = f"there are {len(values)} images; {self.most} are allowed"
            raise InputError(message, field=field, remedy="give fewer", code="image_count")
        budget = None if self.seconds is None else DecodeBudget(self.seconds)
        return [self._picture(value, field, budget) for value, field in values]

    def _picture(self, value: Any, field: str, budget: DecodeBudget | None) -> Picture:
        # A file's pixels are stored only briefly, because they need about ten times its memory.
        source, again = self.reader.source(value, field)
        summary = ImageSummary.of(source) if isinstance(source, Image) else self._summary(source, field, budget)
        layout = self.processor.layout(summary.height, summary.width)
        rows = layout.rows or self.processor.rows_per_tile
        load = ImageLoader(self.processor, self.reader, again, summary.digest, layout.tiles, rows, self.recent)
        return Picture(
            (summary.height, summary.width), self.processor.key(summary.digest), load, field, summary.animated
        )

    def _summary(self, data: bytes, field: str, budget: DecodeBudget | None) -> ImageSummary:
        """Return the summary of the image in a file. Only files that were not seen recently are decoded."""
        # The prefix is part of the digest. Else decoding times would tell one tenant which files another has sent.
        digest = hashlib.blake2b(f"{self.salt_prefix}\0".encode("utf-8", "surrogatepass"), digest_size=16)
        digest.update(data)
        summary = self.files.get(key := digest.digest())
        if summary is None:
            decoded = self.reader.decoder.decode(data, field, budget)
            self.recent.put(decoded.image.digest, decoded.image)
            self.files.put(key, summary := ImageSummary.of(decoded.image, decoded.animated))
        return summary

    def encode(
        self,
        text: str,
        pictures: Sequence[Picture],
        salt: str,
        field: str,
        encode: Callable[[str], np.ndarray] | None = None,
    ) -> tuple[np.ndarray, tuple[Medium, ...]]:
        """Return (ids of a text with each placeholder replaced by its image's rows, int32 [n]; the images' media).

        Raise InputError if the numbers of placeholders and images differ.

        Args:
            encode: an encoder for texts that are escaped in another way than `escaping` does
        """
        processor = self.processor
        expanded = processor.expand(text, [picture.size for picture in pictures])
        ids = (encode or self.escaping.encode)(expanded)
        salt = within(self.salt_prefix, salt)
        media = tuple(self._medium(picture, salt) for picture in pictures)
        at = np.flatnonzero(ids == processor.image_token_id)
        rows = np.concatenate([np.empty(0, np.int32), *(medium.ids for medium in media)])
        if len(at) != len(rows):
            raise InputError(
                f"{field!r} has {len(at)} tokens {processor.image_token}, but its images have {len(rows)} rows",
                field=field,
                remedy="leave these tokens out of the chat template",
                code="image_count",
            )
        ids[at] = rows
        return ids, media

    def _medium(self, picture: Picture, salt: str) -> Medium:
        """Return the medium of an image for requests with this salt."""
        load = picture.load
        shape = {"tiles": load.tiles, "rows_per_tile": load.rows, "span": load.processor.span}
        medium = self.table.medium(picture.key, load=load, salt=salt, **shape)
        if medium.load is load:  # else the medium has the loader of an earlier item
            load.store_in(self.blobs)
        return medium

    def encode_pictured(self, text: str, pictures: Sequence[Picture], field: str, salt: str = "") -> ImageIds:
        """Return the ids of a text with images, without special tokens around it.

        In a text without placeholders, all images come first.
        """
        placeholder = self.processor.placeholder
        text = text if placeholder in text else placeholder * len(pictures) + text
        return ImageIds.of(*self.encode(text, pictures, salt, field))

    def media_of(self, tokens: np.ndarray, field: str) -> tuple[Medium, ...]:
        """Return the media with rows among these ids. Raise InputError for an image that truncation has cut."""
        media = tuple(self.table.find(tokens[tokens >= MEDIA_BASE]))
        for medium in media:
            if not np.isin(medium.ids, tokens).all():
                raise too_long(field)
        return media

    def wants_parts(self, template: str) -> bool:
        """Return whether a chat template accepts contents only as lists of parts, not as strings."""
        return "is string" not in template and re.search(r"\[.type.\]|\.type\b", template) is not None
