"""Methods of LLM on tables: the same kind comes back, with the answers of the method on a list as further columns."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM, InputError
from prefold.api.tables import PIECE_ROWS
from prefold.errors import MissingExtraError

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("narwhals")

TEXTS = ["yes", "no the", "the question"]
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Is money owed?"},
    "tone": {"type": "choice", "criteria": {"calm": "polite", "angry": None}},
    "bad": {"type": "score", "criteria": ["low", "middle", "high"]},
}
WORDS = {"words": ("yes", "no")}
SHORT = {"max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tables"), "llama", max_position_embeddings=2048)
    (folder / "decision.json").write_text(json.dumps({"labels": {"noul": ["yes", "no"]}}))
    return LLM(str(folder), dtype="float32", device="cpu", threads=1)


CONNECTIONS = []  # DuckDB 1 closes one that is not kept


def kinds(rows):
    """{name: (a table of the rows, a function that returns its rows as a list)}"""
    arrow = pa.table(rows)
    found = {
        "pandas": (pd.DataFrame(rows, index=[5, 5, 4][: arrow.num_rows]), lambda t: as_none(t.to_dict("records"))),
        "arrow": (arrow, lambda t: t.to_pylist()),
        "batch": (pa.RecordBatch.from_pydict(rows), lambda t: t.to_pylist()),
        "reader": (arrow.to_reader(max_chunksize=2), lambda t: t.read_all().to_pylist()),
    }
    if "polars" in sys.modules or can_import("polars"):
        import polars as pl

        found["polars"] = (pl.DataFrame(rows), lambda t: t.to_dicts())
    if can_import("duckdb"):
        import duckdb

        con = duckdb.connect()
        con.register("given", arrow)
        CONNECTIONS.append(con)
        found["relation"] = (con.table("given"), lambda t: [dict(zip(t.columns, r, strict=True)) for r in t.fetchall()])
    return found


def can_import(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def as_none(rows):
    return [
        {name: None if isinstance(value, float) and np.isnan(value) else value for name, value in row.items()}
        for row in rows
    ]


def plain(rows):
    """Rows with lists in place of vectors."""
    return [
        {name: list(map(float, v)) if isinstance(v, (list, tuple, np.ndarray)) or hasattr(v, "to_list") else v
         for name, v in row.items()}
        for row in rows
    ]  # fmt: skip


KINDS = ("pandas", "arrow", "batch", "reader", "polars", "relation")


def open_kind(kind, rows):
    found = kinds(rows)
    if kind not in found:
        pytest.skip(f"needs the package of {kind}")
    return found[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_comes_back_with_the_answers_of_a_list(llm, kind):
    rows = {"id": [3, 1, 2], "text": TEXTS}
    table, read = open_kind(kind, rows)
    out = llm.decide(table, QUESTIONS)
    assert type(out) is type(table)
    if kind == "pandas":
        assert [*out.index] == [5, 5, 4] and out["refund"].dtype == bool
    expected = llm.decide(TEXTS, QUESTIONS)
    found = read(out)
    assert [[row["id"], row["text"]] for row in found] == [[a, b] for a, b in zip([3, 1, 2], TEXTS, strict=True)]
    assert [*found[0]] == ["id", "text", "refund", "refund_p", "tone", "tone_p", "bad", "bad_confidence"]
    for row, decision in zip(found, expected, strict=True):
        assert (row["refund"], row["tone"]) == (decision["refund"].value, decision["tone"].value)
        assert row["bad"] == pytest.approx(decision["bad"].value, abs=1e-5)
        assert row["tone_p"] == pytest.approx(max(decision["tone"].probabilities.values()), abs=1e-5)
        assert row["bad_confidence"] == pytest.approx(decision["bad"].confidence, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_and_errors_of_rows(llm, kind):
    table, read = open_kind(kind, {"text": ["yes", None, "no the"], "embedding": [1, 2, 3], "error": ["x", "y", "z"]})
    found = plain(read(llm.embed(table, errors="return")))
    assert [*found[0]] == ["text", "input_embedding", "input_error", "embedding", "error"]
    assert [row["input_embedding"] for row in found] == [1, 2, 3] and found[2]["input_error"] == "z"
    vectors = np.array([found[0]["embedding"], found[2]["embedding"]])
    assert np.abs(vectors - llm.embed(["yes", "no the"])).max() < 1e-5
    assert found[1]["embedding"] is None and [row["error"] for row in found[::2]] == [None, None]
    assert found[1]["error"] == "null: 'text' is null; give it a text, or drop the row"


def test_a_bad_row_raises_before_anything_is_computed(llm):
    before = llm.stats.rows_computed
    with pytest.raises(InputError, match="item 1 of texts: 'body' is empty; give it a text, or drop the row"):
        llm.embed(pa.table({"body": ["yes", ""]}), text="body")
    with pytest.raises(InputError, match="item 1 of states: 'body' makes a prompt of"):
        llm.decide(pa.table({"body": ["yes", "no " * 4000]}), QUESTIONS, state="body")
    assert llm.stats.rows_computed == before


LONG = {"type": "noul", "instructions": "no " * 600}


def test_a_question_that_one_row_cannot_be_asked(llm):
    """It is too long beside a long state; the others of the row are answered."""
    table = pa.table({"state": ["yes", "no " * 500]})
    before = llm.stats.rows_computed
    with pytest.raises(InputError, match="item 1 of states"):
        llm.decide(table, {"long": LONG, "refund": QUESTIONS["refund"]})
    assert llm.stats.rows_computed == before
    rows = llm.decide(table, {"long": LONG, "refund": QUESTIONS["refund"]}, errors="return").to_pylist()
    assert rows[0]["error"] is None and rows[0]["long_p"] > 0
    assert rows[1]["long"] is None and rows[1]["refund_p"] > 0 and rows[1]["error"].startswith("too_long: ")


def test_templates_and_usual_names(llm):
    rows = {"title": ["a", "b"], "meta": [{"n": 1}, {"n": 2}], "label": ["x", "y"]}
    table = pa.table(rows)
    want = llm.classify(["a: 1", "b: 2"], ["yes", "no"])
    found = llm.classify(table, ["yes", "no"], text="{title}: {meta.n}", scores="all")
    assert found.column_names == ["title", "meta", "input_label", "label", "p", "p_yes", "p_no"]
    assert found["label"].to_pylist() == [one.label for one in want]
    assert found["p_no"].to_pylist() == pytest.approx([one.probabilities["no"] for one in want], abs=1e-5)
    with pytest.raises(InputError, match=r"which column of texts is the text\? It has the columns title, meta, label"):
        llm.embed(table)
    with pytest.raises(InputError, match=r"no column 'titel'; did you mean title"):
        llm.embed(table, text="titel")
    with pytest.raises(InputError, match=r"text '\{title' is not a template"):
        llm.embed(table, text="{title")
    with pytest.raises(InputError, match=r"text is of type list; give the name of a column"):
        llm.embed(table, text=["title"])
    for call in (
        lambda: llm.embed(["a"], text="title"),
        lambda: llm.classify(["a"], ["yes", "no"], scores="all"),
        lambda: llm.decide(["a"], QUESTIONS, state="title"),
        lambda: llm.generate(["a"], prompt="title"),
    ):
        with pytest.raises(InputError, match="is for tables; leave it out"):
            call()


def test_the_other_methods(llm):
    table = pa.table(
        {"prompt": ["the", "no"], "continuation": [" yes", " no"], "documents": ["a", "b"], "text": ["c", "d"]}
    )
    want = llm.score(["the", "no"], [" yes", " no"])
    found = llm.score(table)
    assert found["logprob"].to_pylist() == pytest.approx([one.logprob for one in want], abs=1e-5)
    assert found["greedy"].to_pylist() == [one.greedy for one in want]
    whole = llm.score(table.drop(["continuation"]))["logprob"].to_pylist()
    assert whole == pytest.approx([one.logprob for one in llm.score(["the", "no"])], abs=1e-5)
    found = llm.rerank("yes {x}", table, **WORDS)
    assert found["score"].to_pylist() == pytest.approx(
        llm.rerank("yes {x}", ["a", "b"], **WORDS).scores.tolist(), abs=1e-5
    )
    found = llm.generate(table, **SHORT)
    assert found.column_names[3:] == ["input_text", "text", "finish_reason", "num_generated"]
    assert found["text"].to_pylist() == [one.text for one in llm.generate(["the", "no"], **SHORT)]
    assert found["num_generated"].to_pylist() == [3, 3]
    said = [[{"role": "user", "content": f"Say {text}"}] for text in ("the", "no")]
    want = [one.text for one in llm.chat(said, **SHORT)]
    assert llm.chat(table, prompt="Say {prompt}", **SHORT)["text"].to_pylist() == want
    assert llm.chat(pa.table({"messages": said}), **SHORT)["text"].to_pylist() == want
    assert llm.chat(pa.table({"talk": said}), conversation="talk", **SHORT)["text"].to_pylist() == want
    for option in ({"n": 2}, {"logprobs": 0}):
        with pytest.raises(InputError, match="is for lists: a row of a table gets one text"):
            llm.generate(table, **option)
    with pytest.raises(InputError, match="top_n is for lists"):
        llm.rerank("yes", table, top_n=1, **WORDS)
    with pytest.raises(InputError, match='give continuation="COLUMN" with a table'):
        llm.score(table, "continuation")


def test_names_of_questions_that_are_taken(llm):
    noul = {"type": "noul"}
    table = pa.table({"text": ["yes"], "tone": ["x"], "answer_tone": ["y"]})
    found = llm.decide(table, {"tone": noul, "tone_p": noul, "error": noul}, errors="return")
    assert found.column_names == [
        "text", "tone", "input_answer_tone", "answer_tone", "tone_p", "answer_tone_p", "tone_p_p", "answer_error",
        "error_p", "error",
    ]  # fmt: skip
    row, decision = found.to_pylist()[0], llm.decide("yes", {"tone": noul, "tone_p": noul, "error": noul})
    assert row["tone"] == "x" and row["input_answer_tone"] == "y"
    assert row["answer_tone"] == decision["tone"].value and row["answer_tone_p"] == decision["tone_p"].value


def test_objects_in_cells(llm):
    """A state of JSON, from Arrow without the nulls that fill its structs, and from pandas with its own nulls."""
    states = [{"a": "x", "b": [1, 2]}, {"a": "y"}]
    want = llm.decide(states, QUESTIONS)
    found = llm.decide(pa.table({"state": states}), QUESTIONS)
    assert found["bad"].to_pylist() == pytest.approx([one["bad"].value for one in want], abs=1e-5)
    frame = pd.DataFrame({"state": [{"a": "x", "b": np.array([1, 2])}, {"a": None}]})
    found = llm.decide(frame, QUESTIONS)
    want = llm.decide([states[0], {"a": None}], QUESTIONS)
    assert [*found["bad"]] == pytest.approx([one["bad"].value for one in want], abs=1e-5)


def test_lists_of_texts_are_errors_of_their_rows(llm):
    """On the command line they are several prompts; a row of a table gets one answer."""
    for call in (lambda t: llm.embed(t, errors="return"), lambda t: llm.classify(t, ["yes", "no"], errors="return")):
        found = call(pa.table({"text": [["yes", "no"], ["the"]]}))["error"].to_pylist()
        assert found == ["wrong_type: 'text' is a list, not a text; give it a text"] * 2


def test_values_true_and_texts_are_one_column(llm):
    choices = [{"value": True}, {"value": "true"}, {"value": "other"}]
    found = llm.decide(pa.table({"text": TEXTS}), [{"type": "choice", "name": "q", "choices": choices}])
    assert found["q"].type == pa.string() and {*found["q"].to_pylist()} <= {"true", "other"}
    only = llm.decide(
        pa.table({"text": TEXTS}), [{"type": "choice", "name": "q", "choices": [{"value": True}, {"value": False}]}]
    )
    assert only["q"].type == pa.bool_()


def test_a_table_without_rows_has_the_columns(llm):
    empty = pa.table({"text": pa.array([], pa.string())})
    full = llm.decide(pa.table({"text": TEXTS}), QUESTIONS, errors="return", scores="all")
    assert llm.decide(empty, QUESTIONS, errors="return", scores="all").schema == full.schema
    assert llm.embed(empty).schema == llm.embed(pa.table({"text": TEXTS})).schema
    small = llm.embed(pa.table({"text": TEXTS}), dimensions=5)
    assert small["embedding"].type.list_size == 5 and llm.embed(empty, dimensions=5).schema == small.schema


def test_an_adapter_for_each_row_and_a_bar(llm, capsys):
    with pytest.raises(InputError, match="adapter is a list of 1, for 3 prompts"):
        llm.embed(pa.table({"text": TEXTS}), adapter=[None])
    assert llm.embed(pa.table({"text": TEXTS}), adapter=[None] * 3, progress=True).num_rows == 3
    assert "3/3" in capsys.readouterr().err


def test_a_reader_is_computed_in_pieces(llm):
    """Nothing is read before it is asked for, and no more than a piece at a time."""
    taken = []
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])

    def batches():
        for i in range(5):
            taken.append(i)
            ids = range(i * 2500, i * 2500 + 2500)
            yield pa.record_batch([list(ids), ["yes"] * 2500], schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    out = llm.embed(reader)
    assert taken == []
    first = out.read_next_batch()
    assert len(taken) == 4 and first.schema == out.schema  # 4 batches are more than a piece
    rest = out.read_all()
    assert first.num_rows + rest.num_rows == 12_500 and PIECE_ROWS == 8192
    assert [*first["id"].to_pylist(), *rest["id"].to_pylist()] == [*range(12_500)]
    with pytest.raises(InputError, match="no column 'gone'"):  # at once, and not when it is read
        llm.embed(pa.table({"a": ["b"]}).to_reader(), text="gone")
    with pytest.raises(InputError, match="adapter is a list"):
        llm.embed(pa.table({"text": ["b"]}).to_reader(), adapter=[None])


def test_a_relation_can_be_joined_with_others_of_its_connection(llm):
    duckdb = pytest.importorskip("duckdb")
    con = duckdb.connect()
    con.execute("CREATE TABLE t AS SELECT range AS id, 'the ' || range AS text FROM range(3)")
    found = llm.classify(con.sql("SELECT * FROM t WHERE id > 0"), ["yes", "no"]).set_alias("found")
    joined = found.join(con.table("t").set_alias("t"), "found.id = t.id").fetchall()
    assert len(joined) == 2
    assert con.sql("SELECT count(*) FROM duckdb_views() WHERE NOT internal").fetchall() == [(0,)]


def test_equal_names_and_missing_packages(llm, monkeypatch):
    with pytest.raises(InputError, match="equal column names"):
        llm.embed(pd.DataFrame([["a", "b"]], columns=["text", "text"]))
    numbers = llm.embed(pd.DataFrame([["yes", "b"]]), text="0")
    assert [*numbers.columns] == [0, 1, "embedding"]
    monkeypatch.setitem(sys.modules, "narwhals", None)
    with pytest.raises(
        MissingExtraError, match=r"a table needs the package 'narwhals': pip install 'prefold\[tables\]'"
    ):
        llm.embed(pd.DataFrame({"text": TEXTS}))
