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


def test_a_cancel_before_what_was_validated_is_noted_is_kept(kept, client, work_by):
    cancelled = []

    def late(validate, one):
        body = validate(one)
        assert body["status"] == "in_progress"
        cancelled.append(kept.state.batches.cancel(one.id)["status"])
        return body

    work_by(kept, validate=late)
    assert ended(client, batch_of(client, LINES)).status == "cancelled" and cancelled == ["cancelling"]


def test_a_batch_that_is_cancelled_as_soon_as_it_is_stored_is_not_read(kept, client, monkeypatch, work_by):
    batches, store, read = kept.state.batches, kept.state.store, []
    add = store.add

    def cancelled(kind, tenant, body, **rest):
        add(kind, tenant, body, **rest)
        if kind == "batch":
            assert batches.cancel(body["id"])["status"] == "cancelling"

    monkeypatch.setattr(store, "add", cancelled)
    work_by(kept, validate=lambda validate, one: read.append(one.id) or validate(one))
    assert ended(client, batch_of(client, LINES)).status == "cancelled" and not read


def test_what_the_store_knows_of_a_cancel_is_taken_from_it(kept, client, work_by):
    def behind(validate, one):
        kept.state.store.change("batch", one.id, {"status": "cancelling"})
        return validate(one)

    work_by(kept, validate=behind)
    assert ended(client, batch_of(client, LINES)).status == "cancelled"


def test_a_file_can_be_deleted_as_soon_as_clients_see_that_its_batch_has_ended(kept, client, work_by):
    batches, seen = kept.state.batches, threading.Event()

    def late(finish, one):
        body = finish(one)
        assert seen.wait(60)
        return body

    work_by(kept, finish=late)
    batch = batch_of(client, LINES)
    try:
        assert ended(client, batch).status == "completed" and batches.uses(batch.input_file_id)
        assert client.files.delete(batch.input_file_id).deleted
    finally:
        seen.set()
    until(lambda: not batches.uses(batch.input_file_id))


def test_which_files_batches_read_is_known_without_the_store(tmp_path):
    class Failing(Store):
        fails = ()

        def get(self, *given):
            return self._unless("get") or super().get(*given)

        def add(self, *given, **more):
            return self._unless("add") or super().add(*given, **more)

        def _unless(self, name):
            if name in self.fails:
                raise Refusal(503, "no")

    store = Failing(tmp_path)
    for name in ("file-1", "file-2"):
        store.add("file", "", {"id": name})
    batches = Batches(store, pytest.fail)
    body = {"status": "validating", "expires_at": 1e12, "input_file_id": "file-1"}
    for i in range(2):
        batches.create("", body | {"id": f"batch_{i}"})

    for again in (batches, Batches(store, pytest.fail)):  # the second has them from the store
        store.fails = ("get",)
        assert again.uses("file-1") and not again.uses("file-2")
        for i, still in ((0, True), (1, False)):
            again.note(again.open[f"batch_{i}"], {"status": "failed"})
            assert again.uses("file-1") == still
    store.fails = ("add",)
    with pytest.raises(Refusal):
        batches.create("", body | {"id": "batch_2"})
    store.fails = ()
    assert not batches.uses("file-1") and batches.open_counts() == []
    store.close()
