"""Defines records, sources that read them, and adapters, which stand between a job's records and its tasks.

There is an adapter for tables (`tables.py`), and one for OpenAI batch lines (`batch.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ..errors import InputError
from .lines import dumps

FORMATS = ("jsonl", "csv", "tsv", "parquet")


@dataclass(frozen=True, slots=True)
class Record:
    """A record is one line of the input.

    number  its place in the input, from 1
    data    its columns and their values; None where there is an error
    error   what is wrong with it, else None
    size    about how many bytes it takes, for callers that hold many records
    """

    number: int
    data: dict[str, Any] | None = None
    error: InputError | None = None
    size: int = 0


class Source:
    """A source reads the records of one input.

    name        the input's name as the user wrote it
    format      one of FORMATS
    columns     the names of the columns where they are known before the first record is read (CSV, TSV, Parquet), else
                None
    types       {column: Arrow type} of a Parquet file; empty for other formats
    identity    what tells this input from another: its size and a digest. The digest is that of the whole file; of a
                file above 256 MiB that of blocks all over it, beside which stands when the file was last modified; of
                standard input that of its first line. A file is read as far as its identity goes
    paths       the files of the input; empty for standard input
    """

    paths: tuple[Path, ...] = ()

    def __init__(self, name: str, format: str, identity: dict[str, Any], columns: list[str] | None):
        self.name = name
        self.format = format
        self.identity = identity
        self.columns = columns
        self.types: Mapping[str, Any] = {}

    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        """Returns the records in order. columns: those that will be used; a Parquet file reads no others.

        Raises JobError where the file itself is damaged or cannot be read.
        """
        raise NotImplementedError

    def peek(self) -> dict[str, Any] | None:
        """Returns the data of the first record that can be read, or None when none of the first 100 can."""
        return next((record.data for record in islice(self.records(), 100) if record.data is not None), None)


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
