"""Defines a record of the input, and a source of records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError

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
