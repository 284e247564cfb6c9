"""Writes the properties of JSON answers as columns of their own, beside the answer's text."""

from __future__ import annotations

import json
from typing import Any

from .forms import plain
from .tables import TableAdapter, reserved_names

__all__ = ["AnswerColumns", "with_columns"]


class AnswerColumns(TableAdapter):
    """Reads and writes as `TableAdapter` does for "generate", and gives each property of an answer a column.

    For a list of prompts the properties are in each of its `results`.
    """

    def line(self, number: int, meta: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the output object of a record, with the properties of its answer behind what it has without them."""
        kept = set() if meta.get("many") else set(meta.get("keep", {}))
        return super().line(number, meta, [with_columns(result, kept) for result in results])


def with_columns(result: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """Returns a result of "generate" with the properties of the object in its `text` as further names.

    A property is called `answer_NAME` where a line has a NAME of its own, or NAME is in `taken`; where that is another
    property or is taken too, `answer_answer_NAME`, and so on. A result whose text is no JSON object, such as one that
    max_tokens cut off, comes back as it is.
    """
    try:
        answer = json.loads(result.get("text", ""))
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets in each other
        return result
    if not isinstance(answer, dict):
        return result
    taken = taken | reserved_names("generate")
    out = dict(result)
    for name, value in answer.items():
        column = name
        while column in taken or (column != name and column in answer):
            column = f"answer_{column}"
        taken.add(column)
        out[column] = plain(value)
    return out
