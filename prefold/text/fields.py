"""Read columns of a record as text, by column name or by a template such as "Question: {question}".

A dotted path names a value inside a column: `passages.text`, `choices.0`. Every InputError names the column.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any

from ..errors import InputError, JobError
from .prompts import FilledTemplate
from .valid import valid_text

# Limit on the nesting of a record, so that recursive code cannot exhaust Python's stack.
MAX_DEPTH = 200
_MISSING = object()


def lookup(data: dict[str, Any], path: str) -> Any:
    """Return the column with the name `path`. If there is none, return the nested value at the dotted path.

    If a name in the path follows a list, return the list of the values under this name in all elements. Raise
    InputError if there is no value.
    """
    value = data.get(path, _MISSING)
    if value is _MISSING and "." in path:
        value = _walk(data, path.split("."))
    if value is _MISSING:
        remedy = f"the record has: {', '.join(list(data)[:12]) or 'none'}"
        raise InputError(f"column {path!r} is missing", field=path, remedy=remedy, code="missing_field")
    return value


def _walk(value: Any, parts: Sequence[str]) -> Any:
    for i, part in enumerate(parts):
        if isinstance(value, dict):
            value = value.get(part, _MISSING)
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else _MISSING
        elif isinstance(value, list):
            values = [_walk(element, parts[i:]) for element in value]
            return _MISSING if any(v is _MISSING for v in values) else values
        else:
            return _MISSING
        if value is _MISSING:
            return _MISSING
    return value


def is_empty(value: Any) -> bool:
    """Return True for null, for an empty text, and for NaN, because data frames represent null as NaN."""
    return value is None or value == "" or (isinstance(value, float) and value != value)


def as_text(value: Any, field: str, keep_empty: bool = False) -> str:
    """Convert a text, number, date or time to text. Raise InputError for any other type.

    Args:
        value: The value. An empty value (see `is_empty`) is an error, unless `keep_empty` is set.
        field: Name of the column, for errors.
        keep_empty: Return "" for an empty value.
    """
    if is_empty(value):
        if keep_empty:
            return ""
        kind, code = ("empty", "empty") if value == "" else ("null" if value is None else "NaN", "null")
        remedy = "give it a text, drop the record, or use --empty keep to read it as an empty text"
        raise InputError(f"{field!r} is {kind}", field=field, remedy=remedy, code=code)
    if isinstance(value, str):
        return valid_text(value, field)
    if isinstance(value, (int, float, Decimal, date, time)) and not isinstance(value, bool):
        return str(value)
    kind = type(value).__name__
    raise InputError(f"{field!r} is a {kind}, not a text", field=field, remedy="give it a text", code="wrong_type")


def as_texts(value: Any, field: str, keep_empty: bool = False) -> list[str]:
    """Convert a list of texts to text. An element may be an object with the key "text", as in rerank requests.

    Raise InputError if the value is not a list, if the list is empty, or if `as_text` refuses an element. `field` and
    `keep_empty` are as in `as_text`.
    """
    if not isinstance(value, list):
        as_text(value, field)
        raise InputError(f"{field!r} is not a list", field=field, remedy="give it a list of texts", code="wrong_type")
    if not value:
        raise InputError(f"{field!r} is an empty list", field=field, remedy="give it a text", code="empty")
    texts = (v.get("text") if isinstance(v, dict) else v for v in value)
    return [as_text(text, f"{field}[{i}]", keep_empty) for i, text in enumerate(texts)]


def without_filler(value: Any) -> Any:
    """Remove the null fields of all structs in an Arrow value.

    All structs of an Arrow column have the same fields. A field that a row does not have is null, and a chat template
    would write this null into the prompt. Null elements of lists stay.
    """
    if isinstance(value, dict):
        return {name: without_filler(inner) for name, inner in value.items() if inner is not None}
    return [without_filler(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def parse_cell(value: Any, field: str) -> Any:
    """Parse a text that is JSON, such as a CSV cell. Return any other text or value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return check_depth(parsed, value.count("[") + value.count("{"), repr(field), field)


def check_depth(value: Any, brackets: int, subject: str, field: str | None = None) -> Any:
    """Return `value` unchanged. Raise InputError if it nests deeper than MAX_DEPTH.

    Args:
        value: A value parsed from JSON.
        brackets: Number of opening brackets in the JSON. With at most MAX_DEPTH brackets, the value is not examined.
        subject: Name of the value in the error message.
        field: Name of the column, for the error.
    """
    if brackets <= MAX_DEPTH:
        return value
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = (v for outer in level for v in (outer.values() if isinstance(outer, dict) else outer))
        level = [v for v in inner if isinstance(v, (dict, list))]
        if not level:
            return value
    message = f"{subject} nests lists and objects more than {MAX_DEPTH} deep"
    raise InputError(message, field=field, remedy="nest it less deeply", code="too_deep")


class Template:
    """How to make a text from a record: the parsed value of an option such as --prompt.

    Args:
        text: The name of a column; or a template with columns in braces, such as "Q: {question}". In a template,
            {{ and }} are literal braces.
        option: Name of the option in error messages.

    Raises:
        JobError: The text is not a valid template.
    """

    def __init__(self, text: str, option: str):
        self.text = text
        self.option = option
        self.column = text if "{" not in text and "}" not in text else None
        self._parts = [] if self.column is not None else _parse(text, option)

    @property
    def paths(self) -> list[str]:
        if self.column is not None:
            return [self.column]
        return list(dict.fromkeys(path for _, path in self._parts if path is not None))

    def render(self, data: dict[str, Any], keep_empty: bool = False) -> str:
        """Return the text for a record: a str for a bare column name, a `FilledTemplate` for a template.

        Raise InputError if a column is missing, or if `as_text` refuses its value. `keep_empty` is as in `as_text`.
        """
        if self.column is not None:
            return as_text(lookup(data, self.column), self.column, keep_empty)
        out: list[tuple[str, bool]] = []
        for literal, path in self._parts:
            out.append((literal, False))
            if path is not None:
                out.append((as_text(lookup(data, path), path, keep_empty), True))
        return FilledTemplate(out)

    def render_many(self, data: dict[str, Any], keep_empty: bool = False) -> str | list[str]:
        """Like `render`, but return a list of texts if the template is a bare column name and the column has a list."""
        if self.column is not None:
            value = lookup(data, self.column)
            if isinstance(value, list):
                return as_texts(value, self.column, keep_empty)
        return self.render(data, keep_empty)


def _parse(text: str, option: str) -> list[tuple[str, str | None]]:
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise JobError(f"{option} {text!r} is not a template: {error}; write {{{{ and }}}} for braces") from None
    out: list[tuple[str, str | None]] = []
    for literal, name, spec, conversion in parts:
        if name is not None and (not name.strip() or spec or conversion):
            raise JobError(
                f"{option} {text!r} has more than a column's name between braces; write {{{{ and }}}} for braces"
            )
        out.append((literal, name and name.replace("[", ".").replace("]", "")))
    return out
