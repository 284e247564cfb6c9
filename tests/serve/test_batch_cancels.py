"""Batches that are cancelled in the middle of another's work for them, and which files batches read."""

from __future__ import annotations

import threading

import pytest
from batching import batch_of, completion, ended
from serving import until

from prefold.serve.batches import Batches
from prefold.serve.http import Refusal
from prefold.serve.store import Store

LINES = [completion(i) for i in range(3)]


def test_a_cancel_before_what_was_validated_is_noted_is_kept(kept, client, monkeypatch):
    batches, note = kept.state.batches, kept.state.batches._note

    def late(one, body):
        if body["status"] == "in_progress":
            assert batches.cancel(one.id)["status"] == "cancelling"
        note(one, body)

    monkeypatch.setattr(batches, "_note", late)
    assert ended(client, batch_of(client, LINES)).status == "cancelled"


def test_a_batch_that_is_cancelled_as_soon_as_it_is_stored_is_not_read(kept, client, monkeypatch):
    batches, store, read = kept.state.batches, kept.state.store, []
    add, validate = store.add, batches.work.validate

    def cancelled(kind, tenant, body, **rest):
        add(kind, tenant, body, **rest)
        if kind == "batch":
            assert batches.cancel(body["id"])["status"] == "cancelling"

    monkeypatch.setattr(store, "add", cancelled)
    monkeypatch.setattr(batches.work, "validate", lambda one: read.append(one.id) or validate(one))
    assert ended(client, batch_of(client, LINES)).status == "cancelled" and not read


def test_what_the_store_knows_of_a_cancel_is_taken_from_it(kept, client, monkeypatch):
    batches, store = kept.state.batches, kept.state.store
    validate = batches.work.validate

    def behind(one):
        store.change("batch", one.id, {"status": "cancelling"})
        return validate(one)

    monkeypatch.setattr(batches.work, "validate", behind)
    assert ended(client, batch_of(client, LINES)).status == "cancelled"


def test_a_file_can_be_deleted_as_soon_as_clients_see_that_its_batch_has_ended(kept, client, monkeypatch):
    batches, seen = kept.state.batches, threading.Event()
    note = batches._note

    def late(one, body):
        if body["status"] == "completed":
            assert seen.wait(60)
        note(one, body)

    monkeypatch.setattr(batches, "_note", late)
    batch = batch_of(client, LINES)
    try:
        assert ended(client, batch).status == "completed" and batches.uses(batch.input_file_id)
        assert client.files.delete(batch.input_file_id).deleted
    finally:
        seen.set()
    until(lambda: not batches.uses(batch.input_file_id))


def test_which_files_batches_read_is_known_without_the_store(tmp_path, monkeypatch):
    store = Store(tmp_path)
    for name in ("file-1", "file-2"):
        store.add("file", "", {"id": name})
    batches = Batches(store, pytest.fail)
    body = {"status": "validating", "expires_at": 1e12, "input_file_id": "file-1"}
    for i in range(2):
        batches.create("", body | {"id": f"batch_{i}"})

    def failing(*_, **__):
        raise Refusal(503, "no")

    for again in (batches, Batches(store, pytest.fail)):  # the second has them from the store
        with monkeypatch.context() as patched:
            patched.setattr(store, "get", failing)
            assert again.uses("file-1") and not again.uses("file-2")
            for i, still in ((0, True), (1, False)):
                again._note(again._open[f"batch_{i}"], {"status": "failed"})
                assert again.uses("file-1") == still
    with monkeypatch.context() as patched, pytest.raises(Refusal):
        patched.setattr(store, "add", failing)
        batches.create("", body | {"id": "batch_2"})
    assert not batches.uses("file-1") and batches.open_counts() == []
    store.close()
