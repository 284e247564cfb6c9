"""Rows of images on a worker: the tower makes them, some layers at a time, and steps have them in place of
embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..attention import Heads, RowAttention, RowPlan
from ..device import send
from ..model import MediaRows, Tower
from ..model.tower import TowerPass
from ..prefix import MEDIA_BASE
from ..schedule.steps import Encoded, EncodeImage

__all__ = ["ImageRows", "TowerAttend", "without_images"]


class TowerAttend:
    """`attend` of a tower: the patches of a tile see each other, and no others. It is the interval attention of rows,
    in which each tile is one span."""

    def __init__(self, tower: Tower):
        config = tower.config
        self._attention = RowAttention(Heads(config.heads, config.heads, config.head_dim, tower.dtype), tower.device)
        self._patches, self._scale = config.patches, config.head_dim**-0.5
        self._plans: dict[int, RowPlan] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention of q over k and v, [tiles * patches, heads, dim] each, shaped as q."""
        rows = len(q)
        plan = self._plans.get(rows)
        if plan is None:
            every = np.arange(rows)
            first = every - every % self._patches
            self._plans = {rows: self._attention.plan(first + self._patches, every, first=first)}
            plan = self._plans[rows]
        return self._attention.attend(q, k, v, plan, scale=self._scale)


@dataclass(slots=True)
class _Run:
    """A _Run is an image on its way through the tower. layers: how many it has gone through."""

    rows: TowerPass
    layers: int = 0


class ImageRows:
    """An ImageRows holds what the tower has made of images, by the first of the ids that their rows have."""

    def __init__(self, tower: Tower):
        self._tower, self._attend = tower, TowerAttend(tower)
        self._runs: dict[int, _Run] = {}
        self._made: dict[int, tuple[np.ndarray, Tensor]] = {}
        self._firsts = np.empty(0, np.int64)

    def encode(self, message: EncodeImage) -> Encoded:
        """Takes an image through more layers of the tower. What goes wrong with it is told, and not raised; its rows
        are then no numbers, so that nothing comes of whoever reads them."""
        first = int(message.ids[0])
        if message.tiles is None and first not in self._runs and first in self._made:
            return Encoded(True)
        try:
            if not self._go_on(first, message):
                return Encoded(False)
            error = None
        except Exception as problem:
            rows = torch.full((len(message.ids), self._tower.config.output), torch.nan, dtype=self._tower.dtype)
            self._enter(first, message.ids, rows.to(self._tower.device))
            error = f"{type(problem).__name__}: {problem}"
        self._runs.pop(first, None)
        return Encoded(True, error)

    def drop(self, firsts: tuple[int, ...]) -> None:
        """Forgets the rows of these images, and what is made of them at present."""
        for first in firsts:
            self._runs.pop(first, None)
            self._made.pop(first, None)
        self._firsts = np.array(sorted(self._made), np.int64)

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
            own = image_of == number
            if image < 0 or ids[own].max() > (found := self._made[int(self._firsts[image])])[0][-1]:
                raise ValueError("a step has rows of an image that the tower has not made")
            known, rows = found
            index[own] = start + np.searchsorted(known, ids[own])
            parts.append(rows)
            start += len(rows)
        device = self._tower.device
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return MediaRows(send(at, device), values.index_select(0, send(index, device)))

    def _go_on(self, first: int, message: EncodeImage) -> bool:
        """Returns whether the image has gone through all layers, and its rows are there."""
        tower = self._tower
        if message.tiles is not None:
            self._runs[first] = _Run(tower.start(torch.from_numpy(message.tiles).to(tower.device), self._attend))
        run = self._runs[first]
        tower.go_through(run.rows, range(run.layers, message.stop))
        run.layers = max(run.layers, message.stop)
        if run.layers < tower.config.layers:
            return False
        rows = tower.finish(run.rows)
        if len(rows) != len(message.ids):
            raise ValueError(f"the tower made {len(rows)} rows of an image that has {len(message.ids)}")
        if not bool(rows.isfinite().all()):
            raise ValueError("the tower's results are not finite numbers")
        self._enter(first, message.ids, rows)
        return True

    def _enter(self, first: int, ids: np.ndarray, rows: Tensor) -> None:
        self._made[first] = ids, rows
        self._firsts = np.array(sorted(self._made), np.int64)


def without_images(tokens: np.ndarray) -> np.ndarray:
    """Returns the ids of a step's rows with 0 in place of those of images, which the embedding does not have."""
    return np.where(tokens >= MEDIA_BASE, np.int32(0), tokens)
