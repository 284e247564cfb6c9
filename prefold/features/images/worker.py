"""The rows of images on a worker: the tower computes them a few pieces at a time, and steps use them in place of
embeddings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...engine.worker import DONE, CompletedTicket, Ticket
from ...model import MediaRows
from ...model.device import send
from ...trie import MEDIA_BASE
from ...worker.attention import Heads, RowAttention, RowPlan
from ...worker.local import LocalWorker
from ...worker.parts import WorkerPart
from .steps import DropImages, EncodedImage, EncodeImage, ImageFacts
from .tower import Tower, TowerPass

MOST_PLANS = 256  # attention plans that are kept, one for each shape of queries and keys


class TowerAttend:
    """A TowerAttend is the `attend` of a tower: the interval attention of rows, in which each tile is one span."""

    def __init__(self, tower: Tower):
        config = tower.config
        self._attention = RowAttention(Heads(config.heads, config.heads, config.head_dim, tower.dtype), tower.device)
        self._patches, self._scale = config.patches, config.head_dim**-0.5
        self._plans: dict[tuple[int, int, int], RowPlan] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Returns attention of q, whose first row is row `start` of all, over k and v of all, shaped as q."""
        # Only the tiles that the queries are in count.
        low, high = start // self._patches * self._patches, -(-(start + len(q)) // self._patches) * self._patches
        k, v = k[low:high], v[low:high]
        shape = start - low, len(q), len(k)
        plan = self._plans.get(shape)
        if plan is None:
            every = np.arange(len(k))
            first = every - every % self._patches
            queries = every[start - low : start - low + len(q)]
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[shape] = self._attention.plan(first + self._patches, queries, first=first)
        return self._attention.attend(q, k, v, plan, scale=self._scale)


class ImageRows:
    """An ImageRows holds the rows of encoded images, and the passes of those that are being encoded, by first id."""

    def __init__(self, tower: Tower):
        self._tower, self._attend = tower, TowerAttend(tower)
        self._runs: dict[int, TowerPass] = {}
        self._images: dict[int, tuple[np.ndarray, Tensor]] = {}
        self._firsts = np.empty(0, np.int64)

    def encode(self, message: EncodeImage) -> EncodedImage:
        """Does more of the tower's work on an image. A failure is returned and not raised; the image's rows are NaN
        then, so that a request that reads them gets an error."""
        first = int(message.ids[0])
        if message.tiles is None and first not in self._runs and first in self._images:
            return EncodedImage(True)
        try:
            if not self._go_on(first, message):
                return EncodedImage(False)
            error = None
        except Exception as problem:
            rows = torch.full((len(message.ids), self._tower.config.output), torch.nan, dtype=self._tower.dtype)
            self._enter(first, message.ids, rows.to(self._tower.device))
            error = f"{type(problem).__name__}: {problem}"
        self._runs.pop(first, None)
        return EncodedImage(True, error)

    def drop(self, firsts: tuple[int, ...]) -> None:
        """Drops the rows of these images, and their passes."""
        for first in firsts:
            self._runs.pop(first, None)
            self._images.pop(first, None)
        self._firsts = np.array(sorted(self._images), np.int64)

    def rows(self, tokens: np.ndarray) -> MediaRows | None:
        """Returns the rows of images among a step's rows with these ids; None where there are none. Raises ValueError
        for rows that have not been made."""
        at = np.flatnonzero(tokens >= MEDIA_BASE)
        if not len(at):
            return None
        ids = tokens[at]
        images, image_of = np.unique(np.searchsorted(self._firsts, ids, side="right") - 1, return_inverse=True)
        index, parts, start = np.empty(len(ids), np.int64), [], 0
        for number, image in enumerate(images.tolist()):
            of_image = image_of == number
            if image < 0 or ids[of_image].max() > (entry := self._images[int(self._firsts[image])])[0][-1]:
                raise ValueError("a step has rows of an image that the tower has not made")
            image_ids, rows = entry
            index[of_image] = start + np.searchsorted(image_ids, ids[of_image])
            parts.append(rows)
            start += len(rows)
        device = self._tower.device
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return MediaRows(send(at, device), values.index_select(0, send(index, device)))

    def _go_on(self, first: int, message: EncodeImage) -> bool:
        """Does a message's work, and returns whether the image's rows are there."""
        tower = self._tower
        if message.tiles is not None:
            self._runs[first] = tower.start(torch.from_numpy(message.tiles).to(tower.device), self._attend)
        run = self._runs[first]
        if not tower.go_on(run, message.stop):
            return False
        rows = tower.finish(run)
        if len(rows) != len(message.ids):
            raise ValueError(f"the tower made {len(rows)} rows of an image that has {len(message.ids)}")
        if not bool(rows.isfinite().all()):
            raise ValueError("the tower's results are not finite numbers")
        self._enter(first, message.ids, rows)
        return True

    def _enter(self, first: int, ids: np.ndarray, rows: Tensor) -> None:
        self._images[first] = ids, rows
        self._firsts = np.array(sorted(self._images), np.int64)


def image_part(tower: Tower) -> WorkerPart:
    """Returns the part of a worker that has a tower, and the rows of images."""
    images = ImageRows(tower)

    def encode(worker: LocalWorker, message: EncodeImage) -> Ticket:
        encoded = images.encode(message)
        if tower.device.type == "cuda":  # the host measures how long the work takes
            torch.cuda.synchronize(tower.device)
        return CompletedTicket(encoded)

    def drop(worker: LocalWorker, message: DropImages) -> Ticket:
        images.drop(message.firsts)
        return DONE

    facts = ImageFacts(tower.config, tower.config.output * tower.dtype.itemsize)
    return WorkerPart({EncodeImage: encode, DropImages: drop}, facts, images.rows, varies="the rows of images")
