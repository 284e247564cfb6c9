"""Holds the checks that the readers of all request bodies share."""

from __future__ import annotations

from typing import Any

from ..errors import InputError

__all__ = ["check_names", "required"]

# {parameter of another API: what to do in its place}
_REMEDIES = {"max_chunks_per_doc": "give max_tokens_per_doc", "rank_fields": "give the text of each document alone"}
_IGNORED = {"user", "model", "priority", "request_id"}


def check_names(body: dict[str, Any], known: set[str]) -> None:
    """Raises InputError for a parameter that is not known, unless it is one that changes no result, or
    null: clients in typed languages write all that they know."""
    for key in body:
        if key == "truncate_prompt_tokens" and body[key] is not None:
            remedy = "leave it out, and give --truncate to cut what is too long"
            raise InputError(f"{key!r} cannot be set per request", field=key, remedy=remedy, code="unsupported")
        if body[key] is not None and key not in known | _IGNORED | {"truncate_prompt_tokens"}:
            remedy = _REMEDIES.get(key, "leave it out")
            raise InputError(f"unknown parameter {key!r}", field=key, remedy=remedy, code="unsupported")


def required(body: dict[str, Any], *names: str) -> Any:
    """Returns the value of the first of these names that is in the body. Raises InputError where there is none, or
    it is null."""
    name = next((n for n in names if n in body), names[0])
    if body.get(name) is None:
        what = "null" if name in body else "missing"
        raise InputError(f"{name!r} is {what}", field=name, remedy=f"give {name}", code="missing_field")
    return body[name]
