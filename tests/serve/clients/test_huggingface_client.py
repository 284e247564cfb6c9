"""huggingface_hub's InferenceClient, unchanged, over a real socket."""

from __future__ import annotations

import json

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from serving import serving
from tiny import tiny_checkpoint

from prefold import LLM

TEXTS = ["yes no", "the", "no the yes"]
CHAT = [{"role": "user", "content": "is it the one? yes or no"}]


def test_inference_client(server, llm):
    client = InferenceClient(server.url)
    np.testing.assert_allclose(client.feature_extraction("the"), [llm.embed("the")], atol=1e-6)
    vectors = llm.embed(["is it", *TEXTS])
    found = client.sentence_similarity("is it", TEXTS)
    assert found == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)
    endpoint = InferenceClient(server.url, provider="hf-inference")
    assert endpoint.get_endpoint_info()["served_model_name"] == "tiny" and endpoint.health_check()
    expected = llm.chat(CHAT, max_tokens=8)
    found = client.chat_completion(CHAT, max_tokens=8, temperature=0)
    assert found.choices[0].message.content == expected.text
    pieces = client.chat_completion(CHAT, max_tokens=8, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == expected.text
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    found = client.chat_completion(CHAT, max_tokens=120, response_format=form)
    assert json.loads(found.choices[0].message.content)["a"] in ("yes", "no")


def test_text_classification(tmp_path):
    labels = {0: "bad", 1: "good", 2: "odd"}
    names = {"id2label": labels, "label2id": {name: i for i, name in labels.items()}}
    llm = LLM(str(tiny_checkpoint(tmp_path, "qwen3", head="classifier", num_labels=3, **names)), dtype="float32")
    expected = llm.classify("the yes").probabilities
    with serving(llm) as server:
        client = InferenceClient(server.url)
        found = client.text_classification("the yes", top_k=2)
        logits = client.text_classification("the yes", function_to_apply="none")
        sigmoids = client.text_classification("the yes", function_to_apply="sigmoid")
    assert [one.label for one in found] == sorted(expected, key=expected.__getitem__)[::-1][:2]
    assert [one.score for one in found] == pytest.approx([expected[one.label] for one in found], abs=1e-6)
    assert [one.label for one in logits] == sorted(expected, key=expected.__getitem__)[::-1]
    raw = np.array([one.score for one in logits])
    assert (np.exp(raw) / np.exp(raw).sum()).tolist() == pytest.approx(sorted(expected.values())[::-1], abs=1e-5)
    assert [one.score for one in sigmoids] == pytest.approx((1 / (1 + np.exp(-raw))).tolist(), abs=1e-6)


def test_what_the_model_cannot_answer_says_so(server):
    client = InferenceClient(server.url)
    with pytest.raises(HfHubHTTPError, match="no classification head") as caught:
        client.text_classification("good")
    assert caught.value.response.status_code == 424
    with pytest.raises(Exception, match="max_new_tokens"):
        client.text_generation("good", max_new_tokens=5)
