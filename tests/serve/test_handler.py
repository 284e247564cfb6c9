"""What the event loop does itself, and what it leaves to other threads; which route answers a path."""

from __future__ import annotations

import threading

import httpx
import pytest
from serving import serving
from starlette.routing import Route

from prefold.engine.schedule.generate_step import NO_OWNER
from prefold.errors import InputError
from prefold.serve import context
from prefold.serve import handler as module
from prefold.serve.app import make_app
from prefold.serve.handler import RequestHandler
from prefold.serve.limits import Backpressure

SHORT = {"prompt": "the yes", "max_tokens": 3, "temperature": 0}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}


@pytest.fixture
def where(monkeypatch):
    """{what is done: the names of the threads that did it}."""
    found = {"prepare": [], "finish": []}
    for name, place, attribute in (("prepare", RequestHandler, "_prepare"), ("finish", module, "finish_items")):
        real = getattr(place, attribute)

        def noted(*arguments, name=name, real=real):
            found[name].append(threading.current_thread().name.startswith("prefold-prepare"))
            return real(*arguments)

        monkeypatch.setattr(place, attribute, noted)
    return found


@pytest.mark.parametrize(
    ("path", "body", "in_pool"),
    [
        ("/v1/completions", SHORT, (False, False)),
        ("/v1/embeddings", {"input": "yes"}, (False, False)),
        ("/rerank", {"query": "the", "documents": ["yes"] * 17}, (False, True)),
        ("/v1/embeddings", {"input": ["yes " * 50] * 30}, (True, True)),
        (
            "/v1/completions",
            SHORT | {"prompt": "yes " * 1100, "max_tokens": 1, "truncate_prompt_tokens": 9},
            (True, False),
        ),
        ("/v1/completions", SHORT | {"max_tokens": 300, "n": 4, "ignore_eos": True}, (False, True)),
        (
            "/v1/completions",
            SHORT | {"max_tokens": 300, "logprobs": 20, "ignore_eos": True, "stream": True},
            (False, True),
        ),
        ("/v1/completions", SHORT | {"prompt": ["yes"] * 20, "max_tokens": 1}, (True, True)),
        ("/embed_all", {"inputs": "yes no"}, (False, False)),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "1"}], "response_format": SCHEMA},
            (True, False),
        ),
    ],
)
def test_what_is_short_is_done_at_once(server, where, path, body, in_pool):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 200  # the engine has generated before
        where["prepare"].clear(), where["finish"].clear()
        assert client.post(path, json=body).status_code == 200
    assert (where["prepare"][-1:], where["finish"]) == ([in_pool[0]], [in_pool[1]])


def test_a_template_of_a_request_runs_in_a_thread_of_its_own(llm, where):
    asked = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2}
    with serving(llm, allow_chat_template=True) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        where["prepare"].clear()
        assert client.post("/v1/chat/completions", json=asked | {"chat_template": "the yes"}).status_code == 400
        assert client.post("/v1/chat/completions", json=asked | {"chat_template": "{{ 'yes' }}"}).status_code == 200
    assert where["prepare"] == [True, True]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", SHORT), ("/v1/embeddings", {"input": "yes"})])
def test_the_first_request_does_not_wait_in_the_event_loop_for_the_store(llm, where, path, body):
    with serving(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(2):
            assert client.post(path, json=body).status_code == 200
    assert where["prepare"] == [True, False]


@pytest.mark.parametrize(("count", "watched"), [(1, 1), (30, 2)])
def test_a_short_response_is_written_without_watching_its_client(server, monkeypatch, count, watched):
    """A client is watched while its request is computed, and while a long response is written."""
    seen, watch = [], context.unless_gone
    monkeypatch.setattr(context, "unless_gone", lambda request, work: seen.append(work) or watch(request, work))
    found = httpx.post(f"{server.url}/v1/embeddings", json={"input": ["yes"] * count}, timeout=60)
    assert found.status_code == 200 and len(seen) == watched


def test_what_needs_no_engine_is_refused_where_too_much_is_being_prepared(llm):
    with serving(llm, max_waiting_requests=1) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with server.state.handler.backpressure.preparing(5, NO_OWNER):
            for path, body in (
                ("/tokenize", {"inputs": "yes"}), ("/tokenize", {"prompt": "yes"}), ("/decode", {"ids": [5]}),
            ):  # fmt: skip
                assert client.post(path, json=body).status_code == 429
        assert client.post("/tokenize", json={"inputs": "yes"}).status_code == 200


def test_a_path_is_answered_by_the_first_route_that_has_it(server):
    app = make_app(server.state)
    assert len(app._routes) > 30
    for (method, path), route in app._routes.items():
        routes = [one for one in app.routes if isinstance(one, Route) and one.path == path and method in one.methods]
        assert route is routes[0]


def test_texts_to_generate_are_bounded_before_any_is_begun(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.post("/v1/completions", json=SHORT | {"prompt": ["a"] * 1000, "n": 128})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("stop", [["x"] * 65, "x" * 1025])
def test_texts_that_end_an_output_are_bounded(server, stop):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.post("/v1/completions", json=SHORT | {"stop": stop})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "stop")


def test_the_first_failure_ends_a_request(server, submit_by):
    """The first prompt is never answered."""

    def begin(submit, handler, requests, readout, replies, **options):
        replies[1].post(replies[1].put, [InputError("made up", remedy="none")])

    submit_by(begin)
    asked = {"prompt": ["the yes", "no"], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.post("/v1/completions", json=asked)
    assert found.status_code == 400 and "made up" in found.text


def test_embed_all_counts_as_its_tokens_and_asks_for_each_once(server, llm, monkeypatch):
    seen, enter = [], Backpressure.computing
    monkeypatch.setattr(Backpressure, "computing", lambda self, replies: seen.extend(replies) or enter(self, replies))
    before = llm.stats.tokens
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.post("/embed_all", json={"inputs": "yes no " * 20}).json()
    assert [reply.tokens for reply in seen] == [len(found[0])] == [llm.stats.tokens - before]
