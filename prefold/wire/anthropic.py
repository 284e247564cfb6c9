"""Anthropic's messages: conversations, function calls, and streamed events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct

from ..errors import InputError
from ..tasks.results import Generation
from .answers import ChoiceText, Events
from .body import Body as RequestBody
from .body import Ignored, Model, ServedModel, TaskOrder, doc, doc_of_option
from .completions import Chat, Effort, chat_body

Body = dict[str, Any]
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_OF_ANTHROPIC = re.compile(r"[a-z_]+_20\d{6}|tool_search_tool_(bm25|regex)")  # tool types that Anthropic defines


def anthropic_error(status: int, message: str, code: str, param: str | None) -> tuple[int, Any]:
    """Return (status, body) of an error in Anthropic's form."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": message}}


# ------------------------------------------------------------------------------------------------------ requests


class TextBlock(Struct, tag="text"):
    text: str


class Base64(Struct, tag="base64"):
    data: str
    media_type: str = "image/png"


class Url(Struct, tag="url"):
    url: str


class File(Struct, tag="file"):
    file_id: str


class ImageBlock(Struct, tag="image"):
    source: Base64 | Url | File


class ToolUse(Struct, tag="tool_use"):
    name: str
    id: Any = None
    input: Any = None


class ToolResult(Struct, tag="tool_result"):
    tool_use_id: Any = None
    content: str | list[TextBlock] | None = None


class UserMessage(Struct, tag_field="role", tag="user"):
    content: str | list[TextBlock | ImageBlock | ToolResult]


class ThinkingBlock(Struct, tag="thinking"):
    thinking: str


class RedactedThinking(Struct, tag="redacted_thinking"):
    data: Any = None


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ToolUse | ThinkingBlock | RedactedThinking]


class Tool(Struct):
    name: str
    type: Annotated[str, doc("custom, or a dated type of Anthropic, which is left out of the prompt.")] | None = None
    description: str | None = None
    input_schema: Any = None


class ToolChoice(Struct):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonSchema(Struct, tag="json_schema"):
    schema: Any


class OutputConfig(Struct, forbid_unknown_fields=True):
    format: JsonSchema | None = None
    effort: Effort | None = None  # type: ignore[valid-type]


class Thinking(Struct):
    type: Literal["adaptive", "between_tools", "disabled", "enabled"]


class CountTokens(RequestBody, kw_only=True):
    """Count the tokens of a conversation."""

    model: Model = None
    messages: list[UserMessage | AssistantMessage]
    max_tokens: Annotated[Any, doc("Maximum number of tokens to generate.", "integer", minimum=1)] = None
    system: Annotated[str | list[TextBlock], doc("A system message.")] = ""
    stop_sequences: Annotated[Any, doc("Stop strings.", "array", items={"type": "string"})] = None
    temperature: Annotated[Any, doc_of_option("temperature")] = None
    top_p: Annotated[Any, doc_of_option("top_p")] = None
    top_k: Annotated[Any, doc_of_option("top_k")] = None
    stream: Annotated[bool, doc("Stream the answer as server-sent events.")] = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    metadata: Ignored = None
    service_tier: Ignored = None
    thinking: Annotated[Thinking | None, doc("Accepted and ignored.")] = None
    context_management: Ignored = None
    cache_control: Ignored = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonSchema | None, doc("The older name of `output_config.format`.")] = None

    remedies: ClassVar = {
        "messages": 'give a conversation of {"role": "user" or "assistant", "content": ...}; the user has text, image'
        " and tool_result, the assistant text and tool_use",
        "tools": 'give {"name": ..., "description": ..., "input_schema": {...}}',
        "tool_choice": 'give {"type": "auto", "any" or "none"}, or {"type": "tool", "name": ...} of one of the tools',
        "output_config": 'give {"format": {"type": "json_schema", "schema": {...}}, "effort": ...}',
        "output_format": 'give {"type": "json_schema", "schema": {...}}',
        "thinking": 'give {"type": "adaptive"}, or leave it out',
    }

    def order(self, served: ServedModel) -> TaskOrder:
        """Return the TaskOrder of a conversation. Raise InputError for wrong fields."""
        chat: Body = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        chat["stop"] = self.stop_sequences
        chat["messages"] = [new for message in self.messages for new in _messages(message)]
        if self.system:
            chat["messages"].insert(0, {"role": "system", "content": _text(self.system)})
        chat["tools"] = [_tool(tool) for i, tool in enumerate(self.tools) if _is_function(tool, i)] or None
        config = self.output_config or OutputConfig()
        chat["reasoning_effort"] = config.effort
        format, older = config.format or self.output_format, self.output_format
        if format is not None:
            if older not in (None, format):
                message = "output_config.format and output_format are different schemas"
                raise InputError(message, field="output_format", remedy="leave it out")
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": format.schema}}
        if (choice := self.tool_choice) is not None:
            entry = {"type": "tool", "name": choice.name}
            chat["tool_choice"] = entry if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
            chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        try:
            (item,), meta = Chat.of(chat).read({})
        except InputError as wrong:
            is_choice = (wrong.field, wrong.code) == ("tool_choice", "wrong_type")
            raise wrong.renamed(wrong.field, self.remedies["tool_choice"] if is_choice else None) from None
        place = "output_format" if config.format is None else "output_config.format"
        is_format = meta.get("format") == "response_format"
        fields = {"stop": "stop_sequences", "grammar": place if is_format else "tools"}
        names: dict[str, Any] = {"model": served.model, "id": served.id}
        events = MessageEvents(meta, **names) if self.stream else None
        items = [item | {"with_reasoning": False}]
        return TaskOrder("generate", items, partial(message_body, meta, **names), fields=fields, events=events)


class Message(CountTokens, kw_only=True):
    """Continue a conversation."""

    max_tokens: Annotated[Any, doc("Maximum number of tokens to generate.", "integer", minimum=1)]


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _messages(message: UserMessage | AssistantMessage) -> Iterator[Body]:
    """Yield OpenAI's messages for one of Anthropic's. Results of tools become separate messages."""
    role, content = "user" if isinstance(message, UserMessage) else "assistant", message.content
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[Body] = []
    calls = []
    thought: Body = {}
    for block in content:
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            parts.append({"type": "image_url", "image_url": {"url": _address(block.source)}})
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            thought = {"reasoning_content": block.thinking}
        elif isinstance(block, ToolResult):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
    if parts or calls or thought or not content:
        has_images = any("text" not in part for part in parts)
        joined: Any = parts if has_images else "\n".join(part["text"] for part in parts)
        yield {"role": role, "content": joined} | ({"tool_calls": calls} if calls else {}) | thought


def _address(source: Base64 | Url | File) -> str:
    """Return the address of an image: a data URL, a URL, or the id of an uploaded file."""
    if isinstance(source, Base64):
        return f"data:{source.media_type};base64,{source.data}"
    return source.url if isinstance(source, Url) else source.file_id


def _is_function(tool: Tool, number: int) -> bool:
    """Return whether a tool is put into the prompt. Tools that Anthropic defines are not.

    Raise InputError for any other type.
    """
    if tool.type in (None, "custom"):
        return True
    if _OF_ANTHROPIC.fullmatch(tool.type):
        return False
    place = f"tools[{number}].type"
    raise InputError(f"{place!r} is {tool.type!r:.100}", field=place, remedy='give "custom"', code="wrong_type")


def _tool(tool: Tool) -> Body:
    function = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    return {"type": "function", "function": function | {"description": tool.description or ""}}


# ----------------------------------------------------------------------------------------------------- responses


def message_body(meta: Body, answers: Sequence[Generation], *, model: str, id: str) -> Body:
    """Return the response to a request.

    Args:
        answers: The answer to its only item.
    """
    (choice,), (answer,) = chat_body(meta, answers)["choices"], answers
    message = choice["message"]
    content: list[Body] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        use = {"type": "tool_use", "id": call["id"].replace("call_", "toolu_"), "name": function["name"]}
        content.append(use | {"input": json.loads(function["arguments"])})
    reason, stop = choice["finish_reason"], choice["stop_reason"]
    stop = stop if isinstance(stop, str) else None
    end = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason, "stop_sequence" if stop else "end_turn")
    body = {"content": content, "stop_reason": end, "stop_sequence": stop, "usage": _usage(answer)}
    return _head(model, id) | body


def _head(model: str, id: str) -> Body:
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model}


def _usage(answer: Generation) -> Body:
    approximate = {} if answer.approximate_tokens is None else {"approximate_tokens": answer.approximate_tokens}
    return approximate | {
        "input_tokens": answer.num_tokens - answer.cached_tokens, "output_tokens": answer.num_generated,
        "cache_read_input_tokens": answer.cached_tokens, "cache_creation_input_tokens": 0,
    }  # fmt: skip


class MessageEvents(Events):
    """The events of a streamed response. The "type" of an event is its name."""

    def __init__(self, meta: Body, *, model: str, id: str):
        self._meta, self._model, self._id = meta, model, id
        self._text, self._has_text = ChoiceText(None, meta.get("calls")), False

    def begin(self, prompts: list[Body]) -> Iterator[Body]:
        usage = {"input_tokens": prompts[0]["tokens"], "output_tokens": 0}
        empty: Body = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": _head(self._model, self._id) | empty}

    def piece(self, item: int, sample: int, text: str, tokens: list[Body], count: int) -> Iterator[Body]:
        yield from self._send(self._text.add(text)[1])

    def end(self, item: int, answer: Generation) -> Iterator[Body]:
        whole = message_body(self._meta, [answer], model=self._model, id=self._id)
        text = next((block["text"] for block in whole["content"] if block["type"] == "text"), "")
        yield from self._send(self._text.rest({"content": text})[1])
        if self._has_text:
            yield {"type": "content_block_stop", "index": 0}
        uses = [block for block in whole["content"] if block["type"] == "tool_use"]
        for index, block in enumerate(uses, int(self._has_text)):
            yield {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        ending = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ending, "usage": whole["usage"]}
        yield {"type": "message_stop"}

    def failed(self, status: int, message: str, code: str, param: str | None) -> Body:
        body: Body = anthropic_error(status, message, code, param)[1]
        return body

    def _send(self, text: str) -> Iterator[Body]:
        if not text:
            return
        if not self._has_text:
            self._has_text = True
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
