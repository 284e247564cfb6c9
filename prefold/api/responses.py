"""/v1/responses, OpenAI's: a request becomes an item of the task "generate" by way of a chat request, and the result a
response with its output items, whole or in events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import InputError
from ..options import SamplerOptions, http_names
from .asked import metadata_of
from .completions import chat_body, read_chat, usage_of
from .reasoning import Parting
from .tools import GrowingText

__all__ = ["RESPONSE_NAMES", "ResponseEvents", "input_items", "read_responses", "responses_body"]

Body = dict[str, Any]

# {parameter: what a chat request calls it}; those of vLLM beside OpenAI's
# There is one answer, and `max_output_tokens`.
_SAME = [name for name in http_names(SamplerOptions) if name not in ("n", "max_tokens", "max_completion_tokens")]
_SAME += ["cache_salt", "priority", "chat_template_kwargs", "parallel_tool_calls"]
_OWN = {
    "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "include", "top_logprobs", "metadata",
    "reasoning",
}  # fmt: skip
RESPONSE_NAMES = _OWN | set(_SAME)
# Parameters that change no result here.
_IGNORED = {
    "model", "user", "request_id", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "stream_options", "store",
}  # fmt: skip
# Parameters that are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,), "background": (False,), "truncation": ("disabled",), "conversation": (), "prompt": (),
    "max_tool_calls": (), "previous_response_id": (),
}  # fmt: skip
_REMEDIES = {
    "truncation": "shorten the input, or give truncate_prompt_tokens",
    "stream": "leave it out, since a batch answers with whole responses",
    "previous_response_id": "send the whole conversation as input, since no responses are stored",
}
# {what a chat request calls it: what it is here}
_NAMES = {
    "reasoning_effort": "reasoning.effort", "response_format": "text.format", "messages": "input",
    "max_completion_tokens": "max_output_tokens",
}  # fmt: skip
# Parameters that the response repeats.
_SAID = (
    "instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "text",
    "top_logprobs", "reasoning",
)  # fmt: skip
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"  # the latter there is none of
_TEXTS = ("input_text", "output_text", "text", "reasoning_text")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


# ------------------------------------------------------------------------------------------------------- requests


def read_responses(body: Body, defaults: Mapping[str, Any]) -> tuple[list[Body], Body]:
    """Returns one item of the task, and what the response needs. Raises InputError.

    defaults: {field of Sampling: value}, in place of OpenAI's own
    """
    for name, value in body.items():
        if value is None or name in RESPONSE_NAMES | _IGNORED or (name in _NEUTRAL and value in _NEUTRAL[name]):
            continue
        what = f"{name} is not supported" if name in _NEUTRAL else f"unknown parameter {name!r}"
        raise InputError(what, field=name, remedy=_REMEDIES.get(name, "leave it out"), code="unsupported")
    chat: Body = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = list(_messages(input_items(body.get("input"))))
    if body.get("instructions") is not None:
        chat["messages"].insert(0, {"role": "system", "content": _text(body["instructions"], "instructions")})
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(_list(body["tools"], "tools"))]
    choice = body.get("tool_choice")
    if choice is not None:
        named = isinstance(choice, Mapping) and choice.get("type") == "function"
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}} if named else choice
    format = _format(body.get("text"))
    if format is not None:
        chat["response_format"] = format
    if (reasoning := body.get("reasoning")) is not None:
        if not isinstance(reasoning, Mapping) or set(reasoning) - {"effort", "summary", "generate_summary"}:
            message, remedy = f"'reasoning' is {reasoning!r:.100}", 'give {"effort": ...}'
            raise InputError(message, field="reasoning", remedy=remedy, code="wrong_type")
        chat["reasoning_effort"] = reasoning.get("effort")
    include = body.get("include") or []
    if not isinstance(include, list) or any(one not in (_LOGPROBS, _ENCRYPTED) for one in include):
        message, remedy = f"'include' is {include!r:.100}", f'give ["{_LOGPROBS}"], or leave it out'
        raise InputError(message, field="include", remedy=remedy, code="unsupported")
    if _LOGPROBS in include or body.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    metadata = metadata_of(body)
    try:
        items, meta = read_chat(chat, defaults)
    except InputError as wrong:
        name, bracket, rest = (wrong.field or "").partition("[")
        raise wrong.renamed(_NAMES.get(name, name) + bracket + rest) from None
    if "format" in meta:
        meta["format"] = _NAMES.get(meta["format"], meta["format"])
    return items, meta | {"asked": {name: body[name] for name in _SAID if body.get(name) is not None}} | {
        "metadata": metadata or {}
    }


def input_items(value: Any) -> list[Body]:
    """Returns the items of an input, which may be one text. Raises InputError."""
    if value is None or value == [] or value == "":
        what = "is missing" if value is None else "is empty"
        raise InputError(f"input {what}", field="input", remedy="give a text or a list of items", code="missing_field")
    return [{"role": "user", "content": value}] if isinstance(value, str) else _list(value, "input")


def _messages(items: list[Body]) -> Iterator[Body]:
    """Yields the messages of a chat request. Function calls that follow each other belong to one message, and so does
    the reasoning before them, or before a text."""
    calls: list[Body] = []
    thought: Body = {}
    for i, item in enumerate(items):
        place = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "function_call":
            function = {"name": _text(item.get("name"), f"{place}.name")}
            function |= {"arguments": _text(item.get("arguments"), f"{place}.arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
            continue
        if calls:
            yield {"role": "assistant", "content": "", "tool_calls": calls} | thought
            calls, thought = [], {}
        if thought and not (kind == "message" and item.get("role") == "assistant"):
            yield {"role": "assistant", "content": ""} | thought
            thought = {}
        if kind == "reasoning":
            if text := _content(item.get("content") or "", f"{place}.content"):
                thought = {"reasoning_content": text}
            continue
        if kind == "function_call_output":
            content = _content(item.get("output"), f"{place}.output")
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        elif kind == "message" and item.get("role") in _ROLES:
            content = _parts(item.get("content"), f"{place}.content")
            yield {"role": _ROLES[item["role"]], "content": content} | thought
            thought = {}
        else:
            remedy = "give messages of user, assistant, system or developer, function_call, function_call_output"
            raise InputError(f"'{place}' is no item that is known", field=place, remedy=remedy, code="unsupported")
    if calls or thought:
        yield {"role": "assistant", "content": ""} | ({"tool_calls": calls} if calls else {}) | thought


def _parts(value: Any, field: str) -> Any:
    """Returns the content of a message: its text, or where it has images its parts, as a chat request has them."""
    images = [part for part in value if _is_image(part)] if isinstance(value, list) else []
    if not images:
        return _content(value, field)
    found = []
    for i, part in enumerate(value):
        text = "" if _is_image(part) else _content([part], field)
        if not _is_image(part):
            found.append({"type": "text", "text": text})
        elif isinstance(address := part.get("image_url") or part.get("file_id"), str):
            found.append({"type": "image_url", "image_url": {"url": address}})
        else:
            place, remedy = f"{field}[{i}]", 'give {"type": "input_image", "image_url": "data:image/png;base64,..."}'
            raise InputError(f"{place!r} has no image_url", field=place, remedy=remedy, code="unsupported")
    return found


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _content(value: Any, field: str) -> str:
    """Returns the text of a content: of a text, or of a list of parts that are texts."""
    if isinstance(value, str):
        return value
    texts = []
    for i, part in enumerate(_list(value, field)):
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS:
            remedy = 'give {"type": "input_text", "text": ...}'
            raise InputError(f"'{field}[{i}]' is no text", field=f"{field}[{i}]", remedy=remedy, code="unsupported")
        texts.append(_text(part.get("text"), f"{field}[{i}].text"))
    return "\n".join(texts)


def _tool(tool: Any, field: str) -> Body:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        remedy = 'give {"type": "function", "name": ..., "parameters": {...}}'
        raise InputError(f"{field!r} is no function", field=field, remedy=remedy, code="unsupported")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _format(text: Any) -> Body | None:
    """Returns what a chat request calls the format of `text`. Raises InputError."""
    if text is None:
        return None
    format = text.get("format") if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or not isinstance(format, Mapping | None) or set(text) - {"format", "verbosity"}:
        remedy = 'give {"format": {"type": "text", "json_object" or "json_schema", ...}}'
        raise InputError(f"'text' is {text!r:.100}", field="text", remedy=remedy, code="wrong_type")
    if format is None:
        return None
    kind = format.get("type")
    if kind not in ("text", "json_object", "json_schema") or (kind == "json_schema" and format.get("schema") is None):
        remedy = 'give {"type": "text" or "json_object"}, or {"type": "json_schema", "name": ..., "schema": {...}}'
        message = f"'text.format' is {dict(format)!r:.100}"
        raise InputError(message, field="text.format", remedy=remedy, code="wrong_type")
    if kind != "json_schema":
        return dict(format)
    return {"type": "json_schema", "json_schema": {name: format[name] for name in ("name", "schema") if name in format}}


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{field!r} is not a text", field=field, remedy="give a text", code="wrong_type")
    return value


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{field!r} is not a list", field=field, remedy="give a list", code="wrong_type")
    return value


# ------------------------------------------------------------------------------------------------------ responses


def responses_body(meta: Body, results: list[Body]) -> Body:
    """Returns the response, but for the model; `meta["id"]` makes its id, and those of its output items."""
    (choice,) = chat_body(meta, results)["choices"]
    message, id = choice["message"], meta["id"]
    calls = message.get("tool_calls", [])
    cut = choice["finish_reason"] == "length"
    output: list[Body] = []
    thought = message.get("reasoning")
    if thought:
        ended = "completed" if message["content"] or calls or not cut else "incomplete"
        output.append(_reasoning(id, ended, [_thought(thought)]))
    if message["content"] or not (calls or thought):
        logprobs = (choice["logprobs"] or {}).get("content") or []
        part = _part(message["content"] or "") | {"logprobs": logprobs}
        output.append(_message(id, "incomplete" if cut else "completed", [part]))
    for i, call in enumerate(calls):
        function = call["function"]
        found = {"id": f"fc_{id}{i}", "type": "function_call", "status": "completed", "call_id": call["id"]}
        output.append(found | {"name": function["name"], "arguments": function["arguments"]})
    usage = usage_of(results)
    return _head(meta) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": usage["total_tokens"],
        },
    }


def _head(meta: Body) -> Body:
    """Returns what a response says from its beginning on."""
    asked = meta["asked"]
    return {
        "id": f"resp_{meta['id']}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
        "background": False, "error": None, "incomplete_details": None, "instructions": asked.get("instructions"),
        "max_output_tokens": asked.get("max_output_tokens"), "metadata": meta["metadata"], "output": [],
        "parallel_tool_calls": asked.get("parallel_tool_calls", True), "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None} | (asked.get("reasoning") or {}), "store": False,
        "temperature": asked.get("temperature", 1.0), "text": asked.get("text", {"format": {"type": "text"}}),
        "tool_choice": asked.get("tool_choice", "auto"), "tools": asked.get("tools", []),
        "top_logprobs": asked.get("top_logprobs", 0), "top_p": asked.get("top_p", 1.0), "truncation": "disabled",
        "usage": None, "user": None,
    }  # fmt: skip


def _part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(id: str, status: str, content: list[Body]) -> Body:
    return {"id": f"msg_{id}", "type": "message", "status": status, "role": "assistant", "content": content}


def _thought(text: str) -> Body:
    return {"type": "reasoning_text", "text": text}


def _reasoning(id: str, status: str, content: list[Body]) -> Body:
    more = {"summary": [], "content": content, "encrypted_content": None}
    return {"id": f"rs_{id}", "type": "reasoning", "status": status} | more


class ResponseEvents:
    """Makes the events of one response; each is a dict whose "type" is its name."""

    def __init__(self, meta: Body, *, model: str, id: str):
        self._meta, self._model = meta | {"id": id}, model
        self._text, self._has_text, self._number = GrowingText(meta.get("calls")), False, 0
        self._place = {"item_id": f"msg_{id}", "output_index": 0, "content_index": 0}
        self._parting: Parting | None = None
        self._thinking: Body = self._place | {"item_id": f"rs_{id}"}
        self._thought, self._is_thinking = "", False

    def begin(self, prompts: list[Body]) -> Iterator[Body]:
        """Yields what comes before any text. prompts: what the task notes of each."""
        self._parting = Parting(prompts[0]["thinks"]) if "thinks" in prompts[0] else None
        head = _head(self._meta) | {"model": self._model}
        yield self._event("response.created", response=head)
        yield self._event("response.in_progress", response=head)

    def piece(self, item: int, sample: int, text: str, tokens: list[Body], count: int) -> Iterator[Body]:
        """Yields what sends some more of the text. What may be a function call is kept until the end."""
        if self._parting is not None:
            thought, text = self._parting.add(text)
            yield from self._think(thought)
        yield from self._send(self._text.add(text))

    def end(self, item: int, result: Body) -> Iterator[Body]:
        """Yields what ends the response: the rest of its text, its function calls, and the response itself."""
        whole = responses_body(self._meta, [result]) | {"model": self._model}
        for index, one in enumerate(whole["output"]):
            if one["type"] == "reasoning":
                yield from self._think(one["content"][0]["text"][len(self._thought) :])
                yield from self._end_thinking(one["status"])
                continue
            if one["type"] == "message":
                (part,) = one["content"]
                yield from self._send(self._text.rest(part["text"]), always=True)
                said = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **self._place, **said)
                yield self._event("response.content_part.done", **self._place, part=part)
            else:
                place = {"item_id": one["id"], "output_index": index}
                begun = one | {"status": "in_progress", "arguments": ""}
                yield self._event("response.output_item.added", output_index=index, item=begun)
                arguments = one["arguments"]
                yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
                done = {"name": one["name"], "arguments": arguments}
                yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=index, item=one)
        yield self._event(f"response.{whole['status']}", response=whole)

    def last(self) -> Iterator[Body]:
        """Yields nothing: the end of its one item is the end of a response."""
        yield from ()

    def failed(self, status: int, message: str, code: str, param: str | None) -> Body:
        """Returns the event that says that the response could not be ended."""
        return self._event("error", message=message, code=code, param=param)

    def _think(self, thought: str) -> Iterator[Body]:
        """Yields what sends some more of the reasoning."""
        if not thought:
            return
        if not self._thought:
            self._is_thinking, self._place["output_index"] = True, 1
            item = _reasoning(self._meta["id"], "in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **self._thinking, part=_thought(""))
        self._thought += thought
        yield self._event("response.reasoning_text.delta", **self._thinking, delta=thought)

    def _end_thinking(self, status: str = "completed") -> Iterator[Body]:
        """Yields what ends the reasoning, if it has not ended."""
        if self._is_thinking:
            self._is_thinking, part = False, _thought(self._thought)
            yield self._event("response.reasoning_text.done", **self._thinking, text=self._thought)
            yield self._event("response.content_part.done", **self._thinking, part=part)
            item = _reasoning(self._meta["id"], status, [part])
            yield self._event("response.output_item.done", output_index=0, item=item)

    def _send(self, text: str, *, always: bool = False) -> Iterator[Body]:
        if not self._has_text and (text or always):
            yield from self._end_thinking()
            self._has_text = True
            item = _message(self._meta["id"], "in_progress", [])
            yield self._event("response.output_item.added", output_index=self._place["output_index"], item=item)
            yield self._event("response.content_part.added", **self._place, part=_part(""))
        if text:
            yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def _event(self, kind: str, **content: Any) -> Body:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | content
