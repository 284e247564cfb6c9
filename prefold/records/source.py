"""Where the records of a job come from: JSONL, CSV, TSV and Parquet files, plain or gzipped, and standard input.

A source is read as a stream and never held in memory. What is wrong with one record is part of that
record (`Record.error`), and the records behind it are still read; what breaks the file itself (a truncated
gzip stream, an unreadable Parquet footer) is a JobError.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError, JobError
from .delimited import MAX_CELL_LINES, read_rows
from .fields import check_depth
from .parquet import ParquetSource
from .record import FORMATS, Record, Source

__all__ = ["SUFFIXES", "TableOptions", "file_identity", "is_gzip", "lines_of", "open_source", "standard_input"]

SUFFIXES = {".ndjson": "jsonl", ".json": "jsonl"} | {f".{format}": format for format in FORMATS}
_WHOLE_DIGEST = 256 << 20  # bytes up to which a file's digest is of all of it ...
_DIGEST_BLOCKS, _DIGEST_BYTES = 512, 1 << 16  # ... and of these blocks, evenly spread, of a larger one
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TableOptions:
    """How CSV and TSV are read.

    delimiter        the character between cells; None: a comma, of TSV a tab
    max_cell_lines   see `read_rows`
    """

    delimiter: str | None = None
    max_cell_lines: int = MAX_CELL_LINES


def open_source(
    name: str,
    format: str | None = None,
    options: TableOptions | None = None,
    *,
    stdin: Iterable[bytes] | None = None,
) -> Source:
    """The source of the records in `name`, a path or "-" for standard input. The suffix tells the format if none is
    given.

    Raises JobError when there is no such file, its format cannot be told, or its header cannot be used.
    """
    options = options or TableOptions()
    if format is not None and format not in FORMATS:
        raise JobError(f"unknown input format {format!r}; known: {', '.join(FORMATS)}")
    if name == "-":
        return _open_stdin(format or "jsonl", standard_input() if stdin is None else stdin, options)
    path = Path(name)
    if not path.exists():
        raise JobError(f"no such input file: {name}")
    if not path.is_file():
        raise JobError(f"the input {name} is not a file")
    format = format or _format_of(path)
    _delimiter(format, options.delimiter)
    identity = file_identity(path)
    if format == "parquet":
        source: Source = ParquetSource(name, path, identity)
        source.paths = (path,)
        return source
    opener = gzip.open if is_gzip(path) else open
    with _broken(name, 0), opener(path, "rb") as file:
        head = file.readline()
    source = _LineSource.make(name, format, identity, head, lambda: opener(path, "rb"), options)
    source.paths = (path,)
    return source


def _format_of(path: Path) -> str:
    suffixes = [s.lower() for s in path.suffixes if s.lower() != ".gz"]
    format = SUFFIXES.get(suffixes[-1]) if suffixes else None
    if format is None:
        raise JobError(f"cannot tell the format of {path.name} from its name; add --format ({', '.join(FORMATS)})")
    return format


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def file_identity(path: Path, size: int | None = None) -> dict[str, Any]:
    """The identity of a file, or of its first `size` bytes."""
    size = path.stat().st_size if size is None else size
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE_DIGEST:
            left = size
            while block := file.read(min(left, 1 << 20)):
                digest.update(block)
                left -= len(block)
        else:
            for i in range(_DIGEST_BLOCKS):
                file.seek((size - _DIGEST_BYTES) * i // (_DIGEST_BLOCKS - 1))
                digest.update(file.read(_DIGEST_BYTES))
    return {"bytes": size, "digest": digest.hexdigest()}


_BROKEN = (EOFError, OSError, zlib.error)


@contextmanager
def _broken(name: str, number: int) -> Iterator[None]:
    """Errors of the file itself as JobError."""
    try:
        yield
    except _BROKEN as error:
        raise _job_error(name, number, error) from error


def _job_error(name: str, number: int, error: BaseException) -> JobError:
    if isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error)):
        where = f"after record {number}" if number else "at its start"
        return JobError(f"the gzip stream of {name} is damaged {where} ({error}); make the file again")
    return JobError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}")


# ---------------------------------------------------------------------------------------------- lines


class _LineSource(Source):
    """JSONL, CSV and TSV: formats whose records are lines of UTF-8 bytes."""

    @classmethod
    def make(cls, name: str, format: str, identity: dict, head: bytes, opener: Any, options: TableOptions) -> Source:
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise JobError(f"{name} is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8 {name}")
        head = head.removeprefix(_BOM)
        if format == "jsonl":
            if head.lstrip()[:1] == b"[":
                raise JobError(f"{name} is a JSON array, not an object a line; convert it first: jq -c '.[]' {name}")
            return _JsonlSource(name, format, identity, None, opener, head)
        sign = _delimiter(format, options.delimiter)
        columns = _header(name, head, sign, opener, sure=options.delimiter is not None)
        return _DelimitedSource(name, format, identity, columns, opener, sign, options.max_cell_lines)

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
            lines = iter(file)
            with _broken(self.name, self._number):
                line = next(lines, b"")
            line = line.removeprefix(_BOM)
            while line:
                yield line
                try:
                    line = next(lines, b"")
                except _BROKEN as error:
                    raise _job_error(self.name, self._number, error) from error


class _JsonlSource(_LineSource):
    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        for line in self._lines():
            if not line.strip():
                continue
            self._number += 1
            try:
                yield Record(self._number, _parse_line(line), size=len(line))
            except InputError as error:
                yield Record(self._number, error=error)

    def peek(self) -> dict[str, Any] | None:
        with contextlib.suppress(InputError):
            return _parse_line(self._head)
        return super().peek() if self.name != "-" else None


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"the line is not valid UTF-8 at byte {error.start}", remedy="re-encode it as UTF-8", code="invalid_utf8"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"the line is not valid JSON: {error.msg} at column {error.colno}",
            remedy="write one JSON object a line",
            code="invalid_json",
        ) from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"the line cannot be read as JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise InputError(f"the line is a JSON {kind}", remedy="write one JSON object a line", code="wrong_type")
    return check_depth(data, line.count(b"[") + line.count(b"{"), "the line")


def _delimiter(format: str, given: str | None) -> str:
    """The character between cells. given: of --delimiter, None for what the format has."""
    if given is None:
        return "\t" if format == "tsv" else ","
    if format not in ("csv", "tsv"):
        raise JobError(f"--delimiter is for CSV and TSV; the input is {format}")
    found = {"tab": "\t", "\\t": "\t"}.get(given, given)
    if len(found) != 1 or found in '"\r\n':
        raise JobError(f"--delimiter {given!r} is not one character; write ';', or tab")
    return found


def _header(name: str, head: bytes, delimiter: str, opener: Any, *, sure: bool) -> list[str]:
    """The names of the columns. sure: the delimiter is not to be doubted."""
    with opener() as file:
        rest = iter(file)
        next(rest, b"")
        row = next(read_rows(chain([head], rest), delimiter), None)
    if row is None:
        raise JobError(f"{name} is empty: a table starts with a line of column names")
    if row.error is not None:
        raise JobError(f"the header of {name} cannot be read: {row.error}")
    columns = row.cells or []
    other = next((c for c in ";\t|," if c in columns[0]), None) if len(columns) == 1 and not sure else None
    if other is not None:
        option = f"--delimiter {'tab' if other == chr(9) else repr(other)}"
        raise JobError(
            f"the header of {name} is one column, {columns[0]!r}; if its cells are parted by {other!r}, add {option} "
            f"(if they are not, --delimiter {delimiter!r})"
        )
    twice = {c for c in columns if columns.count(c) > 1}
    if twice:
        raise JobError(f"the header of {name} names a column twice: {', '.join(sorted(twice))}")
    return columns


class _DelimitedSource(_LineSource):
    def __init__(
        self,
        name: str,
        format: str,
        identity: dict,
        columns: list[str],
        opener: Any,
        delimiter: str,
        max_cell_lines: int,
    ):
        super().__init__(name, format, identity, columns, opener)
        self._delimiter = delimiter
        self._max_cell_lines = max_cell_lines

    def records(self, columns: Collection[str] | None = None) -> Iterator[Record]:
        assert self.columns is not None
        width, most = len(self.columns), self._max_cell_lines
        rows = read_rows(self._lines(), self._delimiter, width=width, max_cell_lines=most)
        next(rows)  # the header
        self.lost_lines = 0
        for row in rows:
            self._number += 1
            self.lost_lines += row.lost
            data = None if row.cells is None else dict(zip(self.columns, row.cells, strict=True))
            yield Record(self._number, data, row.error, row.size)


def _open_stdin(format: str, stream: Iterable[bytes], options: TableOptions) -> Source:
    if format == "parquet":
        raise JobError("a Parquet file cannot be read from standard input; give its path")
    lines = lines_of(stream)
    with _broken("standard input", 0):
        head = next(lines, b"")
    if head[:2] == b"\x1f\x8b":
        raise JobError("standard input is gzipped; pipe it through `gzip -dc`")
    identity = {"stdin": hashlib.blake2b(head, digest_size=16).hexdigest()}
    taken = False

    @contextmanager
    def opener() -> Iterator[Iterator[bytes]]:
        nonlocal taken
        # The header of a table is read once more; what lies behind it only once.
        if taken:
            raise JobError("standard input can be read only once")
        yield consume()

    def consume() -> Iterator[bytes]:
        nonlocal taken
        if head:
            yield head
        taken = True
        yield from lines

    return _LineSource.make("-", format, identity, head, opener, options)


def standard_input() -> BinaryIO:
    """Standard input as bytes. Raises JobError where it is closed."""
    if sys.stdin is None:
        raise JobError("standard input is closed; give a file, or pipe something into it")
    return sys.stdin.buffer


def lines_of(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream, read from its file descriptor if it has one.

    A thread that waits for input in sys.stdin's own buffer holds a lock that Python wants when the process ends, and
    Python aborts when it cannot have it. A thread that waits in os.read holds nothing.
    """
    try:
        number = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        yield from stream
        return
    parts: list[bytes] = []
    while block := os.read(number, 1 << 16):
        first, *others = block.split(b"\n")
        parts.append(first)
        for part in others:
            yield b"".join(parts) + b"\n"
            parts = [part]
    if last := b"".join(parts):
        yield last
