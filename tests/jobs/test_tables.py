"""Tables: columns to items, results to lines, errors that name the user's columns."""

from __future__ import annotations

import pytest
from answering import answer_of

from prefold.errors import InputError, JobError
from prefold.jobs.record import Record
from prefold.jobs.tables import TableAdapter
from prefold.tasks.rows import Columns, default_columns
from prefold.text.fields import Template

SCORES = [answer_of(logprob=x, logprobs=[x], greedy=True) for x in (-1.0, -2.0)]


def t(text, option="--prompt"):
    return Template(text, option)


def read(adapter, data):
    return adapter.read(Record(1, data))


def test_embed_one_and_many():
    adapter = TableAdapter("embed", Columns(prompt=t("body"), id="key", keep={"lang": "lang"}))
    parsed = read(adapter, {"body": "x", "key": 7, "lang": None})
    assert parsed.items == [{"text": "x"}]
    line = adapter.line(4, parsed.meta, [answer_of(embedding=[1.0])])
    assert line == {"record": 4, "id": 7, "lang": None, "embedding": [1.0], "num_tokens": 0}
    assert read(adapter, {"body": ["x", "y"], "key": "k", "lang": "en"}).items == [{"text": ["x", "y"]}]


def test_rerank_one_document_and_a_list():
    adapter = TableAdapter("rerank", Columns(query=t("q"), document=t("docs")))
    assert read(adapter, {"q": "a", "docs": "b"}).items == [{"query": "a", "document": "b"}]
    parsed = read(adapter, {"q": "a", "docs": [{"text": "b"}, "c"]})
    assert parsed.items == [{"query": "a", "documents": ["b", "c"]}]
    templates = TableAdapter("rerank", Columns(query=t("Q: {q}"), document=t("{title}: {body}")))
    parsed = read(templates, {"q": "a", "title": "t", "body": "b"})
    assert parsed.items == [{"query": "Q: a", "document": "t: b"}]


def test_score_continuations_and_rolling():
    adapter = TableAdapter("score", Columns(prompt=t("p"), continuation=t("choices")))
    parsed = read(adapter, {"p": "a", "choices": ["x", "y"]})
    assert parsed.items == [{"prompt": "a", "continuation": "x"}, {"prompt": "a", "continuation": "y"}]
    line = adapter.line(1, parsed.meta, [*SCORES])
    assert line == {"record": 1, "results": [score.line() for score in SCORES]}
    single = read(adapter, {"p": "a", "choices": ["x"]})
    assert adapter.line(1, single.meta, SCORES[:1])["results"] == [SCORES[0].line()]
    kept = TableAdapter("score", Columns(prompt=t("p"), continuation=t("choices")), keep_empty=True)
    assert read(kept, {"p": "", "choices": "x"}).items == [{"prompt": "", "continuation": "x"}]
    rolling = TableAdapter("score", Columns(prompt=t("p")))
    assert read(rolling, {"p": "a"}).items == [{"text": "a"}]


def test_generate_prompts_messages_and_tools():
    plain = TableAdapter("generate", Columns(prompt=t("q")))
    assert read(plain, {"q": "x"}).items == [{"prompt": "x"}]
    many = read(plain, {"q": ["x", "y"]})
    assert many.items == [{"prompt": "x"}, {"prompt": "y"}]
    both = [answer_of(text="a"), answer_of(text="b")]
    assert plain.line(1, many.meta, both)["results"] == [answer.line() for answer in both]
    chat = TableAdapter("generate", Columns(prompt=t("Say {q}"), tools="t", adapter="a"), chat=True)
    user = [{"role": "user", "content": "Say x"}]
    parsed = read(chat, {"q": "x", "t": '[{"name": "f"}]', "a": ""})
    assert parsed.items == [{"messages": user, "tools": [{"name": "f"}], "adapter": None}]
    messages = TableAdapter("generate", Columns(messages="m", adapter="a"))
    assert read(messages, {"m": user, "a": "fr"}).items == [{"messages": user, "adapter": "fr"}]
    for field in ("prompt", "messages"):
        assert chat.error_line(1, None, InputError("x", field=field))["error"]["field"] == "q"
    assert chat.error_line(1, None, InputError("x", field="messages[0]"))["error"]["field"] == "q[0]"
    assert chat.error_line(1, None, InputError("x", field="tools"))["error"]["field"] == "t"
    with pytest.raises(JobError, match="lines already have a field 'text'"):
        TableAdapter("generate", Columns(prompt=t("q"), keep={"text": "q"}))
    assert default_columns("generate", ["id", "question"], {})["prompt"].column == "question"
    assert default_columns("generate", ["chat"], {"messages": "chat"}) == {}


def test_messages_are_rendered():
    adapter = TableAdapter("classify", Columns(messages="chat"), lambda messages: messages[-1]["content"].upper())
    assert read(adapter, {"chat": [{"role": "user", "content": "hi"}]}).items == [{"text": "HI"}]
    assert read(adapter, {"chat": '[{"role": "user", "content": "hi"}]'}).items == [{"text": "HI"}]
    for bad, code in ((None, "null"), ("hi", "wrong_type"), ([], "wrong_type"), (["hi"], "wrong_type")):
        assert read(adapter, {"chat": bad}).error.code == code


@pytest.mark.parametrize(
    ("data", "field", "code"),
    [
        ({"q": "a"}, "docs", "missing_field"),
        ({"q": None, "docs": "b"}, "q", "null"),
        ({"q": "a", "docs": True}, "docs", "wrong_type"),
    ],
)
def test_bad_columns_are_the_records_error(data, field, code):
    parsed = read(TableAdapter("rerank", Columns(query=t("q"), document=t("docs"))), data)
    assert (parsed.error.field, parsed.error.code) == (field, code)


def test_errors_of_tasks_name_the_column():
    adapter = TableAdapter("rerank", Columns(query=t("q"), document=t("passages.text"), id="k"))
    meta = read(adapter, {"q": "a", "passages": [{"text": "b"}], "k": "id7"}).meta
    error = InputError("'documents[3]' is too long", field="documents[3]", remedy="shorten it", code="too_long")
    out = adapter.error_line(9, meta, error)
    assert out["record"] == 9 and out["id"] == "id7"
    assert out["error"] == {
        "code": "too_long",
        "message": "'passages.text[3]' is too long",
        "field": "passages.text[3]",
        "remedy": "shorten it",
    }
    assert adapter.error_line(9, None, InputError("no JSON", code="invalid_json"))["record"] == 9


def test_bad_ids_are_errors():
    adapter = TableAdapter("embed", Columns(prompt=t("text"), id="k"))
    assert read(adapter, {"text": "x", "k": [1]}).error.field == "k"
    assert read(adapter, {"text": "x"}).error.code == "missing_field"


def test_usual_column_names_are_found():
    found = default_columns("rerank", ["id", "query", "passage"], {})
    assert found["query"].column == "query" and found["document"].column == "passage"
    assert default_columns("embed", ["text"], {"prompt": t("{other}")}) == {}
    assert default_columns("embed", ["chat"], {"messages": "chat"}) == {}
    assert "continuation" not in default_columns("score", ["prompt"], {})
    with pytest.raises(JobError, match=r"--prompt.*the input has: title, body"):
        default_columns("embed", ["title", "body"], {})


def test_columns_are_checked_against_a_known_header():
    adapter = TableAdapter("rerank", Columns(query=t("q"), document=t("docs.text"), keep={"lang": "lang"}))
    assert {"q", "docs", "lang"} <= set(adapter.columns)
    adapter.check(["q", "docs", "lang"])
    with pytest.raises(JobError, match="no column 'lang'"):
        adapter.check(["q", "docs"])
    for name in ("record", "embedding"):
        with pytest.raises(JobError, match=f"--keep my_{name}={name}"):
            TableAdapter("embed", Columns(prompt=t("text"), keep={name: name}))
    renamed = TableAdapter("embed", Columns(prompt=t("text"), keep={"mine": "record"}))
    parsed = read(renamed, {"text": "x", "record": 77})
    line = renamed.line(1, parsed.meta, [answer_of(embedding=[1.0])])
    assert line == {"record": 1, "mine": 77, "embedding": [1.0], "num_tokens": 0}


EMPTY = [(None, "null", "null"), (float("nan"), "NaN", "null"), ("", "empty", "empty")]


@pytest.mark.parametrize(("value", "what", "code"), EMPTY)
@pytest.mark.parametrize("task", ["embed", "classify", "rerank", "score", "generate"])
def test_an_empty_cell_is_alike_in_all_tasks(task, value, what, code):
    columns = Columns(query=t("q"), document=t("text")) if task == "rerank" else Columns(prompt=t("text"))
    data = {"q": "a", "text": value, "texts": ["x", value]}
    error = read(TableAdapter(task, columns), data).error
    assert (error.code, error.field) == (code, "text") and f"'text' is {what}" in str(error)
    assert "--empty keep" in error.remedy
    kept = read(TableAdapter(task, columns, keep_empty=True), data)
    assert kept.error is None and "" in kept.items[0].values()
    template = TableAdapter("embed", Columns(prompt=t("T: {text}")))
    assert read(template, data).error.code == code
    assert read(TableAdapter("embed", Columns(prompt=t("T: {text}")), keep_empty=True), data).items == [{"text": "T: "}]
    assert read(TableAdapter("embed", Columns(prompt=t("texts"))), data).error.field == "texts[1]"


@pytest.mark.parametrize("value", [None, float("nan"), ""])
def test_no_adapter_and_no_tools(value):
    adapter = TableAdapter("generate", Columns(prompt=t("q"), tools="t", adapter="a"))
    assert read(adapter, {"q": "x", "t": value, "a": value}).items == [{"prompt": "x", "tools": None, "adapter": None}]


def test_dates_and_decimals_are_written_out():
    from datetime import date, datetime, time
    from decimal import Decimal

    adapter = TableAdapter("embed", Columns(prompt=t("{a} {b} {c} {d}")))
    data = {"a": date(2024, 5, 1), "b": datetime(2024, 5, 1, 12, 30), "c": time(1, 2), "d": Decimal("1.50")}
    assert read(adapter, data).items == [{"text": "2024-05-01 2024-05-01 12:30:00 01:02:00 1.50"}]


def test_all_columns_are_kept_and_own_names_are_moved():
    adapter = TableAdapter("generate", Columns(prompt=t("q"), keep_all=True, keep={"b": "q"}))
    assert adapter.columns is None
    parsed = read(adapter, {"q": "x", "text": 1, "id": 2, "other": float("nan")})
    line = adapter.line(1, parsed.meta, [answer_of(text="out")])
    kept = {"record": 1, "q": "x", "input_text": 1, "id": 2, "other": None, "b": "x"}
    assert line == kept | answer_of(text="out").line()


def test_a_column_names_the_adapter_of_every_task():
    for task, columns in (
        ("embed", {"prompt": t("q")}),
        ("classify", {"prompt": t("q")}),
        ("rerank", {"query": t("q"), "document": t("d")}),
        ("score", {"prompt": t("q"), "continuation": t("d")}),
        ("generate", {"prompt": t("q")}),
    ):
        adapter = TableAdapter(task, Columns(**columns, adapter="who"))
        for name, wanted in (("fr", "fr"), (None, None), ("", None)):
            parsed = read(adapter, {"q": "a", "d": ["x", "y"], "who": name})
            assert [item["adapter"] for item in parsed.items] == [wanted] * (2 if task == "score" else 1)
