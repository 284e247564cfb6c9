"""Checks that a value is a text that can be encoded and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError


def wrong_type(value: object, field: str, expected: str, remedy: str) -> InputError:
    """Return the error for a value of a wrong type. `expected` describes the right type, such as "a text"."""
    message = f"{field!r} is of type {type(value).__name__}, not {expected}"
    return InputError(message, field=field, remedy=remedy, code="wrong_type")


def check_said(text: str, field: str, *, blank: bool = False) -> None:
    """Raise InputError for an empty text, and for white space alone unless `blank` is True.

    All tasks call this check. A text to embed, classify or rank must have content. A prompt to continue may be blank,
    because the blanks affect the answer.
    """
    if not text or (not blank and text.isspace()):
        fault = "white space alone" if text else "empty"
        raise InputError(f"{field!r} is {fault}", field=field, remedy="give it a text, or leave it out", code="empty")


def valid_text(text: object, field: str = "text") -> str:
    """Return `text` if it is a str of valid Unicode. Raise InputError, naming `field`, for any other value."""
    if text is None:
        raise InputError(f"{field!r} is null", field=field, remedy="give it a text", code="null")
    if not isinstance(text, str):
        raise wrong_type(text, field, "a text", "give it a text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = f"at character {error.start}"
            message = f"{field!r} holds half of a surrogate pair {at}, so it is not valid Unicode"
            remedy = "decode the text again from its source"
            if "\udc80" <= text[error.start] <= "\udcff":  # a byte of a file, decoded with `surrogateescape`
                message, remedy = f"{field!r} is not valid UTF-8 {at}", "re-encode it as UTF-8"
            raise InputError(message, field=field, remedy=remedy, code="invalid_utf8") from None
    return text


# Limit on the nesting of objects and lists in a message or a tool. Real ones have about ten levels.
DEEPEST = 100


def plain_json(value: Any, field: str, write: Callable[[str, str], str] = valid_text, depth: int = 0) -> Any:
    """Return a copy of a value in plain JSON types.

    `write(text, field)` returns the replacement of each text. Raise InputError for other types and for nesting deeper
    than DEEPEST.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str.__str__(write(value, field))
    if depth >= DEEPEST:
        message = f"{field[:80]!r} is nested more than {DEEPEST} deep"
        raise InputError(message, field=field[:80], remedy="nest it less deep", code="too_deep")
    if isinstance(value, Mapping):
        named = ((str(key), item) for key, item in value.items())
        return {
            write(key, f"a name in {field}"): plain_json(item, f"{field}.{key}", write, depth + 1)
            for key, item in named
        }
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{field}[{i}]", write, depth + 1) for i, item in enumerate(value)]
    kind = type(value).__name__
    raise InputError(f"{field!r} is of type {kind}", field=field, remedy="give JSON values only", code="wrong_type")
