"""Output lines: JSON with arrays of float32 written short and exact."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from ..errors import InputError

__all__ = ["dumps", "error_object"]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(", ", ": ")).encode


# What str.splitlines and some readers of JSON lines take for the end of a line, though JSON lets it stand in text.
_LINE_ENDS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
# Halves of surrogate pairs, which UTF-8 cannot hold and many readers of JSON refuse even when they are escaped.
_SURROGATES = re.compile("[\ud800-\udfff]")


def dumps(value: Any) -> str:
    """One line of JSON that UTF-8 can hold, whatever a reader takes for the end of a line.

    Arrays of floats keep nine digits, which is what a float32 needs to come back exact. Half of a surrogate pair
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


def error_object(error: InputError) -> dict[str, Any]:
    """An error as the output carries it: code, message, and the field and remedy when there are any."""
    out: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.field:
        out["field"] = error.field
    if error.remedy:
        out["remedy"] = error.remedy
    return out
