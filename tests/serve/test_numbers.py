"""vLLM's and Cohere's paths for scores, over a real socket: the numbers of the LLM in this process."""

from __future__ import annotations

import httpx
import pytest

QUERY, DOCUMENTS = "is it the one", ["no", "the one", "yes it is", "no, the other"]


@pytest.fixture(scope="module")
def post(server):
    with httpx.Client(base_url=server.url) as client:
        yield lambda path, **body: client.post(path, json=body)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(post, llm, path):
    expected = llm.rerank(QUERY, DOCUMENTS)
    found = post(path, query=QUERY, documents=DOCUMENTS, model="tiny", truncate_prompt_tokens=-1).json()
    assert [one["index"] for one in found["results"]] == list(expected.order)
    scores = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert [scores[i] for i in range(4)] == pytest.approx(list(expected.scores), abs=1e-6)
    found = post(path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True).json()["results"]
    assert [one["document"]["text"] for one in found] == [DOCUMENTS[i] for i in expected.order[:2]]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_an_answer_has_what_vllm_says(post, path):
    """The fields of vLLM's RerankResponse, which its clients need."""
    found = post(path, query=QUERY, documents=DOCUMENTS).json()
    assert found["id"].startswith("rerank-") and found["model"] == "tiny" and found["usage"]["total_tokens"] > 0
    assert [one["document"]["text"] for one in found["results"]] == [
        DOCUMENTS[one["index"]] for one in found["results"]
    ]
    found = post(path, query=QUERY, documents=DOCUMENTS, return_documents=False).json()
    assert all("document" not in one for one in found["results"])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_queries_share_a_document_that_a_template_puts_first(post, llm, path):
    document, template = "all that is the one " * 3, f"{path} {{document}} ? {{query}}"
    pair = ("query", "documents") if path == "/v1/rerank" else ("text_1", "text_2")
    cached = []
    for query in ("yes", "the"):
        found = post(path, **dict(zip(pair, (query, [document]), strict=True)), template=template).json()
        score = found["results"][0]["relevance_score"] if "results" in found else found["data"][0]["score"]
        assert score == pytest.approx(llm.rerank(query, [document], template=template).scores[0], abs=1e-5)
        cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[1] - cached[0] > len(llm.tokenizer.encode(document)) - 3
    wrong = post(path, **dict(zip(pair, ("yes", [document]), strict=True)), template="{query}")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "template"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_max_tokens_per_doc(post, llm, path):
    long = ["yes no the " * 300, "no"]
    assert post(path, query=QUERY, documents=long).status_code == 400
    found = post(path, query=QUERY, documents=long, max_tokens_per_doc=5).json()["results"]
    cut = llm.tokenizer.decode(llm.tokenizer.encode(long[0])[:5])
    expected = llm.rerank(QUERY, [cut, "no"]).scores
    assert {one["index"]: one["relevance_score"] for one in found} == pytest.approx(dict(enumerate(expected)), abs=1e-6)
    wrong = post(path, query=QUERY, documents=long, max_tokens_per_doc=0)
    assert wrong.status_code == 400 and "max_tokens_per_doc" in wrong.text
    wrong = post(path, query=QUERY, documents=long, max_chunks_per_doc=10)  # Cohere's v1
    assert wrong.status_code == 400 and "'max_chunks_per_doc'" in wrong.text and "max_tokens_per_doc" in wrong.text


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(post, llm, path):
    expected = llm.rerank(QUERY, DOCUMENTS).scores
    found = post(path, text_1=QUERY, text_2=DOCUMENTS).json()["data"]
    assert [one["score"] for one in found] == pytest.approx(list(expected), abs=1e-6)


@pytest.mark.parametrize(("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_score_by_vllms_other_names(post, llm, first, second):
    found = post("/score", **{first: QUERY, second: DOCUMENTS}).json()
    expected = llm.rerank(QUERY, DOCUMENTS).scores
    assert [one["score"] for one in found["data"]] == pytest.approx(list(expected), abs=1e-6)
    assert found["id"].startswith("score-") and found["created"] > 1e9 and found["object"] == "list"


def test_no_texts_are_an_error(post):
    for path, body in (
        ("/score", {"text_1": [], "text_2": []}), ("/score", {"text_1": "a", "text_2": []}),
        ("/rerank", {"query": "a", "documents": []}), ("/v1/embeddings", {"input": []}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}), ("/embed_all", {"inputs": []}),
        ("/v2/embed", {"texts": []}), ("/v1/completions", {"prompt": []}), ("/v1/responses", {"input": []}),
        ("/v1/messages", {"messages": [], "max_tokens": 1}), ("/predict", {"inputs": []}),
    ):  # fmt: skip
        assert post(path, **body).status_code == 400, path


def test_errors_name_what_the_request_calls_it(post):
    found = post("/rerank", query=QUERY, documents=["a", 5])
    assert (found.status_code, found.json()["error"]["param"]) == (400, "documents[1]")
    found = post("/score", text_1=QUERY, text_2=["a", "b" * 5000])
    assert (found.status_code, found.json()["error"]["param"]) == (400, "text_2[1]")
    assert post("/score", text_1=QUERY, text_2=["a", "b" * 5000], truncate_prompt_tokens=-1).status_code == 200
    found = post("/v1/embeddings", input="a", truncate_prompt_tokens=0)
    assert found.json()["error"]["param"] == "truncate_prompt_tokens"


def test_truncation(post, llm):
    text = "the yes no " * 300
    whole = post("/v1/embeddings", input=text, truncate_prompt_tokens=-1).json()
    assert whole["data"][0]["embedding"] == pytest.approx(llm.embed(text, truncate=True).tolist(), abs=1e-6)
    assert post("/v1/embeddings", input=text, truncate_prompt_tokens=7).json()["usage"]["prompt_tokens"] == 7
    found = post("/v1/completions", prompt=text, truncate_prompt_tokens=9, max_tokens=1)
    assert found.json()["usage"]["prompt_tokens"] == 9
