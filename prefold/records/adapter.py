"""Between a job's records and its tasks: what an adapter must do.

Two kinds of input have one each: tables (`tables.py`) and OpenAI batch lines (`batch.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import InputError
from .lines import dumps
from .record import Record

__all__ = ["Parsed", "RecordAdapter", "error_text"]


@dataclass(slots=True)
class Parsed:
    """A record as the tasks see it, or what is wrong with it.

    task    name of the one of the job's tasks it is for
    items   what that task prepares; their results belong to one output line
    meta    JSON-able: what the output line needs besides the results (an id, ...)
    """

    task: str = ""
    items: list[Any] = field(default_factory=list)
    meta: Any = None
    error: InputError | None = None


class RecordAdapter(Protocol):
    """Reads records, and writes their lines. `columns`: those of a table it will look at (None: all)."""

    columns: Collection[str] | None

    def read(self, record: Record) -> Parsed:
        """The record as a task sees it. What is wrong with the record is in the result (see `record_error`)."""
        ...

    def line(self, number: int, meta: Any, results: list[dict[str, Any]]) -> dict[str, Any]:
        """The output object of a record, of what the task made of each of its items."""
        ...

    def error_line(self, number: int, meta: Any, error: InputError) -> dict[str, Any]:
        """The output object of a record that failed. meta None: nothing is known of it but its number."""
        ...


def error_text(adapter: RecordAdapter, number: int, meta: Any, error: InputError) -> str:
    """The output line of a record that failed; what is known of the record is left out if it cannot be written."""
    try:
        return dumps(adapter.error_line(number, meta, error))
    except Exception:
        return dumps(adapter.error_line(number, None, error))
