"""What the text of an answer holds beside the answer: function calls, which a request asks for, and reasoning.

An answer that must be a call is enforced by a grammar. Where the model may choose, calls are found in its text: between
<tool_call> and </tool_call>, as Qwen's and Hermes' templates ask for, or a JSON object that is the whole text, as
Llama's do. Reasoning is between <think> and </think>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import InputError
from ..text.chat import THINK
from ..text.grammar import with_keywords

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", re.DOTALL)
Tools = list[Any]


def read_tools(
    tools: Any, choice: Any, parallel: bool = True
) -> tuple[Tools | None, dict[str, Any] | None, dict[str, Any] | None]:
    """Returns (what the template is told of tools, how calls are found in the answer, a grammar that enforces one).

    How calls are found: {"names": those of the functions, "forced": whether the answer is nothing but a call, "most":
    how many are taken, where not all are}. Raises InputError for a tool_choice that is wrong.

    parallel  whether an answer may have several calls
    """
    tools, most = _filled(tools) or None, {} if parallel else {"most": 1}
    if choice in (None, "auto", "none") or not tools:
        if choice not in (None, "auto", "none"):
            message, remedy = f"'tool_choice' is {choice!r:.100} without tools", "give tools"
            raise InputError(message, field="tool_choice", remedy=remedy, code="missing_field")
        if choice == "none" or not tools:
            return (None if choice == "none" else tools), None, None
        return tools, {"names": [tool["name"] for tool in _functions(tools)], "forced": False} | most, None
    functions = _functions(tools)
    if choice != "required":
        wanted = choice.get("function", choice) if isinstance(choice, Mapping) else None
        name = wanted.get("name") if isinstance(wanted, Mapping) else None
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            message = f"'tool_choice' is {choice!r:.100}"
            remedy = 'give auto, none, required, or {"type": "function", "function": {"name": ...}} of one of the tools'
            raise InputError(message, field="tool_choice", remedy=remedy, code="wrong_type")
    how = {"names": [function["name"] for function in functions], "forced": True}
    return tools, how, grammar_of_calls(functions)


def _filled(tools: Any) -> Any:
    """Returns tools whose functions have a description and parameters, null where they lack them: chat templates may
    read both."""
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
            raise InputError(f"'tools[{i}]' is no function", field=f"tools[{i}]", remedy=remedy, code="wrong_type")
    return functions


def grammar_of_calls(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the grammar of a call of one of these functions."""
    calls, parameters = [], {}
    for i, function in enumerate(functions):
        # The parameters of each function are a definition of their own, in which its references stay.
        own = f"#/$defs/{i}"
        parameters[str(i)] = with_keywords(function.get("parameters") or {"type": "object"}, partial(_moved, own))
        properties = {"name": {"const": function["name"]}, "arguments": {"$ref": own}}
        call = {"type": "object", "properties": properties, "required": list(properties)}
        calls.append(call | {"additionalProperties": False})
    return {"json_schema": (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"$defs": parameters}}


def _moved(root: str, keyword: str, text: str) -> str:
    """Returns the text of a keyword of a schema that is moved to `root` of a larger one: there its references begin."""
    return root + text[1:] if keyword == "$ref" and (text == "#" or text.startswith("#/")) else text


def calls_in(text: str, how: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """Returns (the text without its calls, [(name of a function, its arguments as JSON), ...]). Calls beyond those that
    are taken are in neither."""
    if how["forced"] or text.lstrip()[:1] == "{":
        call = _call(text, how["names"])
        return ("", [call]) if call is not None else (text, [])
    parts = [_call(part, how["names"]) for part in _CALL.findall(text)]
    calls = [call for call in parts if call is not None]
    if not calls or len(calls) < len(parts):  # one that is none stays text, and all others with it
        return text, []
    return _CALL.sub("", text).rstrip(), calls[: how.get("most")]


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


class Parting:
    """A Parting parts a text that grows into reasoning and answer, without white space around the reasoning.

    A text holds reasoning where it begins with <think>, or its prompt ends with that.
    """

    def __init__(self, opened: bool):
        """opened: whether the prompt ends with <think>."""
        self._held = ""  # what it cannot be said of yet whether, and where, it belongs
        self._is_open: bool | None = opened or None  # None: the text has not said yet whether it holds reasoning
        self._has_thought = self._has_answer = False

    def add(self, text: str) -> tuple[str, str]:
        """Returns the reasoning and the answer that can be given out now that the text goes on with `text`."""
        held, thought = self._held + text, ""
        if self._is_open is None:
            begun = held.lstrip()
            if len(begun) < len(_THINK_OPEN) and _THINK_OPEN.startswith(begun):
                self._held = held
                return "", ""
            self._is_open, self._has_answer = begun.startswith(_THINK_OPEN), not begun.startswith(_THINK_OPEN)
            held = begun[len(_THINK_OPEN) :] if self._is_open else held
        if self._is_open:
            thought, close, after = held.partition(_THINK_CLOSE)
            self._is_open = not close
            if self._is_open:
                cut = next((n for n in range(len(_THINK_CLOSE) - 1, 0, -1) if held.endswith(_THINK_CLOSE[:n])), 0)
                after = held[len(held[: len(held) - cut].rstrip()) :]
            thought = held[: len(held) - len(after) - len(close)].rstrip()
            thought = thought if self._has_thought else thought.lstrip()
            self._has_thought = self._has_thought or bool(thought)
            held = after
        if self._is_open:
            self._held = held
            return thought, ""
        held = held if self._has_answer else held.lstrip()
        self._has_answer, self._held = self._has_answer or bool(held), ""
        return thought, held

    def rest(self) -> tuple[str, str]:
        """Returns what is left to give out of a text that has ended."""
        if not self._is_open:
            return "", self._held
        return (self._held if self._has_thought else self._held.lstrip()).rstrip(), ""


def parted(text: str, opened: bool) -> tuple[str, str]:
    """Returns the reasoning and the answer of a whole text. opened: whether its prompt ends with <think>."""
    parting = Parting(opened)
    begun, rest = parting.add(text), parting.rest()
    return begun[0] + rest[0], begun[1] + rest[1]


class ChoiceText:
    """A ChoiceText gives the text of one choice out as it grows: its reasoning, and what of the rest can be no call.

    thinks  whether the prompt ends with <think>; None: there is no reasoning
    how     how calls are found; None: there are none
    """

    def __init__(self, thinks: bool | None, how: Mapping[str, Any] | None):
        self._parting, self._how, self._text = None if thinks is None else Parting(thinks), how, ""
        self._num_thought = self._num_sent = 0  # letters that were given out, of the reasoning and of the text

    def add(self, text: str) -> tuple[str, str]:
        """Returns (reasoning, text) that can be given out now that the text goes on with `text`."""
        thought = ""
        if self._parting is not None:
            thought, text = self._parting.add(text)
            self._num_thought += len(thought)
        if self._how is not None:
            self._text += text
            text = self._text[self._num_sent : self._settled(self._how)]
        self._num_sent += len(text)
        return thought, text

    def rest(self, message: Mapping[str, Any]) -> tuple[str, str]:
        """Returns (reasoning, text) that is left to give out of the whole message, as a chat has it."""
        return message.get("reasoning", "")[self._num_thought :], (message["content"] or "")[self._num_sent :]

    def _settled(self, how: Mapping[str, Any]) -> int:
        """Returns how many letters of the text so far can be no part of a call."""
        text = self._text
        if how["forced"] or text.lstrip()[:1] in ("{", ""):
            return 0
        start = text.find(_OPEN)
        if start >= 0:
            return len(text[:start].rstrip())
        held = next((n for n in range(len(_OPEN), 0, -1) if text.endswith(_OPEN[:n])), 0)
        return len(text[: len(text) - held].rstrip())


class Events:
    """Makes the events of one response, each of them a dict.

    is_named  whether an event is sent with its "type" as its name
    mark      what is sent behind all events
    """

    is_named = True
    mark = b""

    def begin(self, prompts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields what comes before any text. prompts: what the task notes of each."""
        raise NotImplementedError

    def piece(
        self, item: int, sample: int, text: str, tokens: list[dict[str, Any]], count: int
    ) -> Iterator[dict[str, Any]]:
        """Yields what sends some more of a sample's text, with its tokens. What may be a function call is kept until
        the end.

        count  how many tokens the sample has so far
        """
        raise NotImplementedError

    def end(self, item: int, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields what ends the samples of an item, by its result."""
        raise NotImplementedError

    def last(self) -> Iterator[dict[str, Any]]:
        """Yields what comes after all items have ended."""
        yield from ()

    def failed(self, status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
        """Returns the event that says that the response could not be ended."""
        raise NotImplementedError
