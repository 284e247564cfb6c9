"""OpenAI batch lines in, OpenAI batch lines out."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from answering import answer_of

from prefold.errors import InputError
from prefold.jobs import FileOutput, OutputOptions, open_source, write_errors
from prefold.jobs.batch import OpenAIBatch, split_lines
from prefold.jobs.record import Record, dumps


def line(custom_id="a", url="/v1/embeddings", body=None, **more):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"model": "m", "input": "x"}} | more


def read(adapter, data, number=1):
    return adapter.read(Record(number, data))


def adapter():
    return OpenAIBatch("m", seed="s")


def test_embeddings_request_and_response():
    batch = adapter()
    parsed = read(batch, line(body={"model": "m", "input": ["x", "y"], "dimensions": 2, "user": "u"}))
    assert parsed.error is None and parsed.task == "embed"
    assert parsed.items == [{"text": ["x", "y"], "dimensions": 2}]
    vectors = np.array([[0.5, 1], [0.25, 0]], np.float32)
    out = batch.line(7, parsed.meta, [answer_of(embeddings=vectors, num_tokens=5)])
    assert out["custom_id"] == "a" and out["error"] is None and out["id"].startswith("batch_req_")
    assert out["response"]["status_code"] == 200 and out["response"]["request_id"]
    body = out["response"]["body"]
    assert body["object"] == "list" and body["model"] == "m"
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert [(d["object"], d["index"], d["embedding"].tolist()) for d in body["data"]] == [
        ("embedding", 0, [0.5, 1.0]),
        ("embedding", 1, [0.25, 0.0]),
    ]


def test_embeddings_of_token_ids_in_base64():
    batch = adapter()
    parsed = read(batch, line(body={"input": [1, 2, 3], "encoding_format": "base64"}))
    assert parsed.items == [{"text": [1, 2, 3], "dimensions": None}]
    out = batch.line(1, parsed.meta, [answer_of(embedding=np.array([0.5, -2], np.float32), num_tokens=3)])
    text = out["response"]["body"]["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == [0.5, -2]


@pytest.mark.parametrize("url", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(url):
    batch = adapter()
    body = {"query": "q", "documents": ["d0", {"text": "d1"}, "d2"], "top_n": 2, "return_documents": True}
    parsed = read(batch, line(url=url, body=body))
    assert parsed.error is None and parsed.task == "rerank"
    assert parsed.items == [body]
    result = answer_of(scores=[0.1, 0.9, 0.5], order=[1, 2], documents=["d1", "d2"], num_tokens=9)
    out = batch.line(1, parsed.meta, [result])["response"]["body"]
    assert out["results"] == [
        {"index": 1, "relevance_score": 0.9, "document": {"text": "d1"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "d2"}},
    ]


def test_score_one_to_many_and_pairs():
    batch = adapter()
    parsed = read(batch, line("a", "/v1/score", {"text_1": "q", "text_2": ["x", "y"]}))
    assert parsed.items == [{"query": "q", "documents": ["x", "y"], "instruction": None}]
    ranking = answer_of(scores=[0.25, 0.5], order=[1, 0], num_tokens=4)
    data = batch.line(1, parsed.meta, [ranking])["response"]["body"]
    assert data["data"] == [{"object": "score", "index": i, "score": s} for i, s in enumerate((0.25, 0.5))]
    parsed = read(batch, line("b", "/v1/score", {"queries": ["q", "r"], "documents": ["x", "y"]}))
    assert [(i["query"], i["document"]) for i in parsed.items] == [("q", "x"), ("r", "y")]
    results = [answer_of(score=0.5, num_tokens=2), answer_of(score=0.75, num_tokens=3)]
    out = batch.line(1, parsed.meta, results)["response"]["body"]
    assert [d["score"] for d in out["data"]] == [0.5, 0.75] and out["usage"]["total_tokens"] == 5
    parsed = read(batch, line("c", "/v1/score", {"text_1": ["q", "r"], "text_2": ["x"]}))
    assert parsed.error.field == "text_1"


@pytest.mark.parametrize(
    ("data", "code", "field"),
    [
        (line(url="/v1/images/generations"), "unknown_url", "url"),
        (line(url=None), "unknown_url", "url"),
        (line(method="GET"), "invalid_line", "method"),
        ({k: v for k, v in line().items() if k != "custom_id"}, "invalid_line", "custom_id"),
        (line(custom_id=7.5), "invalid_line", "custom_id"),
        (line(custom_id=True), "invalid_line", "custom_id"),
        (line(custom_id=""), "invalid_line", "custom_id"),
        (line() | {"body": "text"}, "invalid_line", "body"),
        (line() | {"body": None}, "invalid_line", "body"),
    ],
)
def test_a_line_that_goes_nowhere_has_an_error_and_no_response(data, code, field):
    batch = adapter()
    parsed = read(batch, data)
    assert (parsed.error.code, parsed.error.field) == (code, field) and parsed.error.remedy
    out = batch.error_line(3, parsed.meta, parsed.error)
    assert out["response"] is None and out["error"]["code"] == code
    assert out["error"]["record"] == 3 and out["error"]["message"] == parsed.error.message
    known = data.get("custom_id")
    assert out["custom_id"] == (known if isinstance(known, str) and known else None)


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        ("/v1/embeddings", {"model": "m"}, "input"),
        ("/v1/embeddings", {"input": None}, "input"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "x", "inputs": "y"}, "inputs"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/rerank", {"documents": ["x"]}, "query"),
        ("/rerank", {"query": ["q"], "documents": ["x"]}, "query"),
        ("/rerank", {"query": "q"}, "documents"),
        ("/v1/score", {"text_1": "x"}, "text_2"),
    ],
)
def test_a_body_that_is_refused_has_a_response_with_status_400(url, body, field):
    batch = adapter()
    parsed = read(batch, line(url=url, body=body))
    assert parsed.error.field == field
    out = batch.error_line(3, parsed.meta, parsed.error)
    # where the kind of request was not read yet the error still names its custom_id
    error = out["response"]["body"]["error"]
    assert out["error"] is None and out["response"]["status_code"] == 400 and out["custom_id"] == "a"
    assert error["param"] == field and error["type"] == "invalid_request_error" and repr(field) in error["message"]


def test_fields_of_the_tasks_are_named_as_in_the_request():
    batch = adapter()
    parsed = read(batch, line(body={"input": ["x", "y"]}))
    error = InputError("'text[1]' is too long", field="text[1]", remedy="shorten it", code="too_long")
    out = batch.error_line(1, parsed.meta, error)["response"]["body"]["error"]
    assert out["param"] == "input[1]" and out["code"] == "too_long"
    assert out["message"] == "'input[1]' is too long; shorten it"


def test_a_whole_number_is_a_custom_id_and_comes_back_as_one():
    batch = adapter()
    parsed = read(batch, line(7))
    assert parsed.error is None
    out = batch.line(1, parsed.meta, [answer_of(embedding=np.zeros(1, np.float32), num_tokens=1)])
    assert out["custom_id"] == 7 and type(out["custom_id"]) is int
    assert read(batch, line("7"), 2).error is None
    assert read(batch, line(7), 3).error.code == "duplicate_custom_id"


def test_urls_that_are_not_served_name_what_is():
    parsed = read(adapter(), line(url="/v1/images/generations"))
    assert parsed.error.code == "unknown_url" and "/v1/chat/completions" in parsed.error.remedy


def test_duplicate_custom_ids_and_lines_that_are_no_json():
    batch = adapter()
    assert read(batch, line("a")).error is None
    second = read(batch, line("a"), 2)
    assert second.error.code == "duplicate_custom_id"
    assert batch.error_line(2, second.meta, second.error)["custom_id"] == "a"
    bad = batch.read(Record(3, error=InputError("no JSON", code="invalid_json")))
    out = batch.error_line(3, bad.meta, bad.error)
    assert out["custom_id"] is None and out["response"] is None and out["error"]["code"] == "invalid_json"


def test_ids_are_the_same_again_and_different_otherwise():
    parsed = read(adapter(), line())
    result = [answer_of(embedding=np.zeros(1, np.float32), num_tokens=1)]
    one, again = (adapter().line(n, parsed.meta, result)["id"] for n in (1, 1))
    assert one == again
    assert one != adapter().line(2, parsed.meta, result)["id"]
    assert one != OpenAIBatch("m", seed="t").line(1, parsed.meta, result)["id"]


def test_other_models_are_counted():
    batch = adapter()
    for i, model in enumerate(["m", "gpt", "gpt"]):
        read(batch, line(str(i), body={"model": model, "input": "x"}))
    assert batch.other_models == {"gpt": 2}
    for i in range(100):
        read(batch, line(f"x{i}", body={"model": f"model {i}", "input": "x"}))
    assert len(batch.other_models) == 21 and batch.other_models["others"] == 81


def test_an_empty_custom_id_is_said_to_be_empty():
    """A text that is empty is not told that it is no text."""
    record = Record(1, line(custom_id=""))
    assert "custom_id is empty" in str(OpenAIBatch("m").read(record).error)


def test_a_batch_that_ends_early_has_a_line_for_each_record_and_its_errors_apart(tmp_path):
    """Of records that are not computed, and of those that are no records."""
    lines, good, bad = (tmp_path / name for name in ("lines.jsonl", "good", "bad"))
    asked = [json.dumps(line(custom_id=f"c{number}")) for number in range(4)]
    (tmp_path / "in.jsonl").write_text("\n".join([*asked, "no JSON"]))
    source, batch = open_source(str(tmp_path / "in.jsonl")), adapter()
    output = FileOutput(OutputOptions(lines), {"batch": "b"})
    for record in [*source.records()][1:3]:
        meta = batch.read(record).meta
        answer = answer_of(embeddings=np.zeros((1, 2), np.float32), num_tokens=3 + record.number)
        output.write(record.number, dumps(batch.line(record.number, meta, [answer])), failed=False)
    output.commit()
    write_errors(source, adapter(), output, InputError("it was cancelled", remedy="", code="batch_cancelled"))
    output.finish()
    assert output.ended is False and output.num_bytes == lines.stat().st_size and output.count == 5
    output.close()
    counts, usage = split_lines(lines, good, bad)
    assert counts == {"output": 2, "error": 3} and usage["input"] == 5 + 6
    assert [json.loads(one)["custom_id"] for one in good.read_text().splitlines()] == ["c1", "c2"]
    errors = [json.loads(one) for one in bad.read_text().splitlines()]
    assert [one["custom_id"] for one in errors] == ["c0", "c3", None]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    again = FileOutput(OutputOptions(lines), {"batch": "b"})
    assert again.ended
    again.close()
