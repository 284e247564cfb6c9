"""Writes what is wanted of a request as a few bytes, which travel with its tokens through the spool."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import lru_cache
from typing import Any

from ..types import Grammar, Sampling

_SAMPLING = {field.name: field.default for field in fields(Sampling)}


# Most requests of a job have the same options as the request before, so both directions are cached. (1 and 1.0 are
# equal as keys of the cache. Either is right in place of the other.)
@lru_cache(maxsize=64)
def encode_options(sampling: Sampling | None, priority: int) -> bytes:
    """Returns a request's sampling and priority as JSON of what differs from the defaults; b"" for the defaults."""
    values: dict[str, Any] = {"priority": priority} if priority else {}
    if sampling is not None:
        values["sampling"] = asked = {name: getattr(sampling, name) for name in _SAMPLING}
        for name in [name for name, value in asked.items() if value == _SAMPLING[name]]:
            del asked[name]
        if sampling.grammar is not None:
            asked["grammar"] = [sampling.grammar.kind, sampling.grammar.text, sampling.grammar.compact]
    return json.dumps(values, separators=(",", ":")).encode() if values else b""


@lru_cache(maxsize=64)
def decode_options(data: bytes) -> tuple[Sampling | None, int]:
    """Returns the sampling and the priority that `encode_options` wrote to `data`."""
    values = json.loads(data) if data else {}
    priority, asked = values.get("priority", 0), values.get("sampling")
    if asked is None:
        return None, priority
    if "grammar" in asked:
        asked["grammar"] = Grammar(*asked["grammar"])
    return Sampling(**{name: _tuples(value) for name, value in asked.items()}), priority


def _tuples(value: Any) -> Any:
    """Returns a value with tuples in place of the lists that JSON has made of them."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
