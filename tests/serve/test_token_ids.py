"""What a live answer tells of itself: ids of tokens, reasoning, and the fingerprint of the system."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import pytest
from serving import serving
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.serve.handler import fingerprint

USER = [{"role": "user", "content": "is it the one?"}]
SHORT = {"max_tokens": 6, "temperature": 1, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """An LLM whose template opens the reasoning, unless it is told not to."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("thinking"), "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if effort != 'none' %}<think>\n{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return LLM(str(folder), dtype="float32")


def ask(server, path, body):
    found = httpx.post(server.url + path, json=SHORT | body)
    assert found.status_code == 200, found.text
    return found.json()


def ask_in_pieces(server, path, body):
    with httpx.stream("POST", server.url + path, json=SHORT | body | {"stream": True}) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_ids_of_a_chat(server, more):
    body = {"messages": USER, "n": 2, "return_token_ids": True, **more}
    whole = ask(server, "/v1/chat/completions", body)
    prompt = ask(server, "/tokenize", {name: body[name] for name in ("messages", "tools") if name in body})["tokens"]
    assert whole["prompt_token_ids"] == prompt
    ids = [choice["token_ids"] for choice in whole["choices"]]
    assert [len(some) for some in ids] == [6, 6] and ids[0] != ids[1]
    if "logprobs" not in more and "tools" not in more:
        text = httpx.post(server.url + "/detokenize", json={"tokens": ids[0]}).json()["prompt"]
        assert text == whole["choices"][0]["message"]["content"]
    chunks = ask_in_pieces(server, "/v1/chat/completions", body)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] * 2 + [None] * (len(chunks) - 2)
    pieces = [[], []]
    for chunk in chunks[2:]:
        pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
    assert pieces == ids
    plain = ask(server, "/v1/chat/completions", body | {"return_token_ids": False})
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


def test_ids_of_completions(server):
    body = {"prompt": ["is it", "no"], "n": 2, "return_token_ids": True}
    whole = ask(server, "/v1/completions", body)["choices"]
    prompts = [ask(server, "/tokenize", {"prompt": prompt})["tokens"] for prompt in body["prompt"]]
    assert [choice["prompt_token_ids"] for choice in whole] == [prompts[0]] * 2 + [prompts[1]] * 2
    pieces, firsts = [[] for _ in whole], {}
    for chunk in ask_in_pieces(server, "/v1/completions", body):
        (choice,) = chunk["choices"]
        firsts.setdefault(choice["index"], choice.get("prompt_token_ids"))
        pieces[choice["index"]] += choice["token_ids"]
    assert pieces == [choice["token_ids"] for choice in whole]
    assert [firsts[index] for index in range(4)] == [choice["prompt_token_ids"] for choice in whole]


def test_reasoning_that_the_prompt_opens(thinking):
    body = {"messages": USER}
    with serving(thinking) as server:
        whole = ask(server, "/v1/chat/completions", body)
        message = whole["choices"][0]["message"]
        assert message["content"] is None and message["reasoning"] == message["reasoning_content"] != ""
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
        chunks = ask_in_pieces(server, "/v1/chat/completions", body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
        hidden = ask(server, "/v1/chat/completions", body | {"include_reasoning": False})["choices"][0]["message"]
        assert hidden == {"role": "assistant", "content": None, "refusal": None}
        kwargs = {"chat_template_kwargs": {"effort": "none"}}
        plain = ask(server, "/v1/chat/completions", body | kwargs)
        assert plain["choices"][0]["message"]["content"] and "reasoning" not in plain["choices"][0]["message"]
        response = httpx.post(server.url + "/v1/responses", json={"input": "is it?", "max_output_tokens": 5}).json()
        assert [item["type"] for item in response["output"]] == ["reasoning"]
    with serving(thinking, reasoning_parser="none") as server:
        raw = ask(server, "/v1/chat/completions", body)["choices"][0]["message"]
        assert raw["content"].strip() == message["reasoning"] and "reasoning" not in raw


def test_how_many_tokens_are_reasoning(thinking):
    task, tokenizer = thinking.task("generate"), thinking.tokenizer
    (work,) = task.prepare([{"messages": USER, "with_reasoning": True}])
    assert work.note["thinks"] is True
    ids = [int(id) for id in tokenizer.encode("hm, well</think>Yes, it is.", special=False)]
    ends = next(n for n in range(len(ids) + 1) if "</think>" in tokenizer.decode(ids[:n]))
    for some, count in [(ids, ends), (ids[: ends - 1], ends - 1), ([], 0)]:
        sample = SimpleNamespace(tokens=tuple(some), text=tokenizer.decode(some))
        assert task._reasoning_tokens(sample, True) == count
    assert task._reasoning_tokens(SimpleNamespace(tokens=tuple(ids), text=tokenizer.decode(ids)), False) == 0
    task.reasoning_parser = "none"
    assert "thinks" not in task.prepare([{"messages": USER, "with_reasoning": True}])[0].note


def test_fingerprint(server, llm):
    marks = {ask(server, "/v1/completions", {"prompt": "a"})["system_fingerprint"]}
    marks |= {chunk["system_fingerprint"] for chunk in ask_in_pieces(server, "/v1/completions", {"prompt": "a"})}
    marks |= {ask(server, "/v1/chat/completions", {"messages": USER})["system_fingerprint"]}
    marks |= {
        chunk["system_fingerprint"] for chunk in ask_in_pieces(server, "/v1/chat/completions", {"messages": USER})
    }
    assert marks == {fingerprint(llm)}
    other = SimpleNamespace(engine=llm.engine, device=llm.device, identity=llm.identity | {"dtype": "bfloat16"})
    assert fingerprint(other) not in marks
    elsewhere = llm.identity | {"model": llm.identity["model"] | {"name": "/elsewhere/model"}}
    moved = SimpleNamespace(engine=llm.engine, device=llm.device, identity=elsewhere)
    assert fingerprint(moved) in marks
