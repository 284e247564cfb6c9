"""What prompts have beside text: images that stand in an item, rows of images among token ids, notes on images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..prefix import MEDIA_BASE
from ..types import Medium


@dataclass(frozen=True, eq=False)
class Pictured:
    """A Pictured is a text with images, in place of a text.

    text    has the placeholder of the model's images where they belong; where it has none, the images come first
    images  whatever stands for an image (see `Reader.read`)
    """

    text: str
    images: Sequence[Any]


class ImageIds(np.ndarray[Any, Any]):
    """An ImageIds is token ids, int32 [n], with rows of images among them. It refers to the media: their rows have
    these ids as long as something refers to them."""

    media: tuple[Medium, ...]

    @classmethod
    def of(cls, ids: np.ndarray, media: tuple[Medium, ...]) -> ImageIds:
        """Returns ids that hold these media."""
        view = ids.view(cls)
        view.media = media
        return view


@dataclass(frozen=True)
class Picture:
    """A Picture is an image of an item, as far as a prompt must know it.

    size      (height, width)
    key       by which its rows are known
    load      gives its tiles, float32 [tiles, 3, height, width]; the room of images knows more of it
    field     where in the item it was
    animated  whether it is the first frame of several
    """

    size: tuple[int, int]
    key: bytes
    load: Any
    field: str
    animated: bool

    @property
    def note(self) -> str | None:
        """Returns a sentence that the user should read about this image; None: there is none."""
        return f"{self.field} is an animation, of which the first frame is seen" if self.animated else None


def check_cut(ids: np.ndarray, kept: np.ndarray, field: str) -> None:
    """Raises InputError where rows of images are lost with what is cut off ids; kept: what is left of them."""
    if np.count_nonzero(kept >= MEDIA_BASE) < np.count_nonzero(ids >= MEDIA_BASE):
        raise too_long(field)


def too_long(field: str) -> InputError:
    """Returns the error of a prompt from which an image would have to be cut."""
    return InputError(
        f"{field!r} is too long, and cutting it would cut an image",
        field=field,
        remedy="give fewer images, or a shorter text beside them",
        code="too_long",
    )


KEY = "image_notes"


def notes_of(seen: Sequence[Picture]) -> dict[str, Any]:
    """Returns the notes on a Work's images, as a part of its note: {"image_notes": [...]}; {} without notes."""
    notes = [picture.note for picture in seen if picture.note is not None]
    return {KEY: notes} if notes else {}


def with_notes(line: dict[str, Any], note: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line with the notes on images that a Work's note holds."""
    return line | {KEY: note[KEY]} if KEY in note else line
