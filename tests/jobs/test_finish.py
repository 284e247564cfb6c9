"""The last pass: input order, CSV, Parquet and gzip, made of the lines and resumable like them."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import pytest

from prefold.errors import JobError
from prefold.jobs.journal import journal_path
from prefold.jobs.output import OutputOptions, open_output
from prefold.jobs.record import dumps

JOB = {"task": "embed"}
LINES = {
    3: {"record": 3, "id": "c", "embedding": [0.25, 1.0], "score": 1.5},
    1: {"record": 1, "id": "a", "embedding": [1, 0], "score": 2},
    2: {"record": 2, "id": "b", "error": {"code": "null", "message": "'text' is null", "remedy": "give it a text"}},
    4: {"record": 4, "id": 'd, "q"\nx', "embedding": [0.5, 0.5], "score": 0.125},
}


def make(path, **options):
    out = open_output(OutputOptions(path, **options), JOB)
    for number, line in LINES.items():
        out.write(number, dumps(line), "error" in line)
    return out


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_keep_order_is_input_order(tmp_path, name):
    path = tmp_path / name
    out = make(path, keep_order=True)
    out.commit()
    assert not path.exists() and (tmp_path / f"{name}.partial").exists()
    out.finish()
    out.close()
    text = gzip.decompress(path.read_bytes()).decode() if name.endswith("gz") else path.read_text()
    assert [json.loads(line) for line in text.splitlines()] == [LINES[n] for n in (1, 2, 3, 4)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, f"{name}.journal"]
    assert open_output(OutputOptions(path, keep_order=True), JOB).ended


def test_csv_quotes_and_keeps_every_column(tmp_path):
    path = tmp_path / "out.csv"
    out = make(path)
    out.finish()
    out.close()
    rows = list(csv.DictReader(path.open(newline="")))
    assert [r["record"] for r in rows] == ["3", "1", "2", "4"]
    assert rows[3]["id"] == LINES[4]["id"] and json.loads(rows[0]["embedding"]) == [0.25, 1.0]
    assert rows[2]["error"] == "null: 'text' is null; give it a text" and rows[2]["score"] == ""


def test_parquet_has_types_and_nulls(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "out.parquet"
    out = make(path, keep_order=True)
    out.finish()
    out.close()
    table = pq.read_table(path)
    assert {f.name: str(f.type) for f in table.schema} == {
        "record": "int64",
        "id": "string",
        "embedding": "list<element: float>",
        "score": "double",
        "error": "string",
    }
    assert table["record"].to_pylist() == [1, 2, 3, 4]
    assert table["embedding"].to_pylist() == [[1, 0], None, [0.25, 1.0], [0.5, 0.5]]
    assert table["score"].to_pylist() == [2, None, 1.5, 0.125]


def test_killed_in_the_last_pass_it_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    out = make(path)
    monkeypatch.setattr(type(out.journal), "finish", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        out.finish()
    out.close()
    monkeypatch.undo()
    assert path.exists()
    path.write_text("torn")
    again = open_output(OutputOptions(path), JOB)
    assert not again.ended and again.count == 4
    again.finish()
    again.close()
    assert len(list(csv.DictReader(path.open(newline="")))) == 4


@pytest.mark.parametrize("keep_order", [False, True])
def test_killed_behind_its_end_it_leaves_no_lines_file(tmp_path, monkeypatch, keep_order):
    path = tmp_path / "out.csv"
    out = make(path, keep_order=keep_order)
    monkeypatch.setattr(type(out), "_remove_lines", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        out.finish()
    out.close()
    monkeypatch.undo()
    left = path.read_bytes()
    assert (tmp_path / "out.csv.partial").exists()
    again = open_output(OutputOptions(path, keep_order=keep_order), JOB)
    assert again.ended and again.count == 4
    again.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "out.csv.journal"] and path.read_bytes() == left


def test_a_lost_lines_file_starts_the_job_again(tmp_path):
    path = tmp_path / "out.csv"
    out = make(path)
    out.commit()
    out.close()
    (tmp_path / "out.csv.partial").unlink()
    again = open_output(OutputOptions(path), JOB)
    assert again.count == 0
    again.close()


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.jsonl.gz", "out.jsonl"])
def test_a_try_with_a_limit_is_the_beginning_of_the_whole(tmp_path, name):
    path = tmp_path / name
    out = make(path, keep_order=True, limit=4)
    out.finish()
    out.close()
    assert open_output(OutputOptions(path, keep_order=True, limit=3), JOB).ended
    for limit in (6, None):
        more = open_output(OutputOptions(path, keep_order=True, limit=limit), JOB)
        assert not more.ended and more.count == (4 if limit else 6)
        for number in (5, 6) if limit else (7,):
            more.write(number, dumps({"record": number, "id": "x", "score": 0.5}), False)
        if limit is None:  # killed and resumed in between
            more.commit()
            more.close()
            more = open_output(OutputOptions(path, keep_order=True), JOB)
            assert not more.ended and more.count == 7
        more.finish()
        more.close()
    assert records_of(path) == list(range(1, 8))
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, f"{name}.journal"]


def test_a_try_whose_lines_are_gone_is_done_again(tmp_path):
    path = tmp_path / "out.csv"
    out = make(path, limit=4)
    out.finish()
    out.close()
    (tmp_path / "out.csv.partial").unlink()
    assert open_output(OutputOptions(path, limit=4), JOB).ended
    again = open_output(OutputOptions(path), JOB)
    assert not again.ended and again.count == 0
    again.close()


def records_of(path):
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path)["record"].to_pylist()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        if path.suffix == ".csv":
            return [int(row["record"]) for row in csv.DictReader(file)]
        return [json.loads(line)["record"] for line in file]


def test_an_empty_job_makes_an_empty_file(tmp_path):
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow")
        out = open_output(OutputOptions(tmp_path / name, keep_order=True), JOB)
        out.finish()
        out.close()
        assert (tmp_path / name).exists() and journal_path(tmp_path / name).exists()


def test_refused_outputs(tmp_path):
    with pytest.raises(JobError, match="-o FILE"):
        open_output(OutputOptions(None, keep_order=True), JOB)
    for name in ("a.xlsx", "a.txt", "a", "a.gz"):
        with pytest.raises(JobError, match=r"\.jsonl, \.csv, \.tsv or \.parquet"):
            open_output(OutputOptions(tmp_path / name), JOB)
    assert not list(tmp_path.iterdir())
    with pytest.raises(JobError, match="its own compression"):
        open_output(OutputOptions(tmp_path / "a.parquet.gz"), JOB)


def test_float32_come_back_exactly():
    scale = (10.0 ** np.arange(-20, 20).repeat(50)).astype(np.float32)
    values = np.random.default_rng(0).normal(size=2000).astype(np.float32) * scale
    back = np.array(json.loads(dumps({"v": values}))["v"], np.float32)
    assert np.array_equal(back, values)
    # Rows of an array have as many digits as an array of its own.
    assert dumps({"m": values[:4].reshape(2, 2)}) == dumps({"m": [values[:2], values[2:4]]})
    assert dumps(np.full((1, 2, 1), 0.1, np.float32)) == "[[[0.100000001], [0.100000001]]]"
    plain = ["ü\n", None, True, 0.1, 1e300]
    assert json.loads(dumps(plain)) == plain
    number, count = json.loads(dumps((np.float32(0.1), np.int64(3))))
    assert np.float32(number) == np.float32(0.1) and count == 3
    assert "\n" not in dumps({"a": "x\ny"})


def test_the_last_endings_of_a_name_tell_the_format(tmp_path):
    for name, sign, opened in (
        ("a.tsv.csv", ",", open),
        ("a.csv.tsv.gz", "\t", gzip.open),
        ("a.csv.GZ", ",", gzip.open),
    ):
        out = open_output(OutputOptions(tmp_path / name), JOB)
        out.write(1, '{"record": 1, "text": "x"}', False)
        out.finish()
        out.close()
        with opened(tmp_path / name, "rt") as file:
            assert file.read() == f"record{sign}text\n1{sign}x\n"
    out = open_output(OutputOptions(tmp_path / "a.jsonl.GZ"), JOB)
    out.write(1, "{}", False)
    out.finish()
    out.close()
    assert gzip.decompress((tmp_path / "a.jsonl.GZ").read_bytes()) == b"{}\n"
