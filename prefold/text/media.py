"""The images of prompts: in items and conversations, as rows among token ids, and in notes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..spec.requests import Medium
from ..trie import MEDIA_BASE

# Types of parts that are images: OpenAI's chat and Responses, and Hugging Face's.
IMAGE_PARTS = ("image_url", "input_image", "image")
LOAD = "load a model that sees images: a folder of Gemma 3 (4B and larger), Idefics3 or SmolVLM, or its GGUF file with "
LOAD += 'images={"mmproj": FILE} (--mmproj FILE), and without images=False; servers (--url) and vLLM (--backend vllm) '
LOAD += "are sent text alone"


class Pixels:
    """A Pixels is a decoded image, which may stand wherever an image may stand."""


@dataclass(frozen=True, eq=False)
class TextWithImages:
    """A TextWithImages is a text with images.

    text    has the placeholder of the model's images where they belong; where it has none, the images come first
    images  whatever stands for an image (see `Reader.read`)
    """

    text: str
    images: Sequence[Any]


class ImageIds(np.ndarray[Any, Any]):
    """An ImageIds is token ids, int32 [n], with rows of images among them. It refers to the media, which keeps the ids
    of their rows in use."""

    media: tuple[Medium, ...]

    @classmethod
    def of(cls, ids: np.ndarray, media: tuple[Medium, ...]) -> ImageIds:
        """Returns ids that hold these media."""
        view = ids.view(cls)
        view.media = media
        return view


@dataclass(frozen=True)
class Picture:
    """A Picture is the part of an image that its prompt needs.

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
        """Returns a sentence about this image for the user, or None."""
        return f"{self.field} is an animation, of which the first frame is seen" if self.animated else None


def check_cut(ids: np.ndarray, rest: np.ndarray, field: str) -> None:
    """Raises InputError if rows of images are cut off. rest: the ids after the cut"""
    if np.count_nonzero(rest >= MEDIA_BASE) < np.count_nonzero(ids >= MEDIA_BASE):
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


def notes_of(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Returns the notes on a Work's images as a part of its note: {"image_notes": [...]}, or {}."""
    notes = [picture.note for picture in pictures if picture.note is not None]
    return {KEY: notes} if notes else {}


def notes_in(note: Mapping[str, Any]) -> list[str] | None:
    """Return the image notes of a Work's note; None if there are none."""
    return note.get(KEY)


@dataclass(frozen=True)
class Chat:
    """A Chat is a conversation with images.

    messages  in which each image is a part {"type": "image"}
    images    (what was given for it, the field it is in), in order; {} for a part that is nothing but a place
    """

    messages: list[Any]
    images: list[tuple[Any, str]]


def chat_of(messages: Any) -> Chat | None:
    """Returns a Chat for a conversation with images; None for any other value."""
    if not isinstance(messages, (list, tuple)):
        return None
    images: list[tuple[Any, str]] = []
    plain = [_message(message, i, images) for i, message in enumerate(messages)]
    return Chat(plain, images) if images else None


def all_images(chat: Chat, separate: Any) -> list[tuple[Any, str]]:
    """Returns (image value, field) of each image of a conversation. separate: the images of parts {"type": "image"}, in
    order; None: there are none. Raises InputError if the numbers of these images and parts differ."""
    if separate is None:
        return chat.images
    places = sum(_is_place(value) for value, _ in chat.images)
    if places != len(separate):
        message = f"there are {len(separate)} images for {places} places in the messages"
        remedy = 'show where each belongs by a part {"type": "image"}'
        raise InputError(message, field="images", remedy=remedy, code="image_count")
    remaining = iter(enumerate(separate))
    placed = []
    for value, place in chat.images:
        if _is_place(value):
            number, image = next(remaining)
            placed.append((image, f"images[{number}]"))
        else:
            placed.append((value, place))
    return placed


def _is_place(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def refuse_images(field: str) -> InputError:
    """Returns the error of an image for a model that takes text alone."""
    return InputError(
        f"{field!r} is an image, and the model takes text alone", field=field, remedy=LOAD, code="no_tower"
    )


def _message(message: Any, index: int, images: list[tuple[Any, str]]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    parts, has_image = [], False
    for i, part in enumerate(content):
        field = f"messages[{index}].content[{i}]"
        value = image_in(part, field)
        if value is None:
            parts.append(part)
            continue
        images.append((value, field))
        parts.append({"type": "image"})
        has_image = True
    if not has_image:
        return message
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {**message, "content": texts}


def image_in(part: Any, field: str) -> Any:
    """Return the image value of a part of content; None for a part of another type."""
    if is_picture(part) or isinstance(part, (bytes, bytearray, np.ndarray)):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
        return None
    for key in ("image_url", "image", "source"):
        if part.get(key) is not None:
            return part[key]
    # A table has the same fields in all parts of a column: those that a part was not given are null.
    return {key: value for key, value in part.items() if key != "type" and value is not None}


def is_picture(value: Any) -> bool:
    """Returns whether a value is decoded pixels, or a Pillow image."""
    if isinstance(value, Pixels):
        return True
    library = sys.modules.get("PIL.Image")  # a process with such a picture has imported it
    return library is not None and isinstance(value, library.Image)
