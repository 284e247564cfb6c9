"""A tenant that asks for as much as it can delays another by no more than its share of turns."""

from __future__ import annotations

import threading
import time

import httpx
import pytest
from batching import client_of, upload
from serving import serving, until

from prefold.errors import InputError
from prefold.serve import handler
from prefold.serve.batch import OpenBatch
from prefold.serve.batches import Batches
from prefold.serve.limits import FairQueue
from prefold.serve.store import Store

KEYS = "".join(f'[[key]]\nkey = "{name}"\ntenant = "{name}"\n' for name in "ab")


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return str(path)


def test_tenants_take_turns():
    pool, gate, order = FairQueue(1, "test"), threading.Event(), []
    first = pool.submit("a", gate.wait)
    futures = [pool.submit(tenant, order.append, tenant) for tenant in "aaaaabbc"]
    gate.set()
    for future in (first, *futures):
        future.result(20)
    assert "".join(order) == "abcabaaa"
    pool.close()


def test_a_function_that_is_cancelled_or_fails_takes_no_other_with_it():
    pool, gate = FairQueue(1, "test"), threading.Event()
    running, dropped = pool.submit("a", gate.wait), pool.submit("a", lambda: 1)
    wrong, right = pool.submit("a", lambda: 1 / 0), pool.submit("b", lambda: 2)
    assert dropped.cancel() and not running.cancel()
    gate.set()
    assert right.result(20) == 2 and isinstance(wrong.exception(20), ZeroDivisionError)
    gate.clear()
    running, left = pool.submit("a", gate.wait), pool.submit("a", lambda: 3)
    until(running.running)
    pool.close()
    assert left.cancelled()
    gate.set()


TEMPLATE = {"messages": [{"role": "user", "content": "1"}], "chat_template": "{{ 1 }}", "max_tokens": 1}


@pytest.mark.parametrize(
    ("pool", "threads", "path", "body"),
    [
        ("_pool", 4, "/v1/completions", {"prompt": "yes " * 2000}),
        ("_pool_of_templates", 1, "/v1/chat/completions", TEMPLATE),
        ("_pool_of_images", 2, "/v1/completions", {"prompt": "yes"}),
    ],
)
def test_requests_are_prepared_in_turn(llm, keys, monkeypatch, prepare_by, pool, threads, path, body):
    gate, order = threading.Event(), []

    def prepare(real, handler, order_):
        gate.wait(60)
        order.append(order_.owner.tenant)
        raise InputError("it is only counted")

    prepare_by(prepare)
    if pool == "_pool_of_images":
        monkeypatch.setattr(handler, "has_images", lambda item: True)
    with serving(llm, api_keys=keys, allow_chat_template=True) as server, pytest.MonkeyPatch.context() as patched:
        if pool == "_pool_of_images":
            patched.setattr(llm, "images", object())
        lines = getattr(server.state.handler, pool)._lines
        asked = []
        for count, key in ((threads + 12, "a"), (1, "b")):
            headers = {"authorization": f"Bearer {key}"}
            asked += [
                threading.Thread(
                    target=httpx.post, args=[server.url + path], kwargs=dict(json=body, headers=headers, timeout=60)
                )
                for _ in range(count)
            ]
            for thread in asked[-count:]:
                thread.start()
            until(lambda key=key, count=count: len(lines.get(key, ())) == (12 if key == "a" else 1))
        gate.set()
        for thread in asked:
            thread.join(60)
    # Those that were being prepared, as many beside it at most, and one that was next.
    assert order.count("a") == threads + 12 and order.index("b") <= 2 * threads, order


def test_batches_are_taken_in_turn(tmp_path):
    store = Store(tmp_path)
    batches = Batches(store, print)
    for id in ("a1", "a2", "b1", "a3", "b2", "c1"):
        batches.hold(OpenBatch(id, id[0], "in_progress", time.time() + 60, "file"))
    taken = []
    while (one := batches.take(lambda one: True)) is not None:
        taken.append(one.id)
    assert taken == ["a1", "b1", "c1", "a2", "b2", "a3"]
    store.close()


def test_a_large_batch_gives_way_to_that_of_another_tenant(llm, keys, tmp_path, work_by, few_running, slow_steps):
    ended = {}
    # Few answers at a time, so that there is a look whether the turn is over behind each.
    slow_steps(llm.engine.worker, 0.01)

    def noted(finish, one):
        body = finish(one)
        if body is not None and body["status"] == "completed":
            counts = [found["request_counts"]["completed"] for _, found in server.state.store.all("batch")]
            ended.setdefault(one.tenant, counts)
        return body

    url, sizes = "/v1/embeddings", {"a": 160, "b": 12}
    with serving(llm, api_keys=keys, served_names=("tiny",), data_dir=str(tmp_path / "data")) as server:
        work_by(server, finish=noted)
        server.state.batches.lines_a_turn = 4
        for key, size in sizes.items():
            body = lambda i: {"custom_id": str(i), "method": "POST", "url": url, "body": {"input": f"yes {i}"}}  # noqa: E731
            client = client_of(server, key)
            file = upload(client, [body(i) for i in range(size)]).id
            client.batches.create(input_file_id=file, endpoint=url, completion_window="24h")
        until(lambda: len(ended) == 2)
        files = [found for _, found in server.state.store.all("file") if found["purpose"] == "batch_output"]
        lines = [server.state.store.path(found["id"]).read_text().splitlines() for found in files]
    assert sorted(map(len, lines)) == [12, 160]
    assert ended["a"] == [160, 12] and ended["b"][1] == 12
    # Three turns of b, with as many of a between them and one before: an eighth of its lines each, and those that
    # were being written.
    assert 0 < ended["b"][0] <= 140, ended
