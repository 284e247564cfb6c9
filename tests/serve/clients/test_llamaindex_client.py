"""LlamaIndex' clients of TEI, for embeddings and for reranking, unchanged, over a real socket."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from serving import serving

embeddings = pytest.importorskip("llama_index.embeddings.text_embeddings_inference")
rerank = pytest.importorskip("llama_index.postprocessor.tei_rerank")
TEXTS = ["yes no", "the", "no the yes"]


def test_embeddings(server, llm):
    client = embeddings.TextEmbeddingsInference("tiny", server.url, embed_batch_size=2)
    np.testing.assert_allclose(client.get_text_embedding_batch(TEXTS), llm.embed(TEXTS), atol=1e-6)
    np.testing.assert_allclose(client.get_query_embedding("the"), llm.embed("the"), atol=1e-6)
    found = asyncio.run(client.aget_text_embedding_batch(TEXTS))
    np.testing.assert_allclose(found, llm.embed(TEXTS), atol=1e-6)
    long = "the yes no " * 300  # it asks for texts that are too long to be cut
    np.testing.assert_allclose(client.get_text_embedding(long), llm.embed(long, truncate="right"), atol=1e-6)


def test_reranking(server, llm):
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    client = rerank.TextEmbeddingInference(top_n=2, base_url=server.url)
    found = client.postprocess_nodes(nodes, QueryBundle("is it"))
    expected = llm.rerank("is it", TEXTS)
    assert [one.node.text for one in found] == [TEXTS[i] for i in expected.order[:2]]
    scores = [expected.scores[i] for i in expected.order[:2]]
    assert [one.score for one in found] == pytest.approx(scores, abs=1e-6)


def test_keys(llm, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nkey = "one"\ntenant = "first"\n')
    with serving(llm, api_keys=str(path)) as server:
        client = embeddings.TextEmbeddingsInference("tiny", server.url, auth_token="one")
        np.testing.assert_allclose(client.get_text_embedding("the"), llm.embed("the"), atol=1e-6)
        wrong = embeddings.TextEmbeddingsInference("tiny", server.url, auth_token="two")
        assert wrong._call_api(["the"])["error_type"]
        assert httpx.get(f"{server.url}/health").status_code == 200
