"""The journal and the output: one line per record whenever the process dies, and only for the same job."""

from __future__ import annotations

import json
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold.errors import JobError
from prefold.jobs import journal as journal_module
from prefold.jobs import output as output_module
from prefold.jobs.journal import Journal, differences, journal_path, recorded_job
from prefold.jobs.output import OutputOptions, open_output
from prefold.jobs.record import RecordSet, TextSet, format_ranges, parse_ranges

JOB = {"input": {"bytes": 10, "digest": "x"}, "task": "embed", "model": {"name": "m"}}


@given(st.sets(st.integers(0, 300)))
def test_record_sets_and_ranges_are_what_sets_are(numbers):
    records = RecordSet()
    for number in numbers:
        assert records.add(number)
        assert not records.add(number)
    assert len(records) == len(numbers)
    assert {n for n in range(400) if n in records} == numbers
    assert list(parse_ranges(format_ranges(numbers))) == sorted(numbers)


def test_record_set_takes_far_numbers():
    records = RecordSet()
    records.add(10_000_000)
    assert 10_000_000 in records and 9_999_999 not in records and len(records) == 1


def test_text_sets_grow_and_know_their_texts():
    texts = TextSet(most_new=300)
    assert all(texts.add(f"id-{i}") for i in range(5000))
    assert not any(texts.add(f"id-{i}") for i in range(0, 5000, 7))
    assert texts.add("id-5000")


def open_file(path, job=JOB, **options):
    return open_output(OutputOptions(path, **options), job)


def write(out, numbers, failed=False):
    for n in numbers:
        out.write(n, json.dumps({"record": n}), failed)


def records_of(path):
    return [json.loads(line)["record"] for line in path.read_text().splitlines()]


def test_a_job_ends_and_starting_it_again_does_nothing(tmp_path):
    path = tmp_path / "out.jsonl"
    out = open_file(path)
    write(out, [2, 1, 3])
    out.finish()
    out.close()
    again = open_file(path)
    assert again.ended and again.count == 3 and again.resumed == 3
    again.finish()
    again.close()
    assert records_of(path) == [2, 1, 3]


def test_errors_are_counted_over_runs(tmp_path):
    path = tmp_path / "out.jsonl"
    out = open_file(path)
    write(out, [1, 2], failed=True)
    out.commit()
    out.close()
    again = open_file(path)
    assert again.errors == 2 and again.count == 2
    write(again, [3], failed=True)
    again.finish()
    again.close()
    assert open_file(path).errors == 3


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    lost=st.integers(0, 400),
    torn=st.integers(0, 60),
    orphan=st.integers(0, 50),
)
def test_whatever_is_lost_of_either_file_a_resumed_job_has_each_record_once(tmp_path_factory, cuts, lost, torn, orphan):
    folder = tmp_path_factory.mktemp("job")
    path = folder / "out.jsonl"
    out = open_file(path)
    number = 0
    for size in cuts:
        write(out, range(number, number + size))
        number += size
        out.commit()
    out.close()
    with path.open("ab") as file:  # written, and not committed
        file.write(b'{"record": 99999}\n'[:orphan])
    os.truncate(path, max(0, path.stat().st_size - lost))
    journal = journal_path(path)
    os.truncate(journal, max(0, journal.stat().st_size - torn))
    try:
        again = open_file(path)
    except JobError:
        # only a journal that has lost its very first line may refuse, and only where there is output
        assert b"\n" not in journal.read_bytes() and path.stat().st_size
        return
    assert len(again.done) == again.count == again.resumed
    write(again, [n for n in range(number) if n not in again.done])
    again.finish()
    again.close()
    assert sorted(records_of(path)) == list(range(number))


def test_another_job_is_refused_and_told_apart(tmp_path):
    path = tmp_path / "out.jsonl"
    out = open_file(path)
    write(out, [1])
    out.finish()
    out.close()
    before = path.read_bytes()
    with pytest.raises(JobError) as error:
        open_file(path, job={**JOB, "model": {"name": "other"}, "task": "rerank"})
    assert 'model.name: "m" in the journal, "other" now' in str(error.value)
    assert 'task: "embed" in the journal, "rerank" now' in str(error.value)
    assert "  input." not in str(error.value) and "--overwrite" in str(error.value)
    assert "earlier version" not in str(error.value) and path.read_bytes() == before


def test_a_journal_of_an_earlier_version_goes_on_if_its_options_have_the_same_names(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    monkeypatch.setattr(journal_module, "_VERSION", 2)
    out = open_file(path)
    write(out, [1])
    out.commit()
    out.close()
    monkeypatch.undo()
    again = open_file(path)
    assert again.resumed == 1
    again.close()
    with pytest.raises(JobError, match="an earlier version wrote it"):
        open_file(path, job={**JOB, "options": {"labels": ["a", "b"]}})


def test_an_output_without_a_journal_is_refused_until_overwritten(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(JobError, match="--overwrite"):
        open_file(path)
    assert path.read_text() == "precious\n"
    out = open_file(path, overwrite=True)
    write(out, [1])
    out.finish()
    out.close()
    assert records_of(path) == [1]


def test_a_job_to_resume_must_be_there(tmp_path):
    with pytest.raises(JobError, match="nothing to resume"):
        open_file(tmp_path / "out.jsonl", only_resume=True)
    out = open_file(tmp_path / "out.jsonl")
    write(out, [1])
    out.commit()
    out.close()
    open_file(tmp_path / "out.jsonl", only_resume=True).close()


def test_two_processes_do_not_write_the_same_job(tmp_path):
    pytest.importorskip("fcntl")
    out = open_file(tmp_path / "out.jsonl")
    with pytest.raises(JobError, match="another process"):
        open_file(tmp_path / "out.jsonl")
    with pytest.raises(JobError, match="another process"):
        open_file(tmp_path / "out.jsonl", overwrite=True)
    out.close()
    open_file(tmp_path / "out.jsonl").close()


def test_a_try_with_a_limit_is_part_of_the_whole(tmp_path):
    path = tmp_path / "out.jsonl"
    out = open_file(path, limit=2)
    write(out, [1, 2])
    out.finish()
    out.close()
    assert open_file(path, limit=1).ended
    whole = open_file(path)
    assert not whole.ended and 2 in whole.done
    write(whole, [3])
    whole.finish()
    whole.close()
    assert records_of(path) == [1, 2, 3]
    assert open_file(path, limit=2).ended


def test_a_second_line_for_a_record_is_a_bug_that_shows(tmp_path):
    out = open_file(tmp_path / "out.jsonl")
    write(out, [1])
    out.commit()
    write(out, [1])
    with pytest.raises(AssertionError):
        out.commit()


def test_lines_wait_to_be_written_together(tmp_path):
    path = tmp_path / "out.jsonl"
    out = open_file(path, commit_seconds=60)
    write(out, range(1, 1001))
    out.commit(due_only=True)
    assert not path.exists()
    out.commit()
    assert len(records_of(path)) == 1000
    assert len(journal_path(path).read_text().splitlines()) == 2
    out.write(1001, "x" * output_module.COMMIT_BYTES, False)
    assert len(path.read_text().splitlines()) == 1001
    out.close()


def test_a_full_disk_keeps_what_is_committed(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    out = open_file(path)
    write(out, [1, 2])
    out.commit()
    good = path.stat().st_size

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            if self.file.tell() > good + 5:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:6])

        def __getattr__(self, name):
            return getattr(self.file, name)

    out._file = Full(out._file)
    write(out, [3])
    with pytest.raises(JobError, match="No space left"):
        out.commit()
    with pytest.raises(JobError, match="No space left"):
        out.commit()
    out.close()
    assert path.stat().st_size > good
    again = open_file(path)
    assert [n for n in range(5) if n in again.done] == [1, 2]
    write(again, [3])
    again.finish()
    again.close()
    assert records_of(path) == [1, 2, 3]


def test_differences_name_nested_keys():
    assert differences({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": 1, "c": 3}, "e": 2}) == [
        "a.c: 2 in the journal, 3 now",
        "d: 1 in the journal, null now",
        "e: null in the journal, 2 now",
    ]


def test_a_journal_killed_before_its_first_line_starts_again(tmp_path):
    path = tmp_path / "out.jsonl"
    journal_path(path).write_text('{"prefold_jour')
    out = open_file(path)
    write(out, [1])
    out.finish()
    out.close()
    assert records_of(path) == [1] and open_file(path).ended


@pytest.mark.parametrize("first", ['{"prefold_journal": 99, "job": {}}\n', "{}\n", "null\n", "5\n"])
def test_journal_of_another_version_is_refused(tmp_path, first):
    path = tmp_path / "out.jsonl"
    journal_path(path).write_text(first)
    with pytest.raises(JobError, match="not a journal"):
        open_file(path)
    assert journal_path(path).read_text() == first


def test_what_a_journal_says_of_its_job(tmp_path):
    out = tmp_path / "out.jsonl"
    assert recorded_job(out) == {}
    journal = Journal(journal_path(out))
    journal.start({"seed": 7})
    journal.close()
    assert recorded_job(out) == {"seed": 7}
    for broken in ("", "{", "[]", '{"job": 5}'):
        journal_path(out).write_text(broken)
        assert recorded_job(out) == {}


def test_a_journal_nothing_was_written_to_leaves_no_file(tmp_path):
    journal = Journal(journal_path(tmp_path / "out.jsonl"))
    with pytest.raises(JobError, match="another process"):
        Journal(journal.path)
    journal.close()
    journal.close()
    assert not list(tmp_path.iterdir())


def damaged_journal(tmp_path, change, keep_order=False):
    """Whose job's journal went through `change`, resumed and finished: the records of its output."""
    path = tmp_path / "out.jsonl"
    out = open_file(path, keep_order=keep_order)
    for number in range(1, 21):
        write(out, [number], failed=number % 7 == 0)
        if number % 3 == 0:
            out.commit()
    out.commit()
    out.close()
    journal = journal_path(path)
    journal.write_bytes(change(journal.read_bytes()))
    again = open_file(path, keep_order=keep_order)
    try:
        write(again, [n for n in range(1, 31) if n not in again.done])
        again.finish()
    finally:
        again.close()
    return sorted(records_of(path))


@settings(max_examples=150)
@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=3), keep=st.booleans())
def test_flipped_bits_in_a_journal_never_give_a_record_a_second_line(tmp_path_factory, flips, keep):
    def flip(data):
        data = bytearray(data)
        for place, mask in flips:
            data[int(place * (len(data) - 1))] ^= mask
        return bytes(data)

    try:
        assert damaged_journal(tmp_path_factory.mktemp("job"), flip, keep) == list(range(1, 31))
    except JobError as error:
        assert re.search("damaged|not a journal|no journal shows", str(error))


@pytest.mark.parametrize(
    "end",
    [b"{}\n", b"null\n", b"[]\n", b'{"to":1}\n', b'{"to":"x","done":"1","errors":0}\n', b'{"ended":5}\n', b"\0" * 99],
)
def test_a_last_entry_that_is_none_does_not_count(tmp_path, end):
    assert damaged_journal(tmp_path, lambda data: data + end) == list(range(1, 31))


def test_a_missing_or_doubled_entry_is_an_error_that_says_where_it_goes_on(tmp_path):
    for change in (lambda lines: lines[:3] + lines[4:], lambda lines: lines[:3] + lines[2:]):
        with pytest.raises(JobError, match=r"line 4 of .* is damaged.*head -n 3"):
            damaged_journal(tmp_path, lambda data, change=change: b"".join(change(data.splitlines(keepends=True))))
        # What the message says does it.
        journal = journal_path(tmp_path / "out.jsonl")
        journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:3]))
        again = open_file(tmp_path / "out.jsonl")
        write(again, [n for n in range(1, 31) if n not in again.done])
        again.finish()
        again.close()
        assert sorted(records_of(tmp_path / "out.jsonl")) == list(range(1, 31))
        for path in tmp_path.iterdir():
            path.unlink()
