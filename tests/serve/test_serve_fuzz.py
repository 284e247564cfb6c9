"""Whatever a client sends, the server answers in the face's form, never with status 500, and goes on."""

from __future__ import annotations

import json
import random
import socket

import httpx
import pytest
from serving import Raw, until

from prefold.api import ENDPOINTS

JUNK = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**70, -(2**70), 0.5, 1e308, -0.0, "", "a", "yes no", "\0", "\ud800",
    "é" * 40, "<|im_end|>", [], {}, [[]], [{}], [None], ["a", 1], [1, "a"], [1, 2, 3], [-1], [10**9], [1.5],
    [[1], ["a"]],
    {"a": {"b": []}}, {"type": "json_schema"}, {"type": "text"}, {"include_usage": 1}, {"5": 1e9}, {"x": 1}, "auto",
    [{"role": "user", "content": "a"}], [{"role": 1}], [{"role": "user"}],
    [{"role": "user", "content": [{"type": "x"}]}],
    [{"type": "function_call", "name": "f", "arguments": "{}"}], {"format": {"type": "json_schema"}},
    [{"type": "function_call_output", "output": "a"}], [{"type": "function", "name": "f"}],
    [{"type": "function", "function": {"name": "f", "parameters": {}}}], {"type": "function"}, [{"text": "a"}],
]  # fmt: skip
GOOD = {
    "chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "completion": {"prompt": "a", "max_tokens": 2},
    "embeddings": {"input": "a"},
    "rerank": {"query": "a", "documents": ["b", "c"]},
    "score": {"text_1": "a", "text_2": ["b"]},
    "response": {"input": "a", "max_output_tokens": 2},
    "message": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "inputs": {"inputs": "a"},
    "texts": {"query": "a", "texts": ["b"]},
    "similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "ids": {"ids": [5, 6]},
    "tokens": {"tokens": [5, 6]},
    "cohere": {"texts": ["a"], "embedding_types": ["float"]},
}
# {path: the kind of body that it takes}
PATHS = {path: [kind] for path, kind in ENDPOINTS.items()} | {
    "/v1/messages": ["message"], "/v1/messages/count_tokens": ["message"], "/embed": ["inputs"],
    "/embed_all": ["inputs"], "/predict": ["inputs"], "/": ["inputs", "texts", "similarity"],
    "/similarity": ["similarity"], "/rerank": ["rerank", "texts"], "/decode": ["ids"], "/detokenize": ["tokens"],
    "/tokenize": ["inputs", "chat", "completion"], "/v1/embed": ["cohere"], "/v2/embed": ["cohere"],
}  # fmt: skip
NAMES = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "stop",
    "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "cache_salt", "cache_prompt", "priority", "tools", "tool_choice",
    "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "stream", "stream_options",
    "echo", "suffix", "best_of", "input", "dimensions", "encoding_format", "truncate_prompt_tokens", "query", "top_n",
    "return_documents", "instruction", "text_1", "text_2", "queries", "user", "metadata", "texts", "inputs", "ids",
    "tokens", "truncate", "truncation_direction", "normalize", "prompt_name", "raw_scores", "return_text", "parameters",
    "system", "stop_sequences", "thinking", "embedding_types", "input_type", "output_dimension", "skip_special_tokens",
    "add_special_tokens", "return_token_strs", "instructions", "max_output_tokens", "text", "include", "store",
    "previous_response_id", "reasoning", "",
]  # fmt: skip


def a_body(draw: random.Random, kind: str) -> bytes:
    body = dict(GOOD[kind])
    for _ in range(draw.randint(0, 3)):
        body[draw.choice(NAMES if draw.random() < 0.5 else list(GOOD[kind]))] = draw.choice(JUNK)
    for name in list(body):
        if draw.random() < 0.05:
            del body[name]
    data = json.dumps(body).encode()
    if draw.random() < 0.1:  # damaged
        place = draw.randrange(len(data))
        data = data[:place] + bytes(draw.randrange(256) for _ in range(draw.randint(0, 3))) + data[place + 1 :]
    return data


def check(path: str, data: bytes, found: httpx.Response) -> None:
    assert found.status_code in (200, 400, 404, 413, 422), (path, data, found.text)
    if found.status_code != 200:
        error = found.json()
        if "error_type" in error:  # TEI
            assert isinstance(error["error"], str) and error["error_type"] in ("empty", "validation", "tokenizer"), (
                error
            )
        elif path in ("/v1/embed", "/v2/embed", "/v2/rerank"):  # Cohere
            assert list(error) == ["message"], error
        else:
            assert isinstance(error["error"]["message"], str) and error["error"]["type"], error
            assert error["error"].get("code") != "unexpected", (path, data, error)
    elif found.headers["content-type"].startswith("text/event-stream"):
        assert "server_error" not in found.text, (path, data, found.text)


@pytest.mark.parametrize("count", [2000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_bodies(server, llm, count):
    draw = random.Random(count)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(count):
            path = draw.choice(list(PATHS))
            data = a_body(draw, draw.choice(PATHS[path]))
            check(path, data, client.post(path, content=data))
        assert client.get("/health").status_code == 200
    until(lambda: not server.site.desk.replies and not llm.engine.generator.has_work)
    llm.engine.generator.scheduler.check()


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_bytes_that_are_no_http(server, count):
    draw = random.Random(count)
    for _ in range(count):
        raw = Raw(server)
        raw.socket.settimeout(5)
        request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 25\r\n\r\n" + b'{"prompt":"a","n":1    } '
        )
        data = bytearray(request)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            raw.socket.sendall(bytes(data[: draw.randint(1, len(data))]))
            raw.socket.shutdown(socket.SHUT_WR)
            answer = raw.read_all()
        except OSError:
            answer = b""
        assert b" 500 " not in answer.partition(b"\r\n")[0], (bytes(data), answer)
        raw.close()
    assert httpx.get(f"{server.url}/health").status_code == 200
