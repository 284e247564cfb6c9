"""Errors have the form of the API that was asked, whatever goes wrong and whenever."""

from __future__ import annotations

import json

import httpx
import pytest
from books import check_books
from running import no_steps
from serving import Raw, serving, until

# {API: (path, body that is right)}
ASKED = {
    "openai": ("/v1/completions", {"prompt": "the yes", "max_tokens": 4, "ignore_eos": True}),
    "vllm": ("/score", {"text_1": "the", "text_2": "yes"}),
    "responses": ("/v1/responses", {"input": "the yes", "max_output_tokens": 4}),
    "anthropic": ("/v1/messages", {"messages": [{"role": "user", "content": "the yes"}], "max_tokens": 4}),
    "cohere": ("/v2/embed", {"texts": ["the yes"], "embedding_types": ["float"]}),
    "tei": ("/embed", {"inputs": "the yes"}),
}
OPENAI_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error",
    429: "rate_limit_error", 500: "server_error", 503: "server_error",
}  # fmt: skip
ANTHROPIC_TYPES = OPENAI_TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
TEI = {400: (400, "Validation"), 401: (401, "Validation"), 404: (404, "Validation"), 413: (413, "Validation"),
       429: (429, "Overloaded"), 500: (424, "Backend"), 503: (503, "Unhealthy")}  # fmt: skip


def check(dialect: str, status: int, found: httpx.Response, word: str = "") -> None:
    """Looks whether a response is that API's error of a status, and says `word`."""
    body = found.json()
    wanted, kind = TEI[status] if dialect == "tei" else (status, "")
    assert found.status_code == wanted, (dialect, found.text)
    if dialect == "tei":
        assert set(body) == {"error", "error_type"} and body["error_type"] == kind
        text = body["error"]
    elif dialect == "cohere":
        assert set(body) == {"message"}
        text = body["message"]
    elif dialect == "anthropic":
        assert body["type"] == "error" and body["error"]["type"] == ANTHROPIC_TYPES[status]
        text = body["error"]["message"]
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["type"] == OPENAI_TYPES[status]
        text = body["error"]["message"]
    assert word in text, text


@pytest.mark.parametrize("dialect", ASKED)
def test_what_is_wrong_with_a_request(llm, tmp_path, dialect):
    path, body = ASKED[dialect]
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nkey = "one"\ntenant = "first"\n')
    with (
        serving(llm, api_keys=str(keys), max_body_bytes=2000) as server,
        httpx.Client(base_url=server.url, headers={"authorization": "Bearer one"}) as client,
    ):
        assert client.post(path, json=body).status_code == 200
        check(dialect, 400, client.post(path, content=b"{"), "JSON")
        check(dialect, 401, httpx.post(server.url + path, json=body), "key")
        check(dialect, 404, client.post(path, json=body | {"model": "none"}), "none")
        check(dialect, 413, client.post(path, content=b" " * 3000), "2000 bytes")


@pytest.mark.parametrize("dialect", ASKED)
def test_a_server_that_cannot_answer_now(llm, dialect):
    path, body = ASKED[dialect]
    with serving(None) as server:
        check(dialect, 503, httpx.post(server.url + path, json=body), "loaded")
    with serving(llm, max_waiting_requests=1) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        server.state.handler.backpressure.most_running = 0
        with no_steps(llm.engine):  # no step is made now
            waiting = Raw(server).send(*ASKED["openai"])
            until(lambda: server.state.handler.backpressure.waiting[0] == 1)
            found = client.post(path, json=body)
            check(dialect, 429, found, "waiting")
            assert int(found.headers["retry-after"]) >= 1
        assert b" 200 " in waiting.read_until(b"usage")


@pytest.fixture
def broken(llm, start_by):
    """Steps fail that have a row at a position of at least the number in this list, or any step where it is 0."""
    places = []

    def start(real, message, *more):
        positions = getattr(message, "positions", None)
        if places and positions is not None and (positions >= places[0]).any():
            raise RuntimeError("the step failed")
        return real(message, *more)

    start_by(llm.engine.worker, start)
    return places


@pytest.mark.parametrize("dialect", ASKED)
def test_a_step_that_fails(llm, broken, dialect):
    path, body = ASKED[dialect]
    with serving(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        broken.append(0)
        check(dialect, 500, client.post(path, json=body | ({} if dialect != "openai" else {"prompt": "no one"})), "log")
        broken.clear()
        assert client.post(path, json=body).status_code == 200
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("dialect", ["openai", "chat", "anthropic", "responses"])
def test_a_stream_that_fails_ends_with_an_error(llm, broken, dialect):
    chat = {"messages": [{"role": "user", "content": "the yes"}], "max_tokens": 400}
    path, body = {
        "openai": ("/v1/completions", {"prompt": "the yes", "max_tokens": 400, "ignore_eos": True}),
        "chat": ("/v1/chat/completions", chat | {"ignore_eos": True}),
        "anthropic": ("/v1/messages", chat),
        "responses": ("/v1/responses", {"input": "the yes", "max_output_tokens": 400, "ignore_eos": True}),
    }[dialect]
    prompt = {"prompt": "the yes"} if dialect == "openai" else {"messages": [{"role": "user", "content": "the yes"}]}
    with serving(llm) as server:
        length = httpx.post(f"{server.url}/tokenize", json=prompt).json()["count"]
        broken.append(length + 2)
        lines = httpx.post(server.url + path, json=body | {"stream": True, "temperature": 0}, timeout=60).text
        broken.clear()
        events = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
        assert len(events) > 1, lines
        if dialect == "anthropic":
            said = {"type": "api_error", "message": "the server failed; see its log"}
            assert events[-1] == {"type": "error", "error": said}
        elif dialect == "responses":
            assert events[-1]["type"] == "error" and "see its log" in events[-1]["message"]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        else:
            assert events[-1]["error"]["type"] == "server_error" and lines.rstrip().endswith("data: [DONE]")
        until(lambda: not server.state.handler.backpressure.replies and not llm.engine.generator.has_work)
        check_books(llm.engine.generator.scheduler)
        assert httpx.get(f"{server.url}/health").status_code == 200
