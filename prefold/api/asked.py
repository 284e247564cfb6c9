"""What a body asks of a task, for the APIs whose requests are answered over HTTP only, and the checks they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError

__all__ = ["Asked", "checked", "choice", "flag", "metadata_of", "need"]


@dataclass(frozen=True)
class Asked:
    """An Asked is what one body asks of a task.

    task     the task's name
    items    its items
    make     (the task's result of each item) -> the body of the response
    options  of the task
    fields   {name of a field of the task's items: what the request calls it}, where they differ
    """

    task: str
    items: Sequence[Any]
    make: Callable[[list[dict[str, Any]]], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, field: str | None) -> str | None:
        """Returns what the request calls a field of the items: "text[3]" is "inputs[3]" of a request to TEI."""
        name, bracket, index = (field or "").partition("[")
        return field and self.fields.get(name, name) + bracket + index


def checked(body: Mapping[str, Any], *known: str) -> Mapping[str, Any]:
    """Returns the body. Raises InputError for a field that is not known, unless it is null."""
    for name, value in body.items():
        if value is not None and name not in known:
            remedy = f"the fields are {', '.join(known)}"
            raise InputError(f"unknown field {name!r:.100}", field=name[:100], remedy=remedy, code="unsupported")
    return body


def need(body: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field. Raises InputError where it is missing, null, or an empty list or text."""
    value = body.get(name)
    if value is None:
        raise InputError(f"{name!r} is missing", field=name, remedy="give it", code="missing_field")
    if value in ("", []):
        raise InputError(f"{name!r} is empty", field=name, remedy="give at least one text", code="empty")
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Returns a field that is true or false; null stands for the default. Raises InputError."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        message = f"{name!r} is {value!r:.100}"
        raise InputError(message, field=name, remedy="give true or false", code="wrong_type")
    return default if value is None else value


def metadata_of(body: Mapping[str, Any]) -> dict[str, str] | None:
    """Returns the texts that a client gives something that is kept for it. Raises InputError beyond OpenAI's bounds."""
    found = body.get("metadata")
    if found is None:
        return None
    if (
        not isinstance(found, dict)
        or len(found) > 16
        or any(len(name) > 64 or not isinstance(text, str) or len(text) > 512 for name, text in found.items())
    ):
        message = "'metadata' is no object of at most 16 texts, of 512 letters each, with names of at most 64"
        raise InputError(message, field="metadata", remedy="give such an object", code="wrong_type")
    return found


def choice(body: Mapping[str, Any], name: str, known: Sequence[str], default: str) -> str:
    """Returns a field that is one of the known words, in any case. Raises InputError."""
    value = body.get(name)
    if value is None:
        return default
    found = next((word for word in known if isinstance(value, str) and value.lower() == word.lower()), None)
    if found is None:
        remedy = f"give one of {', '.join(known)}"
        raise InputError(f"{name!r} is {value!r:.100}", field=name, remedy=remedy, code="wrong_type")
    return found
