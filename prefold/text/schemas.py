"""Changes keywords of JSON schemas, wherever in them these are keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["with_keywords"]

# Keywords that hold values, and those that hold schemas by names.
_VALUES = ("const", "enum", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def with_keywords(schema: Any, change: Callable[[str, str], str | None], *, named: bool = False) -> Any:
    """Returns a schema with its keywords whose values are texts changed.

    change  (keyword, text) -> the new text; None: the keyword is dropped
    named   whether `schema` is no schema, but has schemas by names
    """
    if isinstance(schema, list):
        return [with_keywords(one, change) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if named:
            found[name] = with_keywords(value, change)
        elif name in _VALUES:
            found[name] = value
        elif isinstance(value, str):
            if (text := change(name, value)) is not None:
                found[name] = text
        else:
            found[name] = with_keywords(value, change, named=name in _NAMED)
    return found
