"""Describes Python functions as tools, by signature and docstring, in the JSON schemas that chat templates read."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import InputError

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_GIVE = 'annotate it with str, int, float, bool, list, dict, Literal or a union with None, or give {"type": "function",'
_GIVE += ' "function": {...}} in place of the function'
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def as_tools(tools: Any) -> Any:
    """Returns a list of tools with the schema of each Python function in its place; any other value as it is.

    A function's description is its docstring up to a section such as "Args:", whose lines "name: text" describe the
    parameters (Google's style, as transformers' get_json_schema reads it). Raises InputError for a function without a
    docstring, and for a parameter whose type has no JSON.
    """
    if not isinstance(tools, (list, tuple)):
        return tools
    return [_schema(tool) if callable(tool) and not isinstance(tool, Mapping) else tool for tool in tools]


def _schema(function: Callable[..., object]) -> dict[str, Any]:
    name = getattr(function, "__name__", type(function).__name__)
    description, arguments = _sections(inspect.getdoc(function) or "")
    if not description:
        message = f"the function {name!r} in 'tools' has no docstring"
        raise InputError(message, field="tools", remedy="write one that says what it does")
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        schema = _type(hints.get(parameter.name), f"the parameter {parameter.name!r} of {name!r} in 'tools'")
        if parameter.name in arguments:
            schema["description"] = arguments[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _type(hint: Any, what: str) -> dict[str, Any]:
    """Returns the JSON schema of a type. Raises InputError, which calls it `what`."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [one for one in inner if one is not type(None)]
        schema = _type(kinds[0], what) if len(kinds) == 1 else {"anyOf": [_type(one, what) for one in kinds]}
        return {**schema, "nullable": True} if len(kinds) < len(inner) else schema
    if origin is Literal and {type(one) for one in inner} in ({str}, {int}):
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if origin in (list, Sequence):
        return {"type": "array", **({"items": _type(inner[0], what)} if inner else {})}
    if origin in _TYPES:
        return {"type": _TYPES[origin]}
    problem = "has no type" if hint is None else f"is of type {getattr(hint, '__name__', hint)}, which JSON lacks"
    raise InputError(f"{what} {problem}", field="tools", remedy=_GIVE, code="wrong_type")


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """Returns (what a docstring says before its sections, {name: description} of the section of arguments)."""
    parts = re.split(r"^(\w+):[ ]*$", text, flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        name = ""
        for line in inspect.cleandoc(body).splitlines():
            match = None if line.startswith(" ") else _ARGUMENT.match(line)
            if match:
                name, arguments[match[1]] = match[1], match[2]
            elif name:
                arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return parts[0].strip(), arguments
