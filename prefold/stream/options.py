"""Writes how a request is to be continued as a few bytes, which travel with its tokens through the spool."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np

from ..types import GenerateRequest, Grammar, Sampling

__all__ = ["decode_options", "encode_options"]

_SAMPLING = {field.name: field.default for field in fields(Sampling)}
_BESIDE = {"adapter": None, "salt": "", "priority": 0}


def encode_options(request: GenerateRequest) -> bytes:
    """Returns all of a request but its tokens, as JSON of the fields that differ from their defaults.

    The result is at least "{}", never empty: no bytes at all stand for a request that is read and not continued.
    """
    return _encode(request.sampling, request.adapter, request.salt, request.priority)


def decode_options(data: bytes, tokens: np.ndarray) -> GenerateRequest:
    """Returns the request that has these tokens and the options that `encode_options` wrote to `data`."""
    sampling, beside = _decode(data)
    return GenerateRequest(tokens, sampling, **beside)


# Most requests of a job have the same options as the request before, so both directions are cached. (1 and 1.0 are
# equal as keys of the cache. Either is right in place of the other.)
@lru_cache(maxsize=64)
def _encode(sampling: Sampling, adapter: str | None, salt: str, priority: int) -> bytes:
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING}
    values = {name: value for name, value in values.items() if value != _SAMPLING[name]}
    if sampling.grammar is not None:
        values["grammar"] = [sampling.grammar.kind, sampling.grammar.text, sampling.grammar.compact]
    beside = {"adapter": adapter, "salt": salt, "priority": priority}
    values |= {name: value for name, value in beside.items() if value != _BESIDE[name]}
    return json.dumps(values, separators=(",", ":")).encode()


@lru_cache(maxsize=64)
def _decode(data: bytes) -> tuple[Sampling, dict[str, Any]]:
    values = json.loads(data) if data else {}
    beside = {name: values.pop(name) for name in _BESIDE if name in values}
    for name in ("stop", "stop_ids"):
        if name in values:
            values[name] = tuple(values[name])
    if "logit_bias" in values:
        values["logit_bias"] = tuple((token, bias) for token, bias in values["logit_bias"])
    if "grammar" in values:
        values["grammar"] = Grammar(*values["grammar"])
    return Sampling(**values), beside
