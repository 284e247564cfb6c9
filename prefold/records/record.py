"""Records as they are read, and what reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError

__all__ = ["FORMATS", "Record", "Source"]

FORMATS = ("jsonl", "csv", "tsv", "parquet")


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the input: its number (from 1), and its data or what is wrong with it.

    size: about how many bytes it takes; who holds many records goes by it.
    """

    number: int
    data: dict[str, Any] | None = None
    error: InputError | None = None
    size: int = 0


class Source:
    """The records of one input.

    name      as the user wrote it
    format    one of FORMATS
    columns   names known before the first record is read (CSV, TSV, Parquet), else None
    types     {column: Arrow type} of a Parquet file; of other formats nothing is known
    identity  what tells this input from another: its size and a digest (of a very large file: of
              blocks all over it; of standard input: of the first line)
    paths     its files; none of standard input
    lost_lines  lines of the last pass that a broken quote took along and that became no records of their own
    """

    paths: tuple[Path, ...] = ()
    lost_lines = 0

    def __init__(self, name: str, format: str, identity: dict[str, Any], columns: list[str] | None):
        self.name = name
        self.format = format
        self.identity = identity
        self.columns = columns
        self.types: Mapping[str, Any] = {}

    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        """The records in order. `columns`: those that will be used; a Parquet file reads no others."""
        raise NotImplementedError

    def peek(self) -> dict[str, Any] | None:
        """The first record that can be read, None when there is none among the first few."""
        return next((record.data for record in islice(self.records(), 100) if record.data is not None), None)
