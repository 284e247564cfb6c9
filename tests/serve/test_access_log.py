"""The access log: a line about each request when its answer has ended, of refused ones too, and nothing of what they
hold."""

from __future__ import annotations

import json
import logging
import re
from datetime import datetime

import httpx
import pytest
from serving import Raw, serving, until

KEYS = '[[key]]\nkey = "sk-secret"\ntenant = "the shop"\n'
KEY = {"authorization": "Bearer sk-secret"}
FIELDS = re.compile(
    r'access method=(\S+) path=(\S+) status=(\d+) tenant=("[^"]*"|-) ms=(\d+|-) prompt_tokens=(\S+)'
    r" completion_tokens=(\S+) request_id=(\S+)"
)


@pytest.fixture
def logged(llm, tmp_path, caplog):
    """(a server with an access log, a function that waits for so many lines and returns their fields)."""
    caplog.set_level(logging.INFO, "prefold.access")
    (tmp_path / "keys.toml").write_text(KEYS)

    def lines(count: int) -> list[tuple[str, ...]]:
        def found() -> list[str]:
            return [record.message for record in caplog.records if record.name == "prefold.access"]

        until(lambda: len(found()) >= count)
        assert not re.search("sk-secret|the yes|hidden", caplog.text)
        matches = [FIELDS.fullmatch(message).groups() for message in found()]
        assert len(matches) == count
        return matches

    with serving(llm, api_keys=str(tmp_path / "keys.toml"), access_log="text", max_header_bytes=4096) as server:
        yield server, lines


def test_answers_whole_and_streamed(logged):
    server, lines = logged
    body = {"prompt": "the yes", "max_tokens": 5, "ignore_eos": True, "n": 2}
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as client:
        usage = client.post("/v1/completions", json=body).json()["usage"]
        streamed = client.post("/v1/completions?hidden=1", json=body | {"stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        vectors = client.post("/v1/embeddings", json={"input": ["the yes", "no"]}).json()["usage"]
    whole, stream, numbers = lines(3)
    for line in (whole, stream):
        assert line[:4] == ("POST", "/v1/completions", "200", '"the shop"') and line[4].isdigit()
        assert line[5:7] == (str(usage["prompt_tokens"]), "10")
    assert numbers[1:3] == ("/v1/embeddings", "200") and numbers[5:7] == (str(vectors["prompt_tokens"]), "-")


def test_refusals(logged):
    server, lines = logged
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/metrics", headers=KEY).status_code == 403
        assert client.get("/no%0Aline%20of%20mine", headers=KEY).status_code == 404
        assert client.post("/v1/completions", headers=KEY, content=b"[]").status_code == 400
    large, wrong = Raw(server), Raw(server)
    large.socket.sendall(b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 5000)
    assert b" 431 " in large.read_all()
    lines(5)
    wrong.socket.sendall(b"no HTTP\r\n\r\n")
    assert b" 400 " in wrong.read_all()
    found = [line[:4] for line in lines(6)]
    assert found == [
        ("GET", "/v1/models", "401", "-"),
        ("GET", "/metrics", "403", '"the shop"'),
        ("GET", "/no%0Aline%20of%20mine", "404", "-"),
        ("POST", "/v1/completions", "400", '"the shop"'),
        ("-", "-", "431", "-"),
        ("-", "-", "400", "-"),
    ]
    large.close()
    wrong.close()


def test_a_client_that_leaves(logged):
    server, lines = logged
    body = {"prompt": "the yes", "max_tokens": 400, "ignore_eos": True, "stream": True}
    one = Raw(server).send("/v1/completions", body, headers="authorization: Bearer sk-secret\r\n")
    one.read_until(b"data: {")
    one.close()
    (line,) = lines(1)
    assert line[:4] == ("POST", "/v1/completions", "499", '"the shop"') and int(line[5]) > 0


PROBES = ["/health", "/ping", "/healthz", "/readyz", "/livez", "/metrics"]


@pytest.mark.parametrize("probes", [False, True])
def test_lines_as_json_and_probes(llm, caplog, probes):
    caplog.set_level(logging.INFO, "prefold.access")
    with serving(llm, access_log="json", access_log_probes=probes) as server, httpx.Client(base_url=server.url) as one:
        assert [one.get(path).status_code for path in PROBES] == [200] * len(PROBES)
        body = {"prompt": "the yes", "max_tokens": 2, "ignore_eos": True}
        answer = one.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"

    def found() -> list[dict]:
        return [json.loads(record.message) for record in caplog.records if record.name == "prefold.access"]

    until(lambda: found() and found()[-1]["path"] == "/v1/completions")
    *others, line = found()
    assert [one["path"] for one in others] == (PROBES if probes else [])
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None and line.pop("ms") >= 0
    assert line == {
        "method": "POST", "path": "/v1/completions", "status": 200, "tenant": None,
        "prompt_tokens": answer.json()["usage"]["prompt_tokens"], "completion_tokens": 2, "request_id": "mine",
    }  # fmt: skip


def test_there_is_none_unless_it_is_asked_for(llm, caplog):
    caplog.set_level(logging.INFO)
    with serving(llm) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
    assert "path=" not in caplog.text
