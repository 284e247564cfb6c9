"""The page: what it is made of, and, where there is a chromium, what a person sees."""

from __future__ import annotations

import json
import re
import threading

import httpx
import numpy as np
import pytest
from browsers import COUNT_CALLS
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import serving

from prefold import LLM
from prefold.engine.cache.listing import paths_of
from prefold.engine.cache.tree import RowTrie
from prefold.jobs.report.icicle import icicle, walk
from prefold.jobs.report.page import TreeShape
from prefold.spec.requests import Namespace
from prefold.trie import token_bytes

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=40)


# -------------------------------------------------------------------------------------------------- the tree's shape


@settings(max_examples=150)
@given(several=st.lists(PROMPTS, min_size=1, max_size=3), most=st.sampled_from([3, 1000]))
def test_every_row_of_a_tree_is_in_its_shape_once(several, most):
    tree = RowTrie()
    for number, prompts in enumerate(several):
        for prompt in prompts:
            tree.insert((None, str(number)), token_bytes(prompt))
    shape = TreeShape(paths_of(tree, {}, most=most + 1), lambda namespace: namespace[1], most=most)
    prefixes = {
        (n, *prompt[:i]) for n, prompts in enumerate(several) for prompt in prompts for i in range(1, len(prompt) + 1)
    }
    leaves = [one for one in prefixes if not any(other[:-1] == one for other in prefixes)]
    assert len(shape.owners) == min(most, len(leaves))
    if shape.is_whole:
        assert shape.num_rows == len(prefixes)
        assert sorted(shape.owners) == sorted(str(leaf[0]) for leaf in leaves)
    for node, _ in walk(icicle(shape, max_nodes=1000)):
        if node.length:
            paths = [
                (int(shape.owners[path]), *shape._between(path, 0, node.start + node.length).tolist())
                for path in range(node.first, node.first + node.prompts)
            ]
            assert set(paths) <= prefixes and len(set(paths)) == 1
            assert shape.tokens_of(node, 99).tolist() == list(paths[0][1 + node.start :])


def test_sequences_that_run_are_paths_of_their_own():
    tree = RowTrie()
    above = tree.insert(("", ""), token_bytes([1, 2]))
    tree.insert(("", ""), token_bytes([1, 2, 3]))
    shape = TreeShape(paths_of(tree, {above: [[5, 6], [7]]}, most=9), lambda _: "a", most=9)
    lengths, shared = shape.arrays()
    assert lengths.tolist() == [4, 3, 3] and shared.tolist() == [0, 2, 2]
    made = shape.data(lambda tokens: " ".join(map(str, tokens.tolist())))
    assert [row[-2:] for row in made["nodes"]] == [[2, ""], [2, "a"], [1, "a"], [1, "a"], [0, "a"]]
    assert made["parting"] == [("a", "1 2", 2, 3, 3)]


# ----------------------------------------------------------------------------------------------------- over HTTP


def test_the_page_loads_nothing_from_elsewhere(server):
    found = httpx.get(server.url)
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/html")
    assert "http://" not in found.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in found.text
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    assert "/*" not in re.sub(r"/\*[a-z .]", "", found.text)  # every place was filled


def test_its_data(server, llm):
    llm.engine.generator.scheduler.cache.clear()
    prompts = ["the yes no yes", "the yes no no", "the yes yes"]
    for prompt in prompts:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}).raise_for_status()
    found = httpx.get(f"{server.url}/page/data").json()
    assert found["paths"] >= 3 and found["whole"] and found["rows"] < found["tokens"]
    assert found["model"] == "tiny" and found["status"] == "ready" and len(found["steps"]) > 2
    assert any("the yes" in parting[1] for parting in found["parting"])
    assert sum(row[6] != 0 for row in found["nodes"]) == 0


def test_tokens_of_requests_that_run_are_counted(llm, slow_steps):
    """As their rows are: else the page says that more rows were computed than tokens were asked for."""
    slow_steps(llm.engine.worker, 0.005)
    with serving(llm) as server:
        llm.engine.generator.scheduler.cache.clear()
        before = httpx.get(f"{server.url}/page/data").json()["computed"]
        body = {"prompt": "the yes no yes " * 10, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_raw())
            now = httpx.get(f"{server.url}/page/data").json()
    assert len(now["running"]["sequences"]) == 1
    rows, tokens = (now["computed"][name] - before[name] for name in ("rows", "tokens"))
    assert tokens >= rows > 40


@pytest.mark.parametrize("sharing", ["full", "mlp"])
def test_a_look_makes_no_store(llm, sharing, tmp_path):
    """Nothing was asked of the model yet."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nkey = "a"\ntenant = "boss"\nadmin = true\n')
    with (
        LLM(str(llm.folder), dtype="float32", sharing=sharing) as own,
        serving(own, api_keys=str(keys)) as server,
        httpx.Client(base_url=server.url, headers={"authorization": "Bearer a"}) as client,
    ):
        found = client.get("/page/data").json()
        assert found["slots"] == [0, 0] and found["nodes"] == [] and found["paths"] == 0
        assert client.get("/cache").json()["rows"]["kept"] == 0
        server.state.reload_keys()
        assert not own.engine.snapshot().slots
        assert client.post("/v1/embeddings", json={"input": "yes"}).status_code == 200
        assert own.engine.snapshot().slots


def test_it_is_for_admins(llm, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nkey = "a"\ntenant = "boss"\nadmin = true\n[[key]]\nkey = "b"\ntenant = "b"\n')
    llm.engine.generator.scheduler.cache.clear()
    with serving(llm, api_keys=str(keys), served_names=("tiny",)) as server:
        assert httpx.get(server.url).status_code == 200
        ask = {key: {"authorization": f"Bearer {key}"} for key in "ab"}
        codes = [httpx.get(f"{server.url}/page/data", headers=head).status_code for head in ({}, ask["b"], ask["a"])]
        assert codes == [401, 403, 200]
        for key in "ab":
            body = {"prompt": f"yes no {key}", "max_tokens": 2}
            httpx.post(f"{server.url}/v1/completions", json=body, headers=ask[key]).raise_for_status()
        whole = httpx.get(f"{server.url}/page/data", headers=ask["a"]).json()
        assert whole["tenants"] == ["b", "boss"] and {row[9] for row in whole["nodes"]} == {"", "b", "boss"}
        part = httpx.get(f"{server.url}/page/data?tenant=b", headers=ask["a"]).json()
        assert {row[9] for row in part["nodes"]} == {"", "b"} and part["rows"] < whole["rows"]


# ------------------------------------------------------------------------------------------------------ in chromium


# Where there is little room.
@pytest.mark.parametrize("browser", [360, pytest.param(1200, marks=pytest.mark.slow)], indirect=True)
def test_what_a_person_sees(browser, server, llm, tmp_path):
    llm.engine.generator.scheduler.cache.clear()
    ask = lambda prompt, tokens: httpx.post(  # noqa: E731
        f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}, timeout=60
    )
    for i in range(12):
        ask(f"the yes no {'yes' if i % 3 else 'no'} {i}", 3)
    browser.call("Page.navigate", url=server.url)
    browser.wait("document.body && document.body.dataset.drawn > 1")
    before = browser.value("nodes.length")
    assert before > 12 and browser.value("blocks.length") >= 12
    width = browser.value("document.documentElement.scrollWidth - innerWidth")
    assert width <= 0, f"the page is {width} pixels too wide"
    ended = threading.Event()

    def ask_on():
        while not ended.is_set():
            ask("no no the", 450)

    thread = threading.Thread(target=ask_on)
    thread.start()
    browser.wait("nodes.some(node => node.running)")  # it changes while a request runs
    assert browser.value("document.querySelectorAll('#running tr').length") == 2
    browser.click(*browser.value("[blocks[0].x + blocks[0].w / 2, blocks[0].y + 2]"))
    assert browser.value("document.querySelectorAll('#crumbs button').length") >= 1
    drawn = browser.value("Number(document.body.dataset.drawn)")
    browser.wait(f"document.body.dataset.drawn > {drawn + 1}")
    assert browser.value("document.querySelectorAll('#crumbs button').length") >= 1  # it stays where one looked
    ended.set()
    thread.join()
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert all(url.startswith((server.url, "data:", "about:")) for url in browser.requested())
    assert browser.complaints() == []


def test_two_thousand_nodes_are_drawn_in_few_calls(browser, server):
    rng = np.random.default_rng(1)
    tree = RowTrie()
    for _ in range(1700):
        tree.insert(Namespace(), token_bytes(rng.integers(0, 3, rng.integers(5, 40))))
    shape = TreeShape(paths_of(tree, {}, most=5000), lambda _: "", most=5000)
    made = shape.data(lambda tokens: "word " * len(tokens), max_nodes=2000)
    assert len(made["nodes"]) == 2000
    browser.call("Page.navigate", url=server.url)
    browser.wait("document.body && document.body.dataset.drawn > 0")
    browser.value("stopped = true")
    browser.value(f"globalThis.many2000 = {json.dumps(made['nodes'])}; 1")
    browser.value(COUNT_CALLS)
    # All in one piece: an answer that was on its way when the page was stopped is drawn before it or after it.
    drawing = "calls = 0; lookAt(many2000); draw(nodes[0]); document.getElementById('icicle').offsetHeight"
    drawn, calls = browser.value(f"{drawing}; [blocks.length, calls]")
    assert 100 < drawn < calls < 5 * drawn


def test_the_report_of_a_job_draws_the_same_way(browser, tmp_path):
    from prefold.jobs.report.icicle import StreamShape
    from prefold.jobs.report.page import Report, StepLog, write_report

    shape, steps = StreamShape(), StepLog()
    prompts = sorted([[1, 2, i % 7, i] for i in range(3000)])
    shape.add(np.concatenate(prompts).astype(np.int32), np.arange(0, 4 * len(prompts) + 1, 4))
    steps.add(0.0, 0.5, 100, 3)
    report = Report("a job", "now", 12000, 3030, 1.0, [("rows", "1")], [("a", "b")], shape=shape, steps=steps)
    write_report(report, tmp_path / "report.html")
    browser.call("Page.navigate", url=f"file://{tmp_path / 'report.html'}")
    browser.wait("document.querySelectorAll('#icicle canvas, #steps svg').length === 2")
    assert browser.value("blocks.length") > 10
    browser.click(*browser.value("[blocks[1].x + blocks[1].w / 2, blocks[1].y + 2]"))
    assert browser.value("shown === nodes[0]") is False
    assert browser.value("document.documentElement.scrollWidth - innerWidth") <= 0
    assert browser.complaints() == []
