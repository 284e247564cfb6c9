"""OpenAI's responses with the `openai` package, unchanged, over a real socket."""

from __future__ import annotations

import json

import openai
import pytest
from generating import slowed
from serving import serving

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def kept(llm, tmp_path_factory):
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path_factory.mktemp("data"))) as made:
        yield made


@pytest.fixture(scope="module")
def client(kept):
    with openai.OpenAI(base_url=f"{kept.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def bare(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(llm, *messages, **options):
    messages = [dict(zip(("role", "content"), message, strict=True)) for message in messages]
    return llm.chat(messages, **({"max_tokens": 9, "ignore_eos": True} | options)).text


def test_a_text(bare, llm):
    found = bare.responses.create(model="tiny", input="yes no?", max_output_tokens=9, **GREEDY)
    assert found.output_text == chat(llm, ("user", "yes no?"))
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.model, found.store, found.usage.output_tokens) == ("tiny", False, 9)
    assert found.usage.total_tokens == found.usage.input_tokens + 9


def test_messages_and_instructions(bare, llm):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "yes"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "no"}]},
        {"role": "user", "content": "the?"},
    ]
    found = bare.responses.create(model="tiny", instructions="one", input=items, max_output_tokens=9, **GREEDY)
    assert found.output_text == chat(llm, ("system", "one"), ("user", "yes"), ("assistant", "no"), ("user", "the?"))
    assert found.instructions == "one"


def test_events(bare, llm):
    options = {"model": "tiny", "input": "yes no?", "max_output_tokens": 20, **GREEDY}
    expected = bare.responses.create(**options)
    with slowed(llm.worker):
        events = list(bare.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"
    ]  # fmt: skip
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == expected.output_text and len(pieces) > 1
    assert events[-1].response.output_text == expected.output_text
    with bare.responses.stream(model="tiny", input="yes no?", max_output_tokens=20, **GREEDY) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_logprobs(bare, llm):
    options = {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 4}
    found = bare.responses.create(model="tiny", input="yes", **options, **GREEDY)
    expected = llm.chat([{"role": "user", "content": "yes"}], max_tokens=4, logprobs=2, ignore_eos=True).logprobs
    entries = found.output[0].content[0].logprobs
    assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in expected], abs=1e-5)
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 4


@pytest.mark.parametrize("tools", [{}, {"tools": [{"type": "function", "name": "look", "parameters": {}}]}])
def test_logprobs_of_deltas(bare, tools):
    """Those of the tokens in the delta, or all of them behind the last if text may be held back for a call."""
    options = {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 8, **tools}
    events = list(bare.responses.create(model="tiny", input="yes", stream=True, **options, **GREEDY))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    sent = [entry for delta in deltas for entry in delta.logprobs]
    assert [(one.token, one.logprob) for one in sent] == [(one.token, one.logprob) for one in done.logprobs]
    assert len(sent) == 8 and {len(one.top_logprobs) for one in sent} == {2}
    if not tools:
        assert all(delta.delta == "".join(one.token for one in delta.logprobs) for delta in deltas)


def test_a_wrong_tool_choice_is_told_in_the_form_of_this_api(bare):
    for choice in ({"type": "function", "name": "other"}, "sometimes"):
        with pytest.raises(openai.BadRequestError, match='"type": "function", "name": ') as error:
            bare.responses.create(model="tiny", input="yes", tools=[TOOL], tool_choice=choice)
        assert error.value.param == "tool_choice" and '"function": {' not in error.value.message


TOOL = {
    "type": "function", "name": "look", "description": "looks", "strict": True,
    "parameters": {"type": "object", "properties": {"at": {"enum": ["yes", "no"]}}, "required": ["at"],
                   "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_function_calls(bare, stream):
    options = {"model": "tiny", "input": "look", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 60}
    found = bare.responses.create(stream=stream, **options)
    if stream:
        events = list(found)
        found = events[-1].response
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == [found.output[0].arguments]
    (call,) = found.output
    assert (found.status, call.type, call.name) == ("completed", "function_call", "look")
    assert json.loads(call.arguments)["at"] in ("yes", "no")
    items = [
        {"role": "user", "content": "look"}, call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "yes"},
    ]  # fmt: skip
    found = bare.responses.create(model="tiny", input=items, tools=[TOOL], max_output_tokens=3, **GREEDY)
    assert found.status == "incomplete"


def test_a_schema(bare):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = bare.responses.create(model="tiny", input="yes", text={"format": format}, max_output_tokens=60)
    assert json.loads(found.output_text)["a"] in (1, 2)


def test_the_tokens_of_an_input(client):
    asked = {"model": "tiny", "input": [{"role": "user", "content": "hello"}, {"role": "user", "content": "again"}]}
    count = client.responses.input_tokens.count(**asked)
    assert count.object == "response.input_tokens"
    assert count.input_tokens == client.responses.create(max_output_tokens=1, **asked).usage.input_tokens
    assert count.input_tokens > client.responses.input_tokens.count(model="tiny", input="again").input_tokens


def test_a_forced_call_beside_a_format(bare):
    """A format is of the message's text; where a call is forced there is none."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "name": "pick", "parameters": schema}
    format = {"type": "json_schema", "name": "other", "schema": {"type": "object"}}
    found = bare.responses.create(
        model="tiny", input="hi", text={"format": format}, tools=[tool], max_output_tokens=60,
        tool_choice={"type": "function", "name": "pick"},
    )  # fmt: skip
    (call,) = found.output
    assert call.type == "function_call" and json.loads(call.arguments)["n"] in (1, 2)


@pytest.mark.parametrize("store", [True, False])
def test_nothing_is_stored(client, store):
    """`store` is taken and changes nothing: a later request sends the whole conversation, as the error says."""
    first = client.responses.create(model="tiny", input="yes", max_output_tokens=2, store=store, **GREEDY)
    assert first.store is False and first.id.startswith("resp_") and first.previous_response_id is None
    for call in (client.responses.create, client.responses.input_tokens.count):
        with pytest.raises(openai.BadRequestError, match="send the whole conversation as input") as error:
            call(model="tiny", input="no", previous_response_id=first.id)
        assert error.value.param == "previous_response_id"
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(first.id)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_serach"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}}, "text.format"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"budget": 5}}, "reasoning.budget"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
    ],
)
def test_what_is_wrong(bare, wrong, param):
    with pytest.raises(openai.BadRequestError) as error:
        bare.responses.create(**{"model": "tiny", "input": "yes"} | wrong)
    assert error.value.param == param


def test_a_batch_of_responses(client):
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"input": "yes", "max_output_tokens": 3, "temperature": 0, "ignore_eos": True},
    }
    expected = client.responses.create(model="tiny", input="yes", max_output_tokens=3, store=False, **GREEDY)
    file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        pass
    body = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]
    assert body["object"] == "response" and body["usage"]["output_tokens"] == expected.usage.output_tokens
    assert body["output"][0]["content"][0]["text"] == expected.output_text
