"""JSON schemas: keyword changes, example values, and proofs that no value fits two schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Schema = Mapping[str, Any]
# Keywords with data as values; below, keywords that contain schemas by name.
_VALUES = ("const", "enum", "default", "examples")
_SIMPLE = {"string": "", "integer": 0, "number": 0.0, "boolean": False}
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def with_schemas(schema: Any, change: Callable[[dict[str, Any]], Any], *, named: bool = False) -> Any:
    """Return a schema with `change` applied to every schema in it, inner schemas first.

    With `named`, `schema` is not a schema but an object of schemas by name.
    """
    if isinstance(schema, list):
        return [with_schemas(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {
        name: value
        if not named and name in _VALUES
        else with_schemas(value, change, named=not named and name in _NAMED)
        for name, value in schema.items()
    }
    return changed if named else change(changed)


def with_keywords(schema: Any, change: Callable[[str, str], str | None]) -> Any:
    """Return a schema with changed texts of its keywords.

    `change(keyword, text)` returns the new text, or None to drop the keyword.
    """

    def changed(schema: dict[str, Any]) -> dict[str, Any]:
        texts = {name: change(name, v) for name, v in schema.items() if isinstance(v, str) and name not in _VALUES}
        return {name: texts.get(name, value) for name, value in schema.items() if texts.get(name, value) is not None}

    return with_schemas(schema, changed)


def example_of(schema: Any, root: Any = None, refs: dict[str, Any] | None = None) -> Any:
    """Return a value that fits a schema: an object has all properties, and the first type that is not null is used.

    The result is None if the schema has no type or refers to itself. References start at `root`. `refs` caches the
    example of each reference; a reference inside itself has the example None.
    """
    root, refs = schema if root is None else root, {} if refs is None else refs
    if not isinstance(schema, Mapping):
        return None
    if isinstance(reference := schema.get("$ref"), str):
        if reference in refs:
            return refs[reference]
        refs[reference] = None
        refs[reference] = example_of(_target(reference, root), root, refs)
        return refs[reference]
    types: Any = schema.get("type")
    kind: Any = types
    if isinstance(types, list):
        kind = next((name for name in types if name != "null"), None)
    if properties := schema.get("properties"):
        return {name: example_of(part, root, refs) for name, part in properties.items()}
    if kind == "array":
        item = example_of(schema.get("items"), root, refs)
        return [] if item is None else [item]
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or ()
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    examples = (_SIMPLE.get(kind), *values, *(example_of(part, root, refs) for part in branches))
    return next((value for value in examples if value is not None), None)


def _target(reference: str, root: Any) -> Any:
    """Return the schema that an internal reference points to; None for other references."""
    target = root if reference.startswith("#") else None
    for name in reference.split("/")[1:]:
        target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


# ------------------------------------------------------------------------------------------------ disjoint schemas

_KINDS = frozenset(("null", "boolean", "number", "string", "array", "object"))
# Limit on schemas and enum values compared per schema. A oneOf that needs more stays unchanged.
MOST_COMPARED = 100_000
_DEEPEST = 12


def with_any_of(schema: Any) -> Any:
    """Return a schema in which a oneOf becomes an anyOf if no value fits two of its branches. Both then mean the same.

    Branches are compared by their types, by `const` and `enum`, and in the same way by the properties that one of them
    requires. A oneOf stays if two branches are not proven to be disjoint.
    """
    proofs = _Proofs(schema)

    def change(part: dict[str, Any]) -> dict[str, Any]:
        branches = part.get("oneOf")
        if not branches or not isinstance(branches, list) or not proofs.are_disjoint(part, branches):
            return part
        rest = {name: value for name, value in part.items() if name != "oneOf"}
        if "anyOf" not in rest:
            return rest | {"anyOf": branches}
        return rest | {"allOf": [*rest.get("allOf", ()), {"anyOf": branches}]}

    return with_schemas(schema, change)


class _Proofs:
    """Proofs about the schemas inside the schema `root`, at which references start."""

    def __init__(self, root: Any):
        self._root, self._left = root, MOST_COMPARED

    def are_disjoint(self, around: Schema, branches: Sequence[Any]) -> bool:
        """Return True if no value fits two of the branches of `around` together with its other keywords."""
        around = {name: value for name, value in around.items() if name not in ("oneOf", "anyOf")}
        return all(self._disjoint([around, one], [around, other], 0) for one, other in combinations(branches, 2))

    def _disjoint(self, one: list[Any], other: list[Any], depth: int) -> bool:
        """Return True if it is proven that no value fits all schemas of both lists."""
        if self._left <= 0 or depth > _DEEPEST:
            return False
        parts, others = self._parts(one), self._parts(other)
        first, second = _values(parts), _values(others)
        self._left -= len(parts) + len(others) + len(first or ()) + len(second or ())
        kinds = _kinds(parts, first) & _kinds(others, second)
        if not kinds or (first is not None and second is not None and not first & second):
            return True
        if kinds == {"object"} and (
            self._excludes_property(parts, others, depth) or self._excludes_property(others, parts, depth)
        ):
            return True
        for mine, theirs in ((parts, others), (others, parts)):
            for part in mine:
                for name in ("anyOf", "oneOf"):
                    if isinstance(branches := part.get(name), list) and branches:
                        rest = [p for p in mine if p is not part]
                        rest.append({n: v for n, v in part.items() if n != name})
                        return all(self._disjoint([*rest, branch], theirs, depth + 1) for branch in branches)
        return False

    def _excludes_property(self, parts: list[Schema], others: list[Schema], depth: int) -> bool:
        """Return True if `parts` require a property that objects of `others` lack, or have only with other values."""
        lists = (part.get("required") for part in parts)
        required = {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}
        return any(
            self._disjoint(_properties(parts, name), schemas, depth + 1)
            for name in sorted(required)
            if (schemas := _properties(others, name))
        )

    def _parts(self, schemas: list[Any]) -> list[Schema]:
        """Return schemas without references and allOf that a value must fit if it fits all `schemas`."""
        parts: list[Schema] = []
        waiting, seen = list(schemas), set[str]()
        while waiting:
            schema = waiting.pop()
            if schema is False:
                parts.append({"enum": []})
            if not isinstance(schema, Mapping):
                continue
            reference = schema.get("$ref")
            if isinstance(reference, str):  # older drafts ignore other keywords beside a reference
                if reference not in seen:
                    seen.add(reference)
                    waiting.append(_target(reference, self._root))
                continue
            parts.append(schema)
            if isinstance(every := schema.get("allOf"), list):
                waiting += every
        return parts


def _properties(parts: list[Schema], name: str) -> list[Any]:
    """Return the schemas that a property must fit."""
    schemas = []
    for part in parts:
        table = part.get("properties", {})
        if isinstance(table, Mapping) and name in table:
            schemas.append(table[name])
        elif isinstance(table, Mapping) and "additionalProperties" in part and not part.get("patternProperties"):
            schemas.append(part["additionalProperties"])
    return schemas


def _kinds(parts: list[Schema], values: set[tuple[str, str]] | None) -> frozenset[str]:
    """Return the types of values that may fit all of these schemas. Integers count as numbers."""
    kinds = _KINDS
    for part in parts:
        types = part.get("type")
        if isinstance(types, str):
            types = [types]
        if isinstance(types, list):
            kinds &= {"number" if name == "integer" else name for name in types if isinstance(name, str)}
    return kinds if values is None else kinds & {kind for kind, _ in values}


def _values(parts: list[Schema]) -> set[tuple[str, str]] | None:
    """Return (type, JSON text) of each value that may fit all schemas; None if the values are not limited to a list."""
    lists: list[list[Any]] = [[part["const"]] for part in parts if "const" in part]
    lists += [part["enum"] for part in parts if isinstance(part.get("enum"), list)]
    return set.intersection(*({_written(value) for value in values} for values in lists)) if lists else None


def _written(value: Any) -> tuple[str, str]:
    """Return (type, JSON text) of a value. Equal values have equal texts."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean"), json.dumps(value)
    if isinstance(value, (int, float)):
        whole = isinstance(value, float) and value.is_integer()
        return "number", repr(int(value) if whole else value)
    if isinstance(value, str):
        return "string", value
    if isinstance(value, Mapping):
        return "object", json.dumps(sorted((name, _written(part)) for name, part in value.items()))
    return "array", json.dumps([_written(part) for part in value])
