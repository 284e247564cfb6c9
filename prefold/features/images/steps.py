"""The messages about images between the engine and a worker, and the worker's facts. NumPy arrays only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...engine.schedule.steps import Message
from ...spec.requests import Medium
from .config import TowerConfig


def first_id(medium: Medium) -> int:
    """Return the id of an image's first row."""
    return int(medium.ids[0])


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """A worker's facts about images."""

    tower: TowerConfig
    row_bytes: int  # bytes of one row that the tower computes


@dataclass(frozen=True, eq=False, slots=True)
class EncodeImage(Message):
    """A request to work on an image up to piece `stop`, counted over all layers (see `TowerConfig.pieces`).

    Its result is an EncodedImage.
    """

    ids: np.ndarray  # int32 [rows]: of the image's rows. Steps may use these ids once the image is encoded
    tiles: np.ndarray | None  # float32 [tiles, 3, height, width] in the first message about an image; None afterwards
    stop: int


@dataclass(frozen=True, slots=True)
class DropImages(Message):
    """A request to drop the rows of images, complete or not."""

    firsts: tuple[int, ...]  # their first ids


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The result of an EncodeImage."""

    is_done: bool  # the image's rows are available
    error: str | None = None  # why the tower failed. The rows are NaN then
