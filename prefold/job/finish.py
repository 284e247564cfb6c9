"""The last pass over a job's lines: into input order, CSV, Parquet or gzip.

The lines file holds `number TAB json NEWLINE`, in the order the results came. The made file appears
under its name only when it is whole.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from array import array
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import JobError, MissingExtraError

__all__ = ["Finish", "finish_for"]

Finish = Callable[[Path, Path], None]
_ROWS = 1024


def finish_for(path: Path, keep_order: bool) -> Finish | None:
    """How the file `path` is made of the lines; None when the lines are the file."""
    suffixes = [s.lower() for s in path.suffixes]
    zipped = suffixes[-1:] == [".gz"]
    format = (suffixes[:-1] if zipped else suffixes)[-1:]
    if format in ([".csv"], [".tsv"]):
        write: Any = _write_csv
    elif format == [".parquet"]:
        if zipped:
            raise JobError(f"{path.name}: Parquet is compressed inside; write {path.stem}")
        _pyarrow(path)  # refuse before the work, not after it
        write = _write_parquet
    elif format not in ([".jsonl"], [".ndjson"], [".json"]):
        what = f"of {''.join(format)} files" if format else "without an ending"
        raise JobError(f"{path.name}: an output {what} is not known; name it .jsonl, .csv, .tsv or .parquet, with .gz")
    elif keep_order or zipped:
        write = _write_jsonl
    else:
        return None

    def finish(lines: Path, made: Path) -> None:
        temporary = made.with_name(made.name + ".tmp")
        try:
            with lines.open("rb") as file:
                write(_Lines(file, keep_order), temporary, made)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(made)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    return finish


class _Lines:
    """The lines, each time they are iterated, in input order when asked for."""

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


def _write_jsonl(lines: _Lines, path: Path, made: Path) -> None:
    with gzip.open(path, "wb") if made.suffix == ".gz" else path.open("wb") as file:
        for line in lines:
            file.write(line)


# --------------------------------------------------------------------------------------------- tables


def _columns(lines: _Lines) -> dict[str, set[str]]:
    """Every column with the kinds of value it holds."""
    kinds: dict[str, set[str]] = {}
    for line in lines:
        for name, value in json.loads(line).items():
            kinds.setdefault(name, set()).add(_kind(value))
    return kinds


def _kind(value: Any) -> str:
    if isinstance(value, list):
        # type(), not isinstance: a bool is no number here; a float32 of 1 is written "1"
        return "floats" if value and all(type(v) in (float, int) for v in value) else "json"
    if isinstance(value, dict):
        return "json"
    return {bool: "bool", int: "int", float: "float", str: "text"}.get(type(value), "null")


def _cell(value: Any) -> Any:
    """A value as a table cell: an error as its message, anything nested as JSON."""
    if isinstance(value, dict) and set(value) >= {"code", "message"}:
        remedy = f"; {value['remedy']}" if "remedy" in value else ""
        return f"{value['code']}: {value['message']}{remedy}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


def _write_csv(lines: _Lines, path: Path, made: Path) -> None:
    columns = list(_columns(lines))
    tsv = ".tsv" in [s.lower() for s in made.suffixes]
    opener = gzip.open if made.suffix == ".gz" else open
    with opener(path, "wb") as raw, TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, delimiter="\t" if tsv else ",", lineterminator="\n")
        table.writeheader()
        for line in lines:
            table.writerow({name: _cell(value) for name, value in json.loads(line).items()})


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", f"writing {path}") from None
    return pa, pq


def _write_parquet(lines: _Lines, path: Path, made: Path) -> None:
    pa, pq = _pyarrow(path)
    schema = pa.schema([(name, _arrow_type(pa, kinds - {"null"})) for name, kinds in _columns(lines).items()])
    with pq.ParquetWriter(path, schema) as table:
        batch: list[dict[str, Any]] = []
        for line in lines:
            batch.append(json.loads(line))
            if len(batch) == _ROWS:
                table.write_batch(_arrow_batch(pa, batch, schema))
                batch = []
        if batch:
            table.write_batch(_arrow_batch(pa, batch, schema))


def _arrow_type(pa: Any, kinds: set[str]) -> Any:
    simple = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "floats": pa.list_(pa.float32())}
    if len(kinds) == 1 and (kind := next(iter(kinds))) in simple:
        return simple[kind]
    return pa.float64() if kinds == {"int", "float"} else pa.string()


def _arrow_batch(pa: Any, rows: list[dict[str, Any]], schema: Any) -> Any:
    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if pa.types.is_string(field.type):
            values = [None if (v := _cell(value)) is None else str(v) for value in values]
        try:
            arrays.append(pa.array(values, field.type))
        except (pa.ArrowException, OverflowError) as error:
            raise JobError(f"column {field.name!r} cannot be written as {field.type}: {error}") from error
    return pa.record_batch(arrays, schema=schema)
