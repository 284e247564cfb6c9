"""Files with the `openai` package, unchanged, over a real socket."""

from __future__ import annotations

import io

import httpx
import openai
import pytest
from batching import client_of, upload
from serving import Raw, serving, until


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


@pytest.mark.parametrize("limit", ["000000001" + "9" * 30, "00000000199999999"])
def test_a_long_limit(kept, limit):
    found = httpx.get(f"{kept.url}/v1/files", params={"limit": limit})
    assert found.status_code == 400 and found.json()["error"]["param"] == "limit"


@pytest.mark.parametrize(
    "name, value",
    [
        ("endpoint", []),
        ("completion_window", "x$"),
        ("endpoint", {}),
        ("output_expires_after", []),
        ("output_expires_after", False),
        ("output_expires_after.seconds", {"anchor": "created_at", "seconds": 0}),
    ],
)
def test_fields_of_a_batch_that_are_wrong(kept, client, name, value):
    body = {"input_file_id": upload(client, ["x"]).id, "endpoint": "/v1/completions", name.partition(".")[0]: value}
    found = httpx.post(f"{kept.url}/v1/batches", json=body)
    assert found.status_code == 400 and found.json()["error"]["param"] == name, found.text


def test_a_file_expires_after_a_second_at_least(client):
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        upload(client, ["x"], expires_after={"anchor": "created_at", "seconds": 0})


def test_a_name_that_no_answer_can_hold(llm, tmp_path):
    """Of a form in UTF-7, which has a text for the half of a surrogate pair."""
    form = "multipart/form-data; charset=utf-7; boundary=a"
    parts = [b'name="file"; filename="+2AA-"\r\n\r\nx', b'name="purpose"\r\n\r\nbatch']
    body = b"".join(b"--a\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts) + b"--a--\r\n"
    with serving(llm, data_dir=str(tmp_path)) as server:
        made = httpx.post(f"{server.url}/v1/files", content=body, headers={"content-type": form})
        assert made.status_code == 200, made.text
        assert [file["filename"] for file in httpx.get(f"{server.url}/v1/files").json()["data"]] == ["?"]
