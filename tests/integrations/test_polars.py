"""The namespace `prefold` of Polars' expressions, on a tiny random model."""

from __future__ import annotations

import json

import pytest
from tiny import tiny_checkpoint

from prefold import LLM, InputError

pl = pytest.importorskip("polars")
pytest.importorskip("narwhals")

import prefold.integrations.polars  # noqa: E402, F401

TEXTS = ["the 1", None, "the 2"]
QUESTIONS = {"refund": {"type": "noul"}, "input": {"type": "choice", "criteria": {"calm": None, "angry": None}}}
WORDS = {"words": ("yes", "no")}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("polars"), "llama", max_position_embeddings=512)
    (folder / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}}))
    return LLM(str(folder), dtype="float32", device="cpu", threads=1)


FRAME = pl.DataFrame({"refund": [1, 2, 3], "body": TEXTS})
BODY = pl.col("body")


def test_each_method_is_an_expression(llm):
    frame = FRAME.with_columns(
        v=BODY.prefold.embed(llm),
        c=BODY.prefold.classify(llm, ["yes", "no"], scores="all"),
        r=BODY.prefold.rerank(llm, "yes", **WORDS),
        s=BODY.prefold.score(llm),
        g=BODY.prefold.generate(llm, max_tokens=2, ignore_eos=True),
        t=BODY.prefold.chat(llm, max_tokens=2, ignore_eos=True),
    )
    assert frame.schema["v"] == pl.Array(pl.Float32, 36)
    rows, good = frame.to_dicts(), ["the 1", "the 2"]
    assert all(rows[1][name] is None for name in "vcrsgt")
    first, last = rows[0], rows[2]
    assert list(first["v"]) == pytest.approx(llm.embed(good)[0].tolist(), abs=1e-5)
    assert last["c"]["p_no"] == pytest.approx(llm.classify(good, ["yes", "no"])[1].probabilities["no"], abs=1e-5)
    assert [first["r"], last["r"]] == pytest.approx(llm.rerank("yes", good, **WORDS).scores.tolist(), abs=1e-5)
    assert last["s"]["logprob"] == pytest.approx(llm.score(good)[1].logprob, abs=1e-4)
    assert last["g"]["text"] == llm.generate(good, max_tokens=2, ignore_eos=True)[1].text
    assert first["t"]["num_generated"] == 2


def test_answers_of_lazy_frames_and_of_structs(llm):
    want = llm.decide(["the 1", "the 2"], QUESTIONS)
    lazy = FRAME.lazy().select(BODY.prefold.decide(llm, QUESTIONS).struct.unnest())
    kinds = {"refund": pl.Boolean, "refund_p": pl.Float64, "answer_input": pl.String, "input_p": pl.Float64}
    assert dict(lazy.collect_schema()) == kinds
    rows = lazy.collect(engine="streaming").to_dicts()
    assert [rows[0]["answer_input"], rows[2]["answer_input"]] == [one["input"].value for one in want]
    assert {*rows[1].values()} == {None}
    states = FRAME.select(pl.struct("body", n="refund").prefold.decide(llm, QUESTIONS)).to_series().to_list()
    found = llm.decide([{"body": "the 1", "n": 1}], QUESTIONS)[0]
    assert states[0]["refund_p"] == pytest.approx(max(found["refund"].probabilities.values()), abs=1e-5)


def test_errors_are_raised_or_a_field(llm):
    with pytest.raises(InputError, match="'questions' is empty"):  # when the expression is made
        BODY.prefold.decide(llm, {})
    with pytest.raises(InputError, match="'input' is empty; give it a text, or drop the row"):
        FRAME.select(pl.lit("").prefold.embed(llm))
    found = FRAME.select(pl.lit("").prefold.embed(llm, errors="return").struct.field("error")).to_series()
    assert found[0].startswith("empty: 'input' is empty")
