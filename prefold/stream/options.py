"""How a request is to be continued, as a few bytes that travel with its tokens."""

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
    """All of a request but its tokens, as JSON of what is not the default. It is not empty when all is: only
    requests that are read and not continued have nothing there."""
    return _encode(request.sampling, request.adapter, request.salt, request.priority)


def decode_options(data: bytes, tokens: np.ndarray) -> GenerateRequest:
    """The request that `encode_options` made `data` of."""
    sampling, beside = _decode(data)
    return GenerateRequest(tokens, sampling, **beside)


# Most requests of a job have the options of the one before. (Equal keys may stand for 1 and 1.0, which is no harm.)
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
