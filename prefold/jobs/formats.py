"""Readers of record formats: JSONL, CSV, TSV, and Parquet (with pyarrow).

A quoted cell of CSV may span several lines, so a quote that is never closed would consume all lines after it. Here a
broken quote is one error, at the first line of its row. The lines after that one are read as rows again.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import InputError, JobError, MissingExtraError
from ..text.fields import check_depth
from .record import Record, Source

MAX_CELL_LINES = 1000
MAX_CELL_BYTES = 64 << 20  # maximum size of a row that spans several lines
_MAX_FIELD = 1 << 30


@dataclass(frozen=True, slots=True)
class TableLine:
    """The cells of a table row, or the row's error."""

    line: int  # number of the row's first line, from 1
    cells: list[str] | None = None  # None if there is an error
    error: InputError | None = None  # what is wrong with the row, else None
    size: int = 0  # number of characters


def read_rows(
    lines: Iterable[bytes], delimiter: str, *, width: int | None = None, max_cell_lines: int = MAX_CELL_LINES
) -> Iterator[TableLine]:
    """Yield the rows of a table, including the header. Empty lines between rows are skipped.

    Args:
        lines: The lines of the table.
        delimiter: The character between cells.
        width: The number of cells of each row; another number is an error. None: any number.
        max_cell_lines: Maximum number of lines of a quoted cell; 0: any number.
    """
    csv.field_size_limit(_MAX_FIELD)
    row = _RowLines(lines, max_cell_lines)
    reader = csv.reader(row, delimiter=delimiter, strict=True)
    while True:
        row.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except (csv.Error, _TooLong) as error:
            wrong, size = _broken(row, error), row.size
            row.give_back(len(row.lines) - 1)
            yield TableLine(row.first_line, error=wrong, size=size)
            continue
        if width is not None and cells and len(cells) != width:
            message = f"line {row.first_line} has {len(cells)} cells, the header {width}"
            remedy = "give it as many cells as the header, and quote cells that contain a delimiter"
            wrong = InputError(message, remedy=remedy, code="wrong_number_of_fields")
            yield TableLine(row.first_line, error=wrong, size=row.size)
        elif cells:
            yield TableLine(row.first_line, cells, size=row.size)


class _TooLong(Exception):
    """Raised if a row has too many lines or bytes."""


class _RowLines:
    """An iterator over decoded lines. It remembers the lines of the current row and can push lines back."""

    def __init__(self, lines: Iterable[bytes], most: int):
        self._source = iter(lines)
        self._again: deque[str] = deque()
        self._most = most
        self.first_line = 1  # line number of the row's start
        self.lines: list[str] = []
        self.size = 0

    def begin(self) -> None:
        """Start a new row at the next line."""
        self.first_line += len(self.lines)
        self.lines = []
        self.size = 0

    def give_back(self, count: int) -> None:
        """Push the last `count` lines back, so that they are read again."""
        self._again.extendleft(reversed(self.lines[len(self.lines) - count :]))
        del self.lines[len(self.lines) - count :]

    def __iter__(self) -> _RowLines:
        return self

    def __next__(self) -> str:
        if self.lines and self._most and (len(self.lines) >= self._most or self.size > MAX_CELL_BYTES):
            raise _TooLong
        # Undecodable bytes become lone surrogates. They are reported when their field is used.
        line = self._again.popleft() if self._again else next(self._source).decode("utf-8", "surrogateescape")
        self.lines.append(line)
        self.size += len(line)
        return line


def _broken(row: _RowLines, error: Exception) -> InputError:
    """Return the error of a row whose quotes are broken."""
    behind, message = len(row.lines) - 1, f"the row that begins in line {row.first_line} has a quote that"
    remedy = "close the quote, or double it"
    if isinstance(error, _TooLong):
        message += f" is not closed within {behind + 1:,} lines"
        remedy += ", or allow longer cells with --max-cell-lines N"
    elif "unexpected end" in str(error):
        message += " is never closed"
    elif behind:
        message += f" is closed in the middle of line {row.first_line + behind}, not at the end of a cell"
    else:
        message = f"line {row.first_line} is not a valid row: {str(error).partition(' - ')[0]}"
        remedy = (
            "end lines with a line feed, double the quotes inside a quoted cell, and quote cells that contain a quote"
        )
    if behind:
        message += f"; the {behind:,} lines after it are read as separate rows"
    return InputError(message, remedy=remedy, code="invalid_csv")


_BOM = b"\xef\xbb\xbf"
_BROKEN = (EOFError, OSError, zlib.error)


@dataclass(frozen=True)
class TableOptions:
    """How CSV and TSV are read."""

    delimiter: str | None = None  # character between cells; None: comma in CSV, tab in TSV
    max_cell_lines: int = MAX_CELL_LINES  # maximum lines of a quoted cell; 0: any number (see `read_rows`)


@contextmanager
def file_errors(name: str, number: int) -> Iterator[None]:
    """Turn errors of reading the file `name` into JobErrors.

    Args:
        number: Records read before the error.
    """
    try:
        yield
    except _BROKEN as error:
        raise _job_error(name, number, error) from error


def _job_error(name: str, number: int, error: BaseException) -> JobError:
    if isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error)):
        place = f"after record {number}" if number else "at its start"
        return JobError(f"the gzip stream of {name} is damaged {place} ({error}); make the file again")
    return JobError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}")


class LineSource(Source):
    """A source of records that are lines of UTF-8 bytes: JSONL, CSV, TSV.

    Attributes:
        most_bytes: maximum size of a JSONL line; a longer line is an error and is never in memory as a whole; None: any
            size
    """

    most_bytes: int | None = None

    @classmethod
    def make(cls, name: str, format: str, identity: dict, head: bytes, opener: Any, options: TableOptions) -> Source:
        """Return the source of a format. Raise JobError if the first line, `head`, shows another format.

        Args:
            opener: Opens the input's bytes anew for each pass, as a context manager.
        """
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise JobError(f"{name} is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 {name}")
        head = head.removeprefix(_BOM)
        if format == "jsonl":
            if head.lstrip()[:1] == b"[":
                raise JobError(f"{name} is a JSON array, not one object per line; convert it first: jq -c '.[]' {name}")
            if head.strip() == b"{":
                raise JobError(
                    f"{name} has JSON objects over several lines, not one per line; convert it: jq -c . {name}"
                )
            return _JsonlSource(name, format, identity, None, opener, head)
        sign = delimiter_of(format, options.delimiter)
        columns = _header(name, head, sign, opener, sure=options.delimiter is not None)
        source = _DelimitedSource(name, format, identity, columns, opener)
        source.delimiter, source.max_cell_lines = sign, options.max_cell_lines
        return source

    def __init__(
        self, name: str, format: str, identity: dict, columns: list[str] | None, opener: Any, head: bytes = b""
    ):
        super().__init__(name, format, identity, columns)
        self._opener = opener
        self._head = head
        self._number = 0

    def _lines(self) -> Iterator[bytes]:
        self._number = 0
        with self._opener() as file:
            lines = iter(file) if self.most_bytes is None else _bounded(file, self.most_bytes)
            with file_errors(self.name, self._number):
                line = next(lines, b"")
            line = line.removeprefix(_BOM)
            while line:
                yield line
                try:
                    line = next(lines, b"")
                except _BROKEN as error:
                    raise _job_error(self.name, self._number, error) from error


class _JsonlSource(LineSource):
    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        for line in self._lines():
            if not line.strip():
                continue
            self._number += 1
            if self.most_bytes is not None and len(line) > self.most_bytes:
                wrong = InputError(
                    f"the line is longer than {self.most_bytes} bytes", remedy="ask for less in it", code="too_large"
                )
                yield Record(self._number, error=wrong)
                continue
            try:
                yield Record(self._number, _parse_line(line), size=len(line))
            except InputError as error:
                yield Record(self._number, error=error)

    def peek(self) -> dict[str, Any] | None:
        with contextlib.suppress(InputError):
            return _parse_line(self._head)
        return super().peek() if self.paths else None  # a stream can only be read once


def _bounded(file: Any, most: int) -> Iterator[bytes]:
    """Yield the lines of a file. A line longer than `most` bytes is cut after `most` + 1 bytes."""
    while line := file.readline(most + 1):
        yield line
        while len(line) > most and not line.endswith(b"\n"):
            line = file.readline(most + 1)  # skip the rest of the line


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"the line is not valid UTF-8 at byte {error.start}", remedy="re-encode it as UTF-8", code="invalid_utf8"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"the line is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}",
            remedy="write one JSON object per line",
            code="invalid_json",
        ) from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"the line cannot be read as JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise InputError(f"the line is a JSON {kind}", remedy="write one JSON object per line", code="wrong_type")
    return check_depth(data, line.count(b"[") + line.count(b"{"), "the line")


def delimiter_of(format: str, option: str | None) -> str:
    """Return the character between cells.

    Args:
        option: The value of --delimiter; None: the format's own delimiter.
    """
    if option is None:
        return "\t" if format == "tsv" else ","
    if format not in ("csv", "tsv"):
        raise JobError(f"--delimiter is for CSV and TSV; the input is {format}")
    sign = {"tab": "\t", "\\t": "\t"}.get(option, option)
    if len(sign) != 1 or sign in '"\r\n':
        raise JobError(f"--delimiter {option!r} is not one character; write ';', or tab")
    return sign


def _header(name: str, head: bytes, delimiter: str, opener: Any, *, sure: bool) -> list[str]:
    """Return the names of the columns.

    Args:
        sure: The user gave the delimiter, so it is not questioned.
    """
    with opener() as file:
        rest = iter(file)
        next(rest, b"")
        row = next(read_rows(chain([head], rest), delimiter), None)
    if row is None:
        raise JobError(f"{name} is empty; a table starts with a line of column names")
    if row.error is not None:
        raise JobError(f"the header of {name} cannot be read: {row.error}")
    columns = row.cells or []
    sign = next((c for c in ";\t|," if c in columns[0]), None) if len(columns) == 1 and not sure else None
    if sign is not None:
        option = f"--delimiter {'tab' if sign == chr(9) else repr(sign)}"
        raise JobError(
            f"the header of {name} is one column, {columns[0]!r}; if its cells are separated by {sign!r}, add {option} "
            f"(if they are not, --delimiter {delimiter!r})"
        )
    twice = {c for c in columns if columns.count(c) > 1}
    if twice:
        raise JobError(f"the header of {name} names a column twice: {', '.join(sorted(twice))}; give each its own name")
    return columns


class _DelimitedSource(LineSource):
    delimiter: str
    max_cell_lines: int

    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        assert self.columns is not None
        width, most = len(self.columns), self.max_cell_lines
        rows = read_rows(self._lines(), self.delimiter, width=width, max_cell_lines=most)
        next(rows)  # the header
        for row in rows:
            self._number += 1
            data = None if row.cells is None else dict(zip(self.columns, row.cells, strict=True))
            yield Record(self._number, data, row.error, row.size)


_BATCH_BYTES = 4 << 20


class ParquetSource(Source):
    """A source of records that are rows of a Parquet file."""

    def __init__(self, name: str, path: Path, identity: dict[str, Any]):
        """Raise MissingExtraError without pyarrow, and JobError if the file is not a Parquet file."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingExtraError("pyarrow", "parquet", f"reading {name}") from None
        try:
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
        except pa.ArrowInvalid as error:
            raise JobError(f"{name} is not a Parquet file; give its --format, or make it again ({error})") from error
        super().__init__(name, "parquet", identity, schema.names)
        self.types = dict(zip(schema.names, schema.types, strict=True))
        self._path = path

    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        assert self.columns is not None
        names = self.columns if columns is None else [name for name in self.columns if name in columns]
        names = names or self.columns[:1]  # read at least one column, to count the rows
        number = 0
        try:
            with pq.ParquetFile(self._path) as file:
                for batch in file.iter_batches(batch_size=_batch_rows(file.metadata), columns=names):
                    yield from _batch_records(batch, number)
                    number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise JobError(f"cannot read {self.name} after record {number}: {error}") from error


def _batch_rows(metadata: Any) -> int:
    """Return how many rows to read at once: 512, or fewer if rows are large."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(512, _BATCH_BYTES * metadata.num_rows // max(1, size)))


def _batch_records(batch: Any, number: int) -> Iterator[Record]:
    size = batch.nbytes // max(1, batch.num_rows)
    try:
        for index, data in enumerate(batch.to_pylist(), number + 1):
            yield Record(index, data, size=size)
    except Exception:  # at least one value cannot be converted: find out which
        names = batch.schema.names
        for index in range(batch.num_rows):
            data, bad = {}, None
            for place, name in enumerate(names):
                try:
                    data[name] = batch.column(place)[index].as_py()
                except UnicodeDecodeError as error:
                    message = f"a text is not valid UTF-8: {error}"
                    bad = InputError(message, field=name, remedy="re-encode it", code="invalid_utf8")
                except (ValueError, OverflowError, KeyError, ImportError) as error:  # for example a year above 9999
                    kind = batch.schema.field(place).type
                    message = f"{name!r} is a {kind} that Python cannot represent: {error}"
                    bad = InputError(message, field=name, remedy="write it as a text", code="invalid_value")
            yield Record(number + index + 1, error=bad) if bad else Record(number + index + 1, data, size=size)
