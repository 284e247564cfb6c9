"""Changes keywords of JSON schemas, wherever in them these are keywords, and makes examples of what they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Keywords that hold values, and those that hold schemas by names.
_VALUES = ("const", "enum", "default", "examples")
_SIMPLE = {"string": "", "integer": 0, "number": 0.0, "boolean": False}
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


def example_of(schema: Any, root: Any = None, seen: tuple[str, ...] = ()) -> Any:
    """Returns a value of the type that a schema describes: of an object all properties, of several types the first but
    for null. It is None where the schema says no type, or refers to itself.

    root: where references begin. seen: the references that led here
    """
    root = schema if root is None else root
    if not isinstance(schema, Mapping):
        return None
    if isinstance(reference := schema.get("$ref"), str):
        found = None if reference in seen else root
        for name in reference.split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return example_of(found, root, (*seen, reference))
    types = schema.get("type")
    kind = next((one for one in types if one != "null"), None) if isinstance(types, list) else types
    if properties := schema.get("properties"):
        return {name: example_of(one, root, seen) for name, one in properties.items()}
    if kind == "array":
        item = example_of(schema.get("items"), root, seen)
        return [] if item is None else [item]
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ()
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    examples = (_SIMPLE.get(kind), *values, *(example_of(one, root, seen) for one in branches))
    return next((value for value in examples if value is not None), None)
