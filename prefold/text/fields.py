"""Reads columns of a record as text, by templates such as "Question: {question}" or by column names. A path names a
column, or something inside it: `passages.text`, `choices.0`. An InputError names the column."""

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

# The deepest nesting of a record. Code that walks a record by recursion must not reach the end of Python's stack.
MAX_DEPTH = 200
_MISSING = object()


def lookup(data: dict[str, Any], path: str) -> Any:
    """Returns the value at `path`: of the column with this very name, else of a dotted path into nested values.

    A name that meets a list is looked up in each of its elements. Raises InputError when there is no such value.
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
    """Returns whether a value stands for no value: null, NaN (which data frames write for it), or an empty text."""
    return value is None or value == "" or (isinstance(value, float) and value != value)


def as_text(value: Any, field: str, keep_empty: bool = False) -> str:
    """Returns a text as it is, and a number, date or time written out. Raises InputError for anything else.

    keep_empty: return an empty text for a value that `is_empty`, which is an error otherwise.
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
    """Returns the texts of a list, whose elements are texts, or objects with a "text" like documents of rerank
    requests.

    keep_empty: see `as_text`. Raises InputError for what is no list, an empty list, and elements of other kinds.
    """
    if not isinstance(value, list):
        as_text(value, field)
        raise InputError(f"{field!r} is not a list", field=field, remedy="give it a list of texts", code="wrong_type")
    if not value:
        raise InputError(f"{field!r} is an empty list", field=field, remedy="give it a text", code="empty")
    texts = (v.get("text") if isinstance(v, dict) else v for v in value)
    return [as_text(text, f"{field}[{i}]", keep_empty) for i, text in enumerate(texts)]


def without_filler(value: Any) -> Any:
    """Return a value of Arrow without the null fields of its structs.

    All structs of an Arrow column have the same fields, so a field that one row lacks is null in it. A chat template
    would write these nulls into the prompt. Nulls in lists stay.
    """
    if isinstance(value, dict):
        return {name: without_filler(inner) for name, inner in value.items() if inner is not None}
    return [without_filler(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def parse_cell(value: Any, field: str) -> Any:
    """Returns the value of a text that is JSON, like cells of a CSV; any other value or text as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return check_depth(parsed, value.count("[") + value.count("{"), repr(field), field)


def check_depth(value: Any, brackets: int, subject: str, field: str | None = None) -> Any:
    """Returns `value`, which was read from JSON. Raises InputError where it nests deeper than MAX_DEPTH.

    brackets  opening brackets in the JSON: where they are few, the value need not be looked at
    subject   the name of the value in the message
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
    """A Template makes text from a record; it is the value of an option such as --prompt.

    text    with braces, a template whose {fields} are columns ({{ and }} are braces); without any, the name of a column
    option  the option's name, for messages

    Raises JobError where the text is no template.
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
        """Returns the template's text for a record: a `FilledTemplate` if it has several columns.

        keep_empty: see `as_text`. Raises InputError where a column is missing or holds no text.
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
        """Returns the text of `render`, or the texts of a bare column whose value is a list."""
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
