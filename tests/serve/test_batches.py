"""Files and batches with the `openai` package, unchanged, over a real socket."""

from __future__ import annotations

import io
import json
import sqlite3
import threading
import time
from unittest.mock import Mock

import httpx
import numpy as np
import openai
import pytest
from serving import Raw, serving, until

from prefold.job.flow import Flow
from prefold.schedule.steps import SlotStep, StreamStep
from prefold.serve import batches, lane

KEYS = """
[[key]]
key = "a"
tenant = "a"
[[key]]
key = "b"
tenant = "b"
"""


@pytest.fixture(scope="module")
def kept(llm, tmp_path_factory):
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path_factory.mktemp("data") / "new")) as made:
        yield made


@pytest.fixture(scope="module")
def client(kept):
    with client_of(kept) as made:
        yield made


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def completion(i, **body):
    body = {"model": "tiny", "prompt": f"yes no the {i}", "max_tokens": 6, "temperature": 0, "ignore_eos": True} | body
    return {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}


def upload(client, lines, **options):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch", **options)


def batch_of(client, lines, endpoint="/v1/completions", **options):
    options = {"completion_window": "24h"} | options
    return client.batches.create(input_file_id=upload(client, lines).id, endpoint=endpoint, **options)


def ended(client, batch, seconds=60):
    found = []

    def has_ended():
        found[:] = [client.batches.retrieve(batch.id)]
        return found[0].status in ("completed", "failed", "expired", "cancelled")

    until(has_ended, seconds)
    return found[0]


def lines_of(client, file):
    return (
        {} if file is None else {one["custom_id"]: one for one in map(json.loads, content(client, file).splitlines())}
    )


def content(client, file):
    return client.files.content(file).text


# --------------------------------------------------------------------------------------------------------- files


def test_files(client):
    data = bytes(range(256)) * 9000
    made = client.files.create(file=("../a b.jsonl", io.BytesIO(data)), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.status) == ("a b.jsonl", len(data), "batch", "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == data
    others = [upload(client, [str(i)]) for i in range(4)]
    ids = [file.id for file in client.files.list(limit=2)]  # the client asks for page after page
    assert ids[:5] == [file.id for file in reversed([made, *others])]
    assert [file.id for file in client.files.list(limit=3, order="asc", after=made.id)] == [file.id for file in others]
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.delete(made.id).deleted
    for request in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            request(made.id)


def test_files_that_are_refused(client, kept):
    with pytest.raises(openai.BadRequestError, match='give "batch"'):
        client.files.create(file=("a", b"x"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.files.list(limit=0)
    with pytest.raises(openai.NotFoundError, match="file-no"):
        client.files.list(after="file-no")
    form = "multipart/form-data; boundary=a"
    wrong = [(b"{}", "application/json"), (b"x", "multipart/form-data"), (b"--a\r\nx", form), (b"--a--\r\n", form)]
    for body, kind in [*wrong, (b"--a\r\n\r\nx\r\n--a--\r\n", form)]:
        raw = Raw(kept).send("/v1/files", body, headers=f"content-type: {kind}\r\nconnection: close\r\n")
        answer = raw.read_all()
        assert b" 400 " in answer.splitlines()[0], answer
        assert b'"error"' in answer


def test_a_file_that_is_too_large(llm, tmp_path):
    with serving(llm, data_dir=str(tmp_path), max_file_bytes=100_000) as server, client_of(server) as client:
        with pytest.raises(openai.APIStatusError) as error:
            client.files.create(file=("a", b"x" * 300_000), purpose="batch")
        assert error.value.status_code == 413
        assert client.files.list().data == []
        assert client.files.create(file=("a", b"x" * 100_000), purpose="batch").bytes == 100_000


def test_a_file_expires(client):
    made = upload(client, ["x"], expires_after={"anchor": "created_at", "seconds": 1})
    assert made.expires_at == made.created_at + 1
    until(lambda: made.id not in [file.id for file in client.files.list()])


def test_without_a_folder_there_are_none(server):
    with client_of(server) as client, pytest.raises(openai.NotFoundError, match="--data-dir"):
        client.files.list()


# ------------------------------------------------------------------------------------------------------- batches


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


LONG = {"max_tokens": 100}


def test_a_batch_is_cancelled(client):
    batch = batch_of(client, [completion(i, **LONG) for i in range(600)])
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3, 60)
    assert client.batches.cancel(batch.id).status == "cancelling"
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
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
    done = ended(client, second, 10)
    assert done.status == "cancelled" and done.request_counts.failed == 3
    done = ended(client, third, 10)
    assert done.status == "expired" and done.expired_at
    bad = lines_of(client, done.error_file_id)
    assert set(bad) == {f"c{i}" for i in range(4)} and bad["c0"]["error"]["code"] == "batch_expired"
    assert client.batches.retrieve(first.id).status == "in_progress"
    client.batches.cancel(first.id)
    ended(client, first)


@pytest.mark.parametrize("kind", ["completions", "embeddings"])
def test_live_requests_go_on_beside_a_batch(client, llm, kind, monkeypatch):
    if kind == "completions":
        lines, endpoint = [completion(i, **LONG) for i in range(300)], "/v1/completions"
    else:
        lines, endpoint = embeddings(3000), "/v1/embeddings"
        # However long it takes to ask meanwhile: the batch does not end before.
        advance = lane._BatchNumbers.advance
        monkeypatch.setattr(lane._BatchNumbers, "advance", lambda self: time.sleep(0.01) or advance(self))
    batch = batch_of(client, lines, endpoint)
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3, 60)
    options = {
        "model": "tiny",
        "prompt": "no yes",
        "max_tokens": 5,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    text = client.completions.create(**options).choices[0].text
    vector = client.embeddings.create(model="tiny", input="no yes").data[0].embedding
    beside = client.batches.retrieve(batch.id)
    assert beside.status == "in_progress", "the batch had ended before"
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert text == client.completions.create(**options).choices[0].text
    assert np.allclose(vector, client.embeddings.create(model="tiny", input="no yes").data[0].embedding, atol=1e-6)


def embeddings(count):
    texts = [" ".join(["the yes no"] * 30) + f" {i}" for i in range(count)]
    return [
        {"custom_id": str(i), "url": "/v1/embeddings", "method": "POST", "body": {"input": text}}
        for i, text in enumerate(texts)
    ]


class Log:
    """Steps of the engine, as they begin and end: ("begins" or "ends", kind of message, results that wait)."""

    def __init__(self, llm, monkeypatch):
        self.entries, self.numbers, worker = [], None, llm.engine.worker
        begin, made, log = worker.start, lane._BatchNumbers.__init__, self

        def start(message, *more):
            left = 0 if log.numbers is None else log.numbers.came.qsize()
            log.entries.append(("begins", type(message), left))
            try:
                return begin(message, *more)
            finally:
                log.entries.append(("ends", type(message), left))

        def make(self, *arguments):
            made(self, *arguments)
            log.numbers = self

        monkeypatch.setattr(worker, "start", start)
        monkeypatch.setattr(lane._BatchNumbers, "__init__", make)


def test_a_live_request_comes_in_the_middle_of_a_step_of_a_batch(client, llm, monkeypatch):
    log, give_way, asked = Log(llm, monkeypatch), lane._BatchNumbers._give_way, []

    def ask():
        made = client.completions.create(model="tiny", prompt="no yes", max_tokens=5, temperature=0)
        asked.append(made.choices[0].text)

    asking = threading.Thread(target=ask)

    def wait_for_somebody(self):
        if log.entries[-1][:2] == ("begins", StreamStep) and asking.ident is None:
            asking.start()
            until(lambda: llm.engine.service.replies)
        give_way(self)

    monkeypatch.setattr(lane._BatchNumbers, "_give_way", wait_for_somebody)
    lines = embeddings(200)
    done = ended(client, batch_of(client, lines, "/v1/embeddings"))
    asking.join()
    kinds = [entry[:2] for entry in log.entries]
    place = kinds.index(("begins", SlotStep))
    assert kinds[place - 1] == ("begins", StreamStep) and kinds[place + 1] == ("ends", SlotStep)
    assert asked == [llm.generate("no yes", max_tokens=5).text]
    found = lines_of(client, done.output_file_id)
    vectors = [found[str(i)]["response"]["body"]["data"][0]["embedding"] for i in range(200)]
    assert np.allclose(vectors, llm.embed([line["body"]["input"] for line in lines]), atol=1e-5)


def test_a_batch_that_is_cancelled_ends_in_the_middle_of_a_step(client, llm, monkeypatch):
    log, give_way, calls = Log(llm, monkeypatch), lane._BatchNumbers._give_way, []

    def cancel(self):
        if log.entries[-1][:2] == ("begins", StreamStep):
            calls.append(client.batches.cancel(client.batches.list(limit=1).data[0].id))
        give_way(self)

    monkeypatch.setattr(lane._BatchNumbers, "_give_way", cancel)
    done = ended(client, batch_of(client, embeddings(200), "/v1/embeddings"))
    assert done.status == "cancelled" and done.request_counts.completed == 0 and len(calls) == 1
    assert len(client.embeddings.create(model="tiny", input="yes").data) == 1


def test_a_step_of_a_batch_begins_when_the_lines_of_the_last_are_written(client, llm, monkeypatch):
    write = Flow._write
    monkeypatch.setattr(Flow, "_write", lambda *arguments: time.sleep(0.002) or write(*arguments))
    monkeypatch.setattr(lane.Pace, "stream_rows", lambda self, most, **how: 100)
    log = Log(llm, monkeypatch)
    assert ended(client, batch_of(client, embeddings(100), "/v1/embeddings")).status == "completed"
    waiting = [left for what, kind, left in log.entries if (what, kind) == ("begins", StreamStep)]
    assert len(waiting) > 2 and not any(waiting)


def test_a_batch_begins_at_once(client, monkeypatch):
    monkeypatch.setattr(batches, "LOOK_SECONDS", 30.0)
    time.sleep(0.5)  # until the looks that have begun are over
    assert ended(client, batch_of(client, [completion(1)]), 10).status == "completed"
    monkeypatch.undo()
    assert ended(client, batch_of(client, [completion(1)]), 10).status == "completed"


def test_a_restart_goes_on(llm, tmp_path):
    folder = str(tmp_path)
    with serving(llm, served_names=("tiny",), data_dir=folder) as server, client_of(server) as client:
        batch = batch_of(client, [completion(i, **LONG) for i in range(600)])
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3, 60)
    with serving(None, data_dir=folder) as server, client_of(server) as client:  # while the model is being loaded
        found = client.batches.retrieve(batch.id)
        assert found.status == "in_progress" and 3 < found.request_counts.completed < 600
    with serving(llm, served_names=("tiny",), data_dir=folder) as server, client_of(server) as client:
        done = ended(client, batch, 120)
        assert done.status == "completed"
        found = [json.loads(line)["custom_id"] for line in content(client, done.output_file_id).splitlines()]
        assert sorted(found) == sorted(f"c{i}" for i in range(600))


def test_two_servers_do_not_share_a_folder(kept, llm):
    from prefold.errors import JobError

    with pytest.raises(JobError, match="another server uses it"), serving(llm, data_dir=kept.site.options.data_dir):
        pass


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


# ------------------------------------------------------------------------------------------------------ failures


def test_a_locked_database_is_told_and_loses_nothing(llm, tmp_path, monkeypatch):
    monkeypatch.setattr("prefold.serve.store.LOCKED_SECONDS", 0.1)
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        batch = batch_of(client, [completion(i) for i in range(50)])
        other = sqlite3.connect(tmp_path / "prefold.sqlite", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(openai.InternalServerError, match="data folder fails") as error:
            upload(client, ["x"])
        assert error.value.status_code == 503
        health = httpx.get(f"{server.url}/health").json()
        assert health["status"] == "failing" and "locked" in health["reason"]
        other.execute("ROLLBACK")
        until(lambda: server.site.failing is None, 20)
        assert ended(client, batch).request_counts.completed == 50
        assert len(client.files.list().data) == 2  # the input, the output, and no half of the one that was refused
        assert len(list((tmp_path / "files").iterdir())) == 2


def test_a_full_disk_is_told_and_loses_nothing(llm, tmp_path, monkeypatch):
    import errno
    import os

    full, fsync = threading.Event(), os.fsync

    def failing(number):
        if full.is_set() and str(tmp_path) in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(number)

    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr("prefold.serve.batches.RETRY_SECONDS", 0.2)
    with serving(llm, served_names=("tiny",), data_dir=str(tmp_path)) as server, client_of(server) as client:
        batch = batch_of(client, [completion(i, **LONG) for i in range(300)])
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3, 60)
        full.set()
        with pytest.raises(openai.InternalServerError, match="No space left"):
            upload(client, ["x"])
        until(lambda: server.site.failing is not None)
        time.sleep(1.5)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert client.completions.create(
            model="tiny", prompt="yes", max_tokens=2
        ).choices  # nothing of it needs the disk
        full.clear()
        until(lambda: server.site.failing is None)
        done = ended(client, batch, 120)
        assert done.status == "completed" and done.request_counts.completed == 300
        found = [json.loads(line)["custom_id"] for line in content(client, done.output_file_id).splitlines()]
        assert sorted(found) == sorted(f"c{i}" for i in range(300))
