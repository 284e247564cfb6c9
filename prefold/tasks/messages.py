"""Conversations as users write them become messages as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..images.items import chat_of


def plain_message(message: Any, index: int) -> Any:
    """Returns a message in OpenAI's format as chat templates expect it: parts of text joined, arguments of calls as
    objects."""
    if not isinstance(message, Mapping):
        return message  # `ChatTemplates.render` says what is wrong with it
    out, field = dict(message), f"messages[{index}]"
    if isinstance(out.get("content"), list):
        parts = [_part(part, f"{field}.content[{i}]") for i, part in enumerate(out["content"])]
        if any(part is None for part in parts):  # an image; with images, content stays a list
            out["content"] = [{"type": "image"} if p is None else {"type": "text", "text": p} for p in parts]
        else:
            out["content"] = "\n".join(part for part in parts if part is not None)
    if isinstance(out.get("tool_calls"), list):
        calls = enumerate(out["tool_calls"])
        out["tool_calls"] = [_tool_call(call, f"{field}.tool_calls[{i}]") for i, call in calls]
    return out


def _part(part: Any, field: str) -> str | None:
    """Returns the text of a part of content; None for the place of an image."""
    if part == {"type": "image"}:
        return None
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if kind == "text" and isinstance(part, Mapping) else part
    if not isinstance(text, str):
        remedy = 'give text: {"type": "text", "text": "..."}'
        raise InputError(
            f"{field!r} is of type {kind!r}, which is not supported", field=field, remedy=remedy, code="unsupported"
        )
    return text


def in_parts(message: Any) -> Any:
    """Returns a message whose content is a list of parts, for templates that know no other."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def has_images(message: Any) -> bool:
    return chat_of([message]) is not None


def _tool_call(call: Any, field: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        remedy = "write them as a JSON object"
        raise InputError(f"the arguments of {field!r} are not JSON", field=field, remedy=remedy) from None
    return {**call, "function": {**function, "arguments": arguments}}


def is_cut(message: Any) -> bool:
    """Returns whether a message's content is cut when a conversation is too long."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, str) and bool(content) and message.get("role") not in ("system", "developer")


def objects(values: Any, field: str, example: str) -> Any:
    """Returns a list of objects, or None for None. Raises InputError for anything else."""
    if not values:
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, Mapping) for value in values):
        message = f"{field!r} is not a list of objects"
        raise InputError(message, field=field, remedy=f"give {example}", code="wrong_type")
    return values


def variables(values: Any) -> Mapping[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        message = "'chat_template_kwargs' is not an object"
        remedy = 'give {"name": value, ...}'
        raise InputError(message, field="chat_template_kwargs", remedy=remedy, code="wrong_type")
    return values


def has_system(messages: Sequence[Any]) -> bool:
    return bool(messages) and isinstance(messages[0], Mapping) and messages[0].get("role") in ("system", "developer")
