"""Whatever a client sends, the server answers in the dialect's form, never with status 500, and goes on.

The long tests run in pieces, such as `pytest -m slow tests/serve/test_serve_fuzz.py --rounds 10000 --seed 3`.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import httpx
import pytest
from books import check_books
from serving import Raw, until

from prefold.wire import ENDPOINTS

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
    "decisions": {"input": "a", "questions": [{"type": "choice", "choices": [{"value": "a"}, {"value": True}]}]},
    "systemone": {"state": "a", "questions": {"q": {"type": "score", "criteria": ["a", "b"]}}},
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
    "previous_response_id", "reasoning", "state", "questions", "assets", "",
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
    assert found.status_code in (200, 400, 404, 413, 422, 424), (path, data, found.text)
    if found.status_code != 200:
        error = found.json()
        if "error_type" in error:  # TEI
            assert isinstance(error["error"], str) and error["error_type"] in ("Empty", "Validation", "Backend"), error
        elif path in ("/v1/embed", "/v2/embed", "/v2/rerank"):  # Cohere
            assert list(error) == ["message"], error
        else:
            assert isinstance(error["error"]["message"], str) and error["error"]["type"], error
            assert error["error"].get("code") != "unexpected", (path, data, error)
    elif found.headers["content-type"].startswith("text/event-stream"):
        assert "server_error" not in found.text, (path, data, found.text)


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=pytest.mark.slow)])
def test_bodies(server, llm, count, seed, rounds):
    draw = random.Random(count if seed is None else seed)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(rounds or count):
            path = draw.choice(list(PATHS))
            data = a_body(draw, draw.choice(PATHS[path]))
            check(path, data, client.post(path, content=data))
        assert client.get("/health").status_code == 200
    until(lambda: not server.state.handler.backpressure.replies and not llm.engine.generator.has_work)
    check_books(llm.engine.generator.scheduler)


@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_bytes_that_are_no_http(server, count, seed, rounds):
    draw = random.Random(count if seed is None else seed)
    for _ in range(rounds or count):
        raw = Raw(server)
        raw.socket.settimeout(5)
        request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 25\r\n\r\n"
            + b'{"prompt":"a","n":1    } '
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


HEADERS = [
    b"content-type: application/json", b"content-type: text/plain; charset=utf-16",
    b"content-type: multipart/form-data", b"content-type: multipart/form-data; boundary=x", b"accept: text/html",
    b"accept-encoding: gzip, br",
    b"authorization: Bearer \xff\xfe", b"authorization:", b"x-api-key: " + b"k" * 3000, b"x-request-id: \xe9\x80",
    b"cookie: a=b; c", b"connection: keep-alive", b"te: trailers", b"origin: http://localhost",
    b"host: y", b"range: bytes=5-2",
    b"if-none-match: *", b"x-forwarded-for: 1.2.3.4", b"forwarded: for=_", b"cache-control: no-cache", b"x:\ty\t",
    b"content-encoding: gzip", b"priority: u=9", b"openai-beta: x=1",
]  # fmt: skip
DAMAGED = [
    b"content-length: 5", b"content-length: -1", b"content-length: 1e3", b"content-length: 99999999999999999999",
    b"content-length: 5, 6", b"transfer-encoding: chunked", b"transfer-encoding: gzip",
    b"transfer-encoding: chunked, x", b"transfer-encoding: identity",
    b"upgrade: h2c\r\nconnection: upgrade", b"upgrade: websocket", b": x", b"a b: c",
    b" folded", b"x\0y: z", b"expect: 200-maybe", b"x" * 70_000 + b": y",
]  # fmt: skip
METHODS = b"GET PUT HEAD OPTIONS DELETE PATCH TRACE CONNECT PRI post M-SEARCH ".split(b" ")
TARGETS = [
    b"*", b"http://x/v1/completions", b"/v1/../v1/models", b"//", b"/%00", b"/%", b"/v1/files/%2e%2e/x", b"/\xc3\xa9",
    b"/" + b"a" * 9000, b"/v1/models/" + b"%F0%9F%92%A9" * 50, b"/v1/files?limit=-1&after=%ff", b"x", b"/?a=\xff",
]  # fmt: skip
BAD_CHUNKS = [
    b"1 ; a=b\r\n{\r\n0\r\n\r\n",
    b"zz\r\nab\r\n0\r\n\r\n",
    b"-1\r\n",
    b"ffffffffffffffffff\r\na",
    b"3\r\nabcdef\r\n",
    b"\r\n",
]


def in_chunks(draw: random.Random, data: bytes) -> bytes:
    """The data in chunks of any sizes, some of them with extensions, and sometimes with trailers."""
    parts = []
    while data:
        size = draw.choice([1, 2, 7, draw.randint(1, len(data)), len(data)])
        size = min(size, len(data))
        named = (b"%x" if draw.random() < 0.7 else b"000%X") % size
        parts.append(named + draw.choice([b"", b"", b";a", b';a="b"']) + b"\r\n" + data[:size] + b"\r\n")
        data = data[size:]
    return b"".join(parts) + b"0\r\n" + draw.choice([b"", b"", b"x-trailer: y\r\n"]) + b"\r\n"


def right_request(draw: random.Random) -> tuple[str, bytes, bytes]:
    """A path, a body, and the bytes of a request that HTTP/1.1 allows."""
    path = draw.choice(list(PATHS))
    data = a_body(draw, draw.choice(PATHS[path]))
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"host: localhost", *draw.sample(HEADERS[:-3], draw.randint(0, 5))]
    lines = [line for line in lines if line != b"host: y"]
    chunked = draw.random() < 0.6
    lines.append(b"Transfer-Encoding: chunked" if chunked else b"content-length: %d" % len(data))
    if draw.random() < 0.1:
        lines.append(b"expect: 100-continue")
    lines[1:] = draw.sample(lines[1:], len(lines) - 1)
    return path, data, b"\r\n".join(lines) + b"\r\n\r\n" + (in_chunks(draw, data) if chunked else data)


def wrong_request(draw: random.Random) -> bytes:
    """The bytes of a request that is wrong, or strange, in its first line, its headers, or its chunks."""
    *_, request = right_request(draw)
    head, _, rest = request.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    method, target, version = lines[0].split(b" ")
    if draw.random() < 0.3:
        method = draw.choice(METHODS)
    if draw.random() < 0.3:
        target = draw.choice(TARGETS)
    if draw.random() < 0.2:
        version = draw.choice([b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/11", b"", b"http/1.1", b"HTTP/1.1 x"])
    lines[0] = b" ".join([method, target, version])
    for _ in range(draw.randint(0, 2)):
        lines.insert(draw.randint(1, len(lines)), draw.choice(DAMAGED + HEADERS))
    if draw.random() < 0.2:  # chunks that are none
        rest = draw.choice(BAD_CHUNKS)
    end = draw.choice([b"\r\n\r\n", b"\r\n\r\n", b"\n\n", b"\r\n"])
    return b"\r\n".join(lines) + end + rest


def send_in_parts(draw: random.Random, raw: Raw, data: bytes) -> None:
    """Sends bytes in several pieces, cut anywhere."""
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice([0, 0, 1, 3, 12])))
    for start, stop in zip([0, *places], [*places, len(data)], strict=True):
        raw.socket.sendall(data[start:stop])


def connected(server: Any, old: Raw | None = None) -> tuple[Raw, Any]:
    """A new connection, and the stream of what comes on it."""
    if old is not None:
        old.close()
    raw = Raw(server)
    raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return raw, raw.socket.makefile("rb")


def read_answer(stream: Any) -> httpx.Response:
    """The next response on a connection."""
    status = 100
    while status == 100:
        status = int(stream.readline().split(b" ")[1])
        headers = {}
        while line := stream.readline().strip():
            name, _, value = line.decode("latin-1").partition(": ")
            headers[name.lower()] = value
    if headers.pop("transfer-encoding", "") != "chunked":
        return httpx.Response(status, headers=headers, content=stream.read(int(headers["content-length"])))
    content = b""
    while size := int(stream.readline(), 16):
        content += stream.read(size)
        stream.readline()
    stream.readline()
    return httpx.Response(status, headers=headers, content=content)


@pytest.mark.parametrize("count", [400, pytest.param(30_000, marks=pytest.mark.slow)])
def test_headers_and_chunkings(server, llm, count, seed, rounds):
    """What is right is answered, however it is cut, several on a connection; after what is wrong the server goes on.
    Nothing of either is left: no connection, no task."""
    draw = random.Random(count if seed is None else seed)
    count = rounds or count
    left = 0
    raw, stream = connected(server)
    for _ in range(count):
        if draw.random() < 0.6:
            asked = [right_request(draw) for _ in range(draw.choice([1, 1, 1, 3]))]
            send_in_parts(draw, raw, b"".join(request for _, _, request in asked))
            for path, data, _ in asked:
                answer = read_answer(stream)
                check(path, data, answer)
                if answer.headers.get("connection") == "close":
                    raw, stream = connected(server, raw)
                    break
        else:
            bad = Raw(server)
            bad.socket.settimeout(20)
            data = wrong_request(draw)
            try:
                send_in_parts(draw, bad, data)
                bad.socket.shutdown(socket.SHUT_WR)
                answer = bad.read_all()
            except OSError:
                answer = b""
            assert b" 500 " not in answer.partition(b"\r\n")[0], (data, answer)
            bad.close()
            left += 1
    stream.close()
    raw.close()
    assert left > count // 4
    assert httpx.get(f"{server.url}/health").status_code == 200
    until(
        lambda: (
            not server.state.handler.backpressure.replies
            and not llm.engine.generator.has_work
            and not server.state.open
        )
    )
    until(lambda: not server.server_state.connections)
    until(lambda: len(asyncio.all_tasks(server._loop)) < 10)
    check_books(llm.engine.generator.scheduler)
