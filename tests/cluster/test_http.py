"""Jobs on servers: real HTTP, and the faults that servers have."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from fake_servers import logprob_of, serving
from tiny import tiny_checkpoint, write_tokenizer

from prefold.cli import main
from prefold.cluster.fleet import Fleet
from prefold.cluster.http_bodies import embedding_bodies, generation_body, is_of_bytes, logprob_bodies, remote_model
from prefold.cluster.http_host import HttpReplicas
from prefold.cluster.replicas import AsyncHost, RunCall, requests_of
from prefold.errors import CheckpointError, InputError
from prefold.spec.requests import Exits, Grammar, Readout, Request, Sampling
from prefold.trie import Spool

NUM = 80


pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open("in.jsonl", "w") as file:
        for i in range(NUM):
            text = None if i == 3 else f"the instruction {i % 7} né {i}" + (" refused" if i == 5 else "")
            file.write(json.dumps({"id": i, "text": text}) + "\n")
    return tmp_path


def text_of(i):
    return f"the instruction {i % 7} né {i}"


def run(*arguments, task="generate", model="m", code=3):
    given = ("run", "in.jsonl", "--task", task, "--prompt", "text", "--id", "id", "-o", "out.jsonl", "-m", model)
    more = ("--max-tokens", "7") if task == "generate" else ()
    done = CliRunner().invoke(main, [*map(str, (*given, *more, *arguments))])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.stderr
    return done.stderr


def output(name="out.jsonl"):
    with open(name) as file:
        found = [json.loads(line) for line in file]
    by_id = {line["id"]: line for line in found}
    assert len(found) == len(by_id) == NUM
    return by_id


def assert_answered(found, wrong=(3, 5), raw=True):
    for i, line in found.items():
        if i in wrong:
            assert "error" in line
        else:
            assert line["text"].startswith(f"{len(text_of(i))} of {text_of(i)[:30]}/"), line
            assert line["num_generated"] == 3 and line["finish_reason"] == "length"


def test_texts_go_to_several_servers(table, monkeypatch):
    groups, order = defaultdict(list), HttpReplicas.order

    def noted(replicas, name, method, *arguments):
        if method == "give":
            groups[name] += [request.tokens[:17].tobytes() for _, _, request in requests_of(*arguments)]
        order(replicas, name, method, *arguments)

    monkeypatch.setattr(HttpReplicas, "order", noted)
    few, servers = NUM // 5, []

    def even(path, body, number):
        """Lets a server that is far ahead wait for the other, however the machine shares its time between them."""
        while number > 2 * few and min(len(server.requests) for server in servers) <= few:
            time.sleep(0.005)

    with serving(ids=False, fault=even) as one, serving(ids=False, fault=even) as two:
        servers += [one, two]
        said = run("--raw", "--url", one.url, "--url", two.url + "/v1/", "--temperature", "0.5", "--seed", "1")
    found = output()
    assert_answered(found)
    assert found[5]["error"]["code"] == "http_400" and "this prompt is not allowed" in found[5]["error"]["message"]
    assert one.url in found[5]["error"]["message"] or two.url in found[5]["error"]["message"]
    assert min(len(one.requests), len(two.requests)) > few
    assert len(one.requests) + len(two.requests) == NUM - 1
    path, body = one.requests[0]
    assert path == "/v1/completions" and body["temperature"] == 0.5 and body["max_tokens"] == 7 and body["seed"] > 0
    assert "2 of 2 at the end" in said
    # Many requests are on their way at once, and arrive in any order: this is the order in which they were sent.
    changes = [sum(a != b for a, b in pairwise(sent)) for sent in groups.values()]
    # They are 6 where no server takes a piece of the other's, as one that has answered more does, and 170 at random.
    assert len(changes) == 2 and sum(changes) < 60, "what is shared is sent together"


def test_conversations_are_written_by_the_server(table):
    with serving(ids=False) as server:
        run("--url", server.url, "--system", "be kind")
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": body["messages"][1]["content"]},
    ]
    found = output()
    assert all(found[i]["text"].startswith(f"{len(text_of(i)) + 8} of be kind/the") for i in range(6, NUM))


@pytest.mark.parametrize("ids", [True, False])
def test_token_ids_go_where_they_are_taken(table, ids):
    write_tokenizer(table / "named")
    from prefold.checkpoint import Checkpoint
    from prefold.text import load_tokenizer

    (table / "named" / "config.json").write_text('{"model_type": "a_family_that_is_new"}')
    tokenizer = load_tokenizer(Checkpoint("named", table / "named", "folder", {}))
    with serving(ids=ids, decode=tokenizer.decode) as server:
        run("--raw", "--url", server.url, "--tokenizer", "named")
    assert_answered(output())
    sent = [type(body["prompt"]) for _, body in server.requests]
    assert sent.count(str) <= 1 if ids else list in sent[:9] and sent.count(list) < 20


def test_a_folders_model_has_the_folders_name_at_a_server(table):
    """`prefold serve -m FOLDER` calls the model by the last part of the path."""
    from prefold.checkpoint import Checkpoint
    from prefold.text import load_tokenizer

    write_tokenizer(table / "named")
    (table / "named" / "config.json").write_text('{"model_type": "a_family_that_is_new"}')
    tokenizer = load_tokenizer(Checkpoint("named", table / "named", "folder", {}))
    with serving(models=("named",), decode=tokenizer.decode) as server:
        run("--raw", "--url", server.url, model=table / "named")
    assert_answered(output())
    assert {body["model"] for _, body in server.requests} == {"named"}


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """Two lines of a batch without max_tokens, and a tokenizer's folder that says a context of 512."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "named")
    (tmp_path / "named" / "config.json").write_text('{"model_type": "new", "max_position_embeddings": 512}')
    with open("chats.jsonl", "w") as file:
        for i in range(2):
            body = {"messages": [{"role": "user", "content": f"question {i}"}], "temperature": 0}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return tmp_path


@pytest.mark.parametrize("context", [None, 64])
def test_a_chat_without_max_tokens_is_answered_until_the_context_is_full(chats, context):
    """The server's context, where it says a smaller one."""
    with serving(decode=lambda ids: "x" * len(ids), context=context) as server:
        arguments = ["run", "chats.jsonl", "-o", "out.jsonl", "-m", "m", "--tokenizer", "named", "--url", server.url]
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.stderr
    assert len(server.requests) == 2
    for _, body in server.requests:
        assert body["max_tokens"] == (context or 512) - len(body["prompt"])


def test_a_prompt_without_max_tokens_is_refused_where_the_context_is_not_known(table):
    with serving(ids=False) as server:
        run("--raw", "--url", server.url, "--max-tokens", 0)
    assert not server.requests
    assert all(line["error"]["field"] == "max_tokens" for i, line in output().items() if i != 3)


def test_a_server_that_knows_openais_options_only_is_asked_for_those(table):
    def fault(path, body, number):
        extra = [name for name in ("top_k", "min_p", "repetition_penalty") if name in body]
        message = f"Unrecognized request argument supplied: {extra[0]}" if extra else ""
        return (400, {}, {"error": {"message": message}}) if extra else None

    with serving(ids=False, fault=fault) as server:
        said = run("--raw", "--url", server.url)
        refused = sum("top_k" in body for _, body in server.requests)
        assert_answered(output())
        run("--raw", "--url", server.url, "--overwrite", "--top-k", 20, "--temperature", 1)
    assert refused < 20 and said.count("does not accept top_k") == 1
    messages = [line["error"]["message"] for i, line in output().items() if i != 3]
    assert all("argument supplied: top_k" in message for message in messages), "what is asked for is not left out"


@pytest.mark.parametrize("tei", [False, True])
def test_embeddings(table, tei):
    with serving(ids=False, tei=tei) as server:
        said = run("--url", server.url, "--no-normalize", task="embed", code=3)
    found = output()
    for i in range(6, NUM):
        text = text_of(i)
        assert found[i]["embedding"] == [len(text), text.count("e")]
    assert ("error" in found[5]) == (not tei) and "error" in found[3]
    assert {path for path, _ in server.requests} == ({"/embed", "/v1/embeddings"} if tei else {"/v1/embeddings"})
    assert len(server.requests) < NUM and "replicas  1 of 1" in said
    assert "  bytes " in said and "tokenizer is not here" in said and "  rows " not in said and "rows/s" not in said
    assert not [wrong for wrong in ("random weights", " 0 unique tokens", " 0 steps", "0 bytes") if wrong in said], said


def test_a_server_that_is_overloaded_is_given_less(table):
    def fault(path, body, number):
        if server.now > 4:
            return 429, {"Retry-After": "0.05"}, {"error": {"message": "slow down"}}
        return (503, {}, {"error": "loading"}) if number == 20 else None

    with serving(ids=False, fault=fault, seconds=0.02) as server:
        run("--raw", "--url", server.url)
    assert_answered(output())
    assert server.most < 20  # it would be 199, were no refusal heeded
    refused = len(server.requests) - (NUM - 1)
    assert 0 < refused < NUM


def test_a_request_waits_as_long_as_the_server_says(table):
    def fault(path, body, number):
        return (429, {"Retry-After": "0.6"}, {"error": "wait"}) if number == 0 else None

    with serving(ids=False, fault=fault) as server:
        run("--raw", "--url", server.url)
    assert_answered(output())
    sent = [body["prompt"] for _, body in server.requests]
    first, again = (server.times[i] for i, prompt in enumerate(sent) if prompt == sent[0])
    assert again - first > 0.55
    meanwhile = sum(first < time < first + 0.55 for time in server.times)
    assert meanwhile < 20, "only what was under way comes meanwhile"


def test_connections_that_are_torn_are_tried_again(table):
    tries = Counter()

    def fault(path, body, number):
        tries[body["prompt"]] += 1
        if len(body["prompt"]) % 2 or tries[body["prompt"]] > 2:
            return None
        return "torn" if tries[body["prompt"]] == 1 else (500, {}, {"error": "oops"})

    with serving(ids=False, fault=fault) as server:
        run("--raw", "--url", server.url)
    assert_answered(output())


def test_a_request_that_a_server_always_fails_on_is_an_error(table):
    def fault(path, body, number):
        return (500, {}, {"error": "division by zero"}) if body["prompt"].endswith(" 9") else None

    with serving(ids=False, fault=fault) as server:
        run("--raw", "--url", server.url)
    found = output()
    assert_answered(found, wrong=(3, 5, 9))
    assert found[9]["error"]["code"] == "no_answer" and "division by zero" in found[9]["error"]["message"]


def test_a_server_that_goes_away_loses_nothing(table):
    with serving(ids=False, seconds=0.01) as stays, serving(ids=False, seconds=0.01) as goes:

        def fault(path, body, number):
            if number == 20:
                goes.shutdown()
                goes.server_close()
            return "torn" if number >= 20 else None

        goes.fault = fault
        said = run("--raw", "--url", stays.url, "--url", goes.url)
    assert_answered(output())
    assert "is lost: it cannot be reached" in said and "; it is tried again for 300 s" in said
    assert "it is restarted" not in said, "prefold does not start servers"
    assert "1 of 2 at the end" in said and "1 was lost" in said


def test_requests_that_wait_are_not_sent_while_a_host_ends():
    begun = []

    class Slow(AsyncHost):
        def _refusal(self, call):
            return ""

        def _num_to_ask(self, call):
            return len(self._tasks) < 2

        async def _ask(self, call, requests):
            begun.append(requests)
            await asyncio.sleep(600)

    host = Slow("slow")
    host.begin(RunCall(Readout("tokens")))
    host._loop.call_soon_threadsafe(host._give, [(1, place, None) for place in range(8)])
    deadline = time.monotonic() + 60
    while len(begun) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    host.close()
    assert len(begun) == 2 and not host._tasks and not asyncio.all_tasks(host._loop)


def test_what_stops_a_job_at_once(table, monkeypatch):
    with serving(ids=False, models=("other", "more")) as server:
        said = run("--raw", "--url", server.url, code=1)
        assert "no model 'm'; use -m with one of: other, more" in said and "To continue:" in said
    with serving(ids=False, key="secret") as server:
        assert "the API key was refused" in run("--raw", "--url", server.url, code=1)
        monkeypatch.setenv("PREFOLD_API_KEY", "secret")
        said = run("--raw", "--url", server.url, "--report", "page.html")
    assert_answered(output())
    for path in table.iterdir():
        if path.is_file():
            assert b"secret" not in path.read_bytes()
    assert "secret" not in said


def test_bad_options(table):
    assert "exclude each other" in run("--url", "http://localhost:1", "--ray", code=2)
    assert "write --ray after it" in run("--ray", "in.jsonl", code=2)
    assert "--replicas needs --ray" in run("--replicas", "2", code=2)
    assert "--tokenizer is for jobs on servers (--url)" in run("--tokenizer", "x", "--ray", code=2)
    assert "is not the URL of a server" in run("--url", "localhost:80", code=1)
    said = run("--url", "http://me:word@localhost:1", code=1)
    assert "PREFOLD_API_KEY" in said and "word" not in said
    assert "--pooling does not work with --url" in run(
        "--url", "http://localhost:1", "--pooling", "mean", task="embed", code=2
    )
    said = run("--url", "http://127.0.0.1:9", "--patience", "1", code=1)
    assert "http://127.0.0.1:9: it cannot be reached (connection refused); retrying for 1 s" in said
    with serving() as server:
        said = run("--overwrite", "--url", server.url, "--labels", "a,b", task="classify", code=1)
    assert "log-probabilities need token ids" in said


def test_a_path_that_a_server_does_not_have_stops_the_job(table):
    """404 comes of a wrong URL or a wrong name: every record would get it."""
    with serving(ids=False, fault=lambda path, body, number: (404, {}, {"error": "no such path"})) as server:
        said = run("--raw", "--url", server.url, code=1)
    assert "there is no such model or path" in said and "no such path" in said and len(server.requests) < 20


def test_a_request_that_is_not_answered_in_time_is_tried_again_within_a_bound():
    """Of one that hangs for ever there are five tries; the others go on."""
    hung = Counter()
    release = threading.Event()

    def fault(path, body, number):
        if "hang" in body["prompt"]:
            hung[body["prompt"]] += 1
            release.wait(300)

    with serving(ids=False, fault=fault) as server:
        none = np.empty(0, np.int32)
        of_bytes = SimpleNamespace(prefix_ids=none, suffix_ids=none, decode=lambda ids: bytes(ids.tolist()).decode())
        replicas = HttpReplicas([server.url], "m", of_bytes, takes_ids=False, timeout=0.4)
        with closing(Fleet(replicas)) as fleet, Spool() as spool:
            for text in (b"hang", b"one", b"two"):
                tokens = np.frombuffer(text, np.uint8).astype(np.int32)
                spool.add(Request(tokens, sampling=Sampling(max_tokens=3)), text)
            found = dict(fleet.run(spool.windows(max_tokens=100), Readout("tokens"), object()))
        release.set()
    assert hung == {"hang": 5} and "no answer after 5 attempts" in str(found[b"hang"])
    assert found[b"hang"].code == "no_answer" and found[b"one"][0].text.startswith("3 of one")


def test_a_tokenizer_that_was_asked_for_is_taken_or_is_an_error(tmp_path, monkeypatch):
    """A built-in model holds its tokenizer in its one file; a shape of the same name has none."""
    tiny_checkpoint(tmp_path, "llama").rename(tmp_path / "named")
    monkeypatch.setattr("prefold.checkpoint.checkpoint.fetch", lambda *_: tmp_path / "named")
    assert not is_of_bytes(remote_model("m", "smollm2-135m")[1])
    with pytest.raises(CheckpointError, match="qwen3-8b has no tokenizer; remove --tokenizer"):
        remote_model("m", "qwen3-8b")


def test_the_journal_knows_the_backend_and_the_model_and_not_the_servers(table):
    with serving(ids=False) as one, serving(ids=False) as two:
        run("--raw", "--url", one.url, "--limit", 20)
        assert "20 of them before" in run("--raw", "--url", one.url, "--url", two.url, "--max-running", "3")
    assert_answered(output())
    folder = tiny_checkpoint(table, "llama")
    said = run("--raw", model=folder, code=1)
    assert "belongs to another job" in said and "model" in said


def test_a_package_that_is_not_there_is_named_with_its_extra(table, monkeypatch):
    for package, extra, option in (("ray", "ray", "--ray"), ("httpx", "http", "--url=http://localhost:1")):
        modules = {"ray": ["ray_replicas"], "httpx": ["http_host"]}[package]
        monkeypatch.setitem(sys.modules, package, None)
        for module in modules:
            monkeypatch.delitem(sys.modules, f"prefold.cluster.{module}", raising=False)
        folder = tiny_checkpoint(table / package, "llama")
        assert f"pip install 'prefold[{extra}]'" in run("--raw", option, model=folder, code=1)


@pytest.mark.parametrize(
    "request_, field",
    [
        (Request(np.array([5, 1 << 30], np.int32), sampling=Sampling()), "image"),
        (Request(np.array([5], np.int32), sampling=Sampling(exit_threshold=0.5)), "exit_threshold"),
        (Request(np.array([5], np.int32), sampling=Sampling(logprobs=1)), "logprobs"),
        (Request(np.array([5], np.int32), sampling=Sampling(grammar=Grammar("lark", "x"))), "lark"),
    ],
)
def test_nothing_that_is_asked_for_is_left_out_silently(request_, field):
    with pytest.raises(InputError, match="a server cannot be asked for") as found:
        generation_body(request_, "m", None, True)
    assert found.value.field == field and found.value.code == "unsupported" and "--url" in found.value.remedy


# One of each field of Exits, by the name that requests have for it.
EXITS = {"exit_threshold": 0.5, "min_visits": 2, "max_visits": 1, "exit_change": 0.1, "exit_prompts": True,
         "route": (0, 1), "exit_visits": (3, 1)}  # fmt: skip


@pytest.mark.parametrize("name", EXITS)
def test_exits_and_routes_are_not_left_out_silently(name):
    assert len(EXITS) == len(dataclasses.fields(Exits))
    sampling = Sampling(**{name: EXITS[name]})
    request, exits = Request(np.array([5], np.int32), np.array([6], np.int32), sampling=sampling), sampling.exits
    asked = (
        lambda: generation_body(request, "m", None, True),
        lambda: embedding_bodies([request], Readout("last", exits=exits), "m", None),
        lambda: logprob_bodies(request, Readout("logprobs", exits=exits), "m"),
    )
    for ask in asked:
        with pytest.raises(InputError, match=f"a server cannot be asked for {name}"):
            ask()


def test_what_a_server_cannot_do_is_an_error_of_that_record(table):
    with serving(ids=False) as server:
        run("--raw", "--url", server.url, "--regex", "[a-z]+")
        assert not server.requests
    found = output()
    assert all(found[i]["error"]["code"] == "unsupported" and "regex" in found[i]["error"]["message"] for i in (0, 9))


@pytest.mark.slow
def test_prefold_serve_gives_what_the_model_gives_here(table):
    folder = tiny_checkpoint(table, "llama")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "prefold", "serve", "-m", str(folder), "--port", "0", "--threads", "1"]
    arguments += ["--served-model-name", "tiny"]
    run("--raw", "--limit", NUM, model=folder, code=3)
    os.rename("out.jsonl", "here.jsonl")
    with subprocess.Popen(arguments, env=environment, stderr=-1, text=True) as server:
        try:
            url = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
            time.sleep(0.2)
            run("--raw", "--overwrite", "--url", url.rstrip("/.,;"), "--tokenizer", folder, model="tiny")
        finally:
            server.terminate()
    here, there = output("here.jsonl"), output()
    for i in here:
        assert here[i].get("text") == there[i].get("text")


@pytest.mark.parametrize("kind", ["logprobs", "logits"])
def test_numbers_are_read_out_of_a_prompts_logprobs(kind):
    from prefold.cluster.fleet import Fleet
    from prefold.cluster.http_host import HttpReplicas

    rng = np.random.default_rng(0)
    requests = []
    for _ in range(60):
        tokens, count = rng.integers(8, 40, rng.integers(4, 12)).astype(np.int32), int(rng.integers(1, 4))
        targets = np.append(tokens[len(tokens) - count + 1 :], rng.integers(8, 40)).astype(np.int32)
        requests.append(Request(tokens, targets if kind == "logprobs" else None))
    readout = Readout(kind, (9, 21, 33) if kind == "logits" else ())
    with serving() as server, Spool() as spool:
        fleet = Fleet(HttpReplicas([server.url], "m", None))
        for number, request in enumerate(requests):
            spool.add(request, number.to_bytes(2, "little"))
        found = {int.from_bytes(tag, "little"): one for tag, one in fleet.run(spool.windows(max_tokens=500), readout)}
        fleet.close()
    assert len(found) == 60
    for number, request in enumerate(requests):
        tokens, result = request.tokens.tolist(), found[number]
        if kind == "logits":
            wanted = [logprob_of(tokens, id_) for id_ in readout.ids]
        else:
            whole, count = [*tokens, int(request.targets[-1])], len(request.targets)
            wanted = [logprob_of(whole[:at], whole[at]) for at in range(len(whole) - count, len(whole))]
            assert result.greedy.tolist() == [value > -1 for value in wanted]
        np.testing.assert_allclose(result.values, wanted)


def test_a_server_without_a_prompts_logprobs_is_told_of(table):
    write_tokenizer(table / "named")
    (table / "named" / "config.json").write_text('{"model_type": "a_family_that_is_new"}')
    answer = (200, {}, {"choices": [{"text": "x"}]})
    with serving(fault=lambda *_: answer) as server:
        run("--url", server.url, "--tokenizer", "named", "--labels", "yes,no", task="classify")
    assert all(
        "no log-probabilities of the prompt" in line["error"]["message"] for i, line in output().items() if i != 3
    )


@pytest.mark.parametrize("answer", [{"error": "quota"}, {"choices": [{}]}, {"choices": 5}, [], "<html>", None])
def test_a_200_that_is_no_answer_is_an_error_of_its_record(table, answer):
    def fault(path, body, number):
        return (200, {}, answer) if body["prompt"].endswith(" 7") else None

    with serving(ids=False, fault=fault) as server:
        run("--raw", "--url", server.url)
    found = output()
    assert "the response cannot be read" in found[7]["error"]["message"]
    assert_answered(found, wrong=(3, 5, 7))


def test_vectors_that_are_none(table):
    def fault(path, body, number):
        return 200, {}, {"data": [{"index": 0}]}

    with serving(ids=False, fault=fault) as server:
        run("--url", server.url, task="embed")
    assert all("error" in line for line in output().values())
