"""OpenAI's responses with the `openai` package, unchanged, over a real socket."""

from __future__ import annotations

import json

import openai
import pytest
from serving import serving

from prefold.serve import responses as module

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


def test_events(bare):
    options = {"model": "tiny", "input": "yes no?", "max_output_tokens": 20, **GREEDY}
    expected = bare.responses.create(**options)
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
    first = client.responses.create(model="tiny", input="hello", max_output_tokens=4)
    asked = {"model": "tiny", "input": "again", "previous_response_id": first.id}
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


@pytest.mark.parametrize("stream", [False, True])
def test_kept_responses(client, llm, stream):
    first = client.responses.create(model="tiny", input="yes", max_output_tokens=9, stream=stream, **GREEDY)
    if stream:
        first = list(first)[-1].response
    assert first.store and client.responses.retrieve(first.id) == first
    second = client.responses.create(
        model="tiny", input="no", previous_response_id=first.id, max_output_tokens=9, **GREEDY
    )
    assert second.previous_response_id == first.id
    assert second.output_text == chat(llm, ("user", "yes"), ("assistant", first.output_text), ("user", "no"))
    said = [item.content[0].text for item in client.responses.input_items.list(second.id, order="asc")]
    assert said == ["yes", first.output_text, "no"]
    client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="no response"):
            ask(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    unkept = client.responses.create(model="tiny", input="x", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}}, "text.format"),
        ({"store": True}, "store"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["file_search_call.results"]}, "include"),
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


def test_a_conversation_is_kept_once(kept, client, llm):
    """Each response holds its own items; those that it goes on from stay as long as it does, also deleted ones."""
    store, previous, made_first, said = kept.site.store, None, None, []
    for i in range(4):
        made = client.responses.create(
            model="tiny", input=f"yes {i} " * 10, previous_response_id=previous, max_output_tokens=4, **GREEDY
        )
        said += [f"yes {i} " * 10, made.output_text]
        (own,) = store.get("response", "", made.id)["_own"]
        assert own["content"] == f"yes {i} " * 10
        if i == 1:
            client.responses.delete(previous)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(previous)
        previous, made_first = made.id, made_first or made.id
    items = client.responses.input_items.list(previous, order="asc").data
    assert [item.content[0].text for item in items] == said[:-1]
    drop_at = "SELECT drop_at FROM objects WHERE id = ?"
    first, last = (store._db.execute(drop_at, (id,)).fetchone()[0] for id in (made_first, previous))
    assert first == last


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["gone", "going"])
def test_a_conversation_outlives_a_deletion_during_its_next_turn(kept, client, monkeypatch, stream, when):
    """The deletion comes while the second response is being made, or is half done when that is kept."""
    store = kept.site.store
    first = client.responses.create(model="tiny", input="yes", max_output_tokens=2, **GREEDY)
    keep, delete = module._keep, store.delete

    def late(*arguments):
        if when == "gone":
            client.responses.delete(first.id)
            keep(*arguments)
        else:
            monkeypatch.setattr(store, "delete", lambda *which: keep(*arguments) or delete(*which))
            client.responses.delete(first.id)
            monkeypatch.setattr(store, "delete", delete)

    monkeypatch.setattr(module, "_keep", late)
    asked = {"model": "tiny", "max_output_tokens": 2} | GREEDY
    second = client.responses.create(input="no", previous_response_id=first.id, stream=stream, **asked)
    second = list(second)[-1].response if stream else second
    monkeypatch.setattr(module, "_keep", keep)
    third = client.responses.create(input="the", previous_response_id=second.id, **asked)
    said = [item.content[0].text for item in client.responses.input_items.list(third.id, order="asc")]
    assert said == ["yes", first.output_text, "no", second.output_text, "the"]
    assert store.get("response", "", first.id) is None
