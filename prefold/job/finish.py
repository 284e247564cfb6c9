"""Makes the last pass over a job's lines, which brings them into input order, CSV, Parquet or gzip.

The lines file holds `number TAB json NEWLINE`, in the order in which results came. The file that is made of it appears
under its name only when it is whole.
"""

from __future__ import annotations

import csv
import gzip
import json
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from ..errors import JobError
from ..files import replacing
from .columns import TableForm, cell, need_pyarrow, write_parquet

# A function of (lines file, file to be made) that makes the file and returns notes for the user.
Finish = Callable[[Path, Path], list[str]]


def finish_for(path: Path, keep_order: bool, form: TableForm | None = None) -> Finish | None:
    """Returns the function that makes the file `path` of the lines; None when the lines are the file.

    form: the columns of a table. Raises JobError for a name that tells no format, MissingExtraError without pyarrow.
    """
    suffixes = [s.lower() for s in path.suffixes]
    zipped = suffixes[-1:] == [".gz"]
    format = (suffixes[:-1] if zipped else suffixes)[-1:]
    opened: Any = gzip.open if zipped else open
    if format in ([".csv"], [".tsv"]):
        write: Any = partial(_write_csv, opened, "\t" if format == [".tsv"] else ",")
    elif format == [".parquet"]:
        if zipped:
            raise JobError(f"{path.name} cannot be written, as Parquet is compressed inside; name it {path.stem}")
        need_pyarrow(f"writing {path}")  # refuse before the work, not after it
        write = write_parquet
    elif format not in ([".jsonl"], [".ndjson"], [".json"]):
        what = f"of {''.join(format)} files" if format else "without an ending"
        raise JobError(
            f"{path.name} cannot be written, as an output {what} is not known; name it .jsonl, .csv, .tsv or .parquet "
            "(.gz may follow, but not .parquet)"
        )
    elif keep_order or zipped:
        write = partial(_write_jsonl, opened)
    else:
        return None

    def finish(lines: Path, made: Path) -> list[str]:
        with replacing(made) as temporary, lines.open("rb") as file:
            notes = write(_OutputLines(file, keep_order), temporary, form or TableForm())
        return notes

    return finish


class _OutputLines:
    """Iterates over the lines, as often as wanted, in input order when asked for."""

    def __init__(self, file: BinaryIO, keep_order: bool):
        self._file = file
        self._starts = self._in_order() if keep_order else None

    def _in_order(self) -> np.ndarray:
        numbers, starts, place = array("q"), array("q"), 0
        for line in self._file:
            numbers.append(int(line[: line.index(b"\t")]))
            starts.append(place)
            place += len(line)
        return np.array(starts, np.int64)[np.argsort(np.array(numbers, np.int64))]

    def __iter__(self) -> Iterator[bytes]:
        if self._starts is None:
            self._file.seek(0)
            for line in self._file:
                yield line.split(b"\t", 1)[1]
            return
        for start in self._starts.tolist():
            self._file.seek(start)
            yield self._file.readline().split(b"\t", 1)[1]


def _write_jsonl(opened: Any, lines: _OutputLines, path: Path, form: TableForm) -> list[str]:
    with opened(path, "wb") as file:
        for line in lines:
            file.write(line)
    return []


def _write_csv(opened: Any, delimiter: str, lines: _OutputLines, path: Path, form: TableForm) -> list[str]:
    columns = list(dict.fromkeys((*form.head, *(name for line in form.objects(lines) for name in line))))
    columns.sort(key="error".__eq__)  # the column of errors is the last one
    with opened(path, "wb") as raw, TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        table = csv.DictWriter(_UnixLines(file), columns, delimiter=delimiter, lineterminator="\r\n")
        table.writeheader()
        for line in lines:
            table.writerow({name: cell(name, value) for name, value in json.loads(line).items()})
    return []


class _UnixLines:
    """Ends the records of a csv.writer with "\\n".

    Before Python 3.13 the writer quotes carriage returns only where they are part of what ends a record, so its
    records end with "\\r\\n".
    """

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, record: str) -> int:
        return self._file.write(record[:-2] + "\n")
