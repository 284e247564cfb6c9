"""The `anthropic` package, unchanged, over a real socket."""

from __future__ import annotations

import json

import pytest

CHAT = [{"role": "user", "content": "is it the one? yes or no"}]
GREEDY = {"temperature": 0}
TOOL = {
    "name": "pick",
    "description": "picks",
    "input_schema": {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"],
                     "additionalProperties": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server):
    import anthropic  # takes seconds, so that it is not imported where the tests are collected

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_messages(client, llm):
    expected = llm.chat([{"role": "system", "content": "the"}, *CHAT], max_tokens=8)
    found = client.messages.create(model="tiny", max_tokens=8, messages=CHAT, extra_body=GREEDY, system="the")
    assert found.content[0].text == expected.text
    assert found.stop_reason == ("max_tokens" if expected.finish_reason == "length" else "end_turn")
    usage = found.usage
    counted = client.messages.count_tokens(model="tiny", messages=CHAT, system="the").input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.output_tokens == len(expected.tokens)


def test_stop_sequences(client, llm):
    whole = llm.chat(CHAT, max_tokens=12).text
    stop = whole[4:6]
    found = client.messages.create(model="tiny", max_tokens=12, messages=CHAT, extra_body=GREEDY,
                                   stop_sequences=[stop])  # fmt: skip
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == whole[: whole.index(stop)]


def test_stream(client, llm):
    expected = llm.chat(CHAT, max_tokens=20)
    with client.messages.stream(model="tiny", max_tokens=20, messages=CHAT, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == expected.text
        final = stream.get_final_message()
    assert final.usage.output_tokens == len(expected.tokens) and final.content[0].text == expected.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "pick"}])
def test_tools(client, stream, choice):
    asked = {"model": "tiny", "max_tokens": 200, "messages": CHAT, "tools": [TOOL], "tool_choice": choice}
    if stream:
        with client.messages.stream(**asked) as events:
            found = events.get_final_message()
    else:
        found = client.messages.create(**asked)
    (block,) = found.content
    assert (found.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "pick")
    assert block.input["a"] in ("yes", "no")
    answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "it is"}]}
    turns = [*CHAT, {"role": "assistant", "content": [block.to_dict()]}, answer]
    assert client.messages.create(model="tiny", max_tokens=2, messages=turns, tools=[TOOL]).usage.input_tokens >= 0


def test_a_format(client):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": schema}}
    asked = {"model": "tiny", "max_tokens": 60, "messages": CHAT}
    (block,) = client.messages.create(**asked, extra_body={"output_config": config}).content
    assert json.loads(block.text)["a"] in ("x", "y")
    for wrong, field in (({"effort": "much"}, "output_config.effort"),
                         ({"format": {"type": "json_schema", "schema": {"type": 5}}}, "type"),
                         ({"format": {"type": "json_object"}}, "output_config.format")):  # fmt: skip
        with pytest.raises(Exception, match=field) as refused:
            client.messages.create(**asked, extra_body={"output_config": wrong})
        assert type(refused.value).__name__ == "BadRequestError"


@pytest.mark.parametrize(
    ("body", "error", "kind"),
    [
        ({"model": "none"}, "NotFoundError", "not_found_error"),
        ({"max_tokens": 5000}, "BadRequestError", "invalid_request_error"),
        ({"thinking": {"type": "much"}}, "BadRequestError", "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
         "BadRequestError", "invalid_request_error"),
    ],
)  # fmt: skip
def test_errors(client, body, error, kind):
    with pytest.raises(Exception, match="Error code") as found:
        client.messages.create(**{"model": "tiny", "max_tokens": 2, "messages": CHAT} | body)
    assert type(found.value).__name__ == error
    assert found.value.body["error"]["type"] == kind
