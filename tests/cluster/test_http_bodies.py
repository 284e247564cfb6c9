"""What is asked of servers, and what they answer, as bodies."""

from __future__ import annotations

import json

import numpy as np
import pytest

from prefold.cluster.http_bodies import MESSAGES, embedding_bodies, generated_of, generation_body
from prefold.errors import InputError
from prefold.spec.requests import Namespace, Readout, Request, Sampling
from prefold.spec.task import Grammar
from prefold.wire.answers import calls_in
from prefold.wire.completions import Completion
from prefold.wire.numbers import Embeddings
from prefold.wire.tei import TeiEmbed


def body_of(text):
    return generation_body(Request(np.array([5], np.int32), sampling=Sampling()), "m", lambda tokens: text, True)


def test_a_conversation_is_a_chat_and_nothing_else_of_a_body():
    path, body = body_of(MESSAGES + json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": []}))
    assert path == "/v1/chat/completions" and body.model == "m" and body.messages[0]["content"] == "a"


def body_at(size, context, **sampling):
    request = Request(np.full(size, 5, np.int32), sampling=Sampling(**sampling))
    return generation_body(request, "m", None, True, context=context)[1].sent


def test_a_server_is_never_left_to_its_own_max_tokens():
    """Theirs is 16."""
    assert body_at(30, 512)["max_tokens"] == 482
    assert body_at(30, None, max_tokens=7)["max_tokens"] == 7
    with pytest.raises(InputError, match="context is unknown") as found:
        body_at(30, None)
    assert found.value.field == "max_tokens" and "--max-tokens" in found.value.remedy
    with pytest.raises(InputError, match="512 tokens, the context of the server's model is 512"):
        body_at(512, 512)
    _, body = body_of(MESSAGES + json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    assert "max_tokens" not in body.sent, "a conversation is answered until the context is full"


def test_sampling_options_are_sent_though_they_change_nothing():
    """Servers take those that are left out from the checkpoint's generation_config.json."""
    request = Request(np.array([5], np.int32), sampling=Sampling(max_tokens=3))
    _, body = generation_body(request, "m", None, True)
    sent = {"model": "m", "prompt": [5], "max_tokens": 3, "temperature": 0.0, "top_p": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0}  # fmt: skip
    assert body.sent == sent | {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert generation_body(request, "m", None, True, knows_all=False)[1].sent == sent
    request = Request(np.array([5], np.int32), sampling=Sampling(max_tokens=3, top_k=20))
    assert generation_body(request, "m", None, True, knows_all=False)[1].sent == sent | {"top_k": 20}


@pytest.mark.parametrize("name, value", [("top_n_sigma", 1.0), ("exit_threshold", 0.5), ("exit_visits", (1,))])
def test_an_option_that_servers_do_not_know_is_refused_by_its_name(name, value):
    with pytest.raises(InputError, match=f"cannot be asked for {name}") as found:
        body_at(30, 512, **{name: value})
    assert found.value.field == name


@pytest.mark.parametrize("rest", [" x", "[1]", "{}", '{"messages": [], "model": "other"}', "[" * 100_000])
def test_a_prompt_that_only_begins_as_a_conversation_is_refused(rest):
    with pytest.raises(InputError, match="reserved for conversations") as found:
        body_of(MESSAGES + rest)
    assert found.value.field == "prompt" and found.value.remedy


def test_function_calls_of_an_answer_stay_in_its_text():
    calls = [{"function": {"name": "f", "arguments": '{"x": "né"}'}}, {"function": {"name": "g", "arguments": ""}}]
    choice = {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
    (one,), _ = generated_of({"choices": [choice]})
    options = {"names": ["f", "g"], "forced": False}
    assert calls_in(one.text, options) == ("", [("f", '{"x": "né"}'), ("g", "{}")]) and one.finish_reason == "stop"
    choice["message"] |= {"content": "I ask.", "tool_calls": [{"function": {"name": "f", "arguments": "{half"}}]}
    (one,), _ = generated_of({"choices": [choice]})
    assert one.text.startswith("I ask.") and "{half" in one.text, "what is no call is not lost either"


@pytest.mark.parametrize("usage, cached", [({}, None), ({"prompt_tokens_details": None}, None),
                                           ({"prompt_tokens_details": {"cached_tokens": 0}}, 0)])  # fmt: skip
def test_what_a_server_does_not_say_of_its_cache_is_not_nothing(usage, cached):
    (one,), _ = generated_of({"choices": [{"text": "a"}], "usage": usage})
    assert one.cached_tokens == cached


def test_a_server_without_adapters_is_not_asked_in_their_place():
    request = Request(np.array([1], np.int32), namespace=Namespace("fr"))
    ((path, body),) = embedding_bodies([request], Readout("last"), "m", lambda tokens: "text")
    assert (path, body.model) == ("/v1/embeddings", "fr")


def test_a_server_of_prefold_reads_what_was_asked():
    """Bodies are written and read by the same structs."""
    asked = {"temperature": 0.5, "top_k": 7, "seed": 2**64 - 1, "n": 2, "min_tokens": 1, "max_tokens": 3}
    grammar = Grammar("json_schema", '{"type": "object"}')
    more = {"stop": ("a",), "stop_ids": (5,), "logit_bias": ((7, -1.5),), "grammar": grammar}
    request = Request(np.array([5], np.int32), sampling=Sampling(**asked, **more), namespace=Namespace(salt="s"))
    _, body = generation_body(request, "m", None, True, knows_all=False)
    (item,), _ = Completion.of(json.loads(json.dumps(body.sent))).read({})
    assert (item["prompt"], item["salt"]) == ([5], "s")
    defaults = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    lists = {"stop": ["a"], "stop_ids": [5], "logit_bias": {"7": -1.5}, "grammar": {"json_schema": {"type": "object"}}}
    assert item["sampling"] == asked | defaults | lists
    bodies = embedding_bodies([Request(np.array([5], np.int32))], Readout("last"), "m", lambda tokens: "x")
    assert [kind.of(body.sent).sent for kind, (_, body) in zip((Embeddings, TeiEmbed), bodies, strict=True)] == [
        {"model": "m", "input": ["x"]},
        {"inputs": ["x"]},
    ]
