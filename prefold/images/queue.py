"""What images add to an engine: which requests wait for rows of images, and when the tower runs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..errors import InputError
from ..prefix import MEDIA_BASE
from ..schedule.generate_step import Running
from ..schedule.parts import EnginePart
from ..types import Medium
from .desk import ImageDesk
from .pace import TowerPace

# How long the tower runs at a time where nobody else could.
IDLE_SECONDS = 0.25


class ImageQueue(EnginePart):
    """An ImageQueue is the part of an engine whose model sees images: it knows which requests have rows of images, and
    asks for those that sequences need next.

    desk  sees to it that the worker has the rows
    """

    def __init__(self, desk: ImageDesk):
        self.desk, self.held = desk, desk.held
        self._pace = TowerPace()
        self._was_busy = False  # whether an image was on its way before the last step
        self._keys: set[Hashable] = set()  # requests that have rows of images
        self._waiting: dict[int, list[Hashable]] = {}  # requests that an image holds up, by its first id

    def set_tenants(self, tenant_of: Callable[[Hashable], Hashable]) -> None:
        self.desk.set_tenants(tenant_of)

    def using(self, tokens: np.ndarray) -> AbstractContextManager[None]:
        return self.desk.using(tokens)

    def submit(self, request: Any) -> Mapping[str, Any]:
        if request.request.tokens.max() >= MEDIA_BASE:
            self._keys.add(request.key)
        return {}

    def forget(self, key: Hashable) -> None:
        self._keys.discard(key)

    def before_plan(self, scheduler: Any, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Notes which images have rows that running sequences need next. Those whose image nobody holds any more cannot
        go on."""
        self.is_waiting = False
        if not (self._keys or self._waiting):
            return {}
        self.desk.media.watch(scheduler.tree)
        waiting: dict[int, list[Hashable]] = {}
        asked: list[list[Medium]] = []
        lost: dict[Hashable, Exception] = {}
        for sequence in scheduler.running:
            if sequence.ready or sequence.key not in self._keys or sequence.key in lost:
                continue
            try:
                found = self.desk.media.find(_image_rows(sequence))
            except LookupError:
                lost[sequence.key] = _failure("nobody holds it any more")
                continue
            asked.append(found)
            for medium in found:
                waiting.setdefault(int(medium.ids[0]), []).append(sequence.key)
        self._waiting = waiting
        self.is_waiting = self.desk.want_next(self, asked)
        return lost

    def after_plan(self, rows: int | None, seconds: float) -> Mapping[Hashable, Exception]:
        """Runs the tower where an image is waited for: for about as long as its pace says after a step. Requests cannot
        go on that need an image which it failed for."""
        allowed = IDLE_SECONDS if rows is None else self.seconds_after(rows, seconds)
        failed = self.desk.advance(self, allowed, idle=rows is None) if self.is_waiting else None
        if failed is None:
            return {}
        medium, why = failed
        return {key: _failure(why) for key in self._waiting.get(int(medium.ids[0]), ())}

    def seconds_after(self, rows: int, seconds: float) -> float:
        """Takes note of a step of so many rows, and returns for how many seconds the tower may run after it."""
        disturbed, self._was_busy = self._was_busy, self.desk.is_busy
        return self._pace.seconds_after(rows, seconds, disturbed=disturbed or self._was_busy)


def _failure(why: str) -> InputError:
    return InputError(f"an image cannot be encoded: {why}", field="image", code="image_failed")


def _image_rows(sequence: Running) -> np.ndarray:
    """Returns the ids of the rows of images that have to be computed for a sequence's prompt: where none of its rows
    is missing, of the last one, which runs again."""
    path = sequence.leaf.path()
    pending = [np.asarray(node.tokens[node.computed :]) for node in path if node.pending]
    ids = np.concatenate(pending) if pending else np.asarray(path[-1].tokens[-1:])
    return ids[ids >= MEDIA_BASE]
