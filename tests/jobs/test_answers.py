"""Answers that are JSON objects: a column for each property, and none that replaces another column."""

from __future__ import annotations

import json

import pytest
from answering import answer_of

from prefold.errors import JobError
from prefold.jobs.record import Record, dumps
from prefold.jobs.tables import AnswerColumns, LabelColumns, with_columns
from prefold.tasks.results import Classification
from prefold.tasks.rows import Columns
from prefold.text.fields import Template


def test_properties_follow_what_a_line_has_itself():
    adapter = AnswerColumns("generate", Columns(prompt=Template("q", "--prompt"), keep={"gold": "g"}))
    meta = adapter.read(Record(1, {"q": "x", "g": "yes"})).meta
    answer = {"gold": "no", "text": "mine", "answer_text": 3, "record": None, "n": [1, {"a": 2.5}]}
    result = answer_of(text=json.dumps(answer))
    assert adapter.line(7, meta, [result]) == {
        "record": 7, "gold": "yes", **result.line(),
        "answer_gold": "no", "answer_text": "mine", "answer_answer_text": 3, "answer_record": None,
        "n": [1, {"a": 2.5}],
    }  # fmt: skip
    many = adapter.read(Record(1, {"q": ["x", "y"], "g": "yes"})).meta
    cut = answer_of(text="{")
    line = adapter.line(7, many, [result, cut])
    assert line["results"][0]["gold"] == "no" and line["results"][1] == cut.line()


def test_names_do_not_depend_on_the_record():
    adapter = AnswerColumns("generate", Columns(prompt=Template("q", "--prompt"), keep_all=True))
    answer = {"name": 1, "text": 2, "answer_text": 3}
    found = {"answer_name": 1, "answer_text": 2, "answer_answer_text": 3}
    for columns in ({}, {"name": "x"}, {"answer_name": "x", "input_answer_name": "y", "input_text": 5, "text": 6}):
        data = {"q": "x", **columns}
        result = answer_of(text=json.dumps(answer))
        line = adapter.line(1, adapter.read(Record(1, data)).meta, [result])
        assert {name: line.get(name) for name in found} == found
        kept = {adapter.kept_name(name): value for name, value in columns.items()}
        assert len(kept) == len(columns) and {name: line[name] for name in kept} == kept
        assert set(line) == {"record", "q", *result.line(), *found, *kept}


def test_no_name_is_given_twice():
    names = ["a", "text", "answer_text", "answer_a", "answer_answer_text", "answer_answer_a", "answer_"]
    answer = {name: i for i, name in enumerate(names)}
    for kept in ([], ["a"], ["answer_text"], ["answer_a", "answer_answer_a"], ["", "answer_"]):
        line = with_columns({"text": json.dumps(answer), "finish_reason": "stop"}, kept)
        added = {name: value for name, value in line.items() if name not in ("text", "finish_reason")}
        assert sorted(added.values()) == [*range(len(names))] and not set(added) & set(kept)
        for name in names:  # alone it has the name that it has among others
            alone = with_columns({"text": json.dumps({name: 7})}, kept)
            assert [k for k, v in alone.items() if v == 7] == [k for k, v in added.items() if v == answer[name]]


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[1]", '"a"', "12", "null", "[" * 200_000])
def test_what_is_no_object_has_no_columns(text):
    assert with_columns({"text": text}, set()) == {"text": text}
    assert with_columns({"tokens": [1]}, set()) == {"tokens": [1]}


def test_what_json_lines_cannot_hold_is_written_as_elsewhere():
    line = dumps(with_columns({"text": '{"a": 1e999, "b": "\\ud800"}'}, set()))
    assert json.loads(line.encode()) == {"text": '{"a": 1e999, "b": "\\ud800"}', "a": "Infinity", "b": "\ufffd"}


def labelled(**options):
    return LabelColumns("classify", Columns(prompt=Template("q", "--prompt"), **options.pop("columns", {})), **options)


RESULT = Classification("yes", {"yes": 0.75, "no": 0.25}, logprobs={"yes": -1.0, "no": -2.0}, num_tokens=9)


def test_a_table_has_the_label_and_its_probability_and_on_request_all():
    base = {"record": 1, "label": "yes", "p": 0.75}
    assert labelled().line(1, {}, [RESULT]) == base | {"num_tokens": 9}
    assert labelled(keeps=True).line(1, {}, [RESULT]) == base | RESULT.line()
    every = labelled(every=True).line(1, {}, [RESULT])
    assert every == base | {"p_yes": 0.75, "p_no": 0.25, "num_tokens": 9}
    assert [*every] == ["record", "label", "p", "p_yes", "p_no", "num_tokens"]
    many = labelled(every=True).line(1, {"many": True}, [RESULT, RESULT])
    assert many["results"] == [{name: value for name, value in every.items() if name != "record"}] * 2


def test_a_labels_column_replaces_no_column_that_is_repeated():
    kept = labelled(every=True, columns={"keep": {"p_yes": "p_yes"}})
    assert kept.line(1, {"keep": {"p_yes": "mine"}}, [RESULT])["p_yes"] == "mine"
    assert kept.line(1, {}, [RESULT])["p_p_yes"] == 0.75
    unknown = labelled(every=True, columns={"keep_all": True})
    assert [unknown.kept_name(name) for name in ("p", "p_yes", "input_p_yes", "q", "id")] == [
        "input_p", "input_p_yes", "input_input_p_yes", "q", "id",
    ]  # fmt: skip
    with pytest.raises(JobError, match="--keep my_p=p"):
        labelled(columns={"keep": {"p": "p"}})
