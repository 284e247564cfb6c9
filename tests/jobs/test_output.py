"""An output and who may replace it: only the holder of the lock, and only once a line is there to be written."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fake_jobs import FakeTask, fake_llm
from job_tables import check_complete, table_job, write_records

from prefold.errors import CheckpointError, JobError
from prefold.jobs.journal import journal_path
from prefold.jobs.output import OutputOptions, StreamOutput, open_output
from prefold.jobs.report.progress import Progress
from prefold.jobs.run import Job, run_job
from prefold.jobs.source import open_source
from prefold.jobs.tables import TableAdapter
from prefold.tasks.rows import Columns
from prefold.text.fields import Template

JOB = {"task": "embed"}
NAMES = ["out.jsonl", "out.csv", "out.jsonl.gz"]


def write(out, numbers):
    for n in numbers:
        out.write(n, json.dumps({"record": n}), False)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def finished(path, numbers=(1, 2)):
    out = open_output(OutputOptions(path), JOB)
    write(out, numbers)
    out.finish()
    out.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_second_writer_changes_nothing(tmp_path, name):
    pytest.importorskip("fcntl")
    out = open_output(OutputOptions(tmp_path / name), JOB)
    write(out, [1, 2])
    out.commit()
    before = contents(tmp_path)
    for options in ({}, {"overwrite": True}, {"only_resume": True}):
        with pytest.raises(JobError, match="another process"):
            open_output(OutputOptions(tmp_path / name, **options), {"task": "other"})
        assert contents(tmp_path) == before
    write(out, [3])
    out.finish()
    out.close()
    assert open_output(OutputOptions(tmp_path / name), JOB).count == 3


def test_a_second_writer_that_waits_at_the_lock_while_the_journal_is_replaced_does_not_get_it(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / "out.jsonl"
    finished(path)
    out = open_output(OutputOptions(path, overwrite=True), JOB)
    write(out, [1])
    out.commit()  # puts a new journal in the old one's place
    with pytest.raises(JobError, match="another process"):
        open_output(OutputOptions(path), JOB)
    out.finish()
    out.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("before", ["nothing", "foreign", "finished", "begun"])
def test_a_job_that_cannot_run_leaves_everything_as_it_was(tmp_path, name, before):
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / name
    if before == "foreign":
        path.write_text("precious\n")
    elif before != "nothing":
        out = open_output(OutputOptions(path), JOB)
        write(out, [1])
        out.commit() if before == "begun" else out.finish()
        out.close()
    kept = contents(folder)
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "x"}\nnonsense\n' * 50)

    def load():
        raise CheckpointError("this cannot be run")

    adapter = TableAdapter("embed", Columns(prompt=Template("text", "--prompt")))
    output = open_output(OutputOptions(path, overwrite=before != "nothing"), {"task": "new"})
    with pytest.raises(CheckpointError):
        run_job(Job(open_source(str(source)), adapter, {"embed": FakeTask()}, load, output), Progress())
    assert contents(folder) == kept


@pytest.mark.parametrize("name", NAMES)
def test_an_old_output_stays_until_the_first_new_line(tmp_path, name):
    path = tmp_path / name
    finished(path)
    kept = contents(tmp_path)
    out = open_output(OutputOptions(path, overwrite=True), {"task": "new"})
    out.hold()
    write(out, [1])
    out.commit()
    assert contents(tmp_path) == kept
    out.release()
    assert contents(tmp_path) == kept and not out.begun
    out.commit()
    assert contents(tmp_path) != kept and out.begun
    out.finish()
    out.close()
    assert open_output(OutputOptions(path), {"task": "new"}).count == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_held_lines_are_bounded(tmp_path, overwrite):
    if overwrite:
        finished(tmp_path / "out.jsonl")
    out = open_output(OutputOptions(tmp_path / "out.jsonl", overwrite=overwrite), JOB)
    out.hold()
    for number in range(20):
        out.write(number, "x" * (1 << 20), True)
    assert len(out._pending) < 17 and (tmp_path / "out.jsonl").stat().st_size >= 16 << 20
    out.close()


@pytest.mark.parametrize("what", ["folder", "missing", "file"])
def test_places_that_cannot_be_written_are_one_error(tmp_path, what):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    path = {"folder": tmp_path / "folder.jsonl", "missing": Path("/proc/x.jsonl"), "file": tmp_path / "file" / "x.csv"}
    before = sorted(tmp_path.rglob("*"))
    for overwrite in (False, True):
        with pytest.raises(JobError, match=r"folder|cannot write"):
            open_output(OutputOptions(path[what], overwrite=overwrite), JOB)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fails_when_the_job_begins_keeps_the_old_output(tmp_path, fsync_by):
    path = tmp_path / "out.jsonl"
    finished(path)
    kept = contents(tmp_path)
    out = open_output(OutputOptions(path, overwrite=True), {"task": "new"})
    write(out, [1])

    def full(fsync, fd):
        raise OSError(28, "No space left on device")

    fsync_by(full)
    for _ in range(2):
        with pytest.raises(JobError, match=r"No space left on device.*free disk space"):
            out.commit()
    out.close()
    assert contents(tmp_path) == kept


def test_a_killed_overwrite_belongs_to_the_new_job(tmp_path):
    """Killed between the new journal and the new output: the new job goes on, the old output is not taken for its."""
    path = tmp_path / "out.jsonl"
    finished(path, range(1, 6))
    out = open_output(OutputOptions(path, overwrite=True), {"task": "new"})
    out.journal.start(out._job)
    out.journal.close()
    again = open_output(OutputOptions(path), {"task": "new"})
    assert again.count == 0 and not again.ended
    write(again, [9])
    again.finish()
    again.close()
    assert [json.loads(line)["record"] for line in path.read_text().splitlines()] == [9]


def test_a_full_disk_in_the_last_pass_is_one_error_and_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    out = open_output(OutputOptions(path), JOB)
    write(out, [1, 2])
    out.commit()

    def full(self, row):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("csv.DictWriter.writerow", full)
        with pytest.raises(JobError, match=r"cannot write .*out.csv: No space left.* free disk space"):
            out.finish()
    out.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv.journal", "out.csv.partial"]
    again = open_output(OutputOptions(path), JOB)
    assert again.count == 2 and not again.ended
    again.finish()
    again.close()
    assert path.exists() and not journal_path(path).with_suffix(".partial").exists()


def test_a_full_or_closed_standard_output_is_a_job_error(monkeypatch):
    out = StreamOutput(open("/dev/full", "wb"))  # noqa: SIM115
    write(out, [1])
    with pytest.raises(JobError, match="standard output: No space left"):
        out.commit()
    with pytest.raises(OSError):
        out._stream.close()
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(JobError, match="standard output is closed"):
        open_output(OutputOptions(None), JOB)


HUNG_UP = """
import sys
import os, signal
from pathlib import Path
from prefold.jobs.run import Interrupted, run_job
from prefold.jobs.report.progress import Progress
from prefold.trie import Spool
from fake_jobs import fake_llm
from job_tables import table_job
def before(i):
    if i == 20:
        os.kill(os.getpid(), signal.SIGHUP)
try:
    make = lambda: Spool(memory_bytes=2000, directory={folder!r})
    run_job(table_job(Path({source!r}), Path({out!r}), llm=fake_llm(before=before), make_spool=make), Progress())
except Interrupted as error:
    print("signal", int(error.signal))
else:
    print("done")
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_a_job_cleanly_unless_it_is_to_be_ignored(tmp_path, ignored):
    write_records(tmp_path / "in.jsonl", 400)
    script = HUNG_UP.format(folder=str(tmp_path), source=str(tmp_path / "in.jsonl"), out=str(tmp_path / "out.jsonl"))
    head = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" if ignored else ""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", head + script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == (["done"] if ignored else ["signal", "1"])
    assert not list(tmp_path.glob("prefold-spool-*"))
    if not ignored:
        assert 0 < len((tmp_path / "out.jsonl").read_text().splitlines()) < 400
        run_job(table_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm=fake_llm()), Progress())
    check_complete(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


@pytest.mark.parametrize("done", [False, True])
def test_lines_whose_commit_was_interrupted_are_not_written_again(tmp_path, monkeypatch, done):
    path = tmp_path / "out.jsonl"
    out = open_output(OutputOptions(path), JOB)
    commit = out.journal.commit

    def interrupted(*arguments):
        if done:
            commit(*arguments)
        raise KeyboardInterrupt

    out.write(1, '{"record": 1}', False)
    monkeypatch.setattr(out.journal, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        out.commit()
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(JobError, match="interrupted"):
            out.commit()
    out.close()
    again = open_output(OutputOptions(path), JOB)
    assert again.count == done
    for number in range(1 + done, 3):
        again.write(number, f'{{"record": {number}}}', False)
    again.finish()
    again.close()
    assert path.read_text() == '{"record": 1}\n{"record": 2}\n'


def test_a_signal_within_a_write_parts_no_line_from_its_record(tmp_path):
    class Interrupting(list):
        def append(self, item):
            super().append(item)
            raise KeyboardInterrupt

    path = tmp_path / "out.jsonl"
    out = open_output(OutputOptions(path), JOB)
    for name, value in list(vars(out).items()):
        if value == [] and name != "notes":
            setattr(out, name, Interrupting())
    with pytest.raises(KeyboardInterrupt):
        out.write(1, '{"record": 1}', False)
    out.commit()
    out.close()
    again = open_output(OutputOptions(path), JOB)
    assert path.read_text().count("\n") == again.count == 1
    again.close()


def test_who_reads_standard_output_leaves_while_lines_are_committed(tmp_path, monkeypatch):
    """The thread that commits says nothing of it: the next line that is written does."""
    write_records(tmp_path / "in.jsonl", 400)
    failed, seen = threading.Event(), []

    class Closed(StreamOutput):
        def commit(self, *, due_only=False):
            if due_only:
                failed.set()
                raise BrokenPipeError

    monkeypatch.setattr("prefold.jobs.run.TICK_SECONDS", 0.001)
    monkeypatch.setattr(threading, "excepthook", seen.append)
    job = table_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", llm=fake_llm(before=lambda i: failed.wait(60)))
    job.output.close()
    run_job(replace(job, output=Closed(io.BytesIO())), Progress())
    assert failed.is_set() and not seen
