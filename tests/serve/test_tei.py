"""TEI's paths, and vLLM's of the same tasks, over a real socket."""

from __future__ import annotations

import base64
import threading

import httpx
import numpy as np
import pytest
from serving import dress, serving
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.serve import limits

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
    assert post("/embed", inputs=long).status_code == 422
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
    assert post("/tokenize", inputs=text, prompt_name=None).json() == [found]
    found = post("/tokenize", prompt=text, return_token_strs=True).json()  # vLLM's
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 512)
    assert found["token_strs"] == ["yes", ",", "Ġthe", "Ġ", "n", "Ã", "¶"]
    assert post("/tokenize", prompt=text, truncate_prompt_tokens=3).json()["tokens"] == ids[-3:]
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
    handler, seen = server.state.handler, []

    def noted(real):
        def call(*arguments, **options):
            seen.append(
                (threading.current_thread().name.startswith("prefold-prepare"), len(handler.backpressure._preparing))
            )
            return real(*arguments, **options)

        return call

    for name in ("encode", "encode_batch", "decode_batch", "located"):
        monkeypatch.setattr(handler.llm.tokenizer, name, noted(getattr(handler.llm.tokenizer, name)))
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
        assert found.status_code in (400, 422) and "holds more than 512 tokens" in found.text, (path, found.text)
    for path, name, one in (("/tokenize", "inputs", "a"), ("/decode", "ids", [5])):
        found = post(path, **{name: [one] * 4097})
        assert found.status_code == 422 and "send at most 4096 at once" in found.text, found.text


def test_info_and_errors(server, post):
    info = httpx.get(f"{server.url}/info").json()
    assert info["served_model_name"] == "tiny"
    assert info["model_type"] == {"embedding": {"pooling": "last_token"}} and info["max_input_length"] == 512
    for body, status, kind in (
        ({"inputs": []}, 400, "Empty"),
        ({"inputs": ""}, 400, "Empty"),
        ({"inputs": "a" * 3000}, 422, "Validation"),
        ({"inputs": {"a": 1}}, 422, "Validation"),
        ({"inputs": "a", "truncate": 5}, 422, "Validation"),
        ({"inputs": "a", "dimensions": 100000}, 422, "Validation"),
        ({"inputs": "a", "prompt_name": "none"}, 422, "Validation"),
        ({"input": "a"}, 422, "Validation"),
    ):
        found = post("/embed", **body)
        assert (found.status_code, found.json()["error_type"]) == (status, kind), (body, found.text)
    found = post("/rerank", query="a", texts=[])
    assert (found.status_code, found.json()["error_type"]) == (400, "Empty")
    for path, body in (("/predict", {"inputs": "a"}), ("/", {"inputs": "a", "parameters": {"top_k": 2}})):
        found = post(path, **body)
        assert (found.status_code, found.json()["error_type"]) == (424, "Backend")
        assert "no classification head" in found.json()["error"]
    assert httpx.get(f"{server.url}/embed").json()["error_type"] == "Validation"
    too_large = {"inputs": "a" * (server.state.options.max_body_bytes + 1)}
    assert post("/embed", **too_large).status_code == 413


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A server of a model without a head, which has a prompt, and whose texts end with a special token."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("embedder"), "qwen3", head="bare")
    dress(folder)
    with serving(LLM(str(folder), dtype="float32")) as made:
        yield made


def test_what_an_embedder_answers(embedder):
    llm = embedder.state.handler.llm
    ask = lambda path, **body: httpx.post(embedder.url + path, json=body)  # noqa: E731
    found = ask("/rerank", query="a", texts=["b"])
    assert (found.status_code, found.json()["error_type"]) == (424, "Backend"), found.text
    # The tokenizer needs no logits.
    ids = llm.tokenizer.encode("no the").tolist()
    assert ask("/tokenize", prompt="no the").json()["tokens"] == ids
    assert ask("/tokenize", prompt="no the", add_special_tokens=False).json()["tokens"] == ids[:-1]
    assert ask("/tokenize", prompt="no the", truncate_prompt_tokens=2).json()["tokens"] == ids[-2:]
    assert ask("/tokenize", prompt="yes " * 600, truncate_prompt_tokens=-1).json()["count"] == 512
    chat = llm.tokenizer.encode(llm.tokenizer.render_chat(CHAT, add_generation_prompt=True), False).tolist()
    assert ask("/tokenize", messages=CHAT).json()["tokens"] == chat
    assert ask("/tokenize", messages=CHAT, truncate_prompt_tokens=5).json()["tokens"] == chat[-5:]
    assert ask("/v1/chat/completions", messages=CHAT).status_code == 400
    # The checkpoint's prompts are those of /embed.
    (found,) = ask("/tokenize", inputs="no", prompt_name="query").json()
    assert [one["id"] for one in found] == llm.tokenizer.encode("yes: no").tolist()
    assert [one["text"] for one in found][:2] == ["yes", ":"]
    found = ask("/tokenize", inputs="no", prompt_name="none")
    assert found.status_code == 422 and "none" in found.json()["error"]


def test_a_classifier_reads_pairs(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path, "qwen3", head="classifier", num_labels=3)), dtype="float32")
    with serving(llm) as server:
        ask = lambda path, **body: httpx.post(server.url + path, json=body)  # noqa: E731
        ids = lambda text: llm.tokenizer.encode(text, False).tolist()  # noqa: E731
        expected = dict(llm.classify(ids("the yes") + ids("no")).probabilities)
        scores = lambda found: {one["label"]: one["score"] for one in found}  # noqa: E731
        assert scores(ask("/predict", inputs=["the yes", "no"]).json()) == pytest.approx(expected, abs=1e-6)
        many = ask("/predict", inputs=[["the yes", "no"], ["no"]]).json()
        assert scores(many[0]) == pytest.approx(expected, abs=1e-6) and len(many) == 2
        assert scores(many[1]) == pytest.approx(dict(llm.classify("no").probabilities), abs=1e-6)
        assert scores(ask("/predict", inputs=["no"]).json()) == pytest.approx(scores(many[1]), abs=1e-6)
        for inputs in (["a", "b", "c"], [["a", "b", "c"]], [["a"], "b"], [[]], 5):
            found = ask("/predict", inputs=inputs)
            assert (found.status_code, found.json()["error_type"]) == (422, "Validation"), inputs
        # The longer of two texts is cut.
        long = ["yes no " * 300, "no"]
        assert ask("/predict", inputs=long).status_code == 422
        whole = ids(long[0])[: 512 - len(ids("no"))] + ids("no")
        found = ask("/predict", inputs=long, truncate=True).json()
        assert scores(found) == pytest.approx(dict(llm.classify(whole).probabilities), abs=1e-6)
        for path, body in (("/embed", {"inputs": "a"}), ("/embed_all", {"inputs": "a"}),
                           ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
                           ("/rerank", {"query": "a", "texts": ["b"]})):  # fmt: skip
            found = ask(path, **body)
            assert (found.status_code, found.json()["error_type"]) == (424, "Backend"), found.text


def test_classifier(tmp_path, prepare_by):
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
        waiting = []

        def noted(prepare, handler, order):
            waiting.append(handler.backpressure.waiting[0])
            return prepare(handler, order)

        prepare_by(noted)
        server.state.handler.backpressure.most_running = 0
        many = httpx.post(f"{server.url}/predict", json={"inputs": [["the yes"], ["no"]]}).json()
        assert waiting == [1]  # one request, however many texts it has
        assert many[0][0]["score"] == pytest.approx(found[0]["score"], abs=1e-6) and len(many) == 2
        assert httpx.get(f"{server.url}/info").json()["model_type"]["classifier"]["id2label"]["2"] == "odd"
        found = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert found.status_code == 400 and "classification head" in found.json()["error"]["message"]


def test_vllms_classify_and_pooling(tmp_path, server, llm):
    made = LLM(str(tiny_checkpoint(tmp_path, "qwen3", head="classifier", num_labels=3)), dtype="float32")
    with serving(made, served_names=("tiny",)) as classifier:
        ask = lambda path, **body: httpx.post(classifier.url + path, json=body)  # noqa: E731
        found = ask("/classify", input=TEXTS, model="tiny").json()
        assert set(found) == {"id", "object", "created", "model", "data", "usage"} and found["object"] == "list"
        assert found["usage"]["prompt_tokens"] == sum(len(made.tokenizer.encode(text)) for text in TEXTS)
        pooled = ask("/pooling", input=TEXTS).json()["data"]
        for i, (text, one) in enumerate(zip(TEXTS, found["data"], strict=True)):
            expected = made.classify(text)
            assert (one["index"], one["label"], one["num_classes"]) == (i, expected.label, 3)
            assert one["probs"] == pytest.approx([*expected.probabilities.values()], abs=1e-6)
            assert (pooled[i]["index"], pooled[i]["object"]) == (i, "pooling")
            assert pooled[i]["data"] == pytest.approx(one["probs"], abs=1e-6)
        logits = np.array(ask("/classify", input=TEXTS[0], use_activation=False).json()["data"][0]["probs"])
        assert (np.exp(logits) / np.exp(logits).sum()).tolist() == pytest.approx(found["data"][0]["probs"], abs=1e-5)
        long = "the yes no " * 300
        assert ask("/classify", input=long).status_code == 400
        assert ask("/classify", input=long, truncate_prompt_tokens=7).json()["usage"]["prompt_tokens"] == 7
        for body, name in (
            ({"dimensions": 5}, "dimensions"),
            ({"task": "embed"}, "task"),
            ({"messages": []}, "messages"),
        ):
            assert ask("/pooling", input="a", **body).json()["error"]["param"] == name
    ask = lambda path, **body: httpx.post(server.url + path, json=body)  # noqa: E731
    found = ask("/pooling", input=TEXTS, dimensions=7).json()["data"]
    np.testing.assert_allclose([one["data"] for one in found], llm.embed(TEXTS, dimensions=7), atol=1e-6)
    (found,) = ask("/pooling", input="the", encoding_format="base64", use_activation=False).json()["data"]
    values = np.frombuffer(base64.b64decode(found["data"]), "<f4")
    np.testing.assert_allclose(values, llm.embed("the", normalize=False), rtol=1e-4, atol=1e-4)
    found = ask("/classify", input="the")
    assert found.status_code == 400 and "no classification head" in found.json()["error"]["message"]
    assert ask("/pooling", input="the", task="token_embed").json()["error"]["param"] == "task"
