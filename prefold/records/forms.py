"""Writes values that JSON lacks in a form that a line can hold, and restores them to the Arrow type they had.

| value                          | in a line                                     |
|--------------------------------|-----------------------------------------------|
| NaN                            | null                                          |
| an infinite number             | the text "Infinity" or "-Infinity"            |
| a date, a time, a timestamp    | its text, "2026-01-31 12:00:00"               |
| a duration                     | its seconds                                   |
| a decimal number               | its text                                      |
| bytes                          | their base64                                  |
| a map                          | a list of pairs                               |
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from datetime import time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # in a second
Restore = Callable[[Any], Any]


def plain(value: Any) -> Any:
    """Returns a value in the form that JSON can hold, by this module's table."""
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


def type_at(types: Mapping[str, Any], path: str) -> Any:
    """Returns the Arrow type of a path such as `meta.title` or `choices.0`; None where it is not known.

    It counts as not known where `restorer` cannot restore it. types: {column: Arrow type}.
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
    """Returns the function that turns a line's form of a value into one that `pyarrow.array(..., type)` takes.

    Returns None for types that cannot be restored.
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
    """Returns the units since 1970 in UTC; a text without an offset is taken as UTC."""
    minutes = 0
    if len(text) > 19 and text[-6] in "+-" and text[-3] == ":":
        sign = -1 if text[-6] == "-" else 1
        minutes, text = sign * (60 * int(text[-5:-3]) + int(text[-2:])), text[:-6]
    local = np.datetime64(text.replace(" ", "T"), unit).astype(int).item()
    return local - minutes * 60 * _UNITS[unit]
