"""Sources: every record in order, numbered from 1, and what is wrong with one does not stop the others."""

from __future__ import annotations

import gzip
import io
import json

import pytest

from prefold.errors import JobError
from prefold.jobs.source import open_source


def rows(path, **options):
    return list(open_source(str(path), **options).records())


def test_jsonl_numbers_records_and_skips_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n   \n{"a": 2}\r\n{"a": 3}')
    assert [(r.number, r.data["a"]) for r in rows(path)] == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"a": ', "invalid_json"),
        (b"nonsense", "invalid_json"),
        (b'{"a": "b', "invalid_json"),
        (b"[1, 2]", "wrong_type"),
        (b"null", "wrong_type"),
        (b'"text"', "wrong_type"),
        (b'{"a": "\xff\xfe"}', "invalid_utf8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
    ],
)
def test_a_bad_json_line_is_one_error_and_the_rest_goes_on(tmp_path, line, code):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    got = rows(path)
    assert [r.number for r in got] == [1, 2, 3]
    assert got[1].data is None and got[1].error.code == code
    assert " at at " not in str(got[1].error)
    assert got[0].data == {"a": 1} and got[2].data == {"a": 3}


def test_byte_order_marks_and_gzip(tmp_path):
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + '{"a": "ü"}\n'.encode())
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert [r.data for r in rows(plain)] == [r.data for r in rows(zipped)] == [{"a": "ü"}]


def test_csv_fields_of_several_lines_and_wrong_field_counts(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,"two\nlines, and a comma"\n2\n\n3,x,y\n4,"bad"quote\n5,ü\n', encoding="utf-8")
    got = rows(path)
    assert [r.number for r in got] == [1, 2, 3, 4, 5]
    assert got[0].data == {"id": "1", "text": "two\nlines, and a comma"}
    assert got[1].error.code == got[2].error.code == "wrong_number_of_fields"
    assert got[3].error.code == "invalid_csv"
    assert got[4].data == {"id": "5", "text": "ü"}


def test_csv_invalid_utf8_is_kept_for_the_field_check(tmp_path):
    from prefold.errors import InputError
    from prefold.text.fields import Template

    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,\xff\xfe\n2,fine\n")
    got = rows(path)
    assert Template("id", "--prompt").render(got[0].data) == "1"
    with pytest.raises(InputError) as error:
        Template("text", "--prompt").render(got[0].data)
    assert error.value.code == "invalid_utf8" and error.value.field == "text"
    assert got[1].data["text"] == "fine"


def test_csv_columns_are_known_beforehand(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("a\tb\n1\t2\n")
    source = open_source(str(path))
    assert source.columns == ["a", "b"] and source.format == "tsv"
    assert [r.data for r in source.records()] == [{"a": "1", "b": "2"}]


def test_parquet_reads_the_wanted_columns_over_row_groups(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"t{i}" for i in range(2000)], "other": list(range(2000)), "docs": [["x"]] * 2000})
    pq.write_table(table, path, row_group_size=300)
    source = open_source(str(path))
    got = list(source.records({"text", "docs"}))
    assert source.columns == ["text", "other", "docs"]
    assert [r.number for r in got] == list(range(1, 2001))
    assert got[1234].data == {"text": "t1234", "docs": ["x"]}


def test_large_rows_of_parquet_are_read_few_at_a_time(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    from prefold.jobs.formats import _batch_rows

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    assert _batch_rows(pq.ParquetFile(path).metadata) == 512
    pq.write_table(pa.table({"text": [str(i) * (1 << 20) for i in range(10)]}), path, use_dictionary=False)
    assert 1 <= _batch_rows(pq.ParquetFile(path).metadata) <= 4
    got = rows(path)
    assert [r.number for r in got] == list(range(1, 11)) and all(r.size >= 1 << 20 for r in got)


def test_parquet_invalid_utf8_is_an_error_of_its_record(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    binary = pa.array([b"fine", b"\xff", b"too"], pa.binary())
    text = pa.StringArray.from_buffers(3, binary.buffers()[1], binary.buffers()[2])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    got = rows(tmp_path / "a.parquet")
    assert [r.error and r.error.code for r in got] == [None, "invalid_utf8", None]
    assert got[2].data == {"text": "too"} and [r.number for r in got] == [1, 2, 3]


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_standard_input_is_read_as_a_stream(format):
    lines = b'{"a": "1"}\n{"a": "2"}\n' if format == "jsonl" else b"a\n1\n2\n"
    source = open_source("-", format, stdin=io.BytesIO(lines))
    assert [r.data for r in source.records()] == [{"a": "1"}, {"a": "2"}]
    other = open_source("-", format, stdin=io.BytesIO(b'{"b": 1}\n' if format == "jsonl" else b"b\n"))
    assert source.identity != other.identity


def test_what_breaks_the_file_is_a_job_error(tmp_path):
    whole = gzip.compress(b'{"a": 1}\n' * 10_000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(JobError, match="damaged after record"):
        rows(tmp_path / "cut.jsonl.gz")
    (tmp_path / "array.json").write_text(json.dumps([{"a": 1}]))
    with pytest.raises(JobError, match=r"jq -c"):
        open_source(str(tmp_path / "array.json"))
    (tmp_path / "wide.jsonl").write_bytes('{"a": 1}\n'.encode("utf-16"))
    with pytest.raises(JobError, match="UTF-16"):
        open_source(str(tmp_path / "wide.jsonl"))
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(JobError, match="not a Parquet file; give its --format"):
        open_source(str(tmp_path / "a.parquet"))
    (tmp_path / "twice.csv").write_text("a,b,a\n")
    with pytest.raises(JobError, match="names a column twice: a"):
        open_source(str(tmp_path / "twice.csv"))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(JobError, match="is empty"):
        open_source(str(tmp_path / "empty.csv"))
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(JobError, match="--format"):
        open_source(str(tmp_path / "data.txt"))
    for bad in ("missing.jsonl", "."):
        with pytest.raises(JobError):
            open_source(str(tmp_path / bad))


def test_identity_tells_inputs_apart_by_content_only(tmp_path):
    a, b, c = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    body = "".join(f'{{"a": {i}}}\n' for i in range(50_000))
    a.write_text(body)
    b.write_text(body)
    c.write_text(body.replace('{"a": 25000}', '{"a": 25001}'))
    assert open_source(str(a)).identity == open_source(str(b)).identity != open_source(str(c)).identity


def test_standard_input_is_known_by_its_first_record():
    def identity(text, format):
        source = open_source("-", format, stdin=io.BytesIO(text.encode()))
        assert [record.data for record in source.records()]
        return source.identity

    monday, tuesday = "id,text\n1,a\n2,b\n", "id,text\n3,c\n2,b\n"
    assert identity(monday, "csv") != identity(tuesday, "csv") and identity(monday, "csv") == identity(monday, "csv")
    quoted = open_source("-", "csv", stdin=io.BytesIO(b'"a\nb",c\n1,2\n3,4\n'))
    assert [[*record.data.values()] for record in quoted.records()] == [["1", "2"], ["3", "4"]]


def test_a_value_that_python_does_not_have_is_its_records_error(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    far = pa.array([1, 4_000_000, 3], pa.int32()).cast(pa.date32())  # days; the second is in the year 12921
    pq.write_table(pa.table({"text": ["a", "b", "c"], "day": far}), tmp_path / "in.parquet")
    found = list(open_source(str(tmp_path / "in.parquet")).records())
    assert [record.number for record in found] == [1, 2, 3]
    assert found[0].data["text"] == "a" and found[2].data["day"].year == 1970
    assert found[1].error.field == "day" and "date32" in str(found[1].error)
