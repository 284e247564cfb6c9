"""Answers that are JSON objects: a column for each property, and none that replaces another column."""

from __future__ import annotations

import json

import pytest

from prefold.records.answers import AnswerColumns, with_columns
from prefold.records.fields import Template
from prefold.records.lines import dumps
from prefold.records.record import Record
from prefold.records.tables import Columns


def test_properties_follow_what_a_line_has_itself():
    adapter = AnswerColumns("generate", Columns(prompt=Template("q", "--prompt"), keep={"gold": "g"}))
    meta = adapter.read(Record(1, {"q": "x", "g": "yes"})).meta
    answer = {"gold": "no", "text": "mine", "answer_text": 3, "record": None, "n": [1, {"a": 2.5}]}
    result = {"text": json.dumps(answer), "finish_reason": "stop"}
    assert adapter.line(7, meta, [result]) == {
        "record": 7, "gold": "yes", **result,
        "answer_gold": "no", "answer_answer_text": "mine", "answer_text": 3, "answer_record": None,
        "n": [1, {"a": 2.5}],
    }  # fmt: skip
    many = adapter.read(Record(1, {"q": ["x", "y"], "g": "yes"})).meta
    line = adapter.line(7, many, [result, {"text": "{"}])
    assert line["results"][0]["gold"] == "no" and line["results"][1] == {"text": "{"}


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[1]", '"a"', "12", "null", "[" * 200_000])
def test_what_is_no_object_has_no_columns(text):
    assert with_columns({"text": text}, set()) == {"text": text}
    assert with_columns({"tokens": [1]}, set()) == {"tokens": [1]}


def test_what_json_lines_cannot_hold_is_written_as_elsewhere():
    line = dumps(with_columns({"text": '{"a": 1e999, "b": "\\ud800"}'}, set()))
    assert json.loads(line.encode()) == {"text": '{"a": 1e999, "b": "\\ud800"}', "a": "Infinity", "b": "\ufffd"}
