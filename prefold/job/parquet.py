"""Writes lines of JSON as a Parquet file; needs pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import JobError, MissingExtraError
from ..records.forms import restorer
from .columns import NoType, TableForm, cell, single

_ROWS, _BYTES = 8192, 32 << 20  # the most rows and bytes of a row group


def need_pyarrow(what: str) -> Any:
    """Returns the module pyarrow. Raises MissingExtraError, in which `what` names what needs it."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", what) from None
    return pa


class _Unfit(Exception):
    def __init__(self, name: str, why: str):
        super().__init__(why)
        self.name = name


def write_parquet(lines: Iterable[bytes], path: Path, form: TableForm) -> list[str]:
    """Writes the lines, which are iterated several times. Returns notes about columns that had to become text."""
    pa = need_pyarrow(f"writing {path.name}")
    columns, notes = _column_types(pa, lines, form)
    while True:
        try:
            _write(pa, lines, path, columns)
            return list(notes.values())
        except _Unfit as error:
            if error.name in notes:
                raise JobError(f"column {error.name!r} cannot be written: {error}") from error
            notes[error.name] = _note(error.name, str(error))
            columns[error.name] = pa.string()


def _note(name: str, why: str) -> str:
    return f"the column {name!r} is written as text: {why}"


def _column_types(pa: Any, lines: Iterable[bytes], form: TableForm) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns (the type of every column, notes about columns whose values have no type in common)."""
    types: dict[str, Any] = {name: form.types[name] for name in form.head if name in form.types}
    types = {name: t.value_type if pa.types.is_dictionary(t) else t for name, t in types.items()}
    notes: dict[str, str] = {}
    kinds = {name: form.kind(name) for name in form.head if name not in types}
    order: dict[str, None] = dict.fromkeys(form.head)
    for line in form.objects(lines):
        for name, value in line.items():
            order.setdefault(name)
            if name in types:
                continue
            try:
                if name not in kinds:
                    kinds[name] = form.kind(name)
                    if name == "error":
                        types[name] = pa.string()
                    elif form.is_made(name) and (known := single(pa, name)) is not None:
                        types[name] = known
                kinds[name].add(value)
            except NoType as error:
                types[name], notes[name] = pa.string(), _note(name, f"it holds {error}")
    for name, kind in kinds.items():
        if name not in types:
            try:
                types[name] = kind.arrow(pa) if kind.kinds or name != "record" else pa.int64()
            except NoType as error:
                types[name], notes[name] = pa.string(), _note(name, f"it holds {error}")
    return {name: types[name] for name in sorted(order, key="error".__eq__)}, notes


def _write(pa: Any, lines: Iterable[bytes], path: Path, columns: dict[str, Any]) -> None:
    import pyarrow.parquet as pq

    schema = pa.schema(list(columns.items()))
    restorers = {name: restorer(type) for name, type in columns.items()}
    with pq.ParquetWriter(path, schema) as table:
        rows: list[dict[str, Any]] = []
        size = 0
        for line in lines:
            rows.append(json.loads(line))
            size += len(line)
            if len(rows) == _ROWS or size >= _BYTES:
                table.write_batch(_batch(pa, rows, schema, restorers))
                rows, size = [], 0
        if rows:
            table.write_batch(_batch(pa, rows, schema, restorers))


def _batch(pa: Any, rows: list[dict[str, Any]], schema: Any, restorers: dict[str, Any]) -> Any:
    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        try:
            if pa.types.is_string(field.type):
                values = [_text(field.name, value) for value in values]
            elif (restore := restorers[field.name]) is not None:
                values = [None if value is None else restore(value) for value in values]
            arrays.append(pa.array(values, field.type))
        except (pa.ArrowException, OverflowError, ValueError, TypeError, ArithmeticError) as error:
            raise _Unfit(field.name, f"not every value is a {field.type} ({error})") from error
    return pa.record_batch(arrays, schema=schema)


def _text(name: str, value: Any) -> str | None:
    value = cell(name, value)
    return value if value is None or isinstance(value, str) else json.dumps(value)
