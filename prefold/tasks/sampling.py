"""Checks of the sampling options that users write."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..spec.fields import check_options, checked, kind_of
from ..spec.requests import Grammar, Sampling
from ..spec.task import LoopedOptions, SamplerOptions
from ..text.grammar import check_grammar
from ..text.valid import valid_text

if TYPE_CHECKING:
    from ..text import Tokenizer

NAMES = [field.name for field in fields(Sampling)]
GRAMMARS = ("json_schema", "json", "regex", "choice", "lark")
# Fields for which None is a valid value. For all other fields, None means the default.
NULLABLE = {field.name for field in fields(Sampling) if field.default is None}


def sampling_from(
    options: Mapping[str, Any], *, vocab_size: int | None, tokenizer: Tokenizer | None, defaults: Sampling | None = None
) -> Sampling:
    """Return a Sampling with `options` applied to `defaults` (None: Sampling's own defaults).

    Values are as in Sampling, with these exceptions:

    - top_k: -1 means 0
    - stop: a text or a list of texts
    - stop_ids: an id or a list of ids
    - logit_bias: {id: number}; an id may be a text
    - grammar: any value that `grammar_from` accepts
    - None: the default, unless None is a valid value

    Raise InputError with the option's name as `field`.
    """
    checks = _CHECKS | {
        "stop": partial(_stop, tokenizer=tokenizer),
        "stop_ids": partial(_stop_ids, vocab_size=vocab_size),
        "logit_bias": partial(_logit_bias, vocab_size=vocab_size),
        "grammar": partial(_grammar, tokenizer=tokenizer),
    }
    values = {}
    check_options("sampling", map(str, options), NAMES)
    for name, value in options.items():
        if value is not None:
            values[name] = checks[name](value, name)
        elif name in NULLABLE:
            values[name] = None
    sampling = Sampling(**{**vars(defaults or Sampling()), **values})
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        message = f"min_tokens is {sampling.min_tokens}, which is more than max_tokens ({sampling.max_tokens})"
        raise InputError(message, field="min_tokens", remedy="give a smaller min_tokens", code="out_of_range")
    return sampling


def seed_at(seed: int, *place: int) -> int:
    """Return the seed of the prompt at a place of a list or job that has one seed.

    The first prompt keeps the seed, so a single prompt and the first one of a list draw the same numbers.

    Args:
        place: Numbers; trailing zeros change nothing.
    """
    while place and not place[-1]:
        place = place[:-1]
    if not place:
        return seed
    numbers = (number % 2**64 for number in (seed, *place))
    digest = hashlib.blake2b(struct.pack(f"<{1 + len(place)}Q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


def grammar_from(value: Any, field: str = "grammar") -> Grammar:
    """Return the Grammar of a mapping with one of the keys json_schema, json (true), regex, choice (a list) or lark.

    A schema may be its text, or a pydantic class. Raise InputError for any other value, and for an invalid schema,
    expression or grammar. Raise MissingExtraError if the grammar library is not installed.
    """
    if isinstance(value, Grammar):
        check_grammar(value)
        return value
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in GRAMMARS:
        message = f"{field!r} is not an object with one of {', '.join(GRAMMARS)}"
        raise InputError(message, field=field, remedy='write it like {"regex": "[0-9]+"}', code="wrong_type")
    ((kind, body),) = value.items()
    grammar = Grammar(kind, _GRAMMAR_TEXTS[kind](body, f"{field}.{kind}"))
    check_grammar(grammar)
    return grammar


def format_grammar(value: Any) -> dict[str, Any] | None:
    """Convert a pydantic class, or OpenAI's `response_format`, to the form that `grammar_from` accepts.

    Return None for plain text.
    """
    if hasattr(value, "model_json_schema"):
        return {"json_schema": value}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json": True}
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            remedy = 'give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            raise InputError(
                "response_format of type json_schema has no schema", field="response_format", remedy=remedy
            )
        return {"json_schema": schema}
    remedy = "use text, json_object or json_schema"
    raise InputError(
        f"response_format is of type {kind!r}, which is not supported",
        field="response_format",
        remedy=remedy,
        code="unsupported",
    )


def _wrong(value: Any, field: str, expected: str) -> InputError:
    return InputError(f"{field!r} is {value!r:.200}", field=field, remedy=f"give {expected}", code="wrong_type")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value]


def _stop(value: Any, field: str, *, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    stops = [valid_text(text, field) for text in _listed(value)]
    if not all(stops):
        raise InputError(f"{field!r} holds an empty text", field=field, remedy="leave it out", code="empty")
    if stops:
        _need_tokenizer(tokenizer, field, "give stop_ids instead")
    return tuple(stops)


def _stop_ids(value: Any, field: str, *, vocab_size: int | None) -> tuple[int, ...]:
    return tuple(_token(token, field, vocab_size) for token in _listed(value))


def _token(value: Any, field: str, vocab_size: int | None) -> int:
    return checked(int, value, field, least=0, most=None if vocab_size is None else vocab_size - 1)


def _logit_bias(value: Any, field: str, *, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """Return (id, bias) pairs. Biases of a repeated id are added. The limits are OpenAI's. Raise InputError."""
    if isinstance(value, Mapping):
        value = value.items()
    biases: dict[int, float] = {}
    try:
        pairs = [(token, bias) for token, bias in value]
    except (TypeError, ValueError):
        raise _wrong(value, field, "an object of token ids and numbers") from None
    for token, bias in pairs:
        try:
            number = int(token) if isinstance(token, str) else token
        except ValueError:
            raise _wrong(token, field, "token ids as its names") from None
        number = _token(number, field, vocab_size)
        biases[number] = biases.get(number, 0.0) + checked(float, bias, field, least=-100, most=100)
    return tuple(biases.items())


def _grammar(value: Any, field: str, *, tokenizer: Tokenizer | None) -> Grammar:
    _need_tokenizer(tokenizer, field, "leave it out")
    return grammar_from(value, field)


def _need_tokenizer(tokenizer: Tokenizer | None, field: str, remedy: str) -> None:
    if tokenizer is None:
        message = f"{field!r} needs text, and the model has no tokenizer"
        raise InputError(message, field=field, remedy=remedy, code="no_tokenizer")


def _schema(value: Any, field: str) -> str:
    if hasattr(value, "model_json_schema"):  # a pydantic class
        value = value.model_json_schema()
    if isinstance(value, str):
        return valid_text(value, field)
    if isinstance(value, Mapping):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"{field!r} cannot be written as JSON: {error}"
            raise InputError(message, field=field, remedy="give JSON values only", code="wrong_type") from None
    if value is True:  # the schema `true` accepts any JSON value
        return "{}"
    raise _wrong(value, field, "a JSON schema")


def _json(value: Any, field: str) -> str:
    if value is not True:
        raise _wrong(value, field, "true")
    return ""


def _route(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(value, field, "a list of blocks")
    return tuple(checked(int, block, field, least=0) for block in value)


def _choice(value: Any, field: str) -> str:
    if not isinstance(value, (list, tuple)) or not value:
        raise _wrong(value, field, "a list of texts")
    return json.dumps([valid_text(text, field) for text in value], ensure_ascii=False)


def _check_of(option: Field[Any]) -> Callable[[Any, str], Any]:
    """Return the function that checks and converts values of an option, by its type and bounds."""
    return partial(
        checked, kind_of(option) or int, **{name: option.metadata[name] for name in ("least", "most", "above")}
    )


_CHECKS = {option.name: _check_of(option) for option in (*fields(SamplerOptions), *fields(LoopedOptions))}
_CHECKS |= {
    "top_k": lambda value, field: max(0, checked(int, value, field, least=-1)),
    "exit_visits": _route,
    "route": _route,
}
_GRAMMAR_TEXTS: dict[str, Callable[[Any, str], str]] = {
    "json_schema": _schema,
    "json": _json,
    "regex": valid_text,
    "choice": _choice,
    "lark": valid_text,
}
