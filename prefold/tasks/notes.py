"""What should be known of an item's images beside its answer: as they are read, in its Work's note, and in its line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..text.media import Picture

KEY = "image_notes"


def notes_of(seen: Sequence[Picture]) -> dict[str, Any]:
    """Returns what a Work's note holds of the images that were seen: {"image_notes": [...]}; {} where nothing is to be
    said."""
    notes = [picture.note for picture in seen if picture.note is not None]
    return {KEY: notes} if notes else {}


def with_notes(line: dict[str, Any], note: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line with the notes on images that a Work's note holds."""
    return line | {KEY: note[KEY]} if KEY in note else line
