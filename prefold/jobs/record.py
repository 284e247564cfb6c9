"""Defines records, the sources that read them, and the adapters between a job's records and its tasks; writes output
lines; and has compact sets of record numbers and of texts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import InputError
from ..tasks.results import Answer

# Output lines are JSON, with float32 numbers as short as they can be and still exact.
#
# Values that JSON lacks have a form that a line can hold:
#
# | value                          | in a line                                     |
# |--------------------------------|-----------------------------------------------|
# | NaN                            | null                                          |
# | an infinite number             | the text "Infinity" or "-Infinity"            |
# | a date, a time, a timestamp    | its text, "2026-01-31 12:00:00"               |
# | a duration                     | its seconds                                   |
# | a decimal number               | its text                                      |
# | bytes                          | their base64                                  |
# | a map                          | a list of pairs                               |

_encode = json.JSONEncoder(ensure_ascii=False, separators=(", ", ": ")).encode


# Characters that str.splitlines and some readers of JSON lines take for the end of a line, though JSON allows them in
# texts.
_LINE_ENDS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
# Halves of surrogate pairs. UTF-8 cannot hold them, and many readers of JSON refuse them even when they are escaped.
_SURROGATES = re.compile("[\ud800-\udfff]")


def dumps(value: Any) -> str:
    """Returns `value` as one line of JSON, which UTF-8 can hold and no reader splits.

    Numbers of arrays keep nine digits, which is what a float32 needs to come back exact. Half of a surrogate pair
    becomes U+FFFD.
    """
    line = _dumps(value)
    if not line.isascii():
        for end, escaped in _LINE_ENDS.items():
            line = line.replace(end, escaped)
        line = _SURROGATES.sub("\ufffd", line)
    return line


def _dumps(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_encode(str(k))}: {_dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_dumps, value)) + "]"
    if isinstance(value, np.ndarray):
        if value.ndim == 1 and value.dtype.kind == "f":
            return "[" + ", ".join(["%.9g"] * len(value)) % tuple(value.tolist()) + "]"
        return _dumps(list(value) if value.ndim > 1 else value.tolist())
    if isinstance(value, np.generic):
        return f"{value:.9g}" if value.dtype == np.float32 else _encode(value.item())
    return _encode(value)


def plain(value: Any) -> Any:
    """Returns a value in a form that JSON has, by the table above."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def error_object(error: InputError) -> dict[str, Any]:
    """Returns an error as in an output line: code, message, and field and remedy if there are any."""
    out: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.field:
        out["field"] = error.field
    if error.remedy:
        out["remedy"] = error.remedy
    return out


Extra = list[object]  # what the end of a job needs of a record beside its line, as JSON

FORMATS = ("jsonl", "csv", "tsv", "parquet")


@dataclass(frozen=True, slots=True)
class Record:
    """A Record is one line of the input.

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
    """A Source reads the records of one input.

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
        """Returns the data of the first valid record, or None if none of the first 100 is valid."""
        return next((record.data for record in islice(self.records(), 100) if record.data is not None), None)


@dataclass(slots=True)
class ParsedRecord:
    """A ParsedRecord holds a record as a task's items, or its error.

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
    """A RecordAdapter reads records as items of tasks, and writes their output lines.

    columns  the columns of a table that the adapter will look at; None: all
    """

    columns: Collection[str] | None

    def read(self, record: Record) -> ParsedRecord:
        """Returns a record as a task's items. It does not raise: errors are in the result."""
        ...

    def line(self, number: int, meta: Any, answers: Sequence[Answer]) -> dict[str, Any]:
        """Returns the output object of a record. answers: the task's answer to each of its items"""
        ...

    def error_line(self, number: int, meta: Any, error: InputError) -> dict[str, Any]:
        """Returns the output object of a record that failed. meta: None if only the record's number is known"""
        ...


def error_text(adapter: RecordAdapter, number: int, meta: Any, error: InputError) -> str:
    """Returns the output line of a record that failed, without a `meta` that is not valid JSON."""
    try:
        return dumps(adapter.error_line(number, meta, error))
    except Exception:
        return dumps(adapter.error_line(number, None, error))


class RecordSet:
    """A RecordSet holds a set of record numbers >= 0, one bit for each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Adds a number, and returns whether it is new."""
        byte, bit = number >> 3, 1 << (number & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits), 64)))
        if self._bits[byte] & bit:
            return False
        self._bits[byte] |= bit
        self._count += 1
        return True


class TextSet:
    """A TextSet holds a set of texts as 64-bit digests.

    Two different texts share a digest with a probability of about n^2 / 2^65 (1e-9 for 200,000).

    most_new: digests that are sorted in together
    """

    def __init__(self, most_new: int = 1 << 16) -> None:
        self._most_new = most_new
        self._sorted = np.zeros(0, np.uint64)
        self._new: set[int] = set()  # digests that are to be put among those, many at once

    def add(self, text: str) -> bool:
        """Adds a text, and returns whether it is new."""
        digest = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
        place = int(np.searchsorted(self._sorted, np.uint64(digest)))
        if digest in self._new or (place < len(self._sorted) and int(self._sorted[place]) == digest):
            return False
        self._new.add(digest)
        if len(self._new) == self._most_new:
            new = np.sort(np.fromiter(self._new, np.uint64))
            self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, new), new)
            self._new = set()
        return True


def format_ranges(numbers: Iterable[int]) -> str:
    """Returns distinct numbers as a text of ranges such as "1-5,7,9-12"."""
    ordered = np.sort(np.fromiter(numbers, np.int64))
    ranges = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ranges if len(run))


def parse_ranges(text: str) -> Iterator[int]:
    """Yields the numbers of a text that `format_ranges` wrote. Raises ValueError for any other text."""
    for part in filter(None, text.split(",")):
        start, _, stop = part.partition("-")
        yield from range(int(start), int(stop or start) + 1)
