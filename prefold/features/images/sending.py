"""Send images to replicas: the pixels of each image once, while the replica has requests with it.

In a job's prompts an image is a range of ids of the driver's `MediaTable`. A replica has its own table with other ids
for the same image, and replaces the driver's ids by its own. So its cache never depends on a driver's id that was freed
and now means another image.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...cluster.replicas import place_of
from ...engine.cache import CacheEvents
from ...engine.cache.events import RowsStored
from ...errors import InputError
from ...spec.requests import Medium
from ...trie import MEDIA_BASE, Window
from .decode import Image
from .processor import Processor
from .steps import first_id


@dataclass(frozen=True, eq=False, slots=True)
class SentImage:
    """An image as it is sent to a replica."""

    key: bytes  # the key of the Medium
    salt: str  # the salt of the Medium
    ids: np.ndarray  # int32 [rows]: the ids of the image's rows in the prompts that are sent
    pixels: np.ndarray | None  # uint8 [height, width, 3]; None: the image cannot be read
    error: str = ""  # why the image cannot be read


class SentImages:
    """The driver's record of which images each replica has, and which of its requests need them.

    Args:
        table: the job's MediaTable
    """

    def __init__(self, table: Any):
        self._table = table
        # By replica: its media by first id, the number of its requests with each, and the first ids of each request.
        self._held: dict[str, dict[int, Medium]] = {}
        self._users: dict[str, Counter[int]] = {}
        self._shown: dict[str, dict[tuple[int, int], list[int]]] = {}

    def send(self, name: str, windows: Sequence[Window]) -> tuple[list[Window], list[SentImage], list[int]]:
        """Record that these windows are sent to a replica.

        Return (the windows in the form to be sent, the images that it lacks, the first ids of images that it no longer
        needs).
        """
        media_held, users = self._held.setdefault(name, {}), self._users.setdefault(name, Counter())
        shown = self._shown.setdefault(name, {})
        fresh: list[Medium] = []
        for window in windows:
            if not (window.tokens >= MEDIA_BASE).any():
                continue
            for number, tag in enumerate(window.tags):
                tokens = window.tokens[window.offsets[number] : window.offsets[number + 1]]
                ids = tokens[tokens >= MEDIA_BASE]
                if not len(ids):
                    continue
                media = self._table.find(ids)
                shown[place_of(tag)] = firsts = [first_id(medium) for medium in media]
                users.update(firsts)
                for medium in media:
                    if first_id(medium) not in media_held:
                        media_held[first_id(medium)] = medium
                        fresh.append(medium)
        unneeded = [first for first in media_held if not users[first]]
        for first in unneeded:
            del media_held[first], users[first]
        return [replace(window, media=()) for window in windows], [_picture(medium) for medium in fresh], unneeded

    def answered(self, name: str, number: int, place: int) -> None:
        """Record that a replica has answered a request of a lease, which no longer needs its images."""
        firsts = self._shown.get(name, {}).pop((number, place), ())
        if firsts:
            self._users[name].subtract(firsts)

    def lose(self, name: str) -> None:
        """Record that a replica is lost or restarts, and so has no images."""
        for book in (self._held, self._users, self._shown):
            book.pop(name, None)


def _picture(medium: Medium) -> SentImage:
    """Return an image with its pixels, or with the reason why they cannot be read."""
    load: Any = medium.load  # an `ImageLoader`, as for all images of a job
    try:
        return SentImage(medium.key, medium.salt, medium.ids, load.image().pixels)
    except InputError as error:
        return SentImage(medium.key, medium.salt, medium.ids, None, str(error))


def _tiles(processor: Processor, picture: SentImage) -> np.ndarray:
    """Return the tiles of an image that a replica received."""
    if picture.pixels is None:
        raise InputError(picture.error, field="image")
    return processor.tiles(Image(picture.pixels))


class ReplicaImages:
    """The images that a replica received. It replaces the driver's ids for them by the replica's.

    Any thread may use it, because images do not arrive in the engine's thread.

    Args:
        table: the MediaTable of the replica's engine
        processor: the processor of the replica's model
    """

    def __init__(self, table: Any, processor: Processor):
        self._table, self._processor = table, processor
        self._media: dict[int, Medium] = {}  # the replica's media, by the driver's first id
        self._driver_ids: dict[int, int] = {}  # the driver's first id, by the replica's first id
        self._lock = threading.Lock()

    def hold(self, pictures: Iterable[SentImage], dropped: Iterable[int]) -> None:
        """Add images and drop others.

        Args:
            dropped: the driver's first ids
        """
        with self._lock:
            for first in dropped:
                medium = self._media.pop(first)
                if self._driver_ids.get(first_id(medium)) == first:
                    del self._driver_ids[first_id(medium)]
            for picture in pictures:
                tiles = 1 + int(np.count_nonzero(np.diff(picture.ids) != 1))  # one id between two tiles is unused
                shape = {"tiles": tiles, "rows_per_tile": len(picture.ids) // tiles, "span": self._processor.span}
                load = partial(_tiles, self._processor, picture)
                medium = self._table.medium(picture.key, load=load, salt=picture.salt, **shape)
                self._media[int(picture.ids[0])] = medium
                self._driver_ids[first_id(medium)] = int(picture.ids[0])

    def clear(self) -> None:
        """Drop all images."""
        with self._lock:
            self._media, self._driver_ids = {}, {}

    def own(self, window: Window) -> Window:
        """Return a window with this replica's ids, and with the images of its requests."""
        if not (window.tokens >= MEDIA_BASE).any():
            return window
        with self._lock:
            media = dict(self._media)
        moves = {
            first: (first_id(medium), first + int(medium.ids[-1]) - first_id(medium)) for first, medium in media.items()
        }
        tokens, firsts = _moved(window.tokens, moves)
        return replace(window, tokens=tokens, media=tuple(media[first] for first in firsts))

    def translated(self, events: CacheEvents) -> CacheEvents:
        """Return cache events with the driver's ids for the images that this replica has.

        Other images keep this replica's ids. The router then finds nothing under them, or at worst expects more cached
        rows of a prompt than there are.
        """
        with self._lock:
            theirs = {first: (own, int(self._media[own].ids[-1])) for first, own in self._driver_ids.items()}
        if not theirs:
            return events
        changed = (
            replace(event, tokens=_moved(event.tokens, theirs)[0]) if isinstance(event, RowsStored) else event
            for event in events.events
        )
        return replace(events, events=tuple(changed))


def _moved(tokens: np.ndarray, moves: Mapping[int, tuple[int, int]]) -> tuple[np.ndarray, list[int]]:
    """Return (tokens with other ids for the rows of images, the old first ids of these images).

    Args:
        moves: {first id of an image: (its new first id, its old last id)}. Other images keep their ids
    """
    at = np.flatnonzero(tokens >= MEDIA_BASE)
    if not len(at):
        return tokens, []
    firsts = np.array(sorted(moves), np.int64)
    new, last = np.array([moves[first] for first in firsts.tolist()], np.int64).reshape(-1, 2).T
    place = np.maximum(0, np.searchsorted(firsts, tokens[at], side="right") - 1)
    is_image = (tokens[at] >= firsts[place]) & (tokens[at] <= last[place])
    at, place, tokens = at[is_image], place[is_image], tokens.copy()
    tokens[at] += (new - firsts)[place].astype(tokens.dtype)
    return tokens, firsts[np.unique(place)].tolist()
