"""Answers whose prompts hold chunks that were reused at other positions say so, in every API that has answers."""

from __future__ import annotations

import json

import httpx
import pytest
from serving import serving, until

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.features.shifted.options import ShiftedReuse

FIRST = "The quick brown fox jumps over the lazy dog, 1234567890 times. "
OTHERS = [f"{i} Another beginning, number {i}: {'abcdefgh'[i:]}{'xyz' * i}. " for i in range(7)]


@pytest.fixture(scope="module")
def client(llm, tmp_path_factory):
    shifted = ShiftedReuse(min_tokens=24, recompute=4, min_share=0.0, trial=True)
    made = LLM(str(llm.folder), dtype="float32", kv_memory=1 << 23, cache=CacheOptions(shifted=shifted))
    with (
        serving(made, data_dir=str(tmp_path_factory.mktemp("data"))) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        client.post("/v1/completions", json={"prompt": "a" + FIRST, "max_tokens": 1}).raise_for_status()
        yield client


def ask(client, path, **body):
    found = client.post(path, json={"max_tokens": 2, **body})
    found.raise_for_status()
    return found


def test_completions(client):
    usage = ask(client, "/v1/completions", prompt=OTHERS[0] + FIRST).json()["usage"]
    assert usage["prompt_tokens_details"]["approximate_tokens"] >= len(FIRST) // 2
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_exact_answers_say_nothing(client):
    usage = ask(client, "/v1/completions", prompt="a" + FIRST + "b").json()["usage"]
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens"}
    usage = ask(client, "/v1/completions", prompt=OTHERS[0] + FIRST, cache_salt="another").json()["usage"]
    assert usage["prompt_tokens_details"].keys() == {"cached_tokens"}


def test_chat(client):
    messages = [{"role": "user", "content": OTHERS[1] + FIRST}]
    usage = ask(client, "/v1/chat/completions", messages=messages).json()["usage"]
    assert usage["prompt_tokens_details"]["approximate_tokens"] > 0


def test_streamed(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    said = ask(client, "/v1/completions", prompt=OTHERS[2] + FIRST, **options).text
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    assert events[-1]["usage"]["prompt_tokens_details"]["approximate_tokens"] > 0


def test_responses(client):
    found = client.post("/v1/responses", json={"input": OTHERS[3] + FIRST, "max_output_tokens": 16}).json()
    assert found["usage"]["input_tokens_details"]["approximate_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_messages(client, stream):
    messages = [{"role": "user", "content": OTHERS[4 + stream] + FIRST}]
    found = ask(client, "/v1/messages", messages=messages, stream=stream)
    if not stream:
        assert found.json()["usage"]["approximate_tokens"] > 0
    else:
        events = [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: {")]
        assert any(event.get("usage", {}).get("approximate_tokens", 0) > 0 for event in events)


def test_numbers_are_exact(client):
    usage = client.post("/v1/embeddings", json={"input": OTHERS[6] + FIRST}).json()["usage"]
    assert "prompt_tokens_details" not in usage


def test_metrics(client):
    def counted() -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("prefold:approximate_tokens_total{"))

    before = counted()
    usage = ask(client, "/v1/completions", prompt="A beginning of its own. " + FIRST).json()["usage"]
    assert counted() - before == usage["prompt_tokens_details"]["approximate_tokens"] > 0


def test_a_batch_has_the_sum(client):
    where = "/v1/completions"
    model = client.get("/v1/models").json()["data"][0]["id"]
    bodies = [{"model": model, "prompt": f"{i}: {OTHERS[i]}{FIRST}", "max_tokens": 2} for i in range(3)]
    lines = [{"custom_id": f"{i}", "method": "POST", "url": where, "body": body} for i, body in enumerate(bodies)]
    sent = "\n".join(map(json.dumps, lines)).encode()
    file = client.post("/v1/files", files={"file": ("lines.jsonl", sent)}, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file, "endpoint": where, "completion_window": "24h"}
    made = client.post("/v1/batches", json=asked).json()
    until(lambda: client.get(f"/v1/batches/{made['id']}").json()["status"] == "completed")
    done = client.get(f"/v1/batches/{made['id']}").json()
    said = client.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()
    details = [json.loads(line)["response"]["body"]["usage"]["prompt_tokens_details"] for line in said]
    copied = sum(one.get("approximate_tokens", 0) for one in details)
    assert done["usage"]["input_tokens_details"]["approximate_tokens"] == copied > 0


def test_admins_see_the_settings(client):
    assert client.get("/cache").json()["shifted"]["min_tokens"] == 24
