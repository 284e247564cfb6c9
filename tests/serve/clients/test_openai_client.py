"""The `openai` package, unchanged, over a real socket: what it gets is what the LLM gives in this process."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import openai
import pytest

CHAT = [{"role": "user", "content": "is it the one? yes or no"}]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completions(client, llm):
    expected = llm.generate("yes no the", max_tokens=9, logprobs=2, ignore_eos=True)
    found = client.completions.create(model="tiny", prompt="yes no the", max_tokens=9, logprobs=2, **GREEDY)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].logprobs.token_logprobs == pytest.approx(
        [t.logprob for t in expected.logprobs], rel=2e-6, abs=1e-6
    )
    assert (found.model, found.usage.completion_tokens) == ("tiny", 9)
    assert found.usage.prompt_tokens == len(llm.tokenizer.encode("yes no the"))


def test_decisions(client, llm):
    choices = [{"value": "calm", "description": "polite"}, {"value": "angry"}]
    levels = [{"label": "low"}, {"label": "middle"}, {"label": "high"}]
    questions = [
        {"type": "choice", "instructions": "Which tone?", "choices": choices, "name": "tone"},
        {"type": "score", "instructions": "How bad?", "levels": levels},
        {"type": "predicate", "instructions": "Is it bad?", "name": "is bad"},
    ]
    expected = llm.decide("I was charged twice.", questions)
    found = client.decisions.create(
        model="tiny", input="I was charged twice.", questions=questions, prompt_cache_key="k", safety_identifier="u"
    )
    tone, bad, is_bad = found.answers
    assert (tone.type, tone.choice, tone.name) == ("choice", expected["tone"].value, "tone")
    of = {one.value: one.probability for one in tone.probabilities}
    assert of == pytest.approx(expected["tone"].probabilities, abs=1e-5)
    assert tone.confidence == pytest.approx(expected["tone"].confidence, abs=1e-5)
    assert bad.score == pytest.approx(expected["1"].value, abs=1e-5) and bad.probabilities[2].label == "high"
    assert (is_bad.type, is_bad.name, bad.name) == ("predicate", "is bad", None)
    assert is_bad.probability == pytest.approx(expected["is bad"].probabilities["true"], abs=1e-5)
    assert found.usage.total_tokens == found.usage.input_tokens == expected.num_tokens and found.model == "tiny"
    again = client.decisions.create(model="tiny", input="I was charged twice.", questions=questions)
    assert 0 < again.usage.input_tokens_details.cached_tokens <= again.usage.input_tokens


def test_a_conversation_is_decided_on(client, llm):
    user = [{"type": "input_text", "text": "charged twice"}, {"type": "input_json", "data": {"order": 7}}]
    conversation = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": user, "type": "message"},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "paid"},
    ]
    choices = [{"value": True}, {"value": "true"}]
    question = {"type": "choice", "instructions": [{"type": "input_text", "text": "Refund?"}], "choices": choices}
    (answer,) = client.decisions.create(model="tiny", input=conversation, questions=[question]).answers
    text = (
        'developer: Be strict.\n\nuser: charged twice\n{"order": 7}\n\nassistant: calls look({})\n\nlook returns: paid'
    )
    expected = llm.decide(text, [question | {"instructions": "Refund?"}])["0"]
    assert [one.value for one in answer.probabilities] == [True, "true"] and answer.choice == expected.value
    assert answer.probabilities[0].probability == pytest.approx(expected.probabilities[True], abs=1e-5)


def test_four_hundred_questions(client):
    questions = [{"type": "predicate", "instructions": f"{i}?", "name": f"q{i}"} for i in range(400)]
    found = client.decisions.create(model="tiny", input="yes", questions=questions)
    assert [one.name for one in found.answers] == [one["name"] for one in questions]
    assert all(0 <= one.probability <= 1 for one in found.answers)
    with pytest.raises(openai.BadRequestError, match="401 questions") as caught:
        client.decisions.create(model="tiny", input="yes", questions=[*questions, questions[0]])
    assert (caught.value.param, caught.value.code) == ("questions", "too_many")


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        ({"questions": [{"type": "free", "instructions": "?"}]}, "type 'free'", "questions[0].type"),
        ({"questions": [{"type": "score", "instructions": "?", "levels": [{"label": "a"}] * 27}]}, "27 options", None),
        ({"input": ""}, "'input' is empty", "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "not in the input", None),
        ({"input": "yes " * 9000}, "tokens", "input"),
    ],
)
def test_a_request_for_decisions_that_is_wrong(client, body, says, param):
    asked = {"model": "tiny", "input": "x", "questions": [{"type": "predicate", "instructions": "?"}]} | body
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.decisions.create(**asked)
    assert param is None or caught.value.param == param


def test_several_prompts_and_samples(client, llm):
    prompts = ["yes", llm.tokenizer.encode("no the").tolist()]
    options = {"max_tokens": 5, "temperature": 1.0, "seed": 7}
    expected = llm.generate(prompts, n=3, ignore_eos=True, **options)
    texts = [one.text for samples in expected for one in samples]
    # A prompt draws its numbers by its place in the list.
    alone = [one.text for one in llm.generate(prompts[1], n=3, ignore_eos=True, **options)]
    for prompt, part in ((prompts[0], texts[:3]), (prompts[1], alone)):
        found = client.completions.create(model="tiny", prompt=prompt, n=3, extra_body={"ignore_eos": True}, **options)
        assert [choice.text for choice in found.choices] == part
        assert [choice.index for choice in found.choices] == [0, 1, 2]
    both = client.completions.create(model="tiny", prompt=["yes", "no the"], n=3, extra_body={"ignore_eos": True},
                                     **options)  # fmt: skip
    assert [choice.text for choice in both.choices] == texts


def test_chat(client, llm):
    expected = llm.chat(CHAT, max_tokens=8, logprobs=1, ignore_eos=True)
    found = client.chat.completions.create(model="other", messages=CHAT, max_tokens=8, logprobs=True, top_logprobs=1,
                                           **GREEDY)  # fmt: skip
    assert found.choices[0].message.content == expected.text
    entries = found.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(
        [t.logprob for t in expected.logprobs], rel=2e-6, abs=1e-6
    )
    assert found.usage.completion_tokens == 8


@pytest.mark.parametrize("n", [1, 3])
def test_streams(client, llm, n):
    expected = llm.chat(CHAT, n=n, max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=20, temperature=0.8, seed=3, n=n, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    texts, reasons, usage, chunks = [""] * n, [None] * n, None, 0
    for chunk in stream:
        chunks += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [one.text for one in expected]
    assert reasons == ["length"] * n
    assert usage.completion_tokens == 20 * n
    assert chunks > n + 1  # it came in pieces


def test_completion_streams(client, llm):
    expected = llm.generate(["yes", "the no"], max_tokens=12, ignore_eos=True)
    texts = ["", ""]
    for chunk in client.completions.create(
        model="tiny", prompt=["yes", "the no"], max_tokens=12, stream=True, **GREEDY
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in expected]


def test_stop_and_schema(client, llm):
    whole = llm.generate("yes no the", max_tokens=12, ignore_eos=True).text
    stop = whole[5:8]
    found = client.completions.create(model="tiny", prompt="yes no the", max_tokens=12, stop=[stop], **GREEDY)
    assert found.choices[0].text == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    found = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=120, temperature=0,
                                           response_format=form)  # fmt: skip
    assert json.loads(found.choices[0].message.content)["a"] in ("yes", "no")


def test_embeddings(client, llm):
    texts = ["yes no", "the", "no the yes"]
    expected = llm.embed(texts)
    found = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    np.testing.assert_allclose([one.embedding for one in found.data], expected, atol=1e-6)
    found = client.embeddings.create(model="tiny", input=texts[0], encoding_format="float", dimensions=5)
    np.testing.assert_allclose(found.data[0].embedding, llm.embed(texts[:1], dimensions=5)[0], atol=1e-6)
    assert found.usage.prompt_tokens == len(llm.tokenizer.encode(texts[0]))


def test_all_at_once(server, llm):
    prompts = [f"{word} the {number} no" for number in range(8) for word in ("yes", "no")]
    expected = llm.generate(prompts, max_tokens=10, ignore_eos=True)
    vectors = llm.embed(prompts)

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            texts = [client.completions.create(model="tiny", prompt=p, max_tokens=10, **GREEDY) for p in prompts]
            numbers = [client.embeddings.create(model="tiny", input=p) for p in prompts]
            return await asyncio.gather(*texts), await asyncio.gather(*numbers)

    texts, numbers = asyncio.run(ask())
    assert [one.choices[0].text for one in texts] == [one.text for one in expected]
    np.testing.assert_allclose([one.data[0].embedding for one in numbers], vectors, atol=1e-6)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"model": "none"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 5000}, openai.BadRequestError, "messages"),
        ({"top_logprobs": 50, "logprobs": True}, openai.BadRequestError, "top_logprobs"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"extra_body": {"no_such": 1}}, openai.BadRequestError, "no_such"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         openai.BadRequestError, "messages[0].content[0]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors(client, body, error, param, stream):
    with pytest.raises(error) as found:
        client.chat.completions.create(**{"model": "tiny", "messages": CHAT, "stream": stream} | body)
    assert found.value.param == param
    assert ";" in found.value.message  # what to do about it


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"],
                           "additionalProperties": False},
        },
    }
    for name in ("pick", "take")
]  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "take"}}])
def test_function_calls(client, choice):
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 200, "tools": TOOLS, "tool_choice": choice}
    found = client.chat.completions.create(**asked).choices[0]
    (call,) = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and found.message.content is None
    assert call.function.name in (("pick", "take") if choice == "required" else ("take",))
    assert json.loads(call.function.arguments)["a"] in ("yes", "no")
    calls, reason = [], None
    for chunk in client.chat.completions.create(**asked, stream=True):
        calls += chunk.choices[0].delta.tool_calls or []
        assert not chunk.choices[0].delta.content
        reason = chunk.choices[0].finish_reason or reason
    assert reason == "tool_calls" and json.loads(calls[0].function.arguments)["a"] in ("yes", "no")
    turns = [*CHAT, found.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "it is"}]
    assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=2, tools=TOOLS).usage


@pytest.mark.parametrize("stop", [None, "e"])
def test_log_probabilities_in_a_stream(client, llm, stop):
    """They come with the text, and are together those of the whole answer, up to a stop text."""
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 20, "logprobs": True, "top_logprobs": 2, "stop": stop}
    whole = client.chat.completions.create(**asked, **GREEDY).choices[0]
    found, with_text = [], 0
    for chunk in client.chat.completions.create(**asked, **GREEDY, stream=True):
        choice = chunk.choices[0]
        entries = choice.logprobs.content if choice.logprobs else []
        found += entries
        with_text += bool(entries and choice.delta.content)
    assert [one.token for one in found] == [one.token for one in whole.logprobs.content]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in whole.logprobs.content], abs=1e-5)
    assert with_text > 1 or len(found) < 4
    asked = {"model": "tiny", "prompt": "yes no the", "max_tokens": 20, "logprobs": 1, "stop": stop}
    whole = client.completions.create(**asked, **GREEDY).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, **GREEDY, stream=True)]
    chunks = [one for one in chunks if one]
    assert [token for one in chunks for token in one.tokens] == whole.tokens
    assert [offset for one in chunks for offset in one.text_offset] == whole.text_offset
