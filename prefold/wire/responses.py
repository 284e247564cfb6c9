"""OpenAI's /v1/responses.

A request is converted to a chat request, and that to an item of the task "generate". The answer becomes a response with
output items, whole or in events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct

from ..errors import InputError
from ..spec.task import SamplerOptions, http_names
from ..tasks.results import Generation
from .answers import ChoiceText, Events
from .body import METADATA_REMEDY, OBJECTS, Ignored, Metadata, ServedModel, TaskOrder, converted, doc
from .completions import Chat, Effort, Streamable, ToolChoice, Tools, chat_body, chat_logprobs, sampled, usage_of

Body = dict[str, Any]

# A response has one answer, and `max_output_tokens` instead of max_tokens.
_SAMPLING = [name for name in http_names(SamplerOptions) if name not in ("n", "max_tokens", "max_completion_tokens")]
# parameters that a chat request also has (OpenAI's and vLLM's)
_SAME = [*_SAMPLING, "cache_salt", "priority", "chat_template_kwargs", "parallel_tool_calls"]
# {field of a chat request: its name here}
_NAMES = {
    "reasoning_effort": "reasoning.effort", "response_format": "text.format", "messages": "input",
    "max_completion_tokens": "max_output_tokens",
}  # fmt: skip
# parameters that the response repeats
_SAID = (
    "instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "text",
    "top_logprobs", "reasoning",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


# ------------------------------------------------------------------------------------------------------- requests


class Reasoning(Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None


class Responses(sampled(_SAMPLING), kw_only=True):  # type: ignore[misc]
    """Continue a conversation of items."""

    input: Annotated[Any, doc("A text, or items.", anyOf=[{"type": "string"}, OBJECTS])]
    instructions: Annotated[str | None, doc("A system message before the input.")] = None
    max_output_tokens: Annotated[Any, doc("Maximum number of tokens to generate.", "integer", minimum=1)] = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool | None, doc("false: return at most one function call.")] = None
    text: Annotated[Any, doc('{"format": text, json_object or json_schema}.', "object")] = None
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] = ()
    top_logprobs: Annotated[Any, doc("Number of most likely tokens to list for each token.", "integer", minimum=0)] = (
        None
    )
    metadata: Metadata | None = None
    reasoning: Annotated[Any, doc('{"effort": ...}: a variable of the chat template.', "object")] = None
    client_metadata: Ignored = None
    chat_template_kwargs: Annotated[Any, doc("Variables of the chat template.", "object")] = None

    unsupported: ClassVar = {
        "background": (False,), "truncation": ("disabled",), "conversation": (), "prompt": (), "max_tool_calls": (),
        "previous_response_id": (),
    }  # fmt: skip
    remedies: ClassVar = Streamable.remedies | {
        "truncation": "shorten the input, or give truncate_prompt_tokens",
        "previous_response_id": "send the whole conversation as input, since no responses are stored",
        "include": f'give ["{_LOGPROBS}"], or leave it out',
        "metadata": METADATA_REMEDY,
        "input": "give a text or a list of items",
    }
    prefix = "resp_"
    fields: ClassVar = Chat.fields | {"messages": "input", "max_tokens": "max_output_tokens"}
    missing = ("{} is missing", "give a text or a list of items")
    may_be_empty = True

    def order(self, served: ServedModel) -> TaskOrder:
        self.check_stream_options()
        items, meta = self.read({})
        events = ResponseEvents(meta, model=served.model, id=served.id) if self.stream else None
        return self.ordered(served, items, meta, events=events)

    def read(self, defaults: Mapping[str, Any]) -> tuple[list[Body], Body]:
        chat: Body = {name: getattr(self, name) for name in _SAME}
        chat["messages"] = list(_messages(self.input))
        if self.instructions is not None:
            chat["messages"].insert(0, {"role": "system", "content": self.instructions})
        chat["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            chat["tools"] = list(_tools(self.tools))
        chat["tool_choice"] = self.tool_choice
        if self.text is not None:
            chat["response_format"] = _format(converted(self.text, Text, "text", remedies=_REMEDIES).format)
        if self.reasoning is not None:
            chat["reasoning_effort"] = converted(self.reasoning, Reasoning, "reasoning", remedies=_REMEDIES).effort
        if _LOGPROBS in self.include or self.top_logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        try:
            items, meta = Chat.of(chat).read(defaults)
        except InputError as wrong:
            name, bracket, rest = (wrong.field or "").partition("[")
            remedy = _TOOL_CHOICE if (name, wrong.code) == ("tool_choice", "wrong_type") else None
            raise wrong.renamed(_NAMES.get(name, name) + bracket + rest, remedy) from None
        if "format" in meta:
            meta["format"] = _NAMES.get(meta["format"], meta["format"])
        repeated = {name: value for name in _SAID if (value := getattr(self, name)) is not None}
        return items, meta | {"asked": repeated, "metadata": self.metadata or {}}

    @classmethod
    def response(cls, meta: Mapping[str, Any], answers: Sequence[Any], *, model: str, id: str) -> Body:
        return responses_body({**meta, "id": id}, answers) | {"model": model}


class Part(Struct):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "input_image"]
    text: str | None = None
    image_url: Any = None
    file_id: Any = None


class FunctionCall(Struct, tag="function_call"):
    name: str
    arguments: str
    call_id: Any = None


class FunctionCallOutput(Struct, tag="function_call_output"):
    output: str | list[Part]
    call_id: Any = None


class Thought(Struct, tag="reasoning"):
    content: str | list[Part] | None = None


class Message(Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class Format(Struct):
    type: Literal["text", "json_object", "json_schema"]
    schema: Any = None
    name: Any = None


class Text(Struct, forbid_unknown_fields=True):
    format: Format | None = None
    verbosity: Ignored = None


class Function(Struct, tag="function"):
    name: str
    description: Any = None
    parameters: Any = None


# Tool types that are not functions: tools of OpenAI's server, or of free text. They are left out of the prompt.
_NO_FUNCTIONS = {
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
}  # fmt: skip
_Item = FunctionCall | FunctionCallOutput | Thought | Message
_REMEDIES = {
    "input": "give messages of user, assistant, system or developer, with input_text or input_image, function_call,"
    " function_call_output",
    "tools": 'give {"type": "function", "name": ..., "parameters": {...}}',
    "text": 'give {"format": {"type": "text" or "json_object"}}, or {"type": "json_schema", "name": ..., "schema":'
    " {...}}",
    "reasoning": 'give {"effort": ...}',
}
_TOOL_CHOICE = (
    'give auto, none, required, {"type": "function", "name": ...} of one of the functions in tools, or'
    ' {"type": "allowed_tools", "mode": ..., "tools": [...]}'
)


def _messages(value: Any) -> Iterator[Body]:
    """Yield the messages of a chat request.

    Consecutive function calls become one message. The reasoning before them, or before a text, joins that message.
    """
    calls: list[Body] = []
    thought: Body = {}
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if isinstance(value, list):
        value = [{"type": "message", **item} if isinstance(item, dict) else item for item in value]
    for i, item in enumerate(converted(value, list[_Item], "input", remedies=_REMEDIES)):
        if isinstance(item, FunctionCall):
            function = {"name": item.name, "arguments": item.arguments}
            calls.append({"id": item.call_id, "type": "function", "function": function})
            continue
        if calls:
            yield {"role": "assistant", "content": "", "tool_calls": calls} | thought
            calls, thought = [], {}
        if thought and not (isinstance(item, Message) and item.role == "assistant"):
            yield {"role": "assistant", "content": ""} | thought
            thought = {}
        if isinstance(item, Thought):
            if text := _text(item.content or "", f"input[{i}].content"):
                thought = {"reasoning_content": text}
        elif isinstance(item, FunctionCallOutput):
            content = _text(item.output, f"input[{i}].output")
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        else:
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": _parts(item.content, f"input[{i}].content")} | thought
            thought = {}
    if calls or thought:
        yield {"role": "assistant", "content": ""} | ({"tool_calls": calls} if calls else {}) | thought


def _parts(content: str | list[Part], field: str) -> Any:
    """Return a message's content in the form of a chat request: a text, or parts if there are images."""
    if isinstance(content, str) or not any(part.type == "input_image" for part in content):
        return _text(content, field)
    parts: list[Body] = []
    for i, part in enumerate(content):
        if part.type != "input_image":
            parts.append({"type": "text", "text": _text([part], field)})
        elif isinstance(address := part.image_url or part.file_id, str):
            parts.append({"type": "image_url", "image_url": {"url": address}})
        else:
            place, remedy = f"{field}[{i}]", 'give {"type": "input_image", "image_url": "data:image/png;base64,..."}'
            raise InputError(f"{place!r} has no image_url", field=place, remedy=remedy, code="unsupported")
    return parts


def _text(content: str | list[Part], field: str) -> str:
    """Return the text of a content, which is a text or a list of texts."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type == "input_image" or part.text is None:
            remedy = 'give {"type": "input_text", "text": ...}'
            raise InputError(f"'{field}[{i}]' is not a text", field=f"{field}[{i}]", remedy=remedy, code="unsupported")
    return "\n".join(part.text or "" for part in content)


def _tools(tools: Any) -> Iterator[Body]:
    """Yield the functions among the tools, in the form of a chat request. Raise InputError for wrong tools."""
    for i, tool in enumerate(converted(tools, list[Any], "tools", remedies=_REMEDIES)):
        if not (isinstance(tool, dict) and tool.get("type") in _NO_FUNCTIONS):
            yield _tool(converted(tool, Function, f"tools[{i}]", remedies=_REMEDIES))


def _tool(tool: Function) -> Body:
    values = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in values.items() if value is not None}}


def _format(format: Format | None) -> Body | None:
    """Return a format in the form of a chat request. Raise InputError for a json_schema without a schema."""
    if format is None or format.type != "json_schema":
        return None if format is None else {"type": format.type}
    if format.schema is None:
        message, remedy = "'text.format.schema' is missing", _REMEDIES["text"]
        raise InputError(message, field="text.format", remedy=remedy, code="wrong_type")
    values = {"name": format.name, "schema": format.schema}
    return {"type": "json_schema", "json_schema": {name: value for name, value in values.items() if value is not None}}


# ------------------------------------------------------------------------------------------------------ responses


def responses_body(meta: Body, answers: Sequence[Generation]) -> Body:
    """Return the response, without the model. `meta["id"]` is the base of its id and of the ids of its output items."""
    (choice,) = chat_body(meta, answers)["choices"]
    message, id = choice["message"], meta["id"]
    calls = message.get("tool_calls", [])
    is_cut = choice["finish_reason"] == "length"
    output: list[Body] = []
    thought = message.get("reasoning")
    if thought:
        status = "completed" if message["content"] or calls or not is_cut else "incomplete"
        output.append(_reasoning(id, status, [_thought(thought)]))
    if message["content"] or not (calls or thought):
        logprobs = (choice["logprobs"] or {}).get("content") or []
        part = _part(message["content"] or "") | {"logprobs": logprobs}
        output.append(_message(id, "incomplete" if is_cut else "completed", [part]))
    for i, call in enumerate(calls):
        function = call["function"]
        item = {"id": f"fc_{id}{i}", "type": "function_call", "status": "completed", "call_id": call["id"]}
        output.append(item | {"name": function["name"], "arguments": function["arguments"]})
    usage = usage_of(answers)
    return _head(meta) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
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
    """Return the fields that a response has from its first event on."""
    repeated = meta["asked"]
    return {
        "id": f"resp_{meta['id']}", "object": "response", "created_at": int(time.time()), "status": "in_progress",
        "background": False, "error": None, "incomplete_details": None, "instructions": repeated.get("instructions"),
        "max_output_tokens": repeated.get("max_output_tokens"), "metadata": meta["metadata"], "output": [],
        "parallel_tool_calls": repeated.get("parallel_tool_calls", True), "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None} | (repeated.get("reasoning") or {}), "store": False,
        "temperature": repeated.get("temperature", 1.0), "text": repeated.get("text", {"format": {"type": "text"}}),
        "tool_choice": repeated.get("tool_choice", "auto"), "tools": repeated.get("tools", []),
        "top_logprobs": repeated.get("top_logprobs", 0), "top_p": repeated.get("top_p", 1.0), "truncation": "disabled",
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


class ResponseEvents(Events):
    """The events of a streamed response. The "type" of an event is its name."""

    def __init__(self, meta: Body, *, model: str, id: str):
        self._meta, self._model = meta | {"id": id}, model
        self._text, self._has_text, self._number = ChoiceText(None, None), False, 0
        self._num_logprobs = 0  # tokens whose log-probabilities were sent
        self._holds_text = False  # text may be held back, so its tokens are unknown
        self._place = {"item_id": f"msg_{id}", "output_index": 0, "content_index": 0}
        self._thinking: Body = self._place | {"item_id": f"rs_{id}"}
        self._thought, self._is_thinking = "", False

    def begin(self, prompts: list[Body]) -> Iterator[Body]:
        self._text = ChoiceText(prompts[0].get("thinks"), self._meta.get("calls"))
        self._holds_text = "thinks" in prompts[0] or "calls" in self._meta
        head = _head(self._meta) | {"model": self._model}
        yield self._event("response.created", response=head)
        yield self._event("response.in_progress", response=head)

    def piece(self, item: int, sample: int, text: str, tokens: list[Body], count: int) -> Iterator[Body]:
        thought, text = self._text.add(text)
        yield from self._think(thought)
        has_logprobs = text and tokens and "logprob" in tokens[0] and not self._holds_text
        yield from self._send(text, chat_logprobs(tokens)["content"] if has_logprobs else [])

    def end(self, item: int, answer: Generation) -> Iterator[Body]:
        whole = responses_body(self._meta, [answer]) | {"model": self._model}
        for index, item in enumerate(whole["output"]):
            if item["type"] == "reasoning":
                yield from self._think(item["content"][0]["text"][len(self._thought) :])
                yield from self._end_thinking(item["status"])
                continue
            if item["type"] == "message":
                (part,) = item["content"]
                rest = self._text.rest({"content": part["text"]})[1]
                yield from self._send(rest, part["logprobs"][self._num_logprobs :], always=True)
                content = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **self._place, **content)
                yield self._event("response.content_part.done", **self._place, part=part)
            else:
                place = {"item_id": item["id"], "output_index": index}
                new_item = item | {"status": "in_progress", "arguments": ""}
                yield self._event("response.output_item.added", output_index=index, item=new_item)
                arguments = item["arguments"]
                yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
                function_call = {"name": item["name"], "arguments": arguments}
                yield self._event("response.function_call_arguments.done", **place, **function_call)
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, status: int, message: str, code: str, param: str | None) -> Body:
        return self._event("error", message=message, code=code, param=param)

    def _think(self, thought: str) -> Iterator[Body]:
        """Yield events with more reasoning."""
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
        """Yield the events that end the reasoning, if it has not ended."""
        if self._is_thinking:
            self._is_thinking, part = False, _thought(self._thought)
            yield self._event("response.reasoning_text.done", **self._thinking, text=self._thought)
            yield self._event("response.content_part.done", **self._thinking, part=part)
            item = _reasoning(self._meta["id"], status, [part])
            yield self._event("response.output_item.done", output_index=0, item=item)

    def _send(self, text: str, logprobs: list[Body], *, always: bool = False) -> Iterator[Body]:
        if not self._has_text and (text or always):
            yield from self._end_thinking()
            self._has_text = True
            item = _message(self._meta["id"], "in_progress", [])
            yield self._event("response.output_item.added", output_index=self._place["output_index"], item=item)
            yield self._event("response.content_part.added", **self._place, part=_part(""))
        if text or logprobs:
            self._num_logprobs += len(logprobs)
            yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def _event(self, kind: str, **content: Any) -> Body:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | content
