"""Tools in a conversation whose chat template writes none."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Backend

from prefold.text import Tokenizer
from prefold.wire.answers import calls_in

# Like SmolLM2's: it writes any role, and a system's message of its own where there is none.
PLAIN = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}[system]You are helpful.\n{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "description": None, "parameters": {"type": "object"}}}
CALL = {"name": "look", "arguments": {"where": "Zürich"}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}] * 2}
TOLD = {"role": "tool", "content": "rain"}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(backends):
    return Tokenizer(Backend.from_str(backends["smollm"]))


def test_functions_calls_and_results_are_written(tokenizer):
    text = tokenizer.render_chat([USER, ASKED, TOLD, TOLD], template=PLAIN, tools=[TOOL], add_generation_prompt=True)
    system, said = text.split("[user]", 1)
    assert system.startswith("[system]You can call functions.")
    (line,) = system.partition("<tools>\n")[2].partition("</tools>")[0].splitlines()
    assert json.loads(line) == {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    question, _, called = said.partition("[assistant]")
    called, results, rest = called.replace("[user]", "[assistant]").split("[assistant]")
    rest_of, calls = calls_in(called, {"names": ["look"], "forced": False})
    assert (question, rest_of, rest) == ("hi\n", "", "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("look", CALL["arguments"])] * 2
    assert results.count("<tool_response>\nrain\n</tool_response>\n") == 2


def test_a_system_message_stays_and_a_template_that_uses_tools_writes_them(tokenizer):
    system = {"role": "system", "content": "Be brief."}
    text = tokenizer.render_chat([system, USER], template=PLAIN, tools=[TOOL])
    assert text.startswith("[system]Be brief.\n\nYou can call functions.") and text.count("[system]") == 1
    own = tokenizer.render_chat([system, USER], template=PLAIN + "{{ tools | length }}", tools=[TOOL])
    assert "You can call" not in own and own.endswith("1")
    assert "You can call" not in tokenizer.render_chat([system, USER], template=PLAIN, tools=[])


def test_contents_that_are_parts(tokenizer):
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{% for p in m['content'] %}{{ p['text'] }}|{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "hi"}]
    messages = [USER | {"content": parts}, ASKED | {"content": parts}, TOLD | {"content": parts}]
    text = tokenizer.render_chat(messages, template=template, tools=[TOOL])
    assert text.startswith("[system]You can call") and "[user]hi|[assistant]hi|" in text
    assert text.endswith("[user]<tool_response>\n|hi|\n</tool_response>|")
