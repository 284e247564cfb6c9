"""Writes output lines: JSON, with float32 numbers as short as they can be and still exact.

Values that JSON lacks have a form that a line can hold:

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
import json
import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from ..errors import InputError

_encode = json.JSONEncoder(ensure_ascii=False, separators=(", ", ": ")).encode


# Characters that str.splitlines and some readers of JSON lines take for the end of a line, though JSON allows them in
# texts.
_LINE_ENDS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
# Halves of surrogate pairs. UTF-8 cannot hold them, and many readers of JSON refuse them even when they are escaped.
_SURROGATES = re.compile("[\ud800-\udfff]")


def dumps(value: Any) -> str:
    """Returns `value` as one line of JSON, which UTF-8 can hold and no reader takes for several lines.

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


def error_object(error: InputError) -> dict[str, Any]:
    """Returns an error as an output line has it: code, message, and field and remedy where there are any."""
    out: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.field:
        out["field"] = error.field
    if error.remedy:
        out["remedy"] = error.remedy
    return out
