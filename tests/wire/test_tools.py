"""Function calls: the grammar that enforces one, and how calls are found in a text."""

from __future__ import annotations

import json

import pytest
from answering import answer_of
from llguidance import LLMatcher, LLTokenizer

from prefold.errors import InputError
from prefold.wire.answers import ChoiceText, calls_in, grammar_of_calls, read_tools
from prefold.wire.anthropic import Message, message_body
from prefold.wire.body import ServedModel
from prefold.wire.completions import Chat, chat_body
from prefold.wire.responses import Responses, responses_body

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
G = {"type": "function", "function": {"name": "g"}}
NULLS = {"description": None, "parameters": None}  # templates may read both
HOW = {"names": ["f", "g"], "forced": False}


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("just text", "just text", []),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [("f", {"x": 1})]),
        ('I see.\n<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f", "arguments": {}}', "I see.",
         [("g", {}), ("f", {})]),
        ('{"name": "f", "parameters": {"x": "é"}}', "", [("f", {"x": "é"})]),
        ('{"name": "h", "arguments": {}}', '{"name": "h", "arguments": {}}', []),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": 5}', '<tool_call>{"name": "f", "arguments": 5}', []),
    ],
)  # fmt: skip
def test_calls_in_a_text(text, rest, calls):
    found, named = calls_in(text, HOW)
    assert (found, [(name, json.loads(arguments)) for name, arguments in named]) == (rest, calls)
    growing = ChoiceText(None, HOW)
    said = "".join(growing.add(letter)[1] for letter in text)
    assert "<tool_call>" not in said  # what may be a call is not given out
    assert said + growing.rest({"content": found})[1] == rest


def test_choices():
    filled = [F | {"function": F["function"] | {"description": None}}, G | {"function": {"name": "g", **NULLS}}]
    assert read_tools([F, G], None) == (filled, HOW, None)
    assert read_tools([F], "none") == (None, None, None)
    assert read_tools(None, None) == (None, None, None)
    _, form, grammar = read_tools([F, G], "required")
    assert form == HOW | {"forced": True} and len(grammar["json_schema"]["anyOf"]) == 2
    _, form, grammar = read_tools([F, G], {"type": "function", "function": {"name": "g"}})
    assert form["names"] == ["g"] and grammar["json_schema"]["properties"]["name"] == {"const": "g"}


def test_references_stay_within_the_parameters_of_their_function():
    """Both functions call a definition `Item`; a tree refers to the root of its schema, and a value looks like a
    reference."""

    def function(name, x, **more):
        parameters = {"type": "object", "properties": {"x": x}, "required": ["x"], "additionalProperties": False}
        return {"name": name, "parameters": parameters | more}

    item = {"$ref": "#/$defs/Item"}
    like = {"$ref": {"const": {"$ref": "#"}}}
    schema = grammar_of_calls([
        function("f", item, **{"$defs": {"Item": {"type": "integer"}}}),
        function("g", item, **{"$defs": {"Item": {"const": "text"}}}),
        function("tree", {"type": "array", "items": {"$ref": "#"}}),
        function("again", {"type": "array", "items": {"$ref": "#/properties/x"}}),
        function("value", {"type": "object", "properties": like, "required": ["$ref"]}),
    ])["json_schema"]  # fmt: skip
    grammar, letters = LLMatcher.grammar_from_json_schema(json.dumps(schema)), LLTokenizer("byte")

    def fits(name, x):
        text = json.dumps({"name": name, "arguments": {"x": x}}).encode()
        matcher = LLMatcher(letters, grammar)
        return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()

    for name, right, wrong in (
        ("f", 1, "text"),
        ("g", "text", 1),
        ("tree", [{"x": []}], [{"name": "tree", "arguments": {"x": []}}]),
        ("again", [[], [[]]], [1]),
        ("value", {"$ref": {"$ref": "#"}}, {"$ref": {"$ref": "#/$defs/4"}}),
    ):
        assert fits(name, right) and not fits(name, wrong), name


MESSAGES = [{"role": "user", "content": "hi"}]
ANTHROPIC = {"messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "f"}, {"name": "g"}]}
RESPONSES = {"input": "hi", "tools": [{"type": "function", "name": name} for name in ("f", "g")]}


def chat_calls(body):
    _, meta = Chat.of({"messages": MESSAGES, "tools": [F, G]} | body).read({})
    return [call["function"]["name"] for call in chat_body(meta, [TWO])["choices"][0]["message"]["tool_calls"]]


def message_calls(body):
    meta = Message.of(ANTHROPIC | body).order(ServedModel(None, "m", "1")).make.args[0]
    return [block["name"] for block in message_body(meta, [TWO], model="m", id="1")["content"]]


def response_calls(body):
    _, meta = Responses.of(RESPONSES | body).read({})
    found = responses_body(meta | {"id": "1"}, [TWO])
    assert found["parallel_tool_calls"] == body.get("parallel_tool_calls", True)
    return [item["name"] for item in found["output"]]


CALLS = '<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f"}</tool_call>'
TWO = answer_of(text=CALLS, num_tokens=7, num_generated=3)
ALONE = {"parallel_tool_calls": False}


@pytest.mark.parametrize(
    ("calls", "alone"),
    [(chat_calls, ALONE), (response_calls, ALONE),
     (message_calls, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})],
)  # fmt: skip
def test_at_most_one_call_where_that_is_asked(calls, alone):
    assert calls({}) == ["g", "f"] and calls(alone) == ["g"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": [F], "tool_choice": 5}, "tool_choice"),
        ({"tools": [F], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": "f"}, "tools"),
        ({"tools": [{"function": {}}]}, "tools[0]"),
    ],
)
def test_what_is_wrong(body, field):
    with pytest.raises(InputError) as caught:
        Chat.of({"messages": MESSAGES, **body}).read({})
    assert caught.value.field == field
