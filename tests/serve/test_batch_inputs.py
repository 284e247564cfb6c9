"""Batches whose input file is wrong, or gone: each of them ends, and the server goes on as if it had not been."""

from __future__ import annotations

import errno
import gzip
import json
import os

import httpx
import openai
import pytest
from batching import LONG, batch_of, client_of, completion, ended, lines_of, upload
from serving import serving, until

GOOD = json.dumps(completion(0)).encode()
WRONG = {
    "array": (b"[\n" + GOOD + b"]\n", "is a JSON array"),
    "utf16": (GOOD.decode().encode("utf-16"), "is UTF-16"),
    "gzip": (gzip.compress(GOOD), "is compressed"),
}


def upload_bytes(client, data):
    return client.files.create(file=("in.jsonl", data), purpose="batch")


def begin(client, file):
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


@pytest.mark.parametrize("which", WRONG)
def test_a_file_that_cannot_be_read_fails_the_batch(kept, client, which):
    data, message = WRONG[which]
    done = ended(client, begin(client, upload_bytes(client, data)))
    assert done.status == "failed" and done.failed_at
    (error,) = done.errors.data
    assert (error.code, error.param) == ("invalid_file", "input_file_id") and f"in.jsonl {message}" in error.message
    assert httpx.get(f"{kept.url}/health").status_code == 200


def test_a_file_that_is_gone_ends_the_batch(llm, tmp_path):
    """Whether it is validated, runs, or is cancelled."""
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        file = upload(client, [completion(i, **LONG) for i in range(600)])
        store = server.state.store
        first = begin(client, file)
        until(lambda: client.batches.retrieve(first.id).request_counts.completed > 3)
    store.path(file.id).unlink()
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        done = ended(client, first)
        assert done.status == "failed" and "in.jsonl is gone" in done.errors.data[0].message
        assert 3 < done.request_counts.completed < 600 and done.output_file_id is not None
        again = ended(client, begin(client, file))
        assert again.status == "failed" and "in.jsonl is gone" in again.errors.data[0].message
        assert server.state.failing is None


def test_a_batch_is_cancelled_though_its_file_is_gone(llm, tmp_path, work_by):
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        work_by(server, validate=lambda validate, one: None)
        batch = batch_of(client, [completion(0)])
        server.state.store.path(batch.input_file_id).unlink()
        client.batches.cancel(batch.id)
        assert ended(client, batch).status == "cancelled" and server.state.failing is None


def test_a_file_is_not_forgotten_while_a_batch_begins_to_read_it(kept, client, monkeypatch):
    file = upload(client, [completion(0)])
    batches, create = kept.state.batches, kept.state.batches.create

    def late(tenant, body):
        assert batches.forget_file(tenant, file.id)
        return create(tenant, body)

    monkeypatch.setattr(batches, "create", late)
    with pytest.raises(openai.NotFoundError, match=file.id):
        begin(client, file)
    assert httpx.get(f"{kept.url}/health").status_code == 200


def test_what_fails_is_told_without_paths_and_ids(llm, tmp_path, work_by):
    def failing(validate, one):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path / "files" / one.id))

    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        work_by(server, validate=failing)
        batch = batch_of(client, [completion(0)])
        until(lambda: server.state.failing is not None)
        reason = httpx.get(f"{server.url}/health").json()["reason"]
        assert "Input/output error" in reason and batch.id not in reason and str(tmp_path) not in reason


def test_a_line_is_no_larger_than_a_body(llm, tmp_path):
    """The rest of a longer one is passed over, in pieces."""
    good = [completion(i) for i in range(2)]
    lines = [good[0], completion(5, prompt="a" * 2000), "b" * 10_000, good[1]]
    with (
        serving(llm, served_names=("tiny",), data_dir=str(tmp_path), max_body_bytes=1000) as server,
        client_of(server) as client,
    ):
        done = ended(client, batch_of(client, lines))
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 2)
        assert set(lines_of(client, done.output_file_id)) == {"c0", "c1"}
        bad = [json.loads(line)["error"] for line in client.files.content(done.error_file_id).text.splitlines()]
        assert [one["code"] for one in bad] == ["too_large"] * 2
        assert bad[0]["record"] == 2 and "the line is longer than 1000 bytes" in bad[0]["message"]
