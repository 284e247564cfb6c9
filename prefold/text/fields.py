"""Read columns of a record as text, by column name or by a template such as "Question: {question}".

A path names a column or a value inside it: `passages.text`, `choices.0`. Each InputError names the column.
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

# The deepest nesting of a record. Recursive code that walks a record must not exhaust Python's stack.
MAX_DEPTH = 200
_MISSING = object()


def lookup(data: dict[str, Any], path: str) -> Any:
    """Return the value at `path`: the column with exactly this name, else the nested value at a dotted path.

    A name that meets a list is looked up in each of its elements. Raise InputError if there is no value.
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
    """Return True for null, NaN (which data frames write for null) and an empty text."""
    return value is None or value == "" or (isinstance(value, float) and value != value)


def as_text(value: Any, field: str, keep_empty: bool = False) -> str:
    """Return a text unchanged, and a number, date or time as text. Raise InputError for other types.

    An empty value (see `is_empty`) is an error, unless `keep_empty` asks for an empty text.
    """
    if is_empty(value):
        if keep_empty:
            return ""
        kind, code = ("empty", "empty") if value == "" else ("null" if value is None else "NaN", "null")
        remedy = "give it a text, drop the record, or take it as an empty text with --empty keep"
        raise InputError(f"{field!r} is {kind}", field=field, remedy=remedy, code=code)
    if isinstance(value, str):
        return valid_text(value, field)
    if isinstance(value, (int, float, Decimal, date, time)) and not isinstance(value, bool):
        return str(value)
    kind = type(value).__name__
    raise InputError(f"{field!r} is a {kind}, not a text", field=field, remedy="give it a text", code="wrong_type")


def as_texts(value: Any, field: str, keep_empty: bool = False) -> list[str]:
    """Return the texts of a list of texts, or of objects with a "text" such as the documents of rerank requests.

    Raise InputError if the value is no list or is an empty list, or if an element has another type. For `keep_empty`,
    see `as_text`.
    """
    if not isinstance(value, list):
        as_text(value, field)
        raise InputError(f"{field!r} is not a list", field=field, remedy="give it a list of texts", code="wrong_type")
    if not value:
        raise InputError(f"{field!r} is an empty list", field=field, remedy="give it a text", code="empty")
    texts = (v.get("text") if isinstance(v, dict) else v for v in value)
    return [as_text(text, f"{field}[{i}]", keep_empty) for i, text in enumerate(texts)]


def without_filler(value: Any) -> Any:
    """Return an Arrow value without the null fields of its structs.

    All structs of an Arrow column have the same fields, so a field that one row lacks is null. A chat template would
    write these nulls into the prompt. Nulls in lists stay.
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
        brackets: Number of opening brackets in the JSON. If it is small, the value is not walked.
        subject: Name of the value in the error message.
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
    """Text from a record; the value of an option such as --prompt.

    Args:
        text: A template with columns as {fields} ({{ and }} are literal braces), or, without braces, a column's name.
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
        """Return the template's text for a record; a template with fields returns a `FilledTemplate`.

        Raise InputError if a column is missing or has no text. For `keep_empty`, see `as_text`.
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
        """Return the text of `render`, or the texts of a list if the template is a bare column name."""
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
