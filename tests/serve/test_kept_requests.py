"""`prefold serve --answers`: a request whose answer is kept is not computed again, and no tenant gets another's."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest
from batching import batch_of, client_of, ended, lines_of
from serving import serving
from tiny import tiny_checkpoint

from prefold import LLM

EMBED = {"input": ["one text", "another text"]}
SCORE = {"query": "one", "documents": ["text", "other"]}
CHAT = {"messages": [{"role": "user", "content": "yes no"}], "max_tokens": 5, "temperature": 0}
ASK = {"state": "text", "questions": {"q": {"type": "choice", "criteria": {"a": None, "b": None}}}}
BODIES = {"/v1/embeddings": EMBED, "/v1/rerank": SCORE, "/v1/chat/completions": CHAT, "/v1/systemone": ASK}


@pytest.fixture
def llm(tmp_path):
    with LLM(str(tiny_checkpoint(tmp_path, "llama")), dtype="float32", answers=str(tmp_path / "kept")) as made:
        yield made


@pytest.fixture
def client(llm):
    with serving(llm) as server, httpx.Client(base_url=server.url) as made:
        yield made


def post(client, url, body, **headers):
    response = client.post(url, json={"model": "dummy", **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def answer_in(response):
    """A response without what differs from request to request."""
    return {name: value for name, value in response.items() if name not in ("id", "created", "usage")}


@pytest.mark.parametrize("url", BODIES)
def test_a_kept_answer_is_given_again(llm, client, url):
    first = post(client, url, BODIES[url])
    rows, kept = llm.stats.rows_computed, llm.stats.kept
    assert answer_in(post(client, url, BODIES[url])) == answer_in(first)
    assert llm.stats.rows_computed == rows and llm.stats.kept > kept


def test_new_texts_of_a_request_are_computed_alone(llm, client):
    alone = post(client, "/v1/embeddings", {"input": "a new text"})["data"][0]["embedding"]
    one, two = (part["embedding"] for part in post(client, "/v1/embeddings", EMBED)["data"])
    kept, rows = llm.stats.kept, llm.stats.rows_computed
    data = post(client, "/v1/embeddings", {"input": ["another text", "a new text", "third", "one text"]})["data"]
    found = [part["embedding"] for part in data]
    assert (found[0], found[3], found[1]) == (two, one, alone)
    assert llm.stats.kept == kept + 3 and 0 < llm.stats.rows_computed - rows < 8
    for body in ({"input": "third"}, {"input": ["third", "third"]}):
        assert post(client, "/v1/embeddings", body)["data"][0]["embedding"] == found[2]


def test_what_is_drawn_or_streamed_is_computed(llm, client):
    drawn = CHAT | {"temperature": 2.0, "max_tokens": 20}
    post(client, "/v1/chat/completions", drawn)
    post(client, "/v1/chat/completions", drawn)
    assert llm.stats.kept == 0
    seeded = [post(client, "/v1/chat/completions", drawn | {"seed": 3}) for _ in range(2)]
    assert llm.stats.kept == 1 and answer_in(seeded[0]) == answer_in(seeded[1])
    whole = post(client, "/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    with client.stream("POST", "/v1/chat/completions", json={"model": "dummy", "stream": True, **CHAT}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(deltas) == whole and llm.stats.kept == 1
    several = CHAT | {"n": 2, "seed": 5, "temperature": 1.0}
    one, two = (post(client, "/v1/chat/completions", several) for _ in range(2))
    assert len(one["choices"]) == 2 and answer_in(one) == answer_in(two) and llm.stats.kept == 2


def test_no_tenant_gets_an_answer_of_another(llm, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[[key]]\nkey = "{one}-key-of-a-tenant"\ntenant = "{one}"\n' for one in "ab"))
    with serving(llm, api_keys=str(file)) as server, httpx.Client(base_url=server.url) as client:
        kept = []
        for tenant in "aabba":
            post(client, "/v1/embeddings", EMBED, authorization=f"Bearer {tenant}-key-of-a-tenant")
            kept.append(llm.stats.kept)
        assert kept == [0, 2, 2, 4, 6]


def test_a_batch_and_requests_know_each_others_answers(llm, tmp_path):
    texts = [f"text {i}" for i in range(6)]
    lines = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"model": "dummy", "input": text}}
        for text in texts
    ]
    with serving(llm, data_dir=str(tmp_path / "data")) as server, httpx.Client(base_url=server.url) as client:
        asked = post(client, "/v1/embeddings", {"input": texts[:2]})["data"]
        own = client_of(server)
        found = lines_of(own, ended(own, batch_of(own, lines, "/v1/embeddings")).output_file_id)
        of_batch = [found[text]["response"]["body"]["data"][0]["embedding"] for text in texts]
        assert (np.float32(of_batch[:2]) == np.float32([part["embedding"] for part in asked])).all()
        kept, rows = llm.stats.kept, llm.stats.rows_computed
        again = [part["embedding"] for part in post(client, "/v1/embeddings", {"input": texts})["data"]]
        assert (np.float32(again) == np.float32(of_batch)).all() and (
            llm.stats.kept - kept,
            llm.stats.rows_computed,
        ) == (6, rows)
