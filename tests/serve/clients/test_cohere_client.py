"""The `cohere` package, unchanged, over a real socket."""

from __future__ import annotations

import base64

import cohere
import numpy as np
import pytest

TEXTS = ["yes no", "the", "no the yes"]


def test_rerank(server, llm):
    expected = llm.rerank("is it", TEXTS)
    for client in (cohere.ClientV2("key", base_url=server.url), cohere.Client("key", base_url=server.url)):
        found = client.rerank(model="tiny", query="is it", documents=TEXTS, top_n=2)
        assert [one.index for one in found.results] == list(expected.order)[:2]
        scores = [expected.scores[one.index] for one in found.results]
        assert [one.relevance_score for one in found.results] == pytest.approx(scores, abs=1e-6)


def test_max_tokens_per_doc(server, llm):
    long = ["yes no the " * 300, "no"]
    client = cohere.ClientV2("key", base_url=server.url)
    found = client.rerank(model="tiny", query="is it", documents=long, max_tokens_per_doc=5)
    expected = llm.rerank("is it", [llm.tokenizer.decode(llm.tokenizer.encode(long[0])[:5]), "no"])
    assert [one.index for one in found.results] == list(expected.order) and found.id


def test_embed(server, llm):
    expected = llm.embed(TEXTS)
    client = cohere.ClientV2("key", base_url=server.url)
    found = client.embed(model="tiny", texts=TEXTS, input_type="search_document",
                         embedding_types=["float", "base64", "ubinary", "binary"])  # fmt: skip
    np.testing.assert_allclose(found.embeddings.float_, expected, atol=1e-6)
    first = np.frombuffer(base64.b64decode(found.embeddings.base64[0]), "<f4")
    np.testing.assert_allclose(first, expected[0], atol=1e-6)
    assert found.embeddings.ubinary == np.packbits(expected > 0, axis=1).tolist()
    assert (np.array(found.embeddings.binary) + 128 == found.embeddings.ubinary).all()
    assert found.meta.billed_units.input_tokens == sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    found = cohere.Client("key", base_url=server.url).embed(model="tiny", texts=TEXTS, input_type="search_query")
    np.testing.assert_allclose(found.embeddings, expected, atol=1e-6)


def test_without_types_v2_gives_floats(server, llm):
    client = cohere.ClientV2("key", base_url=server.url)
    found = client.embed(model="tiny", texts=TEXTS, input_type="search_document")
    np.testing.assert_allclose(found.embeddings.float_, llm.embed(TEXTS), atol=1e-6)


def test_errors(server):
    client = cohere.ClientV2("key", base_url=server.url)
    with pytest.raises(cohere.NotFoundError) as caught:
        client.rerank(model="none", query="is it", documents=TEXTS)
    assert "not served" in caught.value.body["message"]
    with pytest.raises(cohere.NotFoundError) as caught:
        client.chat(model="tiny", messages=[{"role": "user", "content": "a"}])
    assert "/v2/chat" in caught.value.body["message"]
    with pytest.raises(cohere.BadRequestError, match="int8"):
        client.embed(model="tiny", texts=TEXTS, input_type="search_document", embedding_types=["int8"])
