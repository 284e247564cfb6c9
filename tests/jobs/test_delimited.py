"""CSV and TSV: cells of several lines are cells, and a broken quote costs the line it is in."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.errors import JobError
from prefold.jobs.formats import TableOptions, read_rows
from prefold.jobs.source import open_source


def read(text, *, delimiter=",", **options):
    width = len(next(csv.reader(io.StringIO(text), delimiter=delimiter)))
    rows = read_rows(io.BytesIO(text.encode()), delimiter, width=width, **options)
    next(rows)
    return list(rows)


def table(rows=300, *, bad=None, at=100, quoted=None):
    """id,text with `bad` as the text of one row; `quoted`: a row whose text is properly quoted."""
    out = ["id,text"]
    for i in range(1, rows + 1):
        out.append(f'r{i},"quoted, {i}"' if i == quoted else f"r{i},it was row {i}")
    if bad is not None:
        out[at] = f"r{at},{bad}"
    return "\n".join(out) + "\n"


def ids(rows):
    return [row.cells[0] for row in rows if row.cells is not None]


@pytest.mark.parametrize(
    ("quoted", "says"),
    [
        (
            None,
            "begins in line 101 has a quote that is never closed; the 200 lines after it are read as separate rows",
        ),
        (150, "the row that begins in line 101 has a quote that is closed in the middle of line 151"),
    ],
)
def test_a_quote_that_is_not_closed_costs_one_row(quoted, says):
    rows = read(table(bad='"he said it was good', quoted=quoted))
    assert len(rows) == 300 and ids(rows) == [f"r{i}" for i in range(1, 301) if i != 100]
    (bad,) = [row for row in rows if row.error]
    assert bad.line == 101 and bad.error.code == "invalid_csv" and says in str(bad.error)


def test_cells_that_may_have_one_line_only():
    """A quote that another one happens to close makes one cell of what lies between, where cells may be so long."""
    text = table(bad='"he said it was good').replace("it was row 160", 'it was row 160"')
    assert len(read(text)) == 240 and not any(row.error for row in read(text))
    assert [row.line for row in read('id,text\n1,"two\nlines"\n', max_cell_lines=1) if row.error] == [2, 3]
    assert [row.cells for row in read('id,text\n1,"two\nlines"\n', max_cell_lines=2)] == [["1", "two\nlines"]]
    rows = read(text, max_cell_lines=1)
    assert len(rows) == 300 and ids(rows) == [f"r{i}" for i in range(1, 301) if i != 100]
    assert rows[159].cells == ["r160", 'it was row 160"']


def test_a_very_long_cell_names_the_option():
    text = 'id,text\n1,"' + "a line\n" * 1500 + '"\n2,two\n'
    rows = read(text)
    assert "is not closed within 1,000 lines" in str(rows[0].error) and "--max-cell-lines" in rows[0].error.remedy
    assert ids(rows)[-1] == "2" and len(rows) == 1502
    assert [len(row.cells[1]) for row in read(text, max_cell_lines=2000)] == [7 * 1500, 3]
    assert [len(row.cells[1]) for row in read(text, max_cell_lines=0)] == [7 * 1500, 3]


def test_cells_of_several_lines_are_cells():
    letter = "Dear Sir,\nmany thanks, and so on\n\n" + "a, b\n" * 10 + '"quoted"'
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerows([["id", "text"], *[[i, letter] for i in range(30)]])
    assert [row.cells for row in read(buffer.getvalue())] == [[str(i), letter] for i in range(30)]


def test_lines_behind_a_broken_quote_are_rows_or_errors():
    rows = read('id,text\n1,one\n2,"a letter\nwith lines\nand more" of it\n3,three\n')
    assert ids(rows) == ["1", "3"] and [row.line for row in rows] == [2, 3, 4, 5, 6]
    assert "line 3 has a quote that is closed in the middle of line 5" in str(rows[1].error)
    assert all("has 1 cells, the header 2" in str(row.error) for row in rows[2:4])


def test_an_open_quote_behind_a_cell_of_several_lines():
    rows = read('id,a,b\n1,"two\nlines","open\n2,x,y\n3,x,y\n4,x,y\n')
    assert ids(rows) == ["2", "3", "4"] and [row.line for row in rows if row.error] == [2, 3]
    assert all("is never closed" in str(row.error) for row in rows[:2])


def test_rows_of_another_width_name_their_line():
    rows = read("a,b\n1,2\n\n3\n4,5,6\n7,8\n")
    assert [row.line for row in rows] == [2, 4, 5, 6]
    assert "line 4 has 1 cells, the header 2" in str(rows[1].error)


def test_memory_is_bounded_whatever_the_quotes():
    taken = 0

    def lines():
        nonlocal taken
        yield b"id,text\n"
        for i in range(20_000):
            taken = i
            yield b'%d,"open\n' % i if i == 10 else b"%d,x\n" % i

    rows = read_rows(lines(), ",", width=2)
    for row in rows:
        if row.error:
            break
    assert taken < 1200
    assert sum(1 for _ in rows) == 20_000 - 11


cells = st.text(st.sampled_from('ab0 ,;"\n\té\r'), max_size=12)


@settings(max_examples=100)
@given(st.integers(2, 4).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1, max_size=8)))
def test_what_a_writer_wrote_is_read_back(rows):
    buffer = io.StringIO()
    csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([["h"] * len(rows[0]), *rows])
    assert [row.cells for row in read(buffer.getvalue(), max_cell_lines=0)] == rows


@settings(max_examples=150)
@given(st.lists(st.text(st.sampled_from('a0,"é\r'), max_size=8), max_size=30), st.sampled_from([0, 2, 1000]))
def test_any_lines_end_and_none_is_forgotten(lines, most):
    text = "".join(line + "\n" for line in ["a,b", *lines])
    rows = list(read_rows(io.BytesIO(text.encode()), ",", width=2, max_cell_lines=most))
    places = [row.line for row in rows]
    assert places == sorted(set(places)) and (not places or places[-1] <= len(lines) + 1)
    if most and not any('"' in line or "\r" in line for line in lines):
        assert len(rows) == 1 + sum(bool(line) for line in lines)


def test_delimiters(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id;body\n1;one, two\n")
    with pytest.raises(JobError, match=r"one column, 'id;body'.*add --delimiter ';'"):
        open_source(str(path))
    source = open_source(str(path), options=TableOptions(delimiter=";"))
    assert [r.data for r in source.records()] == [{"id": "1", "body": "one, two"}]
    assert open_source(str(path), options=TableOptions(delimiter=",")).columns == ["id;body"]
    path.write_text("id\tbody\n1\tone\n")
    with pytest.raises(JobError, match="--delimiter tab"):
        open_source(str(path))
    for sign in ("tab", "\\t", "\t"):
        assert open_source(str(path), options=TableOptions(delimiter=sign)).columns == ["id", "body"]
    for sign in ("", ";;", '"', "\n"):
        with pytest.raises(JobError, match="not one character"):
            open_source(str(path), options=TableOptions(delimiter=sign))
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(JobError, match="for CSV and TSV"):
        open_source(str(tmp_path / "a.jsonl"), options=TableOptions(delimiter=";"))


def test_lines_that_end_with_a_carriage_return_alone_say_what_to_do(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"id,text\r1,x\r")
    with pytest.raises(JobError, match=r"line 1 is not a valid row: .*unquoted field; end lines with a line feed"):
        open_source(str(tmp_path / "a.csv"))


def test_a_header_that_is_never_closed(tmp_path):
    (tmp_path / "a.csv").write_text('"id,text\n' + "1,x\n" * 5000)
    with pytest.raises(JobError, match="line 1 has a quote that is not closed"):
        open_source(str(tmp_path / "a.csv"))
