"""TEI's paths, over a real socket."""

from __future__ import annotations

import threading

import httpx
import numpy as np
import pytest
from serving import serving
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.serve import limits
from prefold.serve.desk import Desk

TEXTS = ["yes no", "the", "no the yes"]
CHAT = [{"role": "user", "content": "is it the one? yes or no"}]


@pytest.fixture(scope="module")
def post(server):
    with httpx.Client(base_url=server.url) as client:
        yield lambda path, **body: client.post(path, json=body)


def test_embed(post, llm):
    np.testing.assert_allclose(post("/embed", inputs=TEXTS).json(), llm.embed(TEXTS), atol=1e-6)
    one = post("/embed", inputs="the", normalize=False, dimensions=7).json()
    np.testing.assert_allclose(one, [llm.embed("the", normalize=False, dimensions=7)], atol=1e-5)
    long = "the yes no " * 300
    assert post("/embed", inputs=long).status_code == 413
    expected = llm.embed(long, truncate="left")
    found = post("/embed", inputs=long, truncate=True, truncation_direction="Left").json()
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


def test_embed_all_is_every_hidden_state(post, llm):
    import torch

    model = reference(llm.folder, attention="sdpa").base_model
    found = post("/embed_all", inputs=TEXTS).json()
    for text, rows in zip(TEXTS, found, strict=True):
        ids = torch.tensor(llm.tokenizer.encode(text).tolist())[None]
        expected = model(ids).last_hidden_state[0].detach().numpy()
        np.testing.assert_allclose(rows, expected, atol=1e-4)


def test_rerank_similarity(post, llm):
    ranking = llm.rerank("is it", TEXTS)
    found = post("/rerank", query="is it", texts=TEXTS, return_text=True).json()
    assert [one["index"] for one in found] == list(ranking.order)
    assert [one["text"] for one in found] == [TEXTS[i] for i in ranking.order]
    assert [one["score"] for one in found] == pytest.approx([ranking.scores[i] for i in ranking.order], abs=1e-6)
    raw = post("/rerank", query="is it", texts=TEXTS, raw_scores=True).json()
    expected = llm.rerank("is it", TEXTS, raw_scores=True)
    assert raw[0]["score"] == pytest.approx(expected.scores[expected.order[0]], rel=1e-5)
    vectors = llm.embed(["is it", *TEXTS])
    found = post("/similarity", inputs={"source_sentence": "is it", "sentences": TEXTS}).json()
    assert found == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)


def test_tokens(post, llm):
    text = "yes, the nö"
    ids = llm.tokenizer.encode(text).tolist()
    (found,) = post("/tokenize", inputs=text).json()
    assert [one["id"] for one in found] == ids
    assert "".join(one["text"] for one in found[:3]) == text[: found[2]["stop"]]
    assert post("/decode", ids=ids).json() == [text]
    assert post("/decode", ids=[ids, ids[:1]]).json() == [text, llm.tokenizer.decode(ids[:1])]
    found = post("/tokenize", prompt=text, return_token_strs=True).json()  # vLLM's
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 512)
    assert post("/detokenize", tokens=ids).json() == {"prompt": text}
    chat = post("/tokenize", messages=CHAT).json()["tokens"]
    assert chat == llm.tokenizer.encode(llm.tokenizer.render_chat(CHAT, add_generation_prompt=True), False).tolist()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": "yes no " * 1000}),
        ("/tokenize", {"prompt": "yes " * 99, "add_special_tokens": False, "user": "a" * 5000}),
        ("/tokenize", {"prompt": "yes " * 99, "return_token_strs": True, "user": "a" * 5000}),
        ("/decode", {"ids": [5] * 5000}),
        ("/detokenize", {"tokens": [5] * 5000}),
        ("/v1/messages/count_tokens", {"messages": CHAT, "metadata": {"a": "a" * 5000}}),
    ],
)  # fmt: skip
def test_what_needs_no_engine_is_counted_and_leaves_the_event_loop(server, post, monkeypatch, path, body):
    desk, seen = server.site.desk, []

    def noted(real):
        def call(*arguments, **options):
            seen.append((threading.current_thread().name.startswith("prefold-prepare"), desk.room.num_preparing))
            return real(*arguments, **options)

        return call

    for name in ("encode", "encode_batch", "decode_batch", "located"):
        monkeypatch.setattr(desk.llm.tokenizer, name, noted(getattr(desk.llm.tokenizer, name)))
    assert post(path, **body).status_code == 200
    assert seen and set(seen) == {(True, 1)}


def test_too_many_tokens_are_refused(server, post, monkeypatch):
    monkeypatch.setattr(limits, "MOST_TOKENS", 0)  # then those that the model takes: 512
    for path, body in (
        ("/tokenize", {"inputs": "yes no " * 300}),
        ("/tokenize", {"inputs": ["yes no " * 100] * 4}),
        ("/tokenize", {"prompt": "yes no " * 300, "add_special_tokens": False}),
        ("/decode", {"ids": [[5] * 300] * 2}),
        ("/detokenize", {"tokens": [5] * 600}),
    ):
        found = post(path, **body)
        assert found.status_code in (400, 413) and "holds more than 512 tokens" in found.text, (path, found.text)
    for path, name, one in (("/tokenize", "inputs", "a"), ("/decode", "ids", [5])):
        found = post(path, **{name: [one] * 4097})
        assert found.status_code == 413 and "send at most 4096 at once" in found.text, found.text


def test_info_and_errors(server, post):
    info = httpx.get(f"{server.url}/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "last_token"}} and info["max_input_length"] == 512
    for body, status, kind in (
        ({"inputs": []}, 400, "empty"),
        ({"inputs": ""}, 400, "empty"),
        ({"inputs": "a" * 3000}, 413, "validation"),
        ({"inputs": {"a": 1}}, 422, "tokenizer"),
        ({"inputs": "a", "truncate": 5}, 422, "tokenizer"),
    ):
        found = post("/embed", **body)
        assert (found.status_code, found.json()["error_type"]) == (status, kind), (body, found.text)
    found = post("/rerank", query="a", texts=[])
    assert (found.status_code, found.json()["error_type"]) == (400, "empty")
    assert post("/predict", inputs="a").status_code in (413, 422)  # the model has no classification head


def test_classifier(tmp_path, monkeypatch):
    labels = {0: "bad", 1: "good", 2: "odd"}
    folder = tiny_checkpoint(tmp_path, "qwen3", head="classifier", num_labels=3, id2label=labels,
                             label2id={v: k for k, v in labels.items()})  # fmt: skip
    llm = LLM(str(folder), dtype="float32")
    expected = llm.classify("the yes")
    with serving(llm) as server:
        found = httpx.post(f"{server.url}/predict", json={"inputs": "the yes"}).json()
        assert found[0]["label"] == expected.label
        scores = {one["label"]: one["score"] for one in found}
        assert scores == pytest.approx(dict(expected.probabilities), abs=1e-6)
        waiting, prepare = [], Desk._prepare
        noted = lambda self, order: waiting.append(self.room.waiting[0]) or prepare(self, order)  # noqa: E731
        monkeypatch.setattr(Desk, "_prepare", noted)
        many = httpx.post(f"{server.url}/predict", json={"inputs": [["the yes"], ["no"]]}).json()
        assert waiting == [1]  # one request, however many texts it has
        assert many[0][0]["score"] == pytest.approx(found[0]["score"], abs=1e-6) and len(many) == 2
        assert httpx.post(f"{server.url}/predict", json={"inputs": ["a", "b"]}).status_code == 422  # a pair
        assert httpx.get(f"{server.url}/info").json()["model_type"]["classifier"]["id2label"]["2"] == "odd"
        found = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert found.status_code == 400 and "classification head" in found.json()["error"]["message"]
