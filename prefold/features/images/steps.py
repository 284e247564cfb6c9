"""The messages about images between the host and a worker, and the worker's facts. NumPy arrays only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...engine.schedule.steps import Message
from ...spec.requests import Medium
from .config import TowerConfig


def first_id(medium: Medium) -> int:
    """Returns the id of an image's first row."""
    return int(medium.ids[0])


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """ImageFacts are the facts about its images that a worker tells the host.

    tower      its tower
    row_bytes  bytes of one row of an image as the tower makes it
    """

    tower: TowerConfig
    row_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class EncodeImage(Message):
    """An EncodeImage asks for the tower's work on an image up to piece `stop`, counted over all layers (see
    `TowerConfig.pieces`).

    ids    int32 [rows]: of the image's rows. Once it is encoded, steps may have rows with these ids
    tiles  float32 [tiles, 3, height, width] in the first message about an image; None in later ones

    Its result is an EncodedImage.
    """

    ids: np.ndarray
    tiles: np.ndarray | None
    stop: int


@dataclass(frozen=True, slots=True)
class DropImages(Message):
    """A DropImages tells the worker to drop the rows of images, finished or not. firsts: their first ids"""

    firsts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An EncodedImage is the result of an EncodeImage.

    is_done  whether the image's rows are there
    error    why the tower failed for it, so that its rows are NaN; None: it did not
    """

    is_done: bool
    error: str | None = None
