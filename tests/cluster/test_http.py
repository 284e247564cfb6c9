"""Jobs on servers: real HTTP, and the faults that servers have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import pytest
from click.testing import CliRunner
from tiny import tiny_checkpoint, write_tokenizer

from prefold.cli import main

from .servers import serving

NUM = 200


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


def test_texts_go_to_several_servers(table):
    with serving(ids=False, seconds=0.005) as one, serving(ids=False, seconds=0.005) as two:
        said = run("--raw", "--url", one.url, "--url", two.url + "/v1/", "--temperature", "0.5", "--seed", "1")
    found = output()
    assert_answered(found)
    assert found[5]["error"]["code"] == "http_400" and "this prompt is not allowed" in found[5]["error"]["message"]
    assert one.url in found[5]["error"]["message"] or two.url in found[5]["error"]["message"]
    assert min(len(one.requests), len(two.requests)) > NUM // 5
    assert len(one.requests) + len(two.requests) == NUM - 1
    path, body = one.requests[0]
    assert path == "/v1/completions" and body["temperature"] == 0.5 and body["max_tokens"] == 7 and body["seed"] > 0
    assert "2 of 2 at the end" in said
    groups = [body["prompt"][:17] for _, body in one.requests]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes < 20, "what is shared is sent together"


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
        return (429, {"Retry-After": "1.5"}, {"error": "wait"}) if number == 0 else None

    with serving(ids=False, fault=fault) as server:
        run("--raw", "--url", server.url)
    assert_answered(output())
    pause = max(b - a for a, b in pairwise(server.times))
    assert 1.0 < pause < 4


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
    assert "is lost: it cannot be reached" in said


def test_what_stops_a_job_at_once(table, monkeypatch):
    with serving(ids=False, models=("other", "more")) as server:
        said = run("--raw", "--url", server.url, code=1)
        assert "no model 'm'; those it has: other, more" in said and "To go on:" in said
    with serving(ids=False, key="secret") as server:
        assert "the key was refused" in run("--raw", "--url", server.url, code=1)
        monkeypatch.setenv("PREFOLD_API_KEY", "secret")
        said = run("--raw", "--url", server.url, "--report", "page.html")
    assert_answered(output())
    for path in table.iterdir():
        if path.is_file():
            assert b"secret" not in path.read_bytes()
    assert "secret" not in said


def test_bad_options(table):
    assert "exclude each other" in run("--url", "http://localhost:1", "--ray", code=2)
    assert "write --ray behind it" in run("--ray", "in.jsonl", code=2)
    assert "--replicas needs --ray" in run("--replicas", "2", code=2)
    assert "--tokenizer needs --url" in run("--tokenizer", "x", "--ray", code=2)
    assert "is not the URL of a server" in run("--url", "localhost:80", code=1)
    said = run("--url", "http://me:word@localhost:1", code=1)
    assert "PREFOLD_API_KEY" in said and "word" not in said
    assert "cannot be reached" in run("--url", "http://127.0.0.1:9", "--patience", "1", code=1)
    with serving() as server:
        said = run("--overwrite", "--url", server.url, "--labels", "a,b", task="classify", code=1)
    assert "generates text and makes embeddings" in said


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
