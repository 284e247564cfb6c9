"""--json-columns: the properties of answers as columns of CSV, Parquet and JSON lines."""

from __future__ import annotations

import csv
import json

import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"enum": ["yes", "no"]},
        "list": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
        "part": {
            "type": "object", "properties": {"a": {"enum": [True]}}, "required": ["a"], "additionalProperties": False
        },
        "count": {"enum": [3, 4]},
    },
    "required": ["text", "list", "part", "count"],
    "additionalProperties": False,
}  # fmt: skip
ASK = ("--prompt", "q", "--raw", "--dtype", "float32", "--kv-memory", "20MB", "--json-schema", json.dumps(SCHEMA))
COLUMNS = {"answer_text": "text", "list": "list", "part": "part", "count": "count"}


@pytest.fixture
def table(tmp_path):
    rows = [{"q": f"question {i}", "k": i} for i in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def job(prefold, out, *options, code=0):
    done = prefold("generate", "in.jsonl", *ASK, "--max-tokens", "200", "--json-columns", "-o", out, *options)
    assert done.exit_code == code, done.stderr
    return done


def test_each_property_is_a_column_of_every_format(prefold, table, lines):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    job(prefold, "out.jsonl", "--keep-order")
    found = lines("out.jsonl")
    assert len(found) == 4
    for line in found:
        answer = json.loads(line["text"])
        assert {own: line[name] for name, own in COLUMNS.items()} == answer
    job(prefold, "out.csv", "--keep-order")
    with open("out.csv", newline="") as file:
        for row, line in zip(csv.DictReader(file), found, strict=True):
            assert (row["text"], row["answer_text"], row["count"]) == (
                line["text"], line["answer_text"], str(line["count"])
            )  # fmt: skip
            assert json.loads(row["list"]) == line["list"] and json.loads(row["part"]) == line["part"]
    job(prefold, "out.parquet", "--keep-order")
    read = pq.read_table("out.parquet")
    assert read.schema.field("list").type == pa.list_(pa.int64())
    assert read.schema.field("part").type == pa.struct([("a", pa.bool_())])
    assert read.schema.field("count").type == pa.int64() and read.schema.field("answer_text").type == pa.string()
    assert [{name: row[name] for name in COLUMNS} for row in read.to_pylist()] == [
        {name: line[name] for name in COLUMNS} for line in found
    ]


def test_an_answer_that_was_cut_off_keeps_its_text(prefold, table, lines):
    done = prefold("generate", "in.jsonl", *ASK, "--max-tokens", "4", "--json-columns", "-o", "out.jsonl")
    assert done.exit_code == 0
    for line in lines("out.jsonl"):
        assert line["finish_reason"] == "length" and line["text"].startswith("{") and not set(COLUMNS) & set(line)


def test_a_job_goes_on_with_the_same_columns_only(prefold, table):
    job(prefold, "whole.csv", "--keep-order")
    job(prefold, "out.csv", "--keep-order", "--limit", "2")
    done = job(prefold, "out.csv", "--keep-order")
    assert "2 of them before" in done.stderr
    tables = []
    for name in ("out.csv", "whole.csv"):
        with open(name, newline="") as file:  # what was cached is of a run
            tables.append([{k: v for k, v in row.items() if k != "cached_tokens"} for row in csv.DictReader(file)])
    assert tables[0] == tables[1] and len(tables[0]) == 4 and all(row["answer_text"] for row in tables[0])
    refused = prefold("generate", "in.jsonl", *ASK, "--max-tokens", "200", "-o", "out.csv", "--keep-order")
    assert refused.exit_code == 1 and "json_columns" in refused.stderr.replace("-", "_")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "in.jsonl", "--prompt", "q", "--regex", "a"], "--json-schema"),
        (["generate", "in.jsonl", "--prompt", "q", "--json-object", "--n", "2"], "--n"),
        (["generate", "a text", "--json-object"], "for jobs"),
        (["run", "in.jsonl", "--task", "embed", "--prompt", "q", "--json-object"], "--task generate"),
        (["run", "in.jsonl", "--json-object"], "--task generate"),
    ],
)
def test_what_has_no_such_columns_is_refused(prefold, table, arguments, says):
    done = prefold(*arguments, "--json-columns")
    assert done.exit_code == 2 and says in done.stderr
