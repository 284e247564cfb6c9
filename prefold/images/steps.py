"""The messages about images between the host and a worker, and what the host knows of its tower. NumPy arrays only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..schedule.steps import Message
from ..types import Medium
from .config import TowerConfig


def first_id(medium: Medium) -> int:
    """Returns the id of an image's first row."""
    return int(medium.ids[0])


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """ImageFacts are what the host knows of a worker that takes images.

    tower      its tower
    row_bytes  bytes of one row of an image as the tower makes it
    """

    tower: TowerConfig
    row_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class EncodeImage(Message):
    """An EncodeImage asks for the tower's work on an image, up to its piece `stop` of those of all layers
    (`TowerConfig.pieces`).

    ids    int32 [rows]: of the image's rows. Once they are made, steps may have rows with these ids
    tiles  float32 [tiles, 3, height, width], in the first message about an image; None: go on with it

    Its result is an Encoded.
    """

    ids: np.ndarray
    tiles: np.ndarray | None
    stop: int


@dataclass(frozen=True, slots=True)
class DropImages(Message):
    """A DropImages says that the rows of images may go, and what was made of them so far. firsts: their first ids."""

    firsts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An Encoded says how far an image is.

    is_done  whether its rows are there
    error    why the tower failed for it: its rows are then no finite numbers; None: it did not
    """

    is_done: bool
    error: str | None = None
