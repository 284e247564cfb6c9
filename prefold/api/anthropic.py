"""Reads and writes the bodies of Anthropic's messages: conversations, function calls, and answers in events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import InputError
from .asked import checked, flag
from .completions import chat_body, read_chat
from .tools import GrowingText

__all__ = ["MESSAGE_NAMES", "MessageEvents", "anthropic_error", "message_body", "read_message"]

Body = dict[str, Any]
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
MESSAGE_NAMES = (
    "model", "messages", "max_tokens", "system", "stop_sequences", "temperature", "top_p", "top_k", "stream", "tools",
    "tool_choice", "metadata", "service_tier", "thinking", "cache_control", "output_config",
)  # fmt: skip
_SAMPLING = {"max_tokens": "max_tokens", "stop_sequences": "stop", "temperature": "temperature", "top_p": "top_p",
             "top_k": "top_k"}  # fmt: skip


def anthropic_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Any]:
    """Returns (status, body) of an error in Anthropic's form."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": message}}


# ------------------------------------------------------------------------------------------------------ requests


def read_message(body: Mapping[str, Any], *, answered: bool = True) -> tuple[list[Body], Body]:
    """Returns one item of the task "generate", and what the response needs. Raises InputError.

    answered  whether an answer is wanted, and not only the count of the tokens
    """
    checked(body, *MESSAGE_NAMES)
    thinking = body.get("thinking")
    if thinking is not None and not (isinstance(thinking, Mapping) and thinking.get("type") == "disabled"):
        message, remedy = "'thinking' is not supported", "leave it out"
        raise InputError(message, field="thinking", remedy=remedy, code="unsupported")
    if answered and body.get("max_tokens") is None:
        raise InputError("'max_tokens' is missing", field="max_tokens", remedy="give it", code="missing_field")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        what = (
            "missing" if messages is None else "not a list of messages" if not isinstance(messages, list) else "empty"
        )
        raise InputError(f"'messages' is {what}", field="messages", remedy="give a conversation", code="missing_field")
    chat: Body = {
        "messages": [new for i, message in enumerate(messages) for new in _message(message, f"messages[{i}]")]
    }
    if body.get("system"):
        text = "\n".join(_texts(body["system"], "system"))
        chat["messages"].insert(0, {"role": "system", "content": text})
    chat |= {theirs: body[ours] for ours, theirs in _SAMPLING.items() if body.get(ours) is not None}
    if body.get("tools"):
        chat["tools"] = [_tool(tool, i) for i, tool in enumerate(_list(body["tools"], "tools"))]
    if (format := _format(body.get("output_config"))) is not None:
        chat["response_format"] = format
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _choice(body["tool_choice"])
        chat["parallel_tool_calls"] = not flag(body["tool_choice"], "disable_parallel_tool_use")
    items, meta = read_chat(chat, {})
    return [item | {"with_reasoning": False} for item in items], meta


def _format(config: Any) -> Body | None:
    """Returns what a chat request calls the format of an `output_config`. Raises InputError."""
    if config is None:
        return None
    remedy = 'give {"format": {"type": "json_schema", "schema": {...}}}'
    if not isinstance(config, Mapping):
        raise InputError("'output_config' is no object", field="output_config", remedy=remedy, code="wrong_type")
    for name, value in config.items():
        if name != "format" and value is not None:
            message = f"'output_config.{name}' is not supported"[:200]
            raise InputError(message, field=f"output_config.{name}"[:100], remedy="leave it out", code="unsupported")
    format = config.get("format")
    if format is None:
        return None
    if not isinstance(format, Mapping) or format.get("type") != "json_schema" or format.get("schema") is None:
        message = f"'output_config.format' is {format!r:.100}"
        raise InputError(message, field="output_config.format", remedy=remedy, code="wrong_type")
    return {"type": "json_schema", "json_schema": {"schema": format["schema"]}}


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{field!r} is not a list", field=field, remedy="give a list", code="wrong_type")
    return value


def _block(block: Any, field: str, *kinds: str) -> tuple[str, Mapping[str, Any]]:
    """Returns (type, block) of a block of content. Raises InputError for a type that is none of `kinds`."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind not in kinds:
        message, remedy = f"{field!r} is of type {kind!r:.100}", f"use {', '.join(kinds)}"
        raise InputError(message, field=field, remedy=remedy, code="unsupported")
    return kind, block


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{field!r} is not a text", field=field, remedy="give a text", code="wrong_type")
    return value


def _texts(content: Any, field: str) -> list[str]:
    """Returns the texts of content: of a text, or of a list of blocks of text."""
    if isinstance(content, str):
        return [content]
    places = [(f"{field}[{i}]", block) for i, block in enumerate(_list(content, field))]
    return [_text(_block(block, place, "text")[1].get("text"), f"{place}.text") for place, block in places]


def _message(message: Any, field: str) -> Iterator[Body]:
    """Yields the messages, as OpenAI has them, of one of Anthropic's: results of tools are messages of their own."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
        remedy = 'give {"role": "user" or "assistant", "content": ...}'
        raise InputError(f"{field!r} is no message of user or assistant", field=field, remedy=remedy, code="wrong_type")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts: list[str] = []
    parts: list[Body] = []
    calls = []
    kinds = ("text", "tool_use") if role == "assistant" else ("text", "image", "tool_result")
    for i, block in enumerate(_list(content, f"{field}.content")):
        place = f"{field}.content[{i}]"
        kind, block = _block(block, place, *kinds)
        if kind == "text":
            texts.append(_text(block.get("text"), f"{place}.text"))
            parts.append({"type": "text", "text": texts[-1]})
        elif kind == "image":
            parts.append({"type": "image_url", "image_url": {"url": _image(block.get("source"), f"{place}.source")}})
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": _text(block.get("name"), f"{place}.name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            result = "\n".join(_texts(block.get("content") or "", f"{place}.content"))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
    if parts or calls or not content:
        joined: Any = "\n".join(texts) if len(texts) == len(parts) else parts
        yield {"role": role, "content": joined} | ({"tool_calls": calls} if calls else {})


def _image(source: Any, field: str) -> str:
    """Returns the address of an image: a data URL, where it lies, or the id of an uploaded file."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "url":
        return _text(source.get("url"), f"{field}.url")
    if kind == "file":
        return _text(source.get("file_id"), f"{field}.file_id")
    if kind != "base64":
        remedy = 'give {"type": "base64", "media_type": "image/png", "data": "..."}'
        raise InputError(f"{field!r} is of type {kind!r:.100}", field=field, remedy=remedy, code="unsupported")
    data = _text(source.get("data"), f"{field}.data")
    return f"data:{_text(source.get('media_type', 'image/png'), f'{field}.media_type')};base64,{data}"


def _tool(tool: Any, index: int) -> Body:
    field = f"tools[{index}]"
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or tool.get("type", "custom") != "custom":
        remedy = 'give {"name": ..., "description": ..., "input_schema": {...}}'
        raise InputError(f"{field!r} is no tool of your own", field=field, remedy=remedy, code="unsupported")
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
    return {"type": "function", "function": function | {"description": tool.get("description") or ""}}


def _choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    found = {"auto": "auto", "none": "none", "any": "required"}.get(kind) if isinstance(kind, str) else None
    if kind == "tool" and isinstance(choice, Mapping):
        return {"type": "function", "function": {"name": choice.get("name")}}
    if found is None:
        message, remedy = f"'tool_choice' is {choice!r:.100}", 'give {"type": "auto", "any", "none" or "tool"}'
        raise InputError(message, field="tool_choice", remedy=remedy, code="wrong_type")
    return found


# ----------------------------------------------------------------------------------------------------- responses


def message_body(meta: Body, result: Body, *, model: str, id: str) -> Body:
    """Returns the response to a request, by the result of its one item."""
    (choice,) = chat_body(meta, [result])["choices"]
    message = choice["message"]
    content: list[Body] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        use = {"type": "tool_use", "id": call["id"].replace("call_", "toolu_"), "name": function["name"]}
        content.append(use | {"input": json.loads(function["arguments"])})
    reason, stop = choice["finish_reason"], choice["stop_reason"]
    stop = stop if isinstance(stop, str) else None
    ended = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason, "stop_sequence" if stop else "end_turn")
    found = {"content": content, "stop_reason": ended, "stop_sequence": stop, "usage": _usage(result)}
    return _head(model, id) | found


def _head(model: str, id: str) -> Body:
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model}


def _usage(result: Mapping[str, Any]) -> Body:
    cached = result["cached_tokens"]
    approximate = {name: result[name] for name in ("approximate_tokens",) if name in result}
    return approximate | {
        "input_tokens": result["num_tokens"] - cached, "output_tokens": result["num_generated"],
        "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
    }  # fmt: skip


class MessageEvents:
    """Makes the events of one response; each is a dict whose "type" is its name."""

    def __init__(self, meta: Body, *, model: str, id: str):
        self._meta, self._model, self._id = meta, model, id
        self._text, self._has_text = GrowingText(meta.get("calls")), False

    def begin(self, prompts: list[Body]) -> Iterator[Body]:
        """Yields what comes before any text. prompts: what the task notes of each."""
        usage = {"input_tokens": prompts[0]["tokens"], "output_tokens": 0}
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": _head(self._model, self._id) | empty}

    def piece(self, item: int, sample: int, text: str, tokens: list[Body], count: int) -> Iterator[Body]:
        """Yields what sends some more of the text. What may be a function call is kept until the end."""
        yield from self._send(self._text.add(text))

    def end(self, item: int, result: Body) -> Iterator[Body]:
        """Yields what ends the message: its function calls, why it ended, how many tokens there were."""
        whole = message_body(self._meta, result, model=self._model, id=self._id)
        text = next((block["text"] for block in whole["content"] if block["type"] == "text"), "")
        yield from self._send(self._text.rest(text))
        if self._has_text:
            yield {"type": "content_block_stop", "index": 0}
        uses = [block for block in whole["content"] if block["type"] == "tool_use"]
        for index, block in enumerate(uses, int(self._has_text)):
            yield {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
        yield {"type": "message_stop"}

    def last(self) -> Iterator[Body]:
        """Yields nothing: the end of its one item is the end of a message."""
        yield from ()

    def failed(self, status: int, message: str, code: str, param: str | None) -> Body:
        """Returns the event that says that the message could not be ended."""
        body: Body = anthropic_error(status, message, code, param)[1]
        return body

    def _send(self, text: str) -> Iterator[Body]:
        if not text:
            return
        if not self._has_text:
            self._has_text = True
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
