"""Writes the properties of JSON answers as columns of their own, beside the answer's text."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from .forms import plain
from .tables import TableAdapter, bare, reserved_names

PREFIX = "answer_"


class AnswerColumns(TableAdapter):
    """Reads and writes as `TableAdapter` does for "generate", and gives each property of an answer a column.

    For a list of prompts the properties are in each of its `results`. What a property is called does not depend on the
    record. So where a line repeats all columns of its record, and they are not known beforehand, every property is
    called answer_NAME, and a column with such a name is repeated as input_answer_NAME.
    """

    def kept_name(self, column: str) -> str:
        name = super().kept_name(column)
        return f"input_{name}" if name == column and bare(name, "input_").startswith(PREFIX) else name

    def line(self, number: int, meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the output object of a record, with the properties of its answer behind what it has without them."""
        kept = set() if meta.get("many") else set(self.columns_used.keep)
        every = self.columns_used.keep_all and not meta.get("many")
        return super().line(number, meta, [with_columns(result, kept, every=every) for result in results])


def with_columns(result: dict[str, Any], kept: Collection[str], *, every: bool = False) -> dict[str, Any]:
    """Returns a result of "generate" with the properties of the object in its `text` as further names.

    A property is called `answer_NAME` where a line has a NAME of its own, or NAME is in `kept`; so is one called
    answer_NAME itself, that no two have one name. With names in `kept` that begin with answer_, one more is put before
    it. A result whose text is no JSON object, such as one that max_tokens cut off, comes back as it is.

    every  whether all properties are renamed
    """
    try:
        answer = json.loads(result.get("text", ""))
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets in each other
        return result
    if not isinstance(answer, dict):
        return result
    taken = {*kept, *reserved_names("generate")}
    prefix, bases = PREFIX, {bare(name, PREFIX) for name in taken}
    while any(name.startswith(prefix) for name in taken):
        prefix += PREFIX
    named = (prefix + name if every or bare(name, PREFIX) in bases else name for name in answer)
    return result | dict(zip(named, map(plain, answer.values()), strict=True))
