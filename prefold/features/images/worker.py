"""Rows of images in a worker: the tower computes them a few pieces at a time; steps use them instead of embeddings.

No torch.
"""

from __future__ import annotations

from typing import Generic

import numpy as np

from ...engine.worker import DONE, CompletedTicket, Ticket, Worker
from ...model import MediaRows
from ...trie import MEDIA_BASE
from ...worker.arrays import Array, Arrays
from ...worker.parts import WorkerPart
from .steps import DropImages, EncodedImage, EncodeImage, ImageFacts
from .tower import Tower, TowerAttend, TowerPass


class ImageRows(Generic[Array]):
    """The rows of encoded images, and the passes of images in progress, by first id."""

    def __init__(self, tower: Tower[Array]):
        self._tower: Tower[Array] = tower
        self._attend: TowerAttend[Array] = TowerAttend(tower.executor)
        self._arrays: Arrays[Array] = tower.executor.arrays
        self._runs: dict[int, TowerPass[Array]] = {}
        self._images: dict[int, tuple[np.ndarray, Array]] = {}
        self._firsts = np.empty(0, np.int64)

    def encode(self, message: EncodeImage) -> EncodedImage:
        """Continue the tower's work on an image. A failure is returned, not raised.

        The image's rows are NaN then, so that a request that reads them gets an error.
        """
        first = int(message.ids[0])
        if message.tiles is None and first not in self._runs and first in self._images:
            return EncodedImage(True)
        try:
            if not self._go_on(first, message):
                return EncodedImage(False)
            error = None
        except Exception as problem:
            rows = np.full((len(message.ids), self._tower.config.output), np.nan, np.float32)
            self._enter(first, message.ids, self._arrays.cast(self._arrays.send(rows), self._tower.executor.dtype))
            error = f"{type(problem).__name__}: {problem}"
        self._runs.pop(first, None)
        return EncodedImage(True, error)

    def drop(self, firsts: tuple[int, ...]) -> None:
        """Drop the rows and the passes of these images."""
        for first in firsts:
            self._runs.pop(first, None)
            self._images.pop(first, None)
        self._firsts = np.array(sorted(self._images), np.int64)

    def rows(self, tokens: np.ndarray) -> MediaRows[Array] | None:
        """Return the rows of images for a step's rows with these ids, or None if there are none.

        Raise ValueError for rows of an image that is not encoded.
        """
        at = np.flatnonzero(tokens >= MEDIA_BASE)
        if not len(at):
            return None
        ids = tokens[at]
        images, image_of = np.unique(np.searchsorted(self._firsts, ids, side="right") - 1, return_inverse=True)
        index, parts, start = np.empty(len(ids), np.int64), list[Array](), 0
        for number, image in enumerate(images.tolist()):
            of_image = image_of == number
            if image < 0 or ids[of_image].max() > (entry := self._images[int(self._firsts[image])])[0][-1]:
                raise ValueError("a step has rows of an image that is not encoded")
            image_ids, rows = entry
            index[of_image] = start + np.searchsorted(image_ids, ids[of_image])
            parts.append(rows)
            start += len(rows)
        arrays = self._arrays
        values = parts[0] if len(parts) == 1 else arrays.join(parts)
        return MediaRows(arrays.send(at), arrays.take(values, arrays.send(index)))

    def _go_on(self, first: int, message: EncodeImage) -> bool:
        """Do the work of a message, and return whether the image's rows are available."""
        tower = self._tower
        if message.tiles is not None:
            self._runs[first] = tower.start(self._arrays.send(message.tiles), self._attend)
        run = self._runs[first]
        if not tower.go_on(run, message.stop):
            return False
        rows = tower.finish(run)
        if len(rows) != len(message.ids):
            raise ValueError(f"the tower made {len(rows)} rows of an image that needs {len(message.ids)}")
        (numbers,) = self._arrays.fetch(self._arrays.float32(rows))()
        if not np.isfinite(numbers).all():
            raise ValueError("the tower's results are not finite numbers")
        self._enter(first, message.ids, rows)
        return True

    def _enter(self, first: int, ids: np.ndarray, rows: Array) -> None:
        self._images[first] = ids, rows
        self._firsts = np.array(sorted(self._images), np.int64)


def image_part(tower: Tower[Array]) -> WorkerPart:
    """Return the worker part with a tower and the rows of images."""
    images = ImageRows(tower)

    def encode(worker: Worker, message: EncodeImage) -> Ticket:
        encoded = images.encode(message)
        tower.executor.wait()  # the engine measures how long the work takes
        return CompletedTicket(encoded)

    def drop(worker: Worker, message: DropImages) -> Ticket:
        images.drop(message.firsts)
        return DONE

    facts = ImageFacts(tower.config, tower.config.output * tower.executor.table.itemsize)
    return WorkerPart({EncodeImage: encode, DropImages: drop}, facts, images.rows, varies="the rows of images")
