"""Function calls: the grammar that enforces one, and how calls are found in a text."""

from __future__ import annotations

import json

import pytest

from prefold.api.tools import GrowingText, calls_in, read_tools
from prefold.errors import InputError

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
G = {"type": "function", "function": {"name": "g"}}
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
    growing = GrowingText(HOW)
    said = "".join(growing.add(letter) for letter in text)
    assert "<tool_call>" not in said  # what may be a call is not given out
    assert said + growing.rest(found) == rest


def test_choices():
    assert read_tools({"tools": [F, G]}) == ([F, G], HOW, None)
    assert read_tools({"tools": [F], "tool_choice": "none"}) == (None, None, None)
    assert read_tools({"messages": []}) == (None, None, None)
    _, how, grammar = read_tools({"tools": [F, G], "tool_choice": "required"})
    assert how == HOW | {"forced": True} and len(grammar["json_schema"]["anyOf"]) == 2
    _, how, grammar = read_tools({"tools": [F, G], "tool_choice": {"type": "function", "function": {"name": "g"}}})
    assert how["names"] == ["g"] and grammar["json_schema"]["properties"]["name"] == {"const": "g"}


def test_references_begin_at_the_root():
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    _, _, grammar = read_tools({"tools": [tool], "tool_choice": "required"})
    assert grammar["json_schema"]["$defs"] == {"a": {"type": "integer"}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": [F], "tool_choice": 5}, "tool_choice"),
        ({"tools": "f"}, "tools"),
        ({"tools": [{"function": {}}]}, "tools[0]"),
    ],
)
def test_what_is_wrong(body, field):
    with pytest.raises(InputError) as caught:
        read_tools(body)
    assert caught.value.field == field
