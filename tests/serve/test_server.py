"""States, limits and refusals, over a real socket."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from books import check_books
from generating import slowed, until_idle
from running import no_steps
from serving import KEYS, Raw, serving, until

from prefold.engine import loop
from prefold.errors import JobError
from prefold.serve.keys import Keys
from prefold.serve.run import bind
from prefold.spec.requests import Owner, Request, Sampling
from prefold.spec.server import ServerSpec

TOO_LONG = "a " * 3000
LONG = {"prompt": "the yes no", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


def test_health_and_draining(llm):
    with serving(None, drain_seconds=600) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert (client.get("/health").status_code, client.get("/health").json()) == (503, {"status": "loading"})
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        server.state.ready(llm)
        assert client.get("/health").status_code == 200
        answers = []
        ask = partial(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=600)
        thread = threading.Thread(target=lambda: answers.append(ask()))
        thread.start()
        until(lambda: server.state.handler.backpressure.running)
        server._loop.call_soon_threadsafe(server._begin_to_drain)
        until(lambda: server.state.status == "draining")
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=LONG).status_code == 503
        thread.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 480
        until(lambda: server.should_exit)


def test_what_is_loaded_is_no_work_for_the_garbage_collector(llm):
    with serving(None) as server:
        gc.unfreeze()  # what servers of other tests left
        try:
            server.load(lambda: llm)
            assert server.state.status == "ready" and gc.get_freeze_count() > 100_000
        finally:
            gc.unfreeze()


def test_what_runs_too_long_while_draining_is_answered(llm):
    with slowed(llm.worker), serving(llm, drain_seconds=0.05) as server:
        raw = Raw(server).send("/v1/completions", LONG | {"stream": True})
        raw.read_until(b"data: ")
        server._loop.call_soon_threadsafe(server._begin_to_drain)
        rest = raw.read_all()
        assert b"is being shut down" in rest and b"[DONE]" in rest
    until(lambda: not llm.engine.generator.scheduler.has_work)


def test_bad_requests(server):
    with httpx.Client(base_url=server.url) as client:
        for path, body, status, code in (
            ("/v1/completions", b"{", 400, "invalid_json"),
            ("/v1/completions", b"[1]", 400, "invalid_json"),
            ("/v1/completions", b'{"prompt": "\xff"}', 400, "invalid_json"),
            ("/v1/completions", b"[" * 100_000, 400, "invalid_json"),
            ("/v1/completions", b"{}", 400, "missing_field"),
            ("/v1/embeddings", b"{}", 400, "missing_field"),
            ("/v1/completions", b'{"prompt": "a", "stream": 1}', 400, "wrong_type"),
            ("/v1/nothing", b"{}", 404, "not_found"),
        ):
            found = client.post(path, content=body)
            error = found.json()["error"]
            assert (found.status_code, error["code"]) == (status, code), error
        assert "GET /docs shows the paths" in client.post("/v1/nothing", content=b"{}").json()["error"]["message"]
        found = client.get("/models").json()["error"]
        assert found["message"] == "there is no '/models'; use /v1/models: an OpenAI client's base URL ends in /v1"
        found = client.get("/v1/completions")
        assert found.status_code == 405 and found.json()["error"]["message"].endswith("does not take GET; use POST")
        found = client.post("/v1/completions", content=b'{"prompt": "a", "max_token": 1}').json()["error"]
        assert found["message"] == "unknown parameter 'max_token'; did you mean max_tokens? if not, leave it out"


@pytest.mark.parametrize(
    ("path", "body", "remedy"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": TOO_LONG}]},
            {"truncate_prompt_tokens": -1},
        ),
        ("/v1/completions", {"prompt": TOO_LONG}, {"truncate_prompt_tokens": -1}),
        ("/v1/embeddings", {"input": TOO_LONG}, {"truncate_prompt_tokens": -1}),
        ("/embed", {"inputs": TOO_LONG}, {"truncate": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TOO_LONG}], "max_tokens": 1}, None),
    ],
)
def test_what_is_too_long_names_a_remedy_that_is_taken(server, path, body, remedy):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.post(path, json=body)
        assert found.status_code == (422 if path == "/embed" else 400) and "shorten it" in found.text
        assert "--truncate" not in found.text and "truncate=True" not in found.text
        if remedy is None:
            assert "cut" not in found.text
        else:
            assert json.dumps(remedy)[1:-1] in found.text.replace("\\", "")
            assert client.post(path, json=body | remedy).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/embed", {"inputs": "a"}),
        ("/v1/embed", {"texts": ["a"], "input_type": "search_query"}),
    ],
)
def test_a_null_is_left_out(server, path, body):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.post(path, json=body | {"what_is_this": None})
        assert found.status_code == 200, found.text
        assert client.post(path, json=body | {"what_is_this": 1}).status_code in (400, 422)


def test_limits(llm):
    limits = {"max_body_bytes": 2000, "body_seconds": 0.3, "header_seconds": 0.3, "max_header_bytes": 4000,
              "max_texts": 3, "max_connections": 20}  # fmt: skip
    with serving(llm, **limits) as server, httpx.Client(base_url=server.url) as client:
        found = client.post("/v1/embeddings", json={"input": "a" * 3000})
        assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
        found = client.post("/v1/embeddings", content=iter([b" " * 1500] * 3))  # chunked, of unknown length
        assert found.status_code == 413
        found = client.post("/v1/embeddings", json={"input": ["a"] * 4})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "input")
        assert client.post("/v1/embeddings", json={"input": [5] * 4}).status_code == 200
        raw = Raw(server).send("/v1/embeddings", {"input": "a"}, whole=False)
        assert b" 408 " in raw.read_all()
        raw = Raw(server)
        raw.socket.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost")
        assert b" 408 " in raw.read_all()
        raw = Raw(server)
        raw.socket.sendall(b"GET /health HTTP/1.1\r\na: " + b"b" * 5000)
        assert b" 431 " in raw.read_all()
        many = [Raw(server) for _ in range(25)]
        assert b" 503 " in many[-1].read_all()
        for one in many:
            one.close()
        until(lambda: len(server.server_state.connections) < 5)
        assert client.get("/health").status_code == 200


def test_large_grammars(llm):
    with serving(llm, max_grammar_bytes=300) as server:

        def ask(**more):
            return httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2} | more)

        assert ask(structured_outputs={"choice": ["a", "b"]}).status_code == 200
        for more in ({"structured_outputs": {"choice": ["a" * 50] * 9}}, {"structured_outputs": {"regex": "a?" * 200}}):
            found = ask(**more)
            assert (found.status_code, found.json()["error"]["code"]) == (400, "too_large"), found.text


def test_too_many_wait(llm):
    with serving(llm, max_waiting_requests=2) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        server.state.handler.backpressure.most_running = 0
        with no_steps(llm.engine):  # no step is made now
            waiting = [Raw(server).send("/v1/completions", LONG | {"max_tokens": 1}) for _ in range(2)]
            until(lambda: server.state.handler.backpressure.waiting[0] == 2)
            found = client.post("/v1/embeddings", json={"input": "a"})
            assert (found.status_code, found.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(found.headers["retry-after"]) >= 1
        for one in waiting:
            assert b" 200 " in one.read_until(b"usage")
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_who_has_no_room_is_told_before_its_body_is_there(llm):
    """The rest of the body is thrown away, and the connection goes on. What waits for no step is answered."""
    body = json.dumps({"prompt": "a" * 200_000}).encode()
    with serving(llm, max_waiting_requests=1) as server:
        server.state.handler.backpressure.most_running = 0
        with no_steps(llm.engine):  # no step is made now
            waiting = Raw(server).send("/v1/completions", LONG | {"max_tokens": 1})
            until(lambda: server.state.handler.backpressure.waiting[0] == 1)
            for path in ("/v1/completions", "/v1/embeddings", "/embed", "/v1/messages", "/v2/embed"):
                raw = Raw(server).send(path, body, whole=False)
                assert b" 429 " in raw.read_until(b"waiting")
                raw.socket.sendall(body[len(body) // 2 :])
                assert b'"count":' in raw.send("/tokenize", {"prompt": "the"}).read_until(b"tokens")
                raw.close()
        assert b" 200 " in waiting.read_until(b"usage")


def test_keys_and_tenants(llm, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    with serving(llm, api_keys=str(path)) as server, httpx.Client(base_url=server.url) as client:

        def ask(key, **more):
            body = {"prompt": "tenants apart: the yes no", "max_tokens": 1, "temperature": 0} | more
            found = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return found.status_code, found.json()

        assert ask("none")[0] == ask("one two")[0] == client.post("/v1/completions", json={}).status_code == 401
        assert client.get("/health").status_code == 200
        cached = [ask(key)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for key in ("one", "one", "two")]
        assert cached[0] == 0 < cached[1] and cached[2] == 0  # nobody sees what another tenant has computed
        assert ask("two")[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached[1]
        salted = [ask("one", cache_salt="s")[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in "ab"]
        assert salted == [0, cached[1]]
        apart = ask("one", cache_prompt=False)[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert apart == 0
        assert client.get("/metrics", headers={"authorization": "Bearer two"}).status_code == 403
        assert b"one" not in client.get("/metrics", headers={"x-api-key": "one"}).content
        path.write_text(KEYS.replace('"one"', '"three"'))
        server.reload_keys()
        assert (ask("one")[0], ask("three")[0]) == (401, 200)
        path.write_text("[[key]]")
        server.reload_keys()
        assert ask("three")[0] == 200


def test_limits_of_a_key(llm, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS.replace('"second"', '"second"\nclass = "batch"\nmax_waiting_requests = 1\nmax_running = 3'))
    body = LONG | {"max_tokens": 2}
    with serving(llm, api_keys=str(path)) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(key):
            return client.post("/v1/completions", json=body, headers={"x-api-key": key})

        server.state.handler.backpressure.most_running = 0
        with no_steps(server.state.handler.engine):  # no step is made now
            waiting = Raw(server).send("/v1/completions", body, headers="x-api-key: two\r\n")
            until(lambda: server.state.handler.backpressure.waiting[0] == 1)
            (reply,) = until_some(lambda: [one for one in server.state.handler.backpressure.replies if one.keys])
            assert reply.owner == Owner("second", is_batch=True)
            refused = ask("two")
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "of your" in refused.json()["error"]["message"]
            others = Raw(server).send("/v1/completions", body, headers="x-api-key: one\r\n")
            until(lambda: server.state.handler.backpressure.waiting[0] == 2)
        for raw in (waiting, others):
            assert b" 200 " in raw.read_until(b"usage")
        policy = llm.engine.generator.scheduler.waiting
        assert policy.share_of("second").max_running == 3
        path.write_text(KEYS)
        server.reload_keys()
        assert policy.share_of("second").max_running is None


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ("weight = 0", "'weight' is 0; give a number, more than 0"),
        ('class = "slow"', "'class' is 'slow'; give interactive or batch"),
        ("max_running = 0", "give a whole number, 1 or more"),
        ("max_kept_rows = 1.5", "whole number"),
        ("most = 5", "unknown field 'most'; the fields are key, sha256"),
        ('weight = 2\n[[key]]\nkey="x"\ntenant="second"\nweight = 3', "other limits"),
    ],
)
def test_limits_that_are_wrong(tmp_path, more, wrong):
    path = tmp_path / "keys.toml"
    path.write_text(KEYS + more)
    with pytest.raises(JobError, match=wrong):
        Keys(str(path))


def until_some(find):
    until(find)
    return find()


def test_addresses(tmp_path):
    with pytest.raises(JobError, match="insecure"):
        ServerSpec(host="0.0.0.0").check()
    ServerSpec(host="0.0.0.0", insecure=True).check()
    taken = bind(ServerSpec(port=0))
    with pytest.raises(JobError, match="--port"):
        bind(ServerSpec(port=taken.getsockname()[1]))
    taken.close()


def test_metrics(server, llm):
    with httpx.Client(base_url=server.url) as client:
        client.post("/v1/completions", json=LONG | {"max_tokens": 3})
        lines = client.get("/metrics").text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    labels = 'engine="0",model_name="tiny"'
    assert values[f"prefold:rows_computed_total{{{labels}}}"] == llm.stats.rows_computed
    assert values[f"prefold:generation_tokens_total{{{labels}}}"] == llm.stats.generation.generated_tokens
    seconds = llm.stats.seconds | {"cache": llm.cache.seconds}
    for part in ("plan", "model", "cache"):
        assert values[f'prefold:engine_seconds_total{{{labels},part="{part}"}}'] == seconds[part] > 0
    assert values[f"prefold:e2e_request_latency_seconds_count{{{labels}}}"] >= 1
    assert any(name.startswith("prefold:http_requests_total{") for name in values)


def test_metrics_say_whose_prompts_were_there(llm, tmp_path):
    """For answers that are whole and for those that are streamed."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    with serving(llm, api_keys=str(path)) as server, httpx.Client(base_url=server.url) as client:
        expected = {"first": [0, 0], "second": [0, 0]}
        for key, tenant in (("one", "first"), ("two", "second"), ("one", "first"), ("one", "first")):
            body = {"prompt": "whose is it: the yes no", "max_tokens": 1, "temperature": 0}
            if expected["second"][0]:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            text = client.post("/v1/completions", json=body, headers={"x-api-key": key}).text
            last = [line[6:] for line in text.splitlines() if line.startswith("data: {")][-1:] or [text]
            usage = json.loads(last[0])["usage"]
            expected[tenant][0] += usage["prompt_tokens"]
            expected[tenant][1] += usage["prompt_tokens_details"]["cached_tokens"]
        lines = client.get("/metrics", headers={"x-api-key": "one"}).text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    for tenant, counts in expected.items():
        labels = f'engine="0",model_name="{server.state.names[0]}",tenant="{tenant}"'
        names = (f"prefold:prefix_cache_{what}_total{{{labels}}}" for what in ("queries", "hits"))
        assert [values[name] for name in names] == counts
    assert expected["first"][1] > 0 == expected["second"][1]


@pytest.fixture
def poisoned(llm, start_by):
    """Steps fail that have the first row of a prompt beginning with Q, or for the reasons in the list that this is."""
    reasons, (poison,) = [], llm.tokenizer.encode("Q").tolist()

    def start(real, message, *more):
        if reasons:
            raise reasons.pop()
        tokens = getattr(message, "tokens", None)
        if tokens is not None and ((tokens == poison) & (message.positions == 0)).any():
            raise RuntimeError("the step failed")
        return real(message, *more)

    start_by(llm.engine.worker, start)
    return reasons


def test_a_step_that_fails_once(llm, poisoned):
    with serving(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path, body in (("/v1/completions", LONG | {"max_tokens": 9}), ("/v1/embeddings", {"input": ["a", "b"]})):
            expected = client.post(path, json=body).json()
            poisoned.append(RuntimeError("the worker failed"))
            found = client.post(path, json=body)
            assert found.status_code == 200 and not poisoned
            assert found.json().get("choices") == expected.get("choices")
        poisoned += [MemoryError()] * 2
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code in (200, 503)


def test_requests_at_fault_that_come_one_after_the_other(llm, poisoned, monkeypatch):
    """Each comes while another is searched for, so that many steps fail in a row; who is not at fault goes on."""
    (good,) = (one.text for one in llm.generate(["yes"], max_tokens=60, ignore_eos=True))
    at_fault = Request(llm.tokenizer.encode("Q"), sampling=Sampling(max_tokens=2))
    ended, real = [], loop.find_fault

    def search(generator, error):
        found = real(generator, error)
        if len(ended) < 6:
            generator.add(at_fault, llm.tokenizer, ended.append)
        return found

    monkeypatch.setattr(loop, "find_fault", search)
    with serving(llm) as server:
        body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}

        def ask(prompt):
            return httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": prompt}, timeout=60)

        with ThreadPoolExecutor(2) as pool:
            right, wrong = pool.map(ask, ["yes", "Q"])
        assert (right.status_code, wrong.status_code) == (200, 500)
        assert right.json()["choices"][0]["text"] == good
        until(lambda: len(ended) >= 6)
    assert all(isinstance(one, RuntimeError) for one in ended)


def test_one_request_that_steps_fail_for(llm, poisoned):
    """It alone is answered with 500; all others get what they would get without it, also those that run already."""
    prompts = [f"{word} the {number}" for number in range(3) for word in ("yes", "no", "Q")]
    good = [prompt for prompt in prompts if "Q" not in prompt]
    texts = [one.text for one in llm.generate(good, max_tokens=30, ignore_eos=True)]
    vectors = llm.embed(good)
    found: dict[str, list[httpx.Response]] = {}

    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        found[prompt] = [text, httpx.post(f"{server.url}/v1/embeddings", json={"input": prompt}, timeout=60)]

    with serving(llm) as server:
        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ask(good[0])  # several that fail at once could mean that every step fails, until one does not
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert [one.status_code for p in prompts if "Q" in p for one in found[p]] == [500] * 6
    assert [found[p][0].json()["choices"][0]["text"] for p in good] == texts
    for p, vector in zip(good, vectors, strict=True):
        assert found[p][1].json()["data"][0]["embedding"] == pytest.approx(vector.tolist(), abs=1e-6)
    generator = llm.engine.generator
    until_idle(llm.engine)
    assert not generator.on_hold
    check_books(generator.scheduler)


def test_pings_keep_a_silent_stream_open(llm):
    with serving(llm, ping_seconds=0.05) as server:
        with no_steps(llm.engine):
            raw = Raw(server).send("/v1/completions", LONG | {"max_tokens": 2, "stream": True})
            raw.read_until(b": ping\n\n")
        rest = raw.read_until(b"[DONE]")
        chunks = [json.loads(line[6:]) for line in rest.split(b"\n") if line.startswith(b"data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        raw.close()


@pytest.mark.parametrize("allowed", [False, True])
def test_chat_templates_of_requests(llm, allowed):
    own = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "chat_template": "{{ messages[0].content }}",
    }
    with serving(llm, allow_chat_template=allowed) as server:
        found = httpx.post(f"{server.url}/v1/chat/completions", json=own)
        assert found.status_code == (200 if allowed else 400)
        if not allowed:
            assert found.json()["error"]["param"] == "chat_template"
        named = httpx.post(f"{server.url}/v1/chat/completions", json=own | {"chat_template": "default"})
        assert named.status_code == 200


def test_special_tokens_in_messages_stay_text(llm):
    """In chats, responses and Anthropic's messages alike; a raw prompt is read as ever."""
    special = next(token for token in llm.tokenizer.special_tokens.values())
    (id,) = llm.tokenizer.encode(special, special=False).tolist()
    chat = [{"role": "user", "content": f"yes {special} no"}]
    with serving(llm) as plain, serving(llm, escape_special=True) as escaping:

        def count(server, **body):
            return httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"].count(id)

        assert count(plain, messages=chat) == 1 + count(escaping, messages=chat)
        assert count(plain, prompt=special) == count(escaping, prompt=special)
        for path, body in (
            ("/v1/responses", {"input": chat, "max_output_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": chat}),
        ):
            found = [httpx.post(f"{server.url}{path}", json=body).json() for server in (plain, escaping)]
            read, escaped = (one.get("usage", one)["input_tokens"] for one in found)
            assert read < escaped, path
