"""/v1/chat/completions and /v1/completions in batch lines: requests to items, results to responses."""

from __future__ import annotations

import pytest
from answering import answer_of

from prefold.errors import InputError
from prefold.jobs.batch import OpenAIBatch
from prefold.jobs.record import Record

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def read(url, body, **options):
    batch = OpenAIBatch("m", seed="s", **options)
    return batch, batch.read(Record(1, {"custom_id": "a", "method": "POST", "url": url, "body": body}))


def item(url, body, **options):
    _, parsed = read(url, body, **options)
    assert parsed.error is None and parsed.task == "generate", parsed.error
    (found,) = parsed.items
    return found


def sampling(body, url=CHAT, **options):
    return item(url, {"messages": USER} | body if url == CHAT else {"prompt": "p"} | body, **options)["sampling"]


def result(text="out", **more):
    return answer_of(**{"text": text, "num_tokens": 7, "num_generated": 3, "cached_tokens": 5, **more})


def body_of(batch, parsed, *results):
    out = batch.line(1, parsed.meta, list(results))
    assert out["error"] is None and out["response"]["status_code"] == 200
    return out["response"]["body"]


def test_a_chat_request_and_its_response():
    batch, parsed = read(CHAT, {"model": "m", "messages": USER, "max_tokens": 5})
    sampling = {"temperature": 1.0, "max_tokens": 5}
    assert parsed.items == [{"messages": USER, "tools": None, "sampling": sampling, "with_reasoning": True}]
    body = body_of(batch, parsed, result())
    assert body["object"] == "chat.completion" and body["model"] == "m" and body["id"].startswith("chatcmpl-")
    assert isinstance(body["created"], int)
    message = {"role": "assistant", "content": "out", "refusal": None}
    assert body["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 5}}


def test_a_completion_request_and_its_response():
    batch, parsed = read(PLAIN, {"prompt": "p", "n": 2})
    assert parsed.items == [{"prompt": "p", "sampling": {"temperature": 1.0, "max_tokens": 16, "n": 2}}]
    choices = [{"text": "a", "finish_reason": "length"}, {"text": "b", "finish_reason": "stop", "stop": "\n"}]
    counts = {"num_tokens": 7, "num_generated": 9, "cached_tokens": 0}
    body = body_of(batch, parsed, answer_of(choices=choices, **counts))
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length", "stop_reason": None},
        {"index": 1, "text": "b", "logprobs": None, "finish_reason": "stop", "stop_reason": "\n"},
    ]
    assert body["usage"]["total_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("p", ["p"]), (["p", "q"], ["p", "q"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompts_of_every_kind(prompt, prompts):
    batch, parsed = read(PLAIN, {"prompt": prompt, "max_tokens": 1})
    assert [found["prompt"] for found in parsed.items] == prompts
    body = body_of(batch, parsed, *[result(str(i)) for i in range(len(prompts))])
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(i, str(i)) for i in range(len(prompts))]
    assert body["usage"]["prompt_tokens"] == 7 * len(prompts)


def test_parameters_of_sampling():
    given = {
        "temperature": 0, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "n": 2, "seed": 5, "presence_penalty": 0.5,
        "top_n_sigma": 1.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_tokens": 1, "stop": ["a"], "stop_token_ids": [3],
        "ignore_eos": True, "logit_bias": {"5": -100}, "user": "u",
    }  # fmt: skip
    found = sampling(given)
    wanted = {k: v for k, v in given.items() if k not in ("user", "stop_token_ids")}
    assert found == {"max_tokens": None, "stop_ids": [3]} | wanted
    assert sampling({"max_tokens": 4, "max_completion_tokens": 9})["max_tokens"] == 9
    assert sampling({"temperature": None, "stop": None}) == {"temperature": 1.0, "max_tokens": None}
    assert sampling({}, sampling={"temperature": 0.2, "max_tokens": 3}) == {"temperature": 0.2, "max_tokens": 3}
    assert sampling({"temperature": 0.7}, sampling={"temperature": 0.2})["temperature"] == 0.7
    assert sampling({"logprobs": True, "top_logprobs": 3})["logprobs"] == 3
    assert sampling({"logprobs": True})["logprobs"] == 0
    assert "logprobs" not in sampling({"logprobs": False})
    assert sampling({"logprobs": 0}, url=PLAIN)["logprobs"] == 0


def test_formats():
    schema = {"type": "object"}
    in_openais = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for body, grammar in [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": True}),
        ({"response_format": in_openais}, {"json_schema": schema}),
        ({"guided_json": schema}, {"json_schema": schema}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "start: A"}, {"lark": "start: A"}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {"json": True}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
    ]:
        assert sampling(body).get("grammar") == grammar
    batch, parsed = read(CHAT, {"messages": USER, "guided_regex": "("})
    error = InputError("bad", field="grammar.regex")
    assert batch.error_line(1, parsed.meta, error)["response"]["body"]["error"]["param"] == "guided_regex"


@pytest.mark.parametrize("url", [CHAT, "/v1/responses"])
def test_a_forced_call_and_a_format_of_all_answers(url):
    """The format is of the text of answers, and a call has none."""
    function = {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function"} | ({"function": function} if url == CHAT else function)
    body = {"messages" if url == CHAT else "input": USER, "tools": [tool], "tool_choice": "required"}
    found = item(url, body, sampling={"grammar": {"json": True}})
    assert "name" in found["sampling"]["grammar"]["json_schema"]["properties"]


def test_a_forced_call_and_an_expression_exclude_each_other():
    tools = [{"type": "function", "function": {"name": "f"}}]
    _, parsed = read(CHAT, {"messages": USER, "tools": tools, "tool_choice": "required", "guided_regex": "a"})
    assert parsed.error.field == "tool_choice" and "guided_regex" in parsed.error.message


def test_tools_and_the_chat_template():
    tools = [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]
    bare = [{"type": "function", "function": {"name": "f"}}]  # templates may read what it lacks
    assert item(CHAT, {"messages": USER, "tools": bare})["tools"] == tools
    assert item(CHAT, {"messages": USER, "tools": tools, "tool_choice": "auto"})["tools"] == tools
    assert item(CHAT, {"messages": USER, "tools": tools, "tool_choice": "none"})["tools"] is None
    more = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    found = item(CHAT, {"messages": USER, "cache_salt": "s", "priority": 3} | more)
    assert found.items() >= (more | {"salt": "s", "priority": 3}).items()


def test_a_model_that_is_an_adapter():
    batch, parsed = read(CHAT, {"model": "fr", "messages": USER}, adapters=("fr",))
    assert parsed.items[0]["adapter"] == "fr" and not batch.other_models
    assert body_of(batch, parsed, result())["model"] == "fr"
    batch, parsed = read(CHAT, {"model": "de", "messages": USER}, adapters=("fr",))
    assert "adapter" not in parsed.items[0] and batch.other_models == {"de": 1}


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (CHAT, {"model": "m"}, "messages"),
        (PLAIN, {"model": "m"}, "prompt"),
        (PLAIN, {"prompt": []}, "prompt"),
        (CHAT, {"messages": USER, "prompt": "p"}, "prompt"),
        (CHAT, {"messages": USER, "temprature": 1}, "temprature"),
        (CHAT, {"messages": USER, "stream": True}, "stream"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": USER, "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"messages": USER, "structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        (CHAT, {"messages": USER, "structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        (CHAT, {"messages": USER, "guided_regex": "a", "guided_json": {}}, "guided_regex"),
        (CHAT, {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        (PLAIN, {"prompt": "p", "add_special_tokens": False}, "add_special_tokens"),
        (PLAIN, {"prompt": "p", "best_of": 3}, "best_of"),
        (PLAIN, {"prompt": "p", "echo": True}, "echo"),
        (PLAIN, {"prompt": "p", "suffix": "s"}, "suffix"),
        (PLAIN, {"prompt": "p", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (PLAIN, {"prompt": "p", "messages": USER}, "messages"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(url, body, field):
    batch, parsed = read(url, body)
    assert parsed.error is not None and parsed.error.field == field, parsed.error
    out = batch.error_line(1, parsed.meta, parsed.error)
    assert out["response"]["status_code"] == 400 and out["response"]["body"]["error"]["param"] == field


def test_what_asks_for_nothing_is_no_error():
    neutral = {
        "stream": False,
        "echo": False,
        "suffix": None,
        "best_of": 1,
        "use_beam_search": False,
        "functions": None,
    }
    assert item(PLAIN, {"prompt": "p", "add_special_tokens": True} | neutral)
    assert item(
        CHAT, {"messages": USER, "add_special_tokens": False, "parallel_tool_calls": True, "metadata": {"a": 1}}
    )


def test_fields_are_named_as_in_the_request():
    for url, field, name in [
        (CHAT, "stop_ids", "stop_token_ids"),
        (CHAT, "logprobs", "top_logprobs"),
        (PLAIN, "logprobs", "logprobs"),
        (PLAIN, "salt", "cache_salt"),
        (CHAT, "messages[1].content", "messages[1].content"),
    ]:
        batch, parsed = read(url, {"messages": USER} if url == CHAT else {"prompt": "p"})
        out = batch.error_line(1, parsed.meta, InputError("bad", field=field))
        assert out["response"]["body"]["error"]["param"] == name


ENTRIES = [
    {"id": 5, "token": "ab", "logprob": -0.5, "top": [{"id": 5, "token": "ab", "logprob": -0.5}]},
    {
        "id": 6,
        "token": "\ufffd",
        "bytes": [159, 152],
        "logprob": -1.5,
        "top": [{"id": 7, "token": "c", "logprob": -0.25}],
    },
]


def test_logprobs_of_a_chat():
    batch, parsed = read(CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 1})
    logprobs = body_of(batch, parsed, result(logprobs=ENTRIES))["choices"][0]["logprobs"]
    one, two = logprobs["content"]
    assert one["token"] == "ab" and one["logprob"] == -0.5 and one["bytes"] == [97, 98]
    assert one["top_logprobs"] == [{"token": "ab", "logprob": -0.5, "bytes": [97, 98]}]
    assert two["bytes"] == [159, 152] and two["top_logprobs"][0]["token"] == "c"


def test_logprobs_of_a_completion():
    batch, parsed = read(PLAIN, {"prompt": "p", "logprobs": 1})
    logprobs = body_of(batch, parsed, result(logprobs=ENTRIES))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["ab", "bytes:\\x9f\\x98"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"ab": -0.5}, {"c": -0.25, "bytes:\\x9f\\x98": -1.5}],
        "text_offset": [0, 2],
    }


def test_prompts_of_a_list_with_one_seed_have_seeds_of_their_own():
    _, parsed = read(PLAIN, {"prompt": ["p", "p", [5]], "seed": 7})
    seeds = [found["sampling"]["seed"] for found in parsed.items]
    assert seeds[0] == 7 and len({*seeds}) == 3
    assert [found["sampling"]["seed"] for found in read(PLAIN, {"prompt": ["p"] * 3, "seed": 7})[1].items] == seeds
    assert "seed" not in item(PLAIN, {"prompt": ["p"]})["sampling"]
