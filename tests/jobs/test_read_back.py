"""What is written is read back by other libraries as it was: csv, pyarrow and pandas; every value, and of Parquet every
type."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import io
import json
import math

import numpy as np
import pytest
from fake_jobs import FakeTask, fake_llm

from prefold.jobs.columns import TableForm
from prefold.jobs.output import OutputOptions, open_output
from prefold.jobs.record import dumps
from prefold.jobs.report.progress import Progress
from prefold.jobs.run import Job, run_job
from prefold.jobs.source import open_source
from prefold.jobs.tables import TableAdapter
from prefold.tasks.rows import Columns
from prefold.text.fields import Template

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

JOB = {"task": "embed"}
TEXTS = ["plain", "a\rb", "\r", "c\nd", "e\r\nf", 'q"q', ",", ";\t|", " space ", "", "ü\u2028\x85\x00", "=1+1"]
TEXTS += ["'", '""', "\\"]


def make(path, lines, form=None, **options):
    """The output of these lines, and the notes on it."""
    out = open_output(OutputOptions(path, form=form or TableForm(columns=("record", "error")), **options), JOB)
    for number, line in enumerate(lines, 1):
        out.write(number, dumps({"record": number} | line), "error" in line)
    out.finish()
    out.close()
    return out.notes


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.csv.gz"])
def test_csv_is_read_back_whatever_is_in_a_text(tmp_path, name):
    path = tmp_path / name
    assert make(path, [{"k": text, "n": i} for i, text in enumerate(TEXTS)]) == []
    data = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    delimiter = "\t" if "tsv" in name else ","
    rows = list(csv.DictReader(io.StringIO(data.decode(), newline=""), delimiter=delimiter))
    assert [row["k"] for row in rows] == TEXTS and [row["n"] for row in rows] == [str(i) for i in range(len(TEXTS))]
    if b"\0" not in data:  # neither of these takes one
        return
    path = tmp_path / f"again{name}"
    texts = [text.replace("\0", "0") for text in TEXTS]
    make(path, [{"k": text} for text in texts])
    arrow_csv = pytest.importorskip("pyarrow.csv")
    parse = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    strings = arrow_csv.ConvertOptions(column_types={"k": pa.string()}, strings_can_be_null=False)
    table = arrow_csv.read_csv(path, parse_options=parse, convert_options=strings)
    assert table["k"].to_pylist() == texts and table["record"].to_pylist() == list(range(1, len(texts) + 1))
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(path, sep=delimiter, keep_default_na=False, dtype={"k": str})
    assert frame["k"].tolist() == texts


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_json_lines_are_read_back(tmp_path, name):
    path = tmp_path / name
    make(path, [{"k": text, "n": i} for i, text in enumerate(TEXTS)])
    arrow_json = pytest.importorskip("pyarrow.json")
    opener = gzip.open if name.endswith("gz") else open
    with opener(path, "rb") as file:
        assert arrow_json.read_json(io.BytesIO(file.read()))["k"].to_pylist() == TEXTS
    pandas = pytest.importorskip("pandas")
    assert pandas.read_json(path, lines=True, dtype=False, convert_dates=False)["k"].tolist() == TEXTS


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_an_answer_that_looks_like_an_error_stays_json(tmp_path, name):
    answer = {"code": 200, "message": "OK"}
    error = {"code": "null", "message": "'text' is null", "field": "text", "remedy": "give it a text"}
    make(tmp_path / name, [{"k": answer}, {"k": "text"}, {"error": error}])
    if name == "out.csv":
        rows = list(csv.DictReader(io.StringIO((tmp_path / name).read_text(), newline="")))
    else:
        rows = pq.read_table(tmp_path / name).to_pylist()
    assert json.loads(rows[0]["k"]) == answer and rows[1]["k"] == "text"
    assert rows[2]["error"] == "null: 'text' is null; give it a text"


NESTED = {"a": [1, {"b": "x"}], "c": None}
COLUMNS = {
    "ints": ([1, -(2**63), 2**63 - 1], "int64", None),
    "uint64": ([1, 2**64 - 1, 0], "uint64", None),
    "huge": ([1, 10**30, -5], "string", "64 bits"),
    "beyond 2^53 beside floats": ([2**53 + 1, 0.5, None], "string", r"2\^53"),
    "numbers": ([1, 0.1, None], "double", None),
    "floats": ([0.1, 123456.789012345, 1e-300], "double", None),
    "list of floats": ([[0.1, 123456.789012345], [], None], "list<element: double>", None),
    "list of large ints": ([[16777217, 123456789], [1.1], [2]], "list<element: double>", None),
    "list of too large ints": ([[2**53 + 1], [1.1], [2]], "string", r"2\^53"),
    "lists of lists": ([[["a"], []], [], [[None]]], "list<element: list<element: string>>", None),
    "empty lists": ([[], [], None], "list<element: string>", None),
    "objects": ([{"a": 1}, {"b": "x"}, {}], "struct<a: int64, b: string>", None),
    "list of objects": ([[{"a": 1.5}], [], [{}]], "list<element: struct<a: double>>", None),
    "mixed list": ([[1, "a"], [True], []], "string", "numbers and"),
    "mixed": ([1, "a", True], "string", "numbers and texts"),
    "empty objects": ([{}, {}, None], "string", "without keys"),
    "bools": ([True, None, False], "bool", None),
    "bools and ints": ([True, 1, 0], "string", "numbers and true or false"),
    "nulls": ([None, None, None], "string", None),
    "nested": ([json.dumps(NESTED), NESTED, None], "string", "objects and texts"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_parquet_holds_every_value_with_the_narrowest_type_and_never_fails(tmp_path, name):
    values, type, note = COLUMNS[name]
    path = tmp_path / "out.parquet"
    notes = make(path, [{name: value} for value in values])
    column = pq.read_table(path)[name]
    assert str(column.type).replace("item:", "element:") == type
    got = column.to_pylist()
    if type != "string":
        assert notes == [] and got == [_filled(value, column.type) for value in values]
        return
    assert len(notes) == (note is not None)
    if note is not None:
        assert (repr(name) in notes[0] and note in notes[0].replace("\\", "")) or __import__("re").search(
            note, notes[0]
        )
    texts = [value if isinstance(value, str) else None if value is None else json.dumps(value) for value in values]
    assert got == texts


def _filled(value, type):
    """A value with the fields that its struct does not have."""
    if isinstance(value, dict):
        return {field.name: value.get(field.name) for field in type}
    if isinstance(value, list) and pa.types.is_struct(type.value_type):
        return [_filled(v, type.value_type) for v in value]
    return value


def test_objects_with_many_keys_become_a_map_or_text(tmp_path):
    lines = [{"k": {f"key{i}-{j}": i for j in range(20)}} for i in range(30)]
    assert make(tmp_path / "map.parquet", lines) == []
    column = pq.read_table(tmp_path / "map.parquet")["k"]
    assert pa.types.is_map(column.type) and dict(column.to_pylist()[3]) == lines[3]["k"]
    lines[7]["k"]["other"] = "a text"
    (note,) = make(tmp_path / "text.parquet", lines)
    assert (
        "different keys" in note
        and json.loads(pq.read_table(tmp_path / "text.parquet")["k"][7].as_py()) == lines[7]["k"]
    )


def test_made_columns_have_the_types_of_what_they_are(tmp_path):
    lines = [
        {"embedding": [1, 0], "score": 2, "scores": [1, 0], "order": [1, 0], "probabilities": {"a": 1, "b": 0}},
        {"embedding": [0.1, 0.5], "choices": [{"text": "x", "logprobs": [{"token": "t", "id": 7, "logprob": -1}]}]},
        {"error": {"code": "null", "message": "is null", "remedy": "fill it"}, "results": [{"logprob": -3}]},
    ]
    assert make(tmp_path / "out.parquet", lines, TableForm()) == []
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.names[0] == "record" and table.schema.names[-1] == "error"
    types = {f.name: str(f.type).replace("item:", "element:") for f in table.schema}
    inner = "struct<token: string, id: int64, logprob: double>"
    assert types == {
        "record": "int64",
        "embedding": "list<element: float>",
        "score": "double",
        "scores": "list<element: double>",
        "order": "list<element: int64>",
        "probabilities": "struct<a: double, b: double>",
        "choices": f"list<element: struct<text: string, logprobs: list<element: {inner}>>>",
        "results": "list<element: struct<logprob: double>>",
        "error": "string",
    }
    assert table["error"].to_pylist() == [None, None, "null: is null; fill it"]


def test_an_empty_table_has_its_columns(tmp_path):
    form = TableForm(("record", "id", "when"), (), {"when": pa.timestamp("us")})
    make(tmp_path / "out.csv", [], form)
    assert (tmp_path / "out.csv").read_text() == "record,id,when\n"
    make(tmp_path / "out.parquet", [], form)
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert [str(field.type) for field in schema] == ["int64", "string", "timestamp[us]"]


def test_a_value_that_does_not_fit_its_known_type_makes_text_not_a_failure(tmp_path):
    form = TableForm(("record", "k"), (), {"k": pa.int8()})
    (note,) = make(tmp_path / "out.parquet", [{"k": 1}, {"k": 1000}], form)
    assert "'k'" in note and pq.read_table(tmp_path / "out.parquet")["k"].to_pylist() == ["1", "1000"]


def parquet_input(path):
    """A table with a column of nearly every type."""
    n = 6
    moment = datetime.datetime(2020, 1, 31, 12, 30, 15, 123456)
    table = pa.table({
        "text": ["yes", "no", "x", "é", "z", "abc"],
        "i": pa.array([1, 2, 3, 2**63 - 1, None, -5]),
        "u": pa.array([1, 2**64 - 1, 3, 4, 5, 6], pa.uint64()),
        "i8": pa.array([1, 2, 3, 4, 5, -6], pa.int8()),
        "f": pa.array([1.5, 0.1, float("inf"), None, 0, -0.0]),
        "f32": pa.array([1.5, 0.1, float("-inf"), None, 0, -0.0], pa.float32()),
        "f16": pa.array([1.5] * n, pa.float16()),
        "ts": pa.array([moment, None] * 3, pa.timestamp("us")),
        "s": pa.array([moment.replace(microsecond=0)] * n, pa.timestamp("s")),
        "ns": pa.array([np.datetime64("2020-01-31T12:30:15.123456789")] * n, pa.timestamp("ns")),
        "utc": pa.array([moment] * n, pa.timestamp("ms", "UTC")),
        "zone": pa.array([moment] * n, pa.timestamp("us", "America/New_York")),
        "date": pa.array([moment.date(), datetime.date(1, 1, 1)] * 3),
        "date64": pa.array([moment.date()] * n, pa.date64()),
        "time": pa.array([moment.time()] * n),
        "d": pa.array([decimal.Decimal("1.10"), decimal.Decimal("-12345678901234567.89")] * 3),
        "b": pa.array([b"\xff\x00", b"a", None, b"", b"x", b"y"]),
        "l": pa.array([["a"], [], None, [None], ["b", "c"], ["x"]]),
        "lf": pa.array([[0.1], [], None, [None], [1e300, 2], [3]], pa.list_(pa.float64())),
        "lb": pa.array([[b"\xff"]] * n),
        "fixed": pa.array([[1, 2]] * n, pa.list_(pa.int16(), 2)),
        "st": pa.array([{"a": 1, "when": moment, "deep": {"x": [moment]}}, None] * 3),
        "m": pa.array([[("k", 1), ("j", None)]] * n, pa.map_(pa.string(), pa.int64())),
        "cat": pa.array(["p", "q", "p", "q", "p", "q"]).dictionary_encode(),
        "bool": pa.array([True, False, None, True, True, False]),
        "dur": pa.array([datetime.timedelta(days=1, microseconds=7)] * n, pa.duration("us")),
        "nulls": pa.nulls(n),
        "large": pa.array(["z"] * n, pa.large_string()),
    })  # fmt: skip
    pq.write_table(table, path, row_group_size=2)
    return pq.read_table(path)


def embed(source, out, keep, **options):
    adapter = TableAdapter("embed", Columns(prompt=Template("text", "--prompt"), id="text", keep=keep))
    source = open_source(str(source))
    form = TableForm.of(adapter, source)
    output = open_output(OutputOptions(out, form=form, keep_order=True, **options), JOB)
    summary = run_job(Job(source, adapter, {"embed": FakeTask()}, fake_llm, output), Progress())
    assert summary.errors == 0
    return output.notes


def test_what_is_kept_of_a_parquet_table_keeps_its_type_and_values(tmp_path):
    table = parquet_input(tmp_path / "in.parquet")
    names = [name for name in table.column_names if name != "text"]
    assert embed(tmp_path / "in.parquet", tmp_path / "out.parquet", {f"my_{n}": n for n in names}) == []
    got = pq.read_table(tmp_path / "out.parquet")
    for name in names:
        column, want = got[f"my_{name}"], table[name]
        if name == "cat":
            want = want.cast(pa.string())
        assert column.type == want.type, name
        assert column.to_pylist() == want.to_pylist(), name
    keep = {"a": "st.a", "when": "st.deep.x.0", "record_of": "st.deep"}
    lines = pq.read_table(tmp_path / "in.parquet").slice(0, 1)
    pq.write_table(lines, tmp_path / "one.parquet")
    assert embed(tmp_path / "one.parquet", tmp_path / "inner.parquet", keep) == []
    inner = pq.read_table(tmp_path / "inner.parquet")
    assert inner["a"].type == pa.int64() and inner["when"].type == pa.timestamp("us")
    assert inner["when"].to_pylist() == [datetime.datetime(2020, 1, 31, 12, 30, 15, 123456)]


def test_kept_numbers_that_json_lacks_have_a_form(tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"text": "a", "k": NaN}\n{"text": "b", "k": -Infinity}\n{"text": "c", "k": {"a": [1e999, NaN]}}\n'
    )
    embed(tmp_path / "in.jsonl", tmp_path / "out.jsonl", {"k": "k"})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["k"] for line in lines] == [None, "-Infinity", {"a": ["Infinity", None]}]
    pq.write_table(pa.table({"text": ["a", "b"], "k": [math.nan, math.inf]}), tmp_path / "in.parquet")
    embed(tmp_path / "in.parquet", tmp_path / "out.parquet", {"k": "k"})
    column = pq.read_table(tmp_path / "out.parquet")["k"]
    assert column.type == pa.float64() and column.to_pylist() == [None, math.inf]
