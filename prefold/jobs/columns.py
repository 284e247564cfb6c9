"""Write JSON lines as a Parquet table. Each column has the narrowest Arrow type that holds all its values.

Nothing is rounded or guessed. If values have no common type, the column becomes text, and a note says why.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import JobError, MissingExtraError
from ..tasks.results import ANSWERS, VECTORS, Answer
from .record import RecordAdapter, Source, dumps
from .tables import TableAdapter

_MOST_FIELDS = 256  # maximum fields of a struct; an object with more keys becomes a map
_EXACT = 1 << 53  # a float64 holds whole numbers up to this exactly
# columns of real numbers, even if all values are whole
_REAL = {name for kinds in ANSWERS.values() for kind in kinds for name in kind.numbers if name not in kind.unlisted}
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # units per second


@dataclass(frozen=True)
class TableForm:
    """What is known about a table's columns before its lines are read."""

    head: tuple[str, ...] = ("record",)  # first columns; they exist even in a table without lines
    # columns made by a task, other columns are the user's; None: the task makes all
    columns: Collection[str] | None = None
    types: Mapping[str, Any] = field(default_factory=dict)  # {column: Arrow type} that a Parquet input defines
    # object of a line whose columns a table without lines gets after `head`
    empty: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: RecordAdapter, source: Source, example: Answer | None = None) -> TableForm:
        """Return the form of a job's output. Repeated columns of the input keep their types.

        Args:
            example: An answer of the task.
        """
        if not isinstance(adapter, TableAdapter):
            return cls(head=())
        names = adapter.columns_used.repeated()
        types_or_none = {name: type_at(source.types, path) for name, path in names.items()}
        types = {name: type for name, type in types_or_none.items() if type is not None}
        empty = json.loads(dumps(adapter.line(0, {}, [example]))) if example is not None else {}
        return cls(("record", *names), adapter.reserved, types, empty)

    def objects(self, lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
        """Yield the object of each line, or `empty` if there are no lines."""
        are_none = True
        for line in lines:
            are_none = False
            yield json.loads(line)
        if are_none:
            yield self.empty

    def is_made(self, name: str) -> bool:
        """Return whether a task makes the column of this name."""
        return self.columns is None or name in self.columns

    def kind(self, name: str) -> Kind:
        """Return an empty Kind for the column of this name."""
        return Kind(self.is_made(name) and name in _REAL, self.is_made(name))


Restore = Callable[[Any], Any]


class NoType(Exception):
    """Raised if values have no common Arrow type. Its message says why."""


@dataclass(slots=True)
class Kind:
    """The kinds of values found in a column, or inside its values."""

    real: bool = False  # whole numbers count as real numbers
    named: bool = False  # fields inside belong to a task: those with names in _REAL are real
    listed: bool = False  # the value is an element of a list: its fields are real only by their own names
    kinds: set[str] = field(default_factory=set)
    low: int = 0
    high: int = 0
    items: Kind | None = None
    fields: dict[str, Kind] = field(default_factory=dict)

    def add(self, value: Any) -> None:
        """Add a value of a line. Raise NoType."""
        if value is None:
            return
        kind = type(value)
        if kind is int:
            self._add_int(value, value)
        elif kind is list:
            self._add_list(value)
        elif kind is dict:
            self.kinds.add("object")
            for name, inner in value.items():
                self._field(name).add(inner)
        else:
            self.kinds.add(kind.__name__)

    def _add_int(self, low: int, high: int) -> None:
        self.kinds.add("int")
        self.low, self.high = min(self.low, low), max(self.high, high)

    def _add_list(self, values: list[Any]) -> None:
        self.kinds.add("list")
        if self.items is None:
            self.items = Kind(self.real, self.named, True)
        types = set(map(type, values))
        if types <= {float, str, bool}:  # fast path, as most lists are long and hold floats
            self.items.kinds |= {t.__name__ for t in types}
        elif types == {int}:
            self.items._add_int(min(values), max(values))
        else:
            for value in values:
                self.items.add(value)

    def _field(self, name: str) -> Kind:
        if name not in self.fields:
            if len(self.fields) > 100 * _MOST_FIELDS:
                raise NoType("objects with very many different keys")
            # All values of an object of probabilities are real, whatever its labels are called.
            real = name in _REAL or (self.real and not self.listed)
            self.fields[name] = Kind(self.named and real, self.named)
        return self.fields[name]

    def arrow(self, pa: Any) -> Any:
        """Return the Arrow type of all values so far. Raise NoType."""
        kinds = self.kinds
        if not kinds:
            return pa.string()
        if kinds <= {"int", "float"}:
            return self._number(pa)
        if len(kinds) > 1:
            names = {"str": "texts", "bool": "true or false", "list": "lists", "object": "objects"}
            raise NoType(" and ".join(sorted(names.get(kind, "numbers") for kind in kinds)))
        (kind,) = kinds
        if kind == "list":
            return pa.list_(self.items.arrow(pa) if self.items is not None else pa.string())
        if kind == "object":
            return self._object(pa)
        return pa.bool_() if kind == "bool" else pa.string()

    def _number(self, pa: Any) -> Any:
        if "float" in self.kinds or self.real:
            if max(-self.low, self.high) > _EXACT:
                raise NoType("whole numbers above 2^53 mixed with other numbers")
            return pa.float64()
        if self.low >= -(1 << 63) and self.high < 1 << 63:
            return pa.int64()
        if self.low >= 0 and self.high < 1 << 64:
            return pa.uint64()
        raise NoType("whole numbers of more than 64 bits")

    def _object(self, pa: Any) -> Any:
        if not self.fields:
            raise NoType("objects without keys")
        types = {name: kind.arrow(pa) for name, kind in self.fields.items()}
        if len(types) <= _MOST_FIELDS:
            return pa.struct(list(types.items()))
        if len(set(types.values())) > 1:
            raise NoType(f"objects with more than {_MOST_FIELDS} different keys")
        return pa.map_(pa.string(), next(iter(types.values())))


def type_at(types: Mapping[str, Any], path: str) -> Any:
    """Return the Arrow type at a path such as `meta.title` or `choices.0`.

    Return None if the type is unknown, or if `restorer` cannot restore it.

    Args:
        types: {column: Arrow type}.
    """
    if path in types:
        type = types[path]
        return None if restorer(type) is None else type
    column, dot, rest = path.partition(".")
    if not dot or column not in types:
        return None
    import pyarrow as pa

    type = types[column]
    for part in rest.split("."):
        if pa.types.is_struct(type) and type.get_field_index(part) >= 0:
            type = type.field(part).type
        elif _is_list(pa, type) and part.isdecimal():
            type = type.value_type
        else:
            return None
    return None if restorer(type) is None else type


def restorer(type: Any) -> Restore | None:
    """Return a function from values of JSON lines to values for `pyarrow.array(..., type)`.

    Return None for a type that cannot be restored.
    """
    import pyarrow as pa

    t = pa.types
    if t.is_dictionary(type):
        return restorer(type.value_type)
    if t.is_null(type) or t.is_boolean(type) or t.is_integer(type) or t.is_string(type) or t.is_large_string(type):
        return _same
    if t.is_floating(type):
        return float
    if t.is_timestamp(type):
        return lambda text: _timestamp(text, type.unit)
    if t.is_date(type):
        return lambda text: (
            np.datetime64(text, "D").astype("M8[ms]" if t.is_date64(type) else "M8[D]").astype(int).item()
        )
    if t.is_time(type):
        return time.fromisoformat
    if t.is_duration(type):
        return lambda seconds: round(seconds * _UNITS[type.unit])
    if t.is_decimal(type):
        return Decimal
    if t.is_binary(type) or t.is_large_binary(type) or t.is_fixed_size_binary(type):
        return base64.b64decode
    if t.is_map(type):
        return _pairs(restorer(type.key_type), restorer(type.item_type))
    if _is_list(pa, type):
        inner = restorer(type.value_type)
        return inner and (_same if inner is _same else lambda values: [_or_none(inner, v) for v in values])
    if t.is_struct(type) and type.num_fields:
        inner = {field.name: restorer(field.type) for field in type}
        if None in inner.values():
            return None
        return lambda value: {name: _or_none(restore, value.get(name)) for name, restore in inner.items()}
    return None


def _same(value: Any) -> Any:
    return value


def _or_none(restore: Restore, value: Any) -> Any:
    return None if value is None else restore(value)


def _pairs(key: Restore | None, item: Restore | None) -> Restore | None:
    if key is None or item is None:
        return None

    def restore(pairs: Any) -> list[tuple[Any, Any]]:
        return [(key(k), _or_none(item, v)) for k, v in (pairs.items() if isinstance(pairs, dict) else pairs)]

    return restore


def _is_list(pa: Any, type: Any) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type)


def _timestamp(text: str, unit: str) -> int:
    """Return the units since 1970 in UTC. A text without an offset counts as UTC."""
    minutes = 0
    if len(text) > 19 and text[-6] in "+-" and text[-3] == ":":
        sign = -1 if text[-6] == "-" else 1
        minutes, text = sign * (60 * int(text[-5:-3]) + int(text[-2:])), text[:-6]
    local = np.datetime64(text.replace(" ", "T"), unit).astype(int).item()
    return local - minutes * 60 * _UNITS[unit]


def single(pa: Any, name: str) -> Any:
    """Return the Arrow type of a task's column of float32 vectors, or None for any other column."""
    type = pa.float32()
    for _ in range(VECTORS.get(name, 0)):
        type = pa.list_(type)
    return type if name in VECTORS else None


def cell(name: str, value: Any) -> Any:
    """Return a value as the text of a cell: an error as a message; other nested values, true and false as JSON.

    Only the column "error" holds errors. Objects in users' columns, and in models' answers, are never treated as
    errors.
    """
    if name == "error" and isinstance(value, dict):
        remedy = f"; {value['remedy']}" if "remedy" in value else ""
        return f"{value['code']}: {value['message']}{remedy}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list, bool)) else value


_ROWS, _BYTES = 8192, 32 << 20  # a row group ends at this many rows or bytes


def need_pyarrow(purpose: str) -> Any:
    """Return the module pyarrow. Raise MissingExtraError if it is not installed.

    Args:
        purpose: Why it is needed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "parquet", purpose) from None
    return pa


class _Unfit(Exception):
    def __init__(self, name: str, reason: str):
        super().__init__(reason)
        self.name = name


def write_parquet(lines: Iterable[bytes], path: Path, form: TableForm) -> list[str]:
    """Write the lines, iterating over them several times. Return notes about columns that became text."""
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


def _note(name: str, reason: str) -> str:
    return f"the column {name!r} is written as text: {reason}"


def _column_types(pa: Any, lines: Iterable[bytes], form: TableForm) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (the type of every column, notes about columns whose values have no common type)."""
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
                    elif form.is_made(name) and (vectors := single(pa, name)) is not None:
                        types[name] = vectors
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
    for column in schema:
        values = [row.get(column.name) for row in rows]
        try:
            if pa.types.is_string(column.type):
                values = [_text(column.name, value) for value in values]
            elif (restore := restorers[column.name]) is not None:
                values = [None if value is None else restore(value) for value in values]
            arrays.append(pa.array(values, column.type))
        except (pa.ArrowException, OverflowError, ValueError, TypeError, ArithmeticError) as error:
            raise _Unfit(column.name, f"not every value is a {column.type} ({error})") from error
    return pa.record_batch(arrays, schema=schema)


def _text(name: str, value: Any) -> str | None:
    value = cell(name, value)
    return value if value is None or isinstance(value, str) else json.dumps(value)
