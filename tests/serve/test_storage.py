"""What a tenant stores is bounded, and what it costs to list it."""

from __future__ import annotations

import httpx
import openai
import pytest
from batching import client_of, completion, content, ended, upload
from serving import serving

from prefold.serve.http import Refusal
from prefold.serve.store import Store

KEYS = """
[[key]]
key = "a"
tenant = "a"
max_stored_bytes = 6000
[[key]]
key = "b"
tenant = "b"
"""
LARGE = b"x" * 2500


@pytest.fixture
def server(llm, tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    with serving(
        llm, served_names=("tiny",), api_keys=str(tmp_path / "keys.toml"), data_dir=str(tmp_path / "d")
    ) as made:
        yield made


@pytest.mark.parametrize(
    "metadata", [{"k": "x" * 513}, {"k" * 65: "x"}, {str(i): "x" for i in range(17)}, {"k": 1}, []]
)
@pytest.mark.parametrize("path", ["/v1/batches", "/v1/responses"])
def test_metadata_is_bounded(kept, client, path, metadata):
    body = {"input": "yes", "max_output_tokens": 1}
    if path == "/v1/batches":
        body = {"input_file_id": upload(client, [completion(1)]).id, "endpoint": "/v1/completions"}
    post = lambda value: httpx.post(kept.url + path, json=body | {"metadata": value}, timeout=60)  # noqa: E731
    found = post(metadata)
    assert found.status_code == 400 and found.json()["error"]["param"] == "metadata", found.text
    assert post({"k" * 64: "x" * 512} | {str(i): "" for i in range(15)}).status_code == 200


def test_a_page_of_batches_is_bounded(kept):
    asked = [httpx.get(f"{kept.url}/v1/batches?limit={limit}").status_code for limit in (100, 101)]
    assert asked == [200, 400]
    assert httpx.get(f"{kept.url}/v1/files?limit=10000").status_code == 200


def test_a_tenant_at_its_quota_is_refused_and_others_are_not(server):
    a, b = client_of(server, "a"), client_of(server, "b")
    files = [a.files.create(file=("f", LARGE), purpose="batch") for _ in range(2)]
    for _ in range(2):
        with pytest.raises(openai.APIStatusError, match="delete files") as wrong:
            a.files.create(file=("f", LARGE), purpose="batch")
        assert (wrong.value.status_code, wrong.value.body["code"]) == (413, "storage_quota")
    assert len(list(server.state.store.files.iterdir())) == 2  # nothing is left of those that were refused
    b.files.create(file=("f", LARGE), purpose="batch")
    a.files.delete(files[0].id)
    a.files.create(file=("f", LARGE), purpose="batch")


def test_uploads_count_while_they_come(server):
    """Of many at once none has to be on disk before the others are refused."""
    server.state.store.receiving["a"] = 60_000  # and the form of each file may have as much
    with pytest.raises(openai.APIStatusError) as wrong:
        client_of(server, "a").files.create(file=("f", b"x" * 13_000), purpose="batch")
    assert wrong.value.status_code == 413
    assert server.state.store.receiving["a"] == 60_000


def test_a_batch_whose_answers_are_too_many_fails(server, monkeypatch, few_running, slow_steps):
    server.state.batches.work.commit_seconds = 0.0
    engine = server.state.handler.engine
    # Few answers at a time, so that there are looks between them.
    slow_steps(engine.worker, 0.01)
    b, store = client_of(server, "b"), server.state.store
    url, total = "/v1/embeddings", 500
    lines = [{"custom_id": f"{i}", "method": "POST", "url": url, "body": {"input": f"yes {i}"}} for i in range(total)]
    file = upload(b, lines).id
    most = store._half - store.bytes_left("b") + 5000
    monkeypatch.setattr(store, "_most_of", lambda tenant: most)
    done = ended(b, b.batches.create(input_file_id=file, endpoint=url, completion_window="24h"))
    assert done.status == "failed" and "delete files" in done.errors.data[0].message, done
    counts = done.request_counts
    assert counts.completed + counts.failed == counts.total == total and counts.failed > counts.completed > 0
    assert len(content(b, done.error_file_id).splitlines()) == counts.failed
    with pytest.raises(openai.APIStatusError) as wrong:
        upload(b, lines)
    assert wrong.value.status_code == 413
    assert b.responses.create(model="tiny", input="yes", max_output_tokens=1).id


def test_what_is_stored_is_counted_through_changes_and_starts(tmp_path):
    most = 10_000
    store = Store(tmp_path, lambda tenant: most)
    store.add("file", "a", {"id": "f", "bytes": 3000})
    store.add("batch", "a", {"id": "b", "status": "validating"})
    before = store.bytes_left("a")
    assert 6900 < before < 7000 and store.bytes_left("b") == most
    store.change("batch", "b", {"errors": "e" * 1000})
    assert before - 1100 < store.bytes_left("a") < before - 1000
    with pytest.raises(Refusal):
        store.add("file", "a", {"id": "g", "bytes": 7000})
    assert store.get("file", "a", "g") is None
    left = store.bytes_left("a")
    store.close()
    store = Store(tmp_path, lambda tenant: most)
    assert store.bytes_left("a") == left
    store.delete("batch", "a", "b"), store.delete("file", "a", "f")
    assert store.bytes_left("a") == most
    store.close()


def test_a_start_reads_one_batch_at_a_time(tmp_path, monkeypatch):
    store = Store(tmp_path)
    for i in range(3):
        store.add("batch", "a", {"id": str(i)})
    read = []
    monkeypatch.setattr("prefold.serve.store.json.loads", lambda text: read.append(text))
    every = store.all("batch")
    assert not read
    next(every)
    assert len(read) == 1
    every.close()
    store.close()
