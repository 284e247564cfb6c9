"""Defines what an adapter does, which stands between a job's records and its tasks.

There is one for tables (`tables.py`) and one for OpenAI batch lines (`batch.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import InputError
from .lines import dumps
from .record import Record


@dataclass(slots=True)
class Parsed:
    """Holds a record as the tasks see it, or what is wrong with it.

    task    name of the task that the record is for, one of the job's
    items   the items that this task prepares; their results belong to one output line
    meta    what the output line needs besides the results (an id, ...), as values that JSON has
    error   what is wrong with the record, else None
    """

    task: str = ""
    items: list[Any] = field(default_factory=list)
    meta: Any = None
    error: InputError | None = None


class RecordAdapter(Protocol):
    """Reads records as items of tasks, and writes their output lines.

    columns  the columns of a table that the adapter will look at; None: all
    """

    columns: Collection[str] | None

    def read(self, record: Record) -> Parsed:
        """Returns the record as a task sees it. It does not raise: what is wrong with the record is in the result."""
        ...

    def line(self, number: int, meta: Any, results: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the output object of a record. results: what the task made of each of its items."""
        ...

    def error_line(self, number: int, meta: Any, error: InputError) -> dict[str, Any]:
        """Returns the output object of a record that failed. meta None: only the record's number is known."""
        ...


def error_text(adapter: RecordAdapter, number: int, meta: Any, error: InputError) -> str:
    """Returns the output line of a record that failed; without `meta` where that cannot be written as JSON."""
    try:
        return dumps(adapter.error_line(number, meta, error))
    except Exception:
        return dumps(adapter.error_line(number, None, error))
