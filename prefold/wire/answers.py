"""Function calls and reasoning in the text of an answer.

If an answer must be a call, a grammar enforces it. If the model may choose, calls are found in its text. They stand
between <tool_call> and </tool_call> (templates of Qwen and Hermes), or the whole text is a JSON object (templates of
Llama). Reasoning is the text between <think> and </think>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import InputError
from ..tasks.results import Generation
from ..text.chat import THINK
from ..text.schemas import with_keywords

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", re.DOTALL)
Tools = list[Any]


def read_tools(
    tools: Any, choice: Any, parallel: bool = True
) -> tuple[Tools | None, dict[str, Any] | None, dict[str, Any] | None]:
    """Return (the tools for the chat template, the rules for finding calls, a grammar that enforces a call).

    The rules are {"names": names of the functions, "forced": the answer is only a call, "most": maximum number of calls
    returned (default: all)}. A choice of allowed_tools drops the other tools. Raise InputError for a wrong tool_choice.

    Args:
        tools: The tools of the request.
        choice: The request's tool_choice.
        parallel: Whether an answer may have several calls.
    """
    tools, most = _filled(tools) or None, {} if parallel else {"most": 1}
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice)
    if choice in (None, "auto", "none") or not tools:
        if choice not in (None, "auto", "none"):
            message, remedy = f"'tool_choice' is {choice!r:.100} without tools", "give tools"
            raise InputError(message, field="tool_choice", remedy=remedy, code="missing_field")
        if choice == "none" or not tools:
            return (None if choice == "none" else tools), None, None
        return tools, {"names": [tool["name"] for tool in _functions(tools)], "forced": False} | most, None
    functions = _functions(tools)
    if choice != "required":
        name = _name_of(choice)
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            message = f"'tool_choice' is {choice!r:.100}"
            remedy = 'give auto, none, required, or {"type": "function", "function": {"name": ...}} of one of the tools'
            raise InputError(message, field="tool_choice", remedy=remedy, code="wrong_type")
    calls = {"names": [function["name"] for function in functions], "forced": True}
    return tools, calls, grammar_of_calls(functions)


def _allowed(tools: Any, choice: Mapping[str, Any]) -> tuple[Tools, Any]:
    """Return (the tools that a choice of allowed_tools names, its mode). Raise InputError for a wrong choice."""
    allowed = choice.get("allowed_tools", choice)  # the form of chats, or of /v1/responses
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    names = {_name_of(tool) for tool in listed} if isinstance(listed, list) else set()
    found = [tool for tool in tools if _name_of(tool) in names] if isinstance(tools, list) else []
    mode = allowed.get("mode", "auto") if found else None
    if mode not in ("auto", "required"):
        message = f"'tool_choice' is {choice!r:.100}"
        remedy = 'give a "mode", auto or required, and "tools" with at least one tool of the request'
        raise InputError(message, field="tool_choice", remedy=remedy, code="wrong_type")
    return found, mode


def _name_of(tool: Any) -> str | None:
    """Return the function name of a tool or tool_choice, in the form of /v1/chat/completions or /v1/responses."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _filled(tools: Any) -> Any:
    """Add missing descriptions and parameters of functions as null, because chat templates may read both."""
    if not isinstance(tools, list):
        return tools
    fields = ("name", "description", "parameters")
    return [
        {**tool, "function": dict.fromkeys(fields) | tool["function"]}
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        else tool
        for tool in tools
    ]


def _functions(tools: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(tools, list):
        raise InputError("'tools' is not a list", field="tools", remedy="give a list of functions", code="wrong_type")
    functions: list[Any] = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
    for i, function in enumerate(functions):
        is_function = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not is_function or not isinstance(function.get("parameters"), Mapping | None):
            remedy = 'give {"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise InputError(f"'tools[{i}]' is not a function", field=f"tools[{i}]", remedy=remedy, code="wrong_type")
    return functions


def grammar_of_calls(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the grammar of a call of one of these functions."""
    calls, parameters = [], {}
    for i, function in enumerate(functions):
        # Each function's parameters become a separate definition, so that references inside them still resolve.
        place = f"#/$defs/{i}"
        parameters[str(i)] = with_keywords(function.get("parameters") or {"type": "object"}, partial(_moved, place))
        properties = {"name": {"const": function["name"]}, "arguments": {"$ref": place}}
        call = {"type": "object", "properties": properties, "required": list(properties)}
        calls.append(call | {"additionalProperties": False})
    return {"json_schema": (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"$defs": parameters}}


def _moved(root: str, keyword: str, text: str) -> str:
    """Return the text of a schema's keyword after the schema moved to `root` of a larger one. References change."""
    return root + text[1:] if keyword == "$ref" and (text == "#" or text.startswith("#/")) else text


def calls_in(text: str, rules: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Return (the text without its calls, [(name of a function, its arguments as JSON), ...]).

    Calls beyond `most` are dropped.
    """
    if rules["forced"] or text.lstrip()[:1] == "{":
        call = _call(text, rules["names"])
        return ("", [call]) if call is not None else (text, [])
    parts = [_call(part, rules["names"]) for part in _CALL.findall(text)]
    calls = [call for call in parts if call is not None]
    if not calls or len(calls) < len(parts):  # one invalid call leaves all of them as text
        return text, []
    return _CALL.sub("", text).rstrip(), calls[: rules.get("most")]


def _call(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.get("name") not in names:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


_THINK_OPEN, _THINK_CLOSE = THINK


class ReasoningSplitter:
    """Splits a growing text into reasoning and answer, and strips white space around the reasoning.

    A text has reasoning if it starts with <think>, or if its prompt ends with <think>.

    Args:
        opened: Whether the prompt ends with <think>.
    """

    def __init__(self, opened: bool):
        self._pending = ""  # text that may still be reasoning or answer
        self._is_open: bool | None = opened or None  # True if the text is inside reasoning; None: unknown yet
        self._has_thought = self._has_answer = False

    def add(self, text: str) -> tuple[str, str]:
        """Append `text`. Return (reasoning, answer) that are certain now and were not returned before."""
        pending, thought = self._pending + text, ""
        if self._is_open is None:
            head = pending.lstrip()
            if len(head) < len(_THINK_OPEN) and _THINK_OPEN.startswith(head):
                self._pending = pending
                return "", ""
            self._is_open, self._has_answer = head.startswith(_THINK_OPEN), not head.startswith(_THINK_OPEN)
            pending = head[len(_THINK_OPEN) :] if self._is_open else pending
        if self._is_open:
            thought, close, after = pending.partition(_THINK_CLOSE)
            self._is_open = not close
            if self._is_open:
                size = next((n for n in range(len(_THINK_CLOSE) - 1, 0, -1) if pending.endswith(_THINK_CLOSE[:n])), 0)
                after = pending[len(pending[: len(pending) - size].rstrip()) :]
            thought = pending[: len(pending) - len(after) - len(close)].rstrip()
            thought = thought if self._has_thought else thought.lstrip()
            self._has_thought = self._has_thought or bool(thought)
            pending = after
        if self._is_open:
            self._pending = pending
            return thought, ""
        pending = pending if self._has_answer else pending.lstrip()
        self._has_answer, self._pending = self._has_answer or bool(pending), ""
        return thought, pending

    def rest(self) -> tuple[str, str]:
        """Return the remaining (reasoning, answer) after the end of the text."""
        if not self._is_open:
            return "", self._pending
        return (self._pending if self._has_thought else self._pending.lstrip()).rstrip(), ""


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Return (reasoning, answer) of a whole text.

    Args:
        opened: Whether its prompt ends with <think>.
    """
    splitter = ReasoningSplitter(opened)
    begun, rest = splitter.add(text), splitter.rest()
    return begun[0] + rest[0], begun[1] + rest[1]


class ChoiceText:
    """Releases the text of a choice as it grows: its reasoning, and text that cannot be part of a call."""

    def __init__(self, thinks: bool | None, calls: Mapping[str, Any] | None):
        """Start an empty text.

        Args:
            thinks: Whether the prompt ends with <think>; None: there is no reasoning.
            calls: The rules for finding calls; None: there are no calls.
        """
        self._splitter, self._calls, self._text = None if thinks is None else ReasoningSplitter(thinks), calls, ""
        self._num_thought = self._num_sent = 0  # released characters of reasoning and text

    def add(self, text: str) -> tuple[str, str]:
        """Append `text`. Return (reasoning, text) that are certain now and were not released before."""
        thought = ""
        if self._splitter is not None:
            thought, text = self._splitter.add(text)
            self._num_thought += len(thought)
        if self._calls is not None:
            self._text += text
            text = self._text[self._num_sent : self._settled(self._calls)]
        self._num_sent += len(text)
        return thought, text

    def rest(self, message: Mapping[str, Any]) -> tuple[str, str]:
        """Return (reasoning, text) of the whole chat message that were not released yet."""
        return message.get("reasoning", "")[self._num_thought :], (message["content"] or "")[self._num_sent :]

    def _settled(self, calls: Mapping[str, Any]) -> int:
        """Return how many characters of the text so far cannot be part of a call."""
        text = self._text
        if calls["forced"] or text.lstrip()[:1] in ("{", ""):
            return 0
        start = text.find(_OPEN)
        if start >= 0:
            return len(text[:start].rstrip())
        partial = next((n for n in range(len(_OPEN), 0, -1) if text.endswith(_OPEN[:n])), 0)
        return len(text[: len(text) - partial].rstrip())


class Events:
    """The events of a streamed response. Each event is a dict."""

    is_named = True  # send the "type" of an event as its name
    mark = b""  # bytes sent after the last event

    def begin(self, prompts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events before any text.

        Args:
            prompts: The notes of the prompts' Works.
        """
        raise NotImplementedError

    def piece(
        self, item: int, sample: int, text: str, tokens: list[dict[str, Any]], count: int
    ) -> Iterator[dict[str, Any]]:
        """Yield events with more text of a sample, and its tokens.

        Text that may be a function call is held until the end.

        Args:
            count: Number of the sample's tokens so far.
        """
        raise NotImplementedError

    def end(self, item: int, answer: Generation) -> Iterator[dict[str, Any]]:
        """Yield the events that end the samples of an item.

        Args:
            answer: The answer to the item.
        """
        raise NotImplementedError

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield the events after the end of all items."""
        yield from ()

    def failed(self, status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
        """Return the event of an error that ends the response."""
        raise NotImplementedError
