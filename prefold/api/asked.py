"""What a body asks of a task, for the APIs whose requests are answered over HTTP only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def renamed(field: str | None, names: Mapping[str, str]) -> str | None:
    """Returns what the request calls a field of a task's items: "text[3]" is "inputs[3]" of a request to TEI."""
    name, bracket, index = (field or "").partition("[")
    return field and names.get(name, name) + bracket + index


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
