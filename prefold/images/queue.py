"""Which requests of a generator wait for rows of images. No torch."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import numpy as np

from ..prefix import MEDIA_BASE
from ..schedule.generate_step import Running
from ..types import Medium
from .desk import ImageDesk
from .pace import TowerPace

__all__ = ["ImageQueue"]


class ImageQueue:
    """An ImageQueue knows which requests have rows of images, and asks for those that sequences need next.

    desk  sees to it that the worker has the rows
    """

    def __init__(self, desk: ImageDesk):
        self.desk = desk
        self._pace = TowerPace()
        self._was_busy = False  # whether an image was on its way before the last step
        self._keys: set[Hashable] = set()  # requests that have rows of images
        self._waiting: dict[int, list[Hashable]] = {}  # requests that an image holds up, by its first id

    def add(self, key: Hashable, tokens: np.ndarray) -> None:
        """Takes note of a request, where there are rows of images in its prompt."""
        if tokens.max() >= MEDIA_BASE:
            self._keys.add(key)

    def discard(self, key: Hashable) -> None:
        """Forgets a request."""
        self._keys.discard(key)

    def want(self, running: Collection[Running]) -> tuple[bool, list[Hashable]]:
        """Notes which images have rows that running sequences need next. Returns whether one has to be encoded, and the
        requests whose image nobody holds any more."""
        if not (self._keys or self._waiting):
            return False, []
        waiting: dict[int, list[Hashable]] = {}
        asked: list[list[Medium]] = []
        lost: dict[Hashable, None] = {}
        for sequence in running:
            if sequence.ready or sequence.key not in self._keys or sequence.key in lost:
                continue
            try:
                found = self.desk.media.find(_image_rows(sequence))
            except LookupError:
                lost[sequence.key] = None
                continue
            asked.append(found)
            for medium in found:
                waiting.setdefault(int(medium.ids[0]), []).append(sequence.key)
        self._waiting = waiting
        return self.desk.want_next(self, asked), list(lost)

    def seconds_after(self, rows: int, seconds: float) -> float:
        """Takes note of a step of so many rows, and returns for how many seconds the tower may run after it."""
        disturbed, self._was_busy = self._was_busy, self.desk.is_busy
        return self._pace.seconds_after(rows, seconds, disturbed=disturbed or self._was_busy)

    def encode(self, seconds: float, *, idle: bool) -> tuple[list[Hashable], str]:
        """Runs the tower for about so many seconds. Returns the requests that need an image which it failed for, and
        why it did. idle: whether nobody else has anything to do meanwhile."""
        failed = self.desk.advance(self, seconds, idle=idle)
        if failed is None:
            return [], ""
        medium, why = failed
        return list(dict.fromkeys(self._waiting.get(int(medium.ids[0]), ()))), why


def _image_rows(sequence: Running) -> np.ndarray:
    """Returns the ids of the rows of images that have to be computed for a sequence's prompt: where none of its rows
    is missing, of the last one, which runs again."""
    path = sequence.leaf.path()
    pending = [np.asarray(node.tokens[node.computed :]) for node in path if node.pending]
    ids = np.concatenate(pending) if pending else np.asarray(path[-1].tokens[-1:])
    return ids[ids >= MEDIA_BASE]
