"""Several files as one input."""

from __future__ import annotations

import json

import pytest

from prefold.errors import JobError
from prefold.jobs.source import expand_names, holds_records, open_sources


def jsonl(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_records_are_numbered_on(tmp_path):
    names = [jsonl(tmp_path / "b.jsonl", "x", "y"), jsonl(tmp_path / "a.jsonl", "z")]
    (tmp_path / "b.jsonl").open("a").write("nonsense\n")
    source = open_sources(names)
    found = list(source.records())
    assert [(r.number, r.data and r.data["text"]) for r in found] == [(1, "x"), (2, "y"), (3, None), (4, "z")]
    assert found[2].error.message.startswith(f"{names[0]}: the line is not valid JSON")
    assert (
        source.format == "jsonl"
        and source.peek() == {"text": "x"}
        and [p.name for p in source.paths]
        == [
            "b.jsonl",
            "a.jsonl",
        ]
    )
    assert [r.number for r in source.records()] == [1, 2, 3, 4]
    assert source.identity != open_sources(names[::-1]).identity
    assert open_sources(names[:1]).identity == open_sources([names[0]]).identity


def test_tables_have_the_columns_of_all(tmp_path):
    (tmp_path / "a.csv").write_text('id,text\n1,"open\n2,x\n')
    (tmp_path / "b.csv").write_text("text,label\ny,z\n")
    source = open_sources([str(tmp_path)])
    assert source.columns == ["id", "text", "label"]
    assert [r.data for r in source.records()] == [None, {"id": "2", "text": "x"}, {"text": "y", "label": "z"}]


def test_folders_of_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "deep").mkdir()
    for name, column in (("part-1.parquet", "text"), ("deep/part-2.parquet", "text"), ("part-3.parquet", "other")):
        pq.write_table(pa.table({column: [name, name]}), tmp_path / name)
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".hidden.parquet").write_text("")
    source = open_sources([str(tmp_path)])
    got = [(r.number, r.data.get("text")) for r in source.records({"text"})]
    assert got == [(1, "deep/part-2.parquet"), (2, "deep/part-2.parquet"), (3, "part-1.parquet"), (4, "part-1.parquet"),
                   (5, None), (6, None)]  # fmt: skip
    assert source.types["text"] == pa.string()


def test_names_patterns_and_folders(tmp_path, monkeypatch):
    a, b = jsonl(tmp_path / "a.jsonl", "x"), jsonl(tmp_path / "b.jsonl", "x")
    assert expand_names([f"{tmp_path}/*.jsonl"]) == expand_names([str(tmp_path)]) == [a, b]
    assert expand_names([b, a, "-"]) == [b, a, "-"]
    odd = jsonl(tmp_path / "[odd].jsonl", "x")
    assert expand_names([odd]) == [odd]
    (tmp_path / "empty").mkdir()
    assert holds_records(str(tmp_path)) and holds_records("x.csv.gz") and holds_records("no/such.parquet")
    monkeypatch.chdir(tmp_path)
    assert not holds_records("")
    assert not holds_records(str(tmp_path / "empty")) and not holds_records("why?") and not holds_records("a.txt")
    for name, says in (("*.csv", "no file matches"), ("empty", "holds no file that ends in .ndjson")):
        with pytest.raises(JobError, match=says):
            expand_names([str(tmp_path / name)])
    (tmp_path / "c.csv").write_text("text\nx\n")
    with pytest.raises(JobError, match="files of one format"):
        open_sources([a, str(tmp_path / "c.csv")])
    with pytest.raises(JobError, match="standard input cannot be combined"):
        open_sources([a, "-"])


def test_a_long_text_is_no_file():
    assert not holds_records("please summarise " * 30)  # longer than a file's name may be
