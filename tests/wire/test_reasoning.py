"""The reasoning of a model that thinks: how it is parted from the answer, in whole responses and in pieces."""

from __future__ import annotations

import pytest
from answering import answer_of

from prefold.errors import InputError
from prefold.tasks.results import Answer
from prefold.wire.answers import ReasoningSplitter, split_reasoning
from prefold.wire.completions import Chat, Chunks, StreamOptions, chat_body
from prefold.wire.responses import ResponseEvents, Responses, responses_body

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CASES = [
    ("<think>\nhm, well\n</think>\n\nYes. ", False, "hm, well", "Yes. "),
    ("hm </thin or </think>Yes", True, "hm </thin or", "Yes"),
    (" <think>hm </thi", False, "hm </thi", ""),
    ("\n hm \n", True, "hm", ""),
    ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
    (" <thing> Yes </think>", False, "", " <thing> Yes </think>"),
    (" <thi", False, "", " <thi"),
    ("", False, "", ""),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "opened", "thought", "answer"), CASES)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_parting(text, opened, thought, answer, size):
    assert split_reasoning(text, opened) == (thought, answer)
    parting = ReasoningSplitter(opened)
    pieces = [parting.add(text[i : i + size]) for i in range(0, len(text), size)] + [parting.rest()]
    assert tuple(map("".join, zip(*pieces, strict=True))) == (thought, answer)


def result_of(text: str, opened: bool, reason: str = "stop") -> Answer:
    counts = {"num_tokens": 3, "num_generated": len(text), "cached_tokens": 0}
    return answer_of(text=text, finish_reason=reason, thinks=opened, reasoning_tokens=2, **counts)


def chat_of(**body):
    return Chat.of({"messages": [{"role": "user", "content": "hi"}], **body}).read({})


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("text", "opened", "thought", "answer"), [
    *CASES[:3], ("hm</think>\nSo: " + CALL, True, "hm", "So:"), ("hm</think>" + CALL, True, "hm", None),
])  # fmt: skip
def test_chats_whole_and_streamed(text, opened, thought, answer, hidden):
    (item,), meta = chat_of(tools=TOOLS, include_reasoning=not hidden)
    assert item["with_reasoning"]
    result = result_of(text, opened)
    (choice,) = chat_body(meta, [result])["choices"]
    message = choice["message"]
    fields = {} if hidden else {"reasoning": thought, "reasoning_content": thought}
    assert {name: message[name] for name in message if name.startswith("reasoning")} == fields
    assert message["content"] == (answer or None)
    assert ("tool_calls" in message) == (CALL in text)
    made = Chunks(Chat, meta, StreamOptions(include_usage=True), model="m", id="1", samples=1)
    chunks = [*made.begin([{"tokens": 3, "thinks": opened}])]
    for i, letter in enumerate(text):
        chunks += made.piece(0, 0, letter, [{"id": 5}], i + 1)
    chunks += [*made.end(0, result), *made.last()]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    assert any("tool_calls" in delta for delta in deltas[:-1]) == (CALL in text) and "tool_calls" not in deltas[-1]
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_what_a_grammar_makes_holds_no_reasoning():
    (item,), _ = chat_of(response_format={"type": "json_object"})
    assert not item["with_reasoning"]
    (choice,) = chat_body({}, [answer_of(text="<think>", num_tokens=1)])["choices"]
    assert choice["message"]["content"] == "<think>"


@pytest.mark.parametrize(("text", "reason", "kinds"), [
    ("<think>hm, well</think>Yes.", "stop", ["reasoning", "message"]),
    ("<think>hm, well</think>" + CALL, "stop", ["reasoning", "function_call"]),
    ("<think>hm, well", "length", ["reasoning"]),
    ("Yes.", "stop", ["message"]),
])  # fmt: skip
def test_responses_whole_and_in_events(text, reason, kinds):
    _, meta = Responses.of({"input": "hi", "tools": [{"type": "function", "name": "f"}]}).read({})
    result = result_of(text, False, reason)
    whole = responses_body(meta | {"id": "1"}, [result])
    assert [item["type"] for item in whole["output"]] == kinds
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    made = ResponseEvents(meta, model="m", id="1")
    events = [*made.begin([{"tokens": 3, "thinks": False}])]
    for i, letter in enumerate(text):
        events += made.piece(0, 0, letter, [], i + 1)
    events += made.end(0, result)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added, done = (
        [event for event in events if event["type"] == f"response.output_item.{what}"] for what in ("added", "done")
    )
    assert (
        [event["output_index"] for event in added] == [event["output_index"] for event in done] == [*range(len(kinds))]
    )
    assert [event["item"]["type"] for event in done] == kinds
    if kinds[0] == "reasoning":
        item = whole["output"][0]
        assert item["content"] == [{"type": "reasoning_text", "text": "hm, well"}] and item["encrypted_content"] is None
        assert done[0]["item"] == item and item["status"] == ("incomplete" if reason == "length" else "completed")
        deltas = [event for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(event["delta"] for event in deltas) == "hm, well" and len(deltas) > 2
        assert {event["item_id"] for event in deltas} == {"rs_1"}
        kind, begun = (
            next(e for e in events if e["type"] == f"response.reasoning_text.{w}") for w in ("done", "delta")
        )
        assert kind["text"] == "hm, well" and begun["output_index"] == 0
    texts = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in texts) == ("Yes." if "message" in kinds else "")
    assert {event["output_index"] for event in texts} <= {kinds.index("message") if "message" in kinds else None}


def test_reasoning_goes_back_to_the_message_that_it_was_of():
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "5"}
    said = {"role": "assistant", "content": "a"}
    (item,), _ = Responses.of(
        {"input": [thought, call, output, thought, said, thought, {"role": "user", "content": "b"}]}
    ).read({})
    first, told, second, left, user = item["messages"]
    assert first["reasoning_content"] == "hm" and first["tool_calls"][0]["id"] == "c"
    assert (told["role"], second) == ("tool", said | {"reasoning_content": "hm"})
    assert (left, user) == (
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "user", "content": "b"},
    )
    (bare,), _ = Responses.of({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}, said]}).read(
        {}
    )
    assert bare["messages"] == [said]


def test_how_much_is_to_be_thought_is_a_variable_of_the_template():
    (item,), _ = chat_of(reasoning_effort="low")
    assert item["chat_template_kwargs"] == {"reasoning_effort": "low"}
    (item,), _ = chat_of(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "none", "x": 1})
    assert item["chat_template_kwargs"] == {"reasoning_effort": "none", "x": 1}
    (item,), _ = Responses.of({"input": "hi", "reasoning": {"effort": "high", "summary": "auto"}}).read({})
    assert item["chat_template_kwargs"] == {"reasoning_effort": "high"}
    with pytest.raises(InputError, match="'reasoning_effort' is 'much'; give one of none, minimal, low"):
        chat_of(reasoning_effort="much")
