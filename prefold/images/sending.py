"""Images on their way to replicas: the pixels of each once, as long as a replica has requests that show it.

In a job's prompts an image is ids out of the driver's `MediaTable`. A replica has a table of its own, in which the same
image has other ids, and puts those in their place: so what its cache holds never depends on which of the driver's ids
have become free and stand for another image by now.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..cache import CacheEvents
from ..cache.events import RowsStored
from ..cluster.replicas import place_of
from ..errors import InputError
from ..prefix import MEDIA_BASE
from ..stream import Window
from ..types import Medium
from .decode import Image
from .processor import Processor
from .steps import first_id


@dataclass(frozen=True, eq=False, slots=True)
class SentPicture:
    """A SentPicture is an image as it is sent to a replica.

    key, salt  as of its Medium
    ids        int32 [rows]: in the prompts that are sent they stand for it
    pixels     uint8 [height, width, 3]; None: they cannot be read
    error      why not
    """

    key: bytes
    salt: str
    ids: np.ndarray
    pixels: np.ndarray | None
    error: str = ""


class SentPictures:
    """A SentPictures knows which images each replica holds, and which of its requests need them. table: the MediaTable
    of the job."""

    def __init__(self, table: Any):
        self._table = table
        # By replica: the media that it holds, how many of its requests show each, and the media of each request.
        self._held: dict[str, dict[int, Medium]] = {}
        self._users: dict[str, Counter[int]] = {}
        self._shown: dict[str, dict[tuple[int, int], list[int]]] = {}

    def send(self, name: str, windows: Sequence[Window]) -> tuple[list[Window], list[SentPicture], list[int]]:
        """Books that a replica is given these windows. Returns (the windows as they are sent, the images that it does
        not hold, the first ids of those that it need not hold any more)."""
        held, users = self._held.setdefault(name, {}), self._users.setdefault(name, Counter())
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
                    if first_id(medium) not in held:
                        held[first_id(medium)] = medium
                        fresh.append(medium)
        gone = [first for first in held if not users[first]]
        for first in gone:
            del held[first], users[first]
        return [replace(window, media=()) for window in windows], [_picture(medium) for medium in fresh], gone

    def answered(self, name: str, number: int, place: int) -> None:
        """Notes that a replica has answered a request of a lease, and needs its images no more for it."""
        firsts = self._shown.get(name, {}).pop((number, place), ())
        if firsts:
            self._users[name].subtract(firsts)

    def lose(self, name: str) -> None:
        """Notes that a replica is gone, or begins anew: it holds nothing."""
        for book in (self._held, self._users, self._shown):
            book.pop(name, None)


def _picture(medium: Medium) -> SentPicture:
    """Returns what a replica needs of an image: pixels, or why they cannot be read."""
    load: Any = medium.load  # a `Loading`, as all images of a job have
    try:
        return SentPicture(medium.key, medium.salt, medium.ids, load.image().pixels)
    except InputError as error:
        return SentPicture(medium.key, medium.salt, medium.ids, None, str(error))


def _tiles(processor: Processor, picture: SentPicture) -> np.ndarray:
    """Returns the tiles of an image that a replica was sent."""
    if picture.pixels is None:
        raise InputError(picture.error, field="image")
    return processor.tiles(Image(picture.pixels))


class HeldPictures:
    """A HeldPictures holds the images that a replica was sent, and puts its own ids for them in the place of the
    driver's. Any thread may ask it: images come in another than that of the engine's steps.

    table      the MediaTable of the replica's engine
    processor  of its model
    """

    def __init__(self, table: Any, processor: Processor):
        self._table, self._processor = table, processor
        self._media: dict[int, Medium] = {}  # this replica's, by the driver's first id
        self._theirs: dict[int, int] = {}  # the driver's first id, by ours
        self._lock = threading.Lock()

    def hold(self, pictures: Iterable[SentPicture], gone: Iterable[int]) -> None:
        """Holds some images from now on, and others no more. gone: the driver's first ids."""
        with self._lock:
            for first in gone:
                medium = self._media.pop(first)
                if self._theirs.get(first_id(medium)) == first:
                    del self._theirs[first_id(medium)]
            rows, span = self._processor.rows_per_tile, self._processor.span
            for one in pictures:
                how = {"tiles": len(one.ids) // rows, "rows_per_tile": rows, "span": span, "salt": one.salt}
                medium = self._table.medium(one.key, load=partial(_tiles, self._processor, one), **how)
                self._media[int(one.ids[0])] = medium
                self._theirs[first_id(medium)] = int(one.ids[0])

    def clear(self) -> None:
        """Holds nothing more."""
        with self._lock:
            self._media, self._theirs = {}, {}

    def own(self, window: Window) -> Window:
        """Returns a window with this replica's ids, and with the images of its requests."""
        if not (window.tokens >= MEDIA_BASE).any():
            return window
        with self._lock:
            held = dict(self._media)
        moves = {
            first: (first_id(medium), first + int(medium.ids[-1]) - first_id(medium)) for first, medium in held.items()
        }
        tokens, firsts = _moved(window.tokens, moves)
        return replace(window, tokens=tokens, media=tuple(held[first] for first in firsts))

    def told(self, events: CacheEvents) -> CacheEvents:
        """Returns what a cache tells with the driver's ids of the images that are held. Others keep this replica's ids,
        by which a router does not find them, or at worst sends a prompt where less of it is held than it thinks."""
        with self._lock:
            theirs = {first: (other, int(self._media[other].ids[-1])) for first, other in self._theirs.items()}
        if not theirs:
            return events
        changed = (
            replace(event, tokens=_moved(event.tokens, theirs)[0]) if isinstance(event, RowsStored) else event
            for event in events.events
        )
        return replace(events, events=tuple(changed))


def _moved(tokens: np.ndarray, moves: Mapping[int, tuple[int, int]]) -> tuple[np.ndarray, list[int]]:
    """Returns tokens with other ids for the rows of images, and the first ids that these images had; ids of other
    images stay. moves: by an image's first id the first of those that take their place, and its last id"""
    at = np.flatnonzero(tokens >= MEDIA_BASE)
    if not len(at):
        return tokens, []
    firsts = np.array(sorted(moves), np.int64)
    new, last = np.array([moves[first] for first in firsts.tolist()], np.int64).reshape(-1, 2).T
    place = np.maximum(0, np.searchsorted(firsts, tokens[at], side="right") - 1)
    known = (tokens[at] >= firsts[place]) & (tokens[at] <= last[place])
    at, place, tokens = at[known], place[known], tokens.copy()
    tokens[at] += (new - firsts)[place].astype(tokens.dtype)
    return tokens, firsts[np.unique(place)].tolist()
