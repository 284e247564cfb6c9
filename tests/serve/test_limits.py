"""What strangers may not bring is refused on every way in which items come."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from batching import batch_of, client_of, completion, ended, lines_of
from serving import serving

from prefold.text.grammar_process import GrammarProcess

OWN = {"messages": [{"role": "user", "content": "yes"}], "chat_template": "{{ messages[0].content }}", "max_tokens": 1}
GRAMMAR = {"prompt": "yes", "max_tokens": 2, "guided_regex": "(yes|no)" * 100}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/cache/pin"])
@pytest.mark.parametrize("template", ["{{ messages[0].content }}", ["default"]])
def test_a_chat_template_of_a_request(llm, path, template):
    with serving(llm) as server:
        found = httpx.post(server.url + path, json=OWN | {"chat_template": template}, timeout=60)
        assert found.status_code == 400 and found.json()["error"]["param"] == "chat_template", found.text
    if isinstance(template, str):
        with serving(llm, allow_chat_template=True) as server:
            assert httpx.post(server.url + path, json=OWN, timeout=60).status_code == 200
            if path == "/cache/pin":  # the model is other tests' too
                assert httpx.post(f"{server.url}/cache/unpin", json=OWN, timeout=60).status_code == 200


@pytest.mark.parametrize("body, param", [(OWN, "chat_template"), (GRAMMAR, "guided_regex")])
def test_a_line_of_a_batch(llm, tmp_path, body, param):
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    good = completion(1)
    if "messages" in body:
        good |= {"url": url, "body": {name: value for name, value in body.items() if name != "chat_template"}}
    lines = [{"custom_id": "bad", "method": "POST", "url": url, "body": body}, good]
    with serving(llm, data_dir=str(tmp_path), max_grammar_bytes=300) as server, client_of(server) as client:
        for line in lines:
            line["body"] = line["body"] | {"model": llm.checkpoint.name}
        done = ended(client, batch_of(client, lines, url))
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        (bad,) = lines_of(client, done.error_file_id).values()
        assert bad["custom_id"] == "bad" and bad["response"]["body"]["error"]["param"] == param, bad


@pytest.mark.parametrize(
    "url, body, param",
    [
        ("/v1/embeddings", {"input": ["yes"] * 17}, "input"),
        ("/v1/completions", {"prompt": ["yes"] * 6, "n": 3, "max_tokens": 1}, "n"),
    ],
)
def test_a_line_of_a_batch_with_too_many_texts(llm, tmp_path, url, body, param):
    good = {"/v1/embeddings": {"input": ["yes"] * 16}, "/v1/completions": {"prompt": ["yes"] * 8, "n": 2}}[url]
    lines = [{"custom_id": name, "method": "POST", "url": url, "body": one} for name, one in (("a", body), ("b", good))]
    lines[1]["body"] = good | ({"max_tokens": 1} if "prompt" in good else {})
    with serving(llm, data_dir=str(tmp_path), max_texts=16) as server, client_of(server) as client:
        done = ended(client, batch_of(client, lines, url))
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        (bad,) = lines_of(client, done.error_file_id).values()
        error = bad["response"]["body"]["error"]
        assert (bad["custom_id"], error["code"], error["param"]) == ("a", "too_many", param)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {"inputs": "yes", "other": "query"}),
        ("/tokenize", {"prompt": ["yes", "no"]}),
        ("/v1/rerank", {"query": "yes", "documents": ["no"], "return_documents": "false"}),
    ],
)
def test_what_is_not_done_is_refused(server, path, body):
    found = httpx.post(server.url + path, json=body)
    assert found.status_code in (400, 422) and list(body)[-1] in found.text, found.text


def test_grammars_that_take_long_hold_up_no_other_request(llm, monkeypatch):
    release = threading.Event()

    def slow(self, source):
        assert release.wait(60)
        return "it takes more than 2 s"

    monkeypatch.setattr(GrammarProcess, "fault", slow)
    quick = {"prompt": "yes", "max_tokens": 2, "guided_regex": "yes"}
    with serving(llm) as server, ThreadPoolExecutor(6) as threads:

        def ask(body):
            return httpx.post(server.url + "/v1/completions", json=body, timeout=60)

        # More of them than there are threads that prepare requests.
        bombs = [quick | {"guided_regex": None, "guided_json": {"pattern": f"a{i}"}} for i in range(6)]
        waiting = [threads.submit(ask, body) for body in bombs]
        for body in (quick, {"prompt": "yes " * 2000, "max_tokens": 1, "truncate_prompt_tokens": 9}):
            assert ask(body).status_code == 200
        release.set()
        for found in waiting:
            error = found.result().json()["error"]
            assert error["param"] == "guided_json" and "takes more than" in error["message"]
