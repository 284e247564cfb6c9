"""Conversations: chat templates render them as prompts, and Python functions become tools."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from ..errors import InputError
from ..spec.task import ConversationOptions
from ..text.chat import TEMPLATE_SECONDS
from ..text.media import ImageIds, Picture, chat_of
from ..text.tokenizer import EscapingEncoder
from .base import Inputs

_TOOL = '[{"type": "function", "function": {...}}]'
_NOT_VARIABLES = {"messages", "template", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_NOT_VARIABLES |= {"template_seconds", "in_subprocess"}


@dataclass(frozen=True)
class GenerateItem:
    """One prompt, or one conversation, to continue.

    Attributes:
        prompt: a text or token ids; give it or `messages`
        messages: a conversation: [{"role": "user", "content": "..."}, ...]
        images: images for a model that sees them: paths, URLs or other image values. An image takes the place of a part
            {"type": "image"} of a message, or of the model's placeholder in a prompt. In a prompt without placeholders
            the images come first
        tools: tools for the chat template. A Python function is replaced by its schema
        documents: documents for the chat template
        chat_template_kwargs: {name: value}, further variables for the chat template
        chat_template: the name of one of the checkpoint's templates, or the text of a template
        add_generation_prompt: end the prompt with the header of the assistant's message; None: unless the last message
            is continued
        continue_final_message: continue the last message
        sampling: {field of Sampling: value}, overrides the task's own values
        adapter: the LoRA adapter; None: the task's
        salt: as in Request; None: the task's
        priority: as in Request; None: the task's
        with_ids: return the token ids of the prompt and of the text
        with_reasoning: count the reasoning tokens of a model that thinks
    """

    prompt: Any = None
    messages: Any = None
    images: Any = None
    tools: Any = None
    documents: Any = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    sampling: Mapping[str, Any] | None = None
    adapter: str | None = None
    salt: str | None = None
    priority: int | None = None
    with_ids: bool = False
    with_reasoning: bool = False


@dataclass(frozen=True)
class Conversations(ConversationOptions):
    """The options with which conversations are rendered."""

    def ids(self, messages: Any, inputs: Inputs, *, add_generation_prompt: bool) -> np.ndarray:
        """Return the token ids of a conversation, int32 [n].

        Raise InputError for a conversation that cannot be rendered, or that has images.

        Args:
            add_generation_prompt: end the prompt with the header of the assistant's message
        """
        if chat_of(messages) is not None:
            remedy = "leave it out, or give a text with --image in place of the conversation"
            raise InputError("the conversation holds an image", field="messages", remedy=remedy, code="unsupported")
        item = GenerateItem(messages=messages, add_generation_prompt=add_generation_prompt)
        text, encode = self.render(item, inputs, [], "")
        assert inputs.tokenizer is not None  # else it could not be rendered
        return inputs.tokenizer.encode(text, special=False) if encode is None else encode(text)

    def render(
        self, item: GenerateItem, inputs: Inputs, pictures: list[Picture], salt: str
    ) -> tuple[str, Callable[[str], np.ndarray] | None]:
        """Return (the text of an item's conversation, a function that encodes the text).

        The function is None if the tokenizer may encode the text itself: no special tokens are escaped, and there are
        no images.

        Args:
            pictures: the item's images
        """
        escaping = self._escaping(item, inputs, pictures)
        text = self._text(item, inputs, escaping)
        return text, None if escaping is None else partial(_encoded, inputs, escaping, pictures, salt)

    def _escaping(self, item: GenerateItem, inputs: Inputs, pictures: list[Picture]) -> EscapingEncoder | None:
        """Return the EscapingEncoder for special tokens in user input, or None if nothing has to be escaped.

        A model that sees images also needs its image tokens escaped in user input.
        """
        tokenizer, images = inputs.tokenizer, inputs.images
        if tokenizer is None:
            return None
        if self.escape_special:
            return tokenizer.escaping
        if images is None:
            return None
        text = repr((item.messages, item.tools, item.documents, item.chat_template_kwargs))
        return images.escaping if pictures or images.escaping.finds(text) else None

    def _text(self, item: GenerateItem, inputs: Inputs, escaping: EscapingEncoder | None) -> str:
        """Return the text of a conversation. If `escaping` is given, only `escaping` encodes this text correctly."""
        if inputs.tokenizer is None:
            remedy = "give a prompt of token ids instead of messages"
            raise InputError("the model has no tokenizer", field="messages", remedy=remedy, code="no_tokenizer")
        messages = item.messages
        if not isinstance(messages, (list, tuple)):
            return self._rendered(item, inputs, escaping, messages)
        chat = chat_of(messages)
        messages = [plain_message(m, i) for i, m in enumerate(messages if chat is None else chat.messages)]
        try:
            return self._rendered(item, inputs, escaping, messages)
        except InputError as error:
            with_texts = [_with_text_arguments(message) for message in messages]
            if error.field != "messages" or with_texts == messages:
                raise
            # Some templates (DeepSeek V3 and R1) concatenate call arguments with texts, and fail for objects.
            try:
                return self._rendered(item, inputs, escaping, with_texts)
            except InputError:
                raise error from None

    def _rendered(self, item: GenerateItem, inputs: Inputs, escaping: EscapingEncoder | None, messages: Any) -> str:
        """Return the text of a conversation with these messages in place of the item's."""
        assert inputs.tokenizer is not None
        values: dict[str, Any] = {
            "chat_template_kwargs": variables(item.chat_template_kwargs),
            "messages": messages,
            "tools": None if item.tools is None else as_tools(item.tools),
            "documents": item.documents,
        }
        if escaping is not None:
            values = {name: escaping.shielded(value, name) for name, value in values.items()}
        further = {**variables(self.chat_template_kwargs), **values["chat_template_kwargs"]}
        for name in _NOT_VARIABLES & further.keys():
            message = f"chat_template_kwargs has {name!r}, which is a separate option"
            raise InputError(message, field="chat_template_kwargs", remedy=f"give {name} outside chat_template_kwargs")
        messages = values["messages"]
        if isinstance(messages, (list, tuple)) and self.system is not None:
            first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
            if first.get("role") not in ("system", "developer"):
                messages = [{"role": "system", "content": self.system}, *messages]
        template = self.chat_template if item.chat_template is None else item.chat_template
        if inputs.images is not None and isinstance(messages, (list, tuple)):
            source = inputs.tokenizer.chat_templates.templates.get(template or "default", template or "")
            if inputs.images.wants_parts(source):
                messages = [in_parts(message) for message in messages]
        opens = item.add_generation_prompt
        return inputs.tokenizer.render_chat(
            messages,
            template=template,
            add_generation_prompt=not item.continue_final_message if opens is None else opens,
            continue_final_message=item.continue_final_message,
            tools=objects(self.tools if item.tools is None else values["tools"], "tools", _TOOL),
            documents=objects(values["documents"], "documents", '[{"title": "...", "text": "..."}]'),
            template_seconds=TEMPLATE_SECONDS if self.template_seconds is None else self.template_seconds,
            in_subprocess=item.chat_template is not None,
            **further,
        )


def _encoded(inputs: Inputs, escaping: EscapingEncoder, pictures: list[Picture], salt: str, text: str) -> np.ndarray:
    """Return the token ids of a text with escaped special tokens, and with images in their places."""
    if not pictures:
        return escaping.encode(text)
    assert inputs.images is not None
    ids, media = inputs.images.encode(text, pictures, salt, "messages", escaping.encode)
    return ImageIds.of(ids, media)


def plain_message(message: Any, index: int) -> Any:
    """Return a message of OpenAI's format in the form that chat templates expect.

    Text parts are joined, and the arguments of calls become objects.
    """
    if not isinstance(message, Mapping):
        return message  # `ChatTemplates.render` raises the error
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
    """Return the text of a part of content, or None if the part is an image."""
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
    """Return a message with its content as a list of parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def has_images(message: Any) -> bool:
    return chat_of([message]) is not None


class _Arguments(dict[str, Any]):
    """The arguments of a call, with the JSON text from which they were parsed."""

    text: str


def _with_text_arguments(message: Any) -> Any:
    """Return a message with the arguments of its calls as JSON texts."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), Mapping):
        return call
    text = arguments.text if isinstance(arguments, _Arguments) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _tool_call(call: Any, field: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        remedy = "write them as a JSON object"
        raise InputError(f"the arguments of {field!r} are not JSON", field=field, remedy=remedy) from None
    if isinstance(arguments, dict):
        arguments = _Arguments(arguments)
        arguments.text = function["arguments"] or "{}"
    return {**call, "function": {**function, "arguments": arguments}}


def is_cut(message: Any) -> bool:
    """Return whether a message's content may be cut if a conversation is too long."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, str) and bool(content) and message.get("role") not in ("system", "developer")


def objects(values: Any, field: str, example: str) -> Any:
    """Return a list of objects, or None if it is empty or None. Raise InputError for anything else."""
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


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_GIVE = 'annotate it with str, int, float, bool, list, dict, Literal or a union with None, or give {"type": "function",'
_GIVE += ' "function": {...}} in place of the function'
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def as_tools(tools: Any) -> Any:
    """Replace each Python function in a list of tools by its schema. Other values stay as they are.

    The description of a function is its docstring up to the first section. The section "Args:" describes the
    parameters, one line "name: text" each (Google style, as in transformers' get_json_schema). Raise InputError for a
    function without a docstring, and for a parameter type that has no JSON schema.
    """
    if not isinstance(tools, (list, tuple)):
        return tools
    return [_schema(tool) if callable(tool) and not isinstance(tool, Mapping) else tool for tool in tools]


def _schema(function: Callable[..., object]) -> dict[str, Any]:
    name = getattr(function, "__name__", type(function).__name__)
    description, arguments = _sections(inspect.getdoc(function) or "")
    if not description:
        message = f"the function {name!r} in 'tools' has no docstring"
        raise InputError(message, field="tools", remedy="write one that says what it does")
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        schema = _type(hints.get(parameter.name), f"the parameter {parameter.name!r} of {name!r} in 'tools'")
        if parameter.name in arguments:
            schema["description"] = arguments[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _type(hint: Any, subject: str) -> dict[str, Any]:
    """Return the JSON schema of a type. Raise InputError for a type without one.

    Args:
        subject: the parameter in errors
    """
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in inner if kind is not type(None)]
        schema = _type(kinds[0], subject) if len(kinds) == 1 else {"anyOf": [_type(kind, subject) for kind in kinds]}
        return {**schema, "nullable": True} if len(kinds) < len(inner) else schema
    if origin is Literal and {type(kind) for kind in inner} in ({str}, {int}):
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if origin in (list, Sequence):
        return {"type": "array", **({"items": _type(inner[0], subject)} if inner else {})}
    if origin in _TYPES:
        return {"type": _TYPES[origin]}
    problem = "has no type" if hint is None else f"is of type {getattr(hint, '__name__', hint)}, which JSON lacks"
    raise InputError(f"{subject} {problem}", field="tools", remedy=_GIVE, code="wrong_type")


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """Return (the text of a docstring before its sections, {name: description} of its arguments section)."""
    parts = re.split(r"^(\w+):[ ]*$", text, flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        name = ""
        for line in inspect.cleandoc(body).splitlines():
            match = None if line.startswith(" ") else _ARGUMENT.match(line)
            if match:
                name, arguments[match[1]] = match[1], match[2]
            elif name:
                arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return parts[0].strip(), arguments
