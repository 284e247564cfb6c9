"""Images in prompts: in items and conversations, as rows among token ids, and in notes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..spec.requests import Medium
from ..trie import MEDIA_BASE

# Types of content parts that are images: in OpenAI's chat and Responses APIs, and in Hugging Face's format.
IMAGE_PARTS = ("image_url", "input_image", "image")
LOAD = "load a model with image input: a folder of Gemma 3 (4B and larger), Idefics3 or SmolVLM, or its GGUF file with "
LOAD += 'images={"mmproj": FILE} (--mmproj FILE), and without images=False; servers (--url) and vLLM (--backend vllm) '
LOAD += "accept only text"


class Pixels:
    """A decoded image, valid in every place that accepts an image."""


@dataclass(frozen=True, eq=False)
class TextWithImages:
    """A text with images.

    Args:
        text: The text. The placeholder of the model's images marks their places; without any, the images come first.
        images: The images: file paths, URLs, bytes, arrays or Pillow images (see the docs on image input).

    Example:
        llm.embed([TextWithImages("A photo of", ["cat.png"])])
    """

    text: str
    images: Sequence[Any]


class ImageIds(np.ndarray[Any, Any]):
    """Token ids, int32 [n], with rows of images. The reference to the media keeps the ids of their rows in use."""

    media: tuple[Medium, ...]

    @classmethod
    def of(cls, ids: np.ndarray, media: tuple[Medium, ...]) -> ImageIds:
        """Return ids with a reference to these media."""
        view = ids.view(cls)
        view.media = media
        return view


@dataclass(frozen=True)
class Picture:
    """The part of an image that its prompt needs."""

    size: tuple[int, int]  # (height, width)
    key: bytes  # identifies the rows of the image
    load: Any  # returns the tiles, float32 [tiles, 3, height, width]; see features/images
    field: str  # the image's place in the item
    animated: bool  # the image is the first frame of an animation

    @property
    def note(self) -> str | None:
        """A sentence about this image for the user, or None."""
        return f"{self.field} is an animation; only its first frame is used" if self.animated else None


def check_cut(ids: np.ndarray, rest: np.ndarray, field: str) -> None:
    """Raise InputError if a cut removes rows of images. `rest` are the ids after the cut."""
    if np.count_nonzero(rest >= MEDIA_BASE) < np.count_nonzero(ids >= MEDIA_BASE):
        raise too_long(field)


def too_long(field: str) -> InputError:
    """Return the error for a prompt that cannot be cut without removing an image."""
    return InputError(
        f"{field!r} is too long, and cutting it would cut an image",
        field=field,
        remedy="give fewer images, or a shorter text beside them",
        code="too_long",
    )


KEY = "image_notes"


def notes_of(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the notes on a Work's images as a part of its note: {"image_notes": [...]}, or {}."""
    notes = [picture.note for picture in pictures if picture.note is not None]
    return {KEY: notes} if notes else {}


def notes_in(note: Mapping[str, Any]) -> list[str] | None:
    """Return the image notes of a Work's note; None if there are none."""
    return note.get(KEY)


@dataclass(frozen=True)
class Chat:
    """A conversation with images."""

    messages: list[Any]  # each image is a part {"type": "image"}
    images: list[tuple[Any, str]]  # (image value, its field), in order; {} if the part only marks a place


def chat_of(messages: Any) -> Chat | None:
    """Return a Chat for a conversation with images; None for any other value."""
    if not isinstance(messages, (list, tuple)):
        return None
    images: list[tuple[Any, str]] = []
    plain = [_message(message, i, images) for i, message in enumerate(messages)]
    return Chat(plain, images) if images else None


def all_images(chat: Chat, separate: Any) -> list[tuple[Any, str]]:
    """Return (image value, field) for each image of a conversation.

    `separate` has the images for the parts {"type": "image"}, in order, or None. Raise InputError if the number of
    these images differs from the number of these parts.
    """
    if separate is None:
        return chat.images
    places = sum(_is_place(value) for value, _ in chat.images)
    if places != len(separate):
        message = f"there are {len(separate)} images for {places} places in the messages"
        remedy = 'mark the place of each image with a part {"type": "image"}'
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
    """Return the error for an image given to a model without image input."""
    return InputError(
        f"{field!r} is an image, and the model accepts only text", field=field, remedy=LOAD, code="no_tower"
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
    """Return the image value of a content part; None for a part of another type."""
    if is_picture(part) or isinstance(part, (bytes, bytearray, np.ndarray)):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
        return None
    for key in ("image_url", "image", "source"):
        if part.get(key) is not None:
            return part[key]
    # In a table, all parts of a column have the same fields, so fields that a part lacks are null.
    return {key: value for key, value in part.items() if key != "type" and value is not None}


def is_picture(value: Any) -> bool:
    """Return True for decoded pixels and for a Pillow image."""
    if isinstance(value, Pixels):
        return True
    library = sys.modules.get("PIL.Image")  # a process with a Pillow image has imported Pillow
    return library is not None and isinstance(value, library.Image)
