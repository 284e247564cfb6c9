"""Records, sources and adapters, output lines, and compact sets of record numbers and texts."""

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

# Output lines are JSON. float32 values have the fewest digits that are still exact.
#
# Values that JSON does not have are replaced:
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


# str.splitlines and some JSON lines readers treat these characters as line ends, although JSON allows them in strings.
_LINE_ENDS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
# Lone surrogates. UTF-8 cannot hold them, and many JSON readers refuse them even if they are escaped.
_SURROGATES = re.compile("[\ud800-\udfff]")


def dumps(value: Any) -> str:
    """Return `value` as one line of JSON that UTF-8 can hold and that no reader splits.

    Array values have nine digits, enough to restore a float32 exactly. A lone surrogate becomes U+FFFD.
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
    """Return a value in a form that JSON has, by the table above."""
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
    """Return an error as in an output line: code, message, and field and remedy if there are any."""
    out: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.field:
        out["field"] = error.field
    if error.remedy:
        out["remedy"] = error.remedy
    return out


Extra = list[object]  # JSON data that the end of a job needs about a record

FORMATS = ("jsonl", "csv", "tsv", "parquet")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the input."""

    number: int  # position in the input, from 1
    data: dict[str, Any] | None = None  # {column: value}; None if there is an error
    error: InputError | None = None  # what is wrong with the record, else None
    size: int = 0  # size in bytes (an estimate), for callers that hold many records


class Source:
    """The records of one input.

    Attributes:
        name: the input's name as the user wrote it
        format: one of FORMATS
        columns: names of the columns, if they are known before the first record is read (CSV, TSV, Parquet); else None
        types: {column: Arrow type} of a Parquet file; empty for other formats
        identity: size and digest that distinguish this input from others. For a file above 256 MiB, the digest covers
            blocks all over the file, and the identity has the modification time. For standard input, it covers the
            first lines. A growing file is only read up to the size in its identity
        paths: the files of the input; empty for standard input
    """

    paths: tuple[Path, ...] = ()

    def __init__(self, name: str, format: str, identity: dict[str, Any], columns: list[str] | None):
        self.name = name
        self.format = format
        self.identity = identity
        self.columns = columns
        self.types: Mapping[str, Any] = {}

    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        """Yield the records in order. Raise JobError if the file itself is damaged or cannot be read.

        Args:
            columns: the columns that will be used; a Parquet file reads no others
        """
        raise NotImplementedError

    def peek(self) -> dict[str, Any] | None:
        """Return the data of the first valid record, or None if none of the first 100 is valid."""
        return next((record.data for record in islice(self.records(), 100) if record.data is not None), None)


@dataclass(slots=True)
class ParsedRecord:
    """A record as items of a task, or its error."""

    task: str = ""  # name of the task, one of the job's
    items: list[Any] = field(default_factory=list)  # items for this task; their results form one output line
    meta: Any = None  # what the output line needs besides the results (an id, ...), as JSON values
    error: InputError | None = None  # what is wrong with the record, else None


class RecordAdapter(Protocol):
    """Converts records to items of tasks, and answers to output lines."""

    columns: Collection[str] | None  # columns of a table that the adapter will read; None: all

    def read(self, record: Record) -> ParsedRecord:
        """Return a record as items of a task. Errors are in the result, this never raises."""
        ...

    def line(self, number: int, meta: Any, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the output object of a record.

        Args:
            answers: the task's answer to each of its items
        """
        ...

    def error_line(self, number: int, meta: Any, error: InputError) -> dict[str, Any]:
        """Return the output object of a record that failed.

        Args:
            meta: None if only the record's number is known
        """
        ...


def error_text(adapter: RecordAdapter, number: int, meta: Any, error: InputError) -> str:
    """Return the output line of a record that failed. A `meta` that is not valid JSON is left out."""
    try:
        return dumps(adapter.error_line(number, meta, error))
    except Exception:
        return dumps(adapter.error_line(number, None, error))


class RecordSet:
    """A set of record numbers >= 0, with one bit for each number."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Add a number. Return whether it is new."""
        byte, bit = number >> 3, 1 << (number & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits), 64)))
        if self._bits[byte] & bit:
            return False
        self._bits[byte] |= bit
        self._count += 1
        return True


class TextSet:
    """A set of texts, as 64-bit digests.

    The probability that two different texts of n share a digest is about n^2 / 2^65 (1e-9 for 200,000).

    Args:
        most_new: new digests are merged into the sorted array in groups of this size
    """

    def __init__(self, most_new: int = 1 << 16) -> None:
        self._most_new = most_new
        self._sorted = np.zeros(0, np.uint64)
        self._new: set[int] = set()  # digests that are not in `_sorted` yet

    def add(self, text: str) -> bool:
        """Add a text. Return whether it is new."""
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
    """Return distinct numbers as a text of ranges such as "1-5,7,9-12"."""
    ordered = np.sort(np.fromiter(numbers, np.int64))
    ranges = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ranges if len(run))


def parse_ranges(text: str) -> Iterator[int]:
    """Yield the numbers of a text that `format_ranges` wrote. Raise ValueError for any other text."""
    for part in filter(None, text.split(",")):
        start, _, stop = part.partition("-")
        yield from range(int(start), int(stop or start) + 1)
