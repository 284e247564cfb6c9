"""Batches of a server that stops, or whose database or disk fails: nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading

import httpx
import numpy as np
import openai
import pytest
from batching import batch_of, client_of, completion, content, ended, lines_of, upload
from serving import serving, until

from prefold.serve.batch import _digest
from prefold.serve.store import Store


def test_a_restart_goes_on(llm, tmp_path, monkeypatch, slow_steps):
    """The first server takes its time, so that it ends before the batch does."""
    folder, worker = str(tmp_path), llm.engine.worker
    slow_steps(worker, 0.02)
    with serving(llm, served_names=("tiny",), data_dir=folder) as server, client_of(server) as client:
        batch = batch_of(client, [completion(i, max_tokens=10 + i) for i in range(100)])  # they end one by one
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3)
    monkeypatch.undo()
    with serving(None, data_dir=folder) as server, client_of(server) as client:  # while the model is being loaded
        found = client.batches.retrieve(batch.id)
        assert found.status == "in_progress" and 3 < found.request_counts.completed < 100
    with serving(llm, served_names=("tiny",), data_dir=folder) as server, client_of(server) as client:
        done = ended(client, batch)
        assert done.status == "completed"
        found = [json.loads(line)["custom_id"] for line in content(client, done.output_file_id).splitlines()]
        assert sorted(found) == sorted(f"c{i}" for i in range(100))


def test_an_end_that_was_killed_is_made_again(llm, tmp_path, monkeypatch):
    """The output file's temporary name may be a second name of the lines: they are not written over."""
    change, planted = Store.change, []

    def die(self, kind, id, changes, **options):
        if "finalizing_at" in changes and not planted:
            planted.append(self.path("file-" + _digest(f"{id}:output")))
            os.link(self.batches / id / "lines.jsonl", f"{planted[0]}.tmp")
            raise OSError("killed")
        return change(self, kind, id, changes, **options)

    monkeypatch.setattr(Store, "change", die)
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        server.state.batches.retry_seconds = 0.1
        done = ended(client, batch_of(client, [completion(i) for i in range(20)]))
        assert planted and done.status == "completed" and done.request_counts.completed == 20
        found = lines_of(client, done.output_file_id)
        assert set(found) == {f"c{i}" for i in range(20)}
        usages = [one["response"]["body"]["usage"] for one in found.values()]
        assert done.usage.output_tokens == sum(one["completion_tokens"] for one in usages) == 20 * 6
        assert done.usage.input_tokens == sum(one["prompt_tokens"] for one in usages) > 0


def test_two_servers_do_not_share_a_folder(kept, llm):
    from prefold.errors import JobError

    with pytest.raises(JobError, match="another server uses it"), serving(llm, data_dir=kept.state.options.data_dir):
        pass


def test_a_locked_database_is_told_and_loses_nothing(llm, tmp_path, monkeypatch):
    monkeypatch.setattr("prefold.serve.store.LOCKED_SECONDS", 0.1)
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        server.state.batches.retry_seconds = 0.1
        batch = batch_of(client, [completion(i) for i in range(50)])
        other = sqlite3.connect(tmp_path / "prefold.sqlite", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(openai.InternalServerError, match="data folder fails") as error:
            upload(client, ["x"])
        assert error.value.status_code == 503
        health = httpx.get(f"{server.url}/health").json()
        assert health["status"] == "failing" and "locked" in health["reason"]
        other.execute("ROLLBACK")
        until(lambda: server.state.failing is None)
        assert ended(client, batch).request_counts.completed == 50
        assert len(client.files.list().data) == 2  # the input, the output, and no half of the one that was refused
        assert len(list((tmp_path / "files").iterdir())) == 2


def test_a_full_disk_is_told_and_loses_nothing(llm, tmp_path, fsync_by):
    full, batch_failures = threading.Event(), []

    def failing(fsync, number):
        path = os.readlink(f"/proc/self/fd/{number}")
        if "/batches/" in path and os.fstat(number).st_size and not batch_failures:
            full.set()  # once there are lines, and before the batch can have ended
        if full.is_set() and str(tmp_path) in path:
            batch_failures.extend([path] * ("/batches/" in path))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(number)

    fsync_by(failing)
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        server.state.batches.retry_seconds, server.state.batches.look_seconds = 0.05, 0.02
        batch = batch_of(client, [completion(i) for i in range(50)])
        until(full.is_set)
        with pytest.raises(openai.InternalServerError, match="No space left"):
            upload(client, ["x"])
        until(lambda: server.state.failing is not None)
        until(lambda: len(batch_failures) > 2)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert client.completions.create(
            model="tiny", prompt="yes", max_tokens=2
        ).choices  # nothing of it needs the disk
        full.clear()
        until(lambda: server.state.failing is None)
        done = ended(client, batch)
        assert done.status == "completed" and done.request_counts.completed == 50
        found = [json.loads(line)["custom_id"] for line in content(client, done.output_file_id).splitlines()]
        assert sorted(found) == sorted(f"c{i}" for i in range(50))


def test_a_line_that_steps_fail_for_is_an_error_of_its_own(kept, client, llm, start_by):
    """All other lines of a batch of numbers are answered, as they are without it."""
    texts = ["zebra" if i == 37 else f"the yes {i}" for i in range(100)]
    others = {token for text in texts if text != "zebra" for token in llm.tokenizer.encode(text).tolist()}
    bad = set(llm.tokenizer.encode("zebra").tolist()) - others
    assert bad

    def fail(start, message, *more):
        # The rows of one text may come in several steps, and not every message has rows.
        if bad & set(np.asarray(getattr(message, "tokens", ())).tolist()):
            raise RuntimeError("made up")
        return start(message, *more)

    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for i, text in enumerate(texts)
    ]
    start_by(llm.engine.worker, fail)
    done = ended(client, batch_of(client, lines, "/v1/embeddings"))
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 99, 1)
    (wrong,) = lines_of(client, done.error_file_id).values()
    assert wrong["custom_id"] == "c37" and "made up" in json.dumps(wrong)
    found = lines_of(client, done.output_file_id)["c36"]["response"]["body"]["data"][0]["embedding"]
    assert found == pytest.approx(llm.embed(texts[36]).tolist(), abs=1e-5)
    assert kept.state.failing is None
