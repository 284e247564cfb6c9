"""Reads the images of items, and puts their rows into prompts."""

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
    """An ImageSummary describes an image without its pixels: their digest, its size, and whether it is the first frame
    of several."""

    height: int
    width: int
    digest: bytes
    animated: bool

    @classmethod
    def of(cls, image: Image, animated: bool = False) -> ImageSummary:
        return cls(image.height, image.width, image.digest, animated)


class LRUCache(Generic[T]):
    """An LRUCache is a least-recently-used cache, whose values' sizes sum to `most` at most. Any thread may use it."""

    def __init__(self, most: int, size: Callable[[T], int] = lambda value: 1):
        self._most, self._size, self._used = most, size, 0
        self._values: OrderedDict[bytes, T] = OrderedDict()  # the least recently used value first
        self._lock = threading.Lock()

    def get(self, key: bytes) -> T | None:
        """Returns the value with this key, or None."""
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
                self._used += size
                while self._used > self._most:
                    self._forget(next(iter(self._values)))

    def take(self, key: bytes) -> T | None:
        """Removes the value with this key and returns it, or None."""
        with self._lock:
            return self._forget(key)

    def _forget(self, key: bytes) -> T | None:
        value = self._values.pop(key, None)
        self._used -= 0 if value is None else self._size(value)
        return value


def image_cache(memory: int = MEMORY) -> LRUCache[Image]:
    """Returns a cache of the images that were decoded last, by the digests of their pixels. memory: bytes of pixels"""
    return LRUCache(memory, lambda image: image.pixels.nbytes)


@dataclass(eq=False)
class ImageLoader:
    """An ImageLoader reads an image again when a tower needs its tiles.

    value   the content of its file, the place of that content, or its pixels
    digest  of its pixels; reading it again must give the same
    tiles   how many it has
    rows    how many rows each becomes
    recent  the images that were decoded last
    """

    processor: Processor
    reader: Reader
    value: Any
    digest: bytes
    tiles: int
    rows: int
    recent: LRUCache[Image]

    def image(self) -> Image:
        """Returns the image. Raises InputError if it has changed, or cannot be read any more."""
        image = self.recent.take(self.digest)
        if image is None:
            image = self.reader.read(self.value.read() if isinstance(self.value, Blob) else self.value).image
        if image.digest != self.digest:
            message = "the image has changed since it was first read"
            raise InputError(message, field="image", remedy="leave it as it is until the answer is there")
        return image

    def store_in(self, blobs: BlobStore) -> None:
        """Moves the content of its file into a blob store, if it has one."""
        if isinstance(self.value, bytes):
            self.value = blobs.put(self.value)

    def __call__(self) -> np.ndarray:
        """Returns its tiles, float32 [tiles, 3, height, width]. Raises InputError as `image` does."""
        return self.processor.tiles(self.image())


def image_inputs(
    checkpoint: Checkpoint, tower: TowerConfig, tokenizer: Tokenizer | None, table: MediaTable | None, **options: Any
) -> ImageInputs | None:
    """Returns the ImageInputs of a checkpoint with this tower; None if it has no tokenizer. table: None for a new one;
    options: those of `reader_of`"""
    if tokenizer is None:
        return None
    table = MediaTable() if table is None else table
    return ImageInputs(load_processor(checkpoint, tower, tokenizer), tokenizer, table, reader_of(**options))


@dataclass(frozen=True)
class ImageInputs:
    """An ImageInputs reads the images of items, and gives them their place in prompts.

    table        knows images by the ids of their rows
    most         images that one item may have
    recent       the images that were decoded last
    files        summaries of the files that were decoded last, so that a file which comes again, as in each prompt of a
                 record or each record of a job, is not decoded again
    blobs        holds the files of images that came within items
    seconds      that decoding all images of an item may take; None: each may take what the decoder allows
    salt_prefix  nothing of these images is shared outside of it, not even where they are read from; "": none
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
        """Returns these inputs with another reader, as of `reader_of`."""
        return replace(self, reader=reader_of(**options))

    def for_clients(self, files: Callable[[str], Path | None] | None = None, salt_prefix: str = "") -> ImageInputs:
        """Returns these inputs for clients of a server: they cannot read this machine's files by path, nor occupy the
        decoder for longer with many images than with one. files: returns the path of an uploaded file by its id;
        salt_prefix: of the clients' requests"""
        reader = replace(self.reader, paths=False, folder=None, files=files)
        return replace(self, reader=reader, seconds=reader.decoder.limits.seconds, salt_prefix=salt_prefix)

    def replica_images(self) -> ReplicaImages:
        """Returns the ReplicaImages for what the driver of a fleet sends to this replica."""
        return ReplicaImages(self.table, self.processor)

    @cached_property
    def escaping(self) -> EscapingEncoder:
        """Returns an encoder of texts in which image tokens that users write stay plain text."""
        return self.tokenizer.escaping_only(self.processor.special)

    def read(self, values: Sequence[tuple[Any, str]]) -> list[Picture]:
        """Returns the images of an item. values: (value, its field) of each. Raises InputError for the first that
        cannot be read, and for too many."""
        if len(values) > self.most:
            field = values[self.most][1]
            message = f"there are {len(values)} images; {self.most} are allowed"
            raise InputError(message, field=field, remedy="give fewer", code="image_count")
        budget = None if self.seconds is None else DecodeBudget(self.seconds)
        return [self._picture(value, field, budget) for value, field in values]

    def _picture(self, value: Any, field: str, budget: DecodeBudget | None) -> Picture:
        # A file's pixels are not kept for long: they take ten times its memory.
        source, again = self.reader.source(value, field)
        summary = ImageSummary.of(source) if isinstance(source, Image) else self._summary(source, field, budget)
        layout = self.processor.layout(summary.height, summary.width)
        rows = layout.rows or self.processor.rows_per_tile
        load = ImageLoader(self.processor, self.reader, again, summary.digest, layout.tiles, rows, self.recent)
        return Picture(
            (summary.height, summary.width), self.processor.key(summary.digest), load, field, summary.animated
        )

    def _summary(self, data: bytes, field: str, budget: DecodeBudget | None) -> ImageSummary:
        """Returns the summary of the image in a file, which is decoded unless it was among the last files."""
        # The prefix is hashed too, or the time that this takes would tell one tenant what another has sent.
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
        """Returns the ids of a text, int32 [n], with the rows of an image in place of each placeholder, and the images'
        media. encode: encodes a text that was escaped in another way than by `escaping`. Raises InputError where there
        are not as many placeholders as images."""
        processor = self.processor
        expanded = processor.expand(text, [picture.size for picture in pictures])
        ids = (encode or self.escaping.encode)(expanded)
        salt = within(self.salt_prefix, salt)
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
        shape = {"tiles": load.tiles, "rows_per_tile": load.rows, "span": load.processor.span}
        medium = self.table.medium(picture.key, load=load, salt=salt, **shape)
        if medium.load is load:  # else the medium has a loader from an earlier item
            load.store_in(self.blobs)
        return medium

    def encode_pictured(self, text: str, pictures: Sequence[Picture], field: str, salt: str = "") -> ImageIds:
        """Returns the ids of a text with images; no special tokens are put around it. A text without placeholders comes
        behind its images."""
        placeholder = self.processor.placeholder
        text = text if placeholder in text else placeholder * len(pictures) + text
        return ImageIds.of(*self.encode(text, pictures, salt, field))

    def media_of(self, tokens: np.ndarray, field: str) -> tuple[Medium, ...]:
        """Returns the media that have rows among these ids. Raises InputError for an image that was cut with the
        text."""
        media = tuple(self.table.find(tokens[tokens >= MEDIA_BASE]))
        for medium in media:
            if not np.isin(medium.ids, tokens).all():
                raise too_long(field)
        return media

    def wants_parts(self, template: str) -> bool:
        """Returns whether a chat template takes contents as lists of parts only, and no texts."""
        return "is string" not in template and re.search(r"\[.type.\]|\.type\b", template) is not None
