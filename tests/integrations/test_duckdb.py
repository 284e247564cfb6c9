"""SQL functions of DuckDB, on a tiny random model: the answers equal the answers of LLM's methods."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM, InputError

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from prefold.integrations.duckdb import register  # noqa: E402

WORDS = {"words": ("yes", "no")}
CHOICE = {"type": "choice", "criteria": {"calm": None, "angry": None}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("duckdb"), "llama", max_position_embeddings=512)
    (folder / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}}))
    return LLM(str(folder), dtype="float32", device="cpu", threads=1)


def connect(llm, **options):
    con = duckdb.connect()
    register(con, llm, rerank=WORDS, generate={"max_tokens": 3, "ignore_eos": True}, **options)
    con.execute("CREATE TABLE t AS SELECT range AS id, 'the ' || range AS body FROM range(5)")
    con.execute("INSERT INTO t VALUES (5, NULL), (6, '')")
    return con


@pytest.fixture
def con(llm):
    return connect(llm)


TEXTS = [f"the {i}" for i in range(5)]


def column(con, sql):
    return [row[0] for row in con.sql(f"SELECT {sql} FROM t WHERE body IS NULL OR body <> '' ORDER BY id").fetchall()]


def test_each_function_gives_what_its_method_gives(con, llm):
    yes = llm.decide(TEXTS, {"q": {"type": "noul", "instructions": "Is it?"}})
    found = column(con, "prefold_yes(body, 'Is it?')")
    assert found[:5] == pytest.approx([one["q"].probabilities["true"] for one in yes], abs=1e-5) and found[5] is None
    labels = llm.classify(TEXTS, ["yes", "no"])
    found = column(con, "prefold_classify(body, ['yes', 'no'])")
    assert [one["label"] for one in found[:5]] == [one.label for one in labels] and found[5] is None
    assert found[0]["probabilities"] == pytest.approx(labels[0].probabilities, abs=1e-5) and found[0]["error"] is None
    vectors = np.array(column(con, "prefold_embed(body)")[:5])
    assert np.abs(vectors - llm.embed(TEXTS)).max() < 1e-5
    assert con.sql("SELECT typeof(prefold_embed(body)) FROM t LIMIT 1").fetchall() == [("FLOAT[36]",)]
    assert column(con, "array_cosine_similarity(prefold_embed(body), prefold_embed('the 1'))")[1] == pytest.approx(1)
    scores = llm.rerank("yes", TEXTS, **WORDS).scores.tolist()
    assert column(con, "prefold_rerank('yes', body)")[:5] == pytest.approx(scores, abs=1e-5)
    scores = [one.logprob for one in llm.score(TEXTS, [f" {i}" for i in range(5)])]
    assert column(con, "prefold_score(body, ' ' || id)")[:5] == pytest.approx(scores, abs=1e-5)
    said = llm.chat([[{"role": "user", "content": text}] for text in TEXTS], max_tokens=3, ignore_eos=True)
    assert column(con, "prefold_generate(body)") == [*(one.text for one in said), None]


def test_questions_as_json_and_a_question_a_row(con, llm):
    con.execute("CREATE TABLE q (text VARCHAR)")
    con.execute("INSERT INTO q VALUES (?), ('Is it?')", [json.dumps(CHOICE)])
    rows = con.sql(
        "SELECT id, text LIKE '{%', prefold_decide(body, text) FROM t, q WHERE id < 5 ORDER BY text LIKE '{%', id"
    ).fetchall()
    yes, chosen = (llm.decide(TEXTS, {"q": q}) for q in ({"type": "noul", "instructions": "Is it?"}, CHOICE))
    for (_, is_choice, found), one in zip(rows, [*yes, *chosen], strict=True):
        answer = one["q"]
        assert found["value"] == (answer.value if is_choice else str(answer.value).lower())
        assert found["probabilities"] == pytest.approx(answer.probabilities, abs=1e-5)
        assert found["p"] == pytest.approx(max(answer.probabilities.values()), abs=1e-5)
        assert found["confidence"] == pytest.approx(answer.confidence, abs=1e-4)
    # In turns, in one vector.
    asked = (
        "prefold_decide(body, CASE WHEN id % 2 = 1 THEN (SELECT text FROM q WHERE text LIKE '{%') ELSE 'Is it?' END)"
    )
    for i, found in enumerate(column(con, asked)[:5]):
        answer = (chosen if i % 2 else yes)[i]["q"]
        assert found["probabilities"] == pytest.approx(answer.probabilities, abs=1e-5)


def test_the_rows_of_a_vector_share_what_they_begin_with(llm):
    con = connect(llm, decide={"first": "question"})
    tokens, rows = llm.stats.tokens, llm.stats.rows_computed
    con.sql("SELECT sum(prefold_yes('the ' || range, 'Is it so?')) FROM range(300)").fetchall()
    tokens, rows = llm.stats.tokens - tokens, llm.stats.rows_computed - rows
    assert tokens > 300 * 30 and rows < tokens / 3


def test_a_bad_row_fails_the_query_or_says_why(con, llm):
    with pytest.raises(duckdb.Error, match=r"prefold_embed\(''\): 'text' is empty"):
        con.sql("SELECT prefold_embed(body) FROM t").fetchall()
    patient = connect(llm, errors="return")
    with pytest.warns(UserWarning, match="prefold_embed gives NULL for a row: 'text' is empty"):
        found = patient.sql("SELECT prefold_embed(body) IS NULL FROM t ORDER BY id").fetchall()
    assert [is_null for (is_null,) in found] == [False] * 5 + [True] * 2
    found = patient.sql("SELECT prefold_decide(body, 'Is it?') AS d FROM t ORDER BY id").fetchall()
    assert found[5] == (None,) and found[6][0]["error"].startswith("empty: 'state' is empty")
    assert found[6][0]["p"] is None and found[0][0]["error"] is None
    for question, why in {
        '{"type": "bad"}': "has the type 'bad'",
        "{bad": "the question is not valid JSON",
        '{"type": "choice", "criteria": {"a": null}}': "has 1 option",
    }.items():
        ((answer,),) = patient.execute("SELECT prefold_decide('a', ?)", [question]).fetchall()
        assert why in answer["error"]
    with pytest.raises(duckdb.Error, match="has the type choice; ask a yes/no question"):
        con.execute("SELECT prefold_yes('a', ?)", [json.dumps(CHOICE)]).fetchall()


def test_what_is_registered_wrongly(con, llm):
    with pytest.raises(InputError, match="has a function prefold_yes already; give another prefix="):
        register(con, llm)
    register(con, llm, prefix="other_", chat=False)
    assert con.sql("SELECT other_yes('the', 'Is it?') IS NULL").fetchall() == [(False,)]
    with pytest.raises(InputError, match="there is no option 'decisions'"):
        register(con, llm, decisions={})
    with pytest.raises(InputError, match="errors is 'null'"):
        register(con, llm, errors="null")
    with pytest.raises(InputError, match="embed has no option 'pooled'; did you mean pooling"):
        register(duckdb.connect(), llm, embed={"pooled": "last"})


def test_queries_of_several_threads(llm):
    con = connect(llm)
    con.execute("SET threads = 4")
    want = dict(con.sql("SELECT id, prefold_yes(body, 'Is it?') FROM t WHERE id < 5").fetchall())
    found: list[object] = []

    def ask():
        cursor = con.cursor()
        for _ in range(3):
            found.append(dict(cursor.sql("SELECT id, prefold_yes(body, 'Is it?') FROM t WHERE id < 5").fetchall()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and all(one == pytest.approx(want, abs=1e-5) for one in found)
