"""Batches with the `openai` package, unchanged, over a real socket."""

from __future__ import annotations

import json
import threading
from unittest.mock import Mock

import numpy as np
import openai
import pytest
from batching import LONG, batch_of, client_of, completion, content, ended, lines_of, upload
from serving import serving, until

from prefold.serve.batch import BatchWork

KEYS = """
[[key]]
key = "a"
tenant = "a"
[[key]]
key = "b"
tenant = "b"
"""


@pytest.mark.parametrize("links", [True, False])
def test_a_batch_gives_what_the_model_gives(client, llm, links, monkeypatch):
    if not links:
        monkeypatch.setattr("os.link", Mock(side_effect=OSError("this file system has no second names")))
    lines = [completion(i) for i in range(40)]
    made = batch_of(client, lines, metadata={"what": "test"})
    assert made.status == "validating" and made.metadata == {"what": "test"}
    done = ended(client, made)
    assert done.status == "completed", done
    assert done.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert done.error_file_id is None and done.completed_at >= done.in_progress_at >= done.created_at
    expected = llm.generate([line["body"]["prompt"] for line in lines], max_tokens=6, ignore_eos=True)
    found = lines_of(client, done.output_file_id)
    assert [found[f"c{i}"]["response"]["body"]["choices"][0]["text"] for i in range(40)] == [e.text for e in expected]
    usages = [found[f"c{i}"]["response"]["body"]["usage"] for i in range(40)]
    assert done.usage.output_tokens == sum(one["completion_tokens"] for one in usages) == 40 * 6
    assert done.usage.input_tokens == sum(one["prompt_tokens"] for one in usages) > 0
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
    assert done.usage.input_tokens_details.cached_tokens == cached > 0
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.bytes) == ("batch_output", len(content(client, done.output_file_id).encode()))
    assert made.id in [batch.id for batch in client.batches.list(limit=1)]


@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/v1/chat/completions", "/v1/rerank"])
def test_batches_of_other_endpoints(client, llm, endpoint):
    bodies = {
        "/v1/embeddings": [{"model": "tiny", "input": ["yes the", f"no the {i}"]} for i in range(30)],
        "/v1/chat/completions": [
            {"messages": [{"role": "user", "content": f"{i}?"}], "max_tokens": 3} for i in range(9)
        ],
        "/v1/rerank": [{"query": "the", "documents": ["yes", f"no {i}"]} for i in range(9)],
    }[endpoint]
    lines = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": body} for i, body in enumerate(bodies)]
    done = ended(client, batch_of(client, lines, endpoint))
    assert done.status == "completed"
    found = lines_of(client, done.output_file_id)
    assert set(found) == {str(i) for i in range(len(bodies))}
    if endpoint == "/v1/embeddings":
        vectors = [entry["embedding"] for i in range(30) for entry in found[str(i)]["response"]["body"]["data"]]
        expected = llm.embed([text for body in bodies for text in body["input"]])
        assert np.allclose(vectors, expected, atol=1e-5)


def test_lines_that_are_wrong_are_in_the_error_file(client):
    lines = [
        completion(0), "{", completion(0), completion(1, model="gpt-4o"), completion(2, what=1),
        {"custom_id": "c3", "url": "/v1/embeddings", "body": {"input": "x"}}, completion(4, max_tokens=10**9),
        completion(5),
    ]  # fmt: skip
    done = ended(client, batch_of(client, lines))
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"total": 8, "completed": 2, "failed": 6}
    assert set(lines_of(client, done.output_file_id)) == {"c0", "c5"}
    errors = [json.loads(line) for line in content(client, done.error_file_id).splitlines()]
    codes = {e["custom_id"]: (e["error"] or e["response"]["body"]["error"])["code"] for e in errors}
    assert codes["c1"] == "model_not_found" and codes["c3"] == "mismatched_url"
    (wrong,) = [e["response"] for e in errors if e["custom_id"] == "c1"]
    assert wrong["status_code"] == 404 and "dummy" not in wrong["body"]["error"]["message"]
    assert codes["c0"] == "duplicate_custom_id" and len(errors) == 6


def test_batches_that_are_refused(client):
    for lines, code in (([], "empty_file"), (["{}", "no"], "invalid_line")):
        done = ended(client, batch_of(client, lines))
        assert done.status == "failed" and code in [error.code for error in done.errors.data]
    right = {
        "input_file_id": upload(client, [completion(0)]).id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    for wrong in ({"endpoint": "/v1/moderations"}, {"completion_window": "soon"}, {"metadata": {"a": 1}}):
        with pytest.raises(openai.BadRequestError):
            client.batches.create(**right | wrong)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-no", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_no")


def test_a_batch_is_cancelled(client, monkeypatch):
    looked, end = threading.Event(), BatchWork._end
    monkeypatch.setattr(BatchWork, "_end", lambda *arguments: looked.wait(300) and end(*arguments))
    batch = batch_of(client, [completion(i, **LONG) for i in range(600)])
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3)
    assert client.batches.cancel(batch.id).status == "cancelling"
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    looked.set()
    done = ended(client, batch)
    assert done.status == "cancelled" and done.cancelled_at
    good, bad = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert len(good) > 3 and len(bad) > 3 and not set(good) & set(bad)
    assert set(good) | set(bad) == {f"c{i}" for i in range(600)}
    assert {one["error"]["code"] for one in bad.values()} == {"batch_cancelled"}
    assert client.batches.cancel(batch.id).status == "cancelled"
    client.files.delete(batch.input_file_id)


def test_a_batch_that_waits_is_cancelled_at_once_and_one_expires(client):
    first = batch_of(client, [completion(i, **LONG) for i in range(600)])
    second = batch_of(client, [completion(i) for i in range(3)])
    third = batch_of(client, [completion(i) for i in range(4)], completion_window="1s")
    client.batches.cancel(second.id)
    done = ended(client, second)
    assert done.status == "cancelled" and done.request_counts.failed == 3
    done = ended(client, third)
    assert done.status == "expired" and done.expired_at
    bad = lines_of(client, done.error_file_id)
    assert set(bad) == {f"c{i}" for i in range(4)} and bad["c0"]["error"]["code"] == "batch_expired"
    assert client.batches.retrieve(first.id).status == "in_progress"
    client.batches.cancel(first.id)
    ended(client, first)


def test_tenants_see_their_own(llm, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    options = {"served_names": ("tiny",), "data_dir": str(tmp_path / "data"), "api_keys": str(keys)}
    with serving(llm, **options) as server, client_of(server, "a") as a, client_of(server, "b") as b:
        batch = batch_of(a, [completion(0)])
        done = ended(a, batch)
        assert done.status == "completed"
        for request, id in ((b.files.retrieve, batch.input_file_id), (b.files.content, done.output_file_id),
                            (b.files.delete, done.output_file_id), (b.batches.retrieve, batch.id),
                            (b.batches.cancel, batch.id)):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                request(id)
        with pytest.raises(openai.NotFoundError):
            b.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
        assert b.files.list().data == [] and b.batches.list().data == []
        assert len(a.files.list().data) == 2
