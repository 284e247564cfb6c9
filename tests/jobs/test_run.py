"""Jobs with a fake engine: every record has exactly one line, whatever happens on the way."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fake_jobs import FakeGenerateTask, FakeTask, digest, fake_llm
from forked import begin
from job_tables import FINGERPRINT, check_complete, read_lines, table_job, write_records

from prefold.errors import CheckpointError, JobError, UnsupportedModelError
from prefold.jobs.batch import OpenAIBatch
from prefold.jobs.journal import journal_path
from prefold.jobs.output import OutputOptions, StreamOutput, open_output
from prefold.jobs.report.progress import Progress
from prefold.jobs.run import WAITING, Interrupted, Job, run_job
from prefold.jobs.source import check_grown, file_identity, open_source, open_sources
from prefold.jobs.tables import TableAdapter
from prefold.tasks.rows import Columns
from prefold.text.fields import Template
from prefold.trie import Spool


@pytest.mark.parametrize("options", [{}, {"window": 500}, {"window": 500, "streaming": True}, {"window": 1}])
@pytest.mark.parametrize("sharing", ["full", "off"])
def test_every_record_has_its_line(tmp_path, options, sharing):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 300, bad={5, 77, 300})
    job = table_job(source, out, llm=fake_llm(sharing=sharing), collect=True, **options)
    summary = run_job(job, Progress())
    check_complete(source, out)
    assert (summary.records, summary.errors, summary.resumed) == (300, 3, 0)
    assert summary.stats.requests == 297 and summary.sharing == sharing
    assert summary.streams == 1
    assert summary.shape.num_requests == 297 - summary.stats.repeats and len(summary.steps) == summary.stats.steps
    again = run_job(table_job(source, out, load=lambda: pytest.fail("loaded a model for nothing")), Progress())
    assert again.records == 300 and again.errors == 3 and again.resumed == 300


def test_a_limit_takes_the_first_records_and_the_whole_job_goes_on(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 50)
    assert run_job(table_job(source, out, limit=10), Progress()).records == 10
    assert sorted(line["record"] for line in read_lines(out)) == list(range(1, 11))
    job = table_job(source, out)
    assert run_job(job, Progress()).resumed == 10
    assert job.tasks["embed"].prepared == 40
    check_complete(source, out)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_tokenised_at_once_is_bounded_in_bytes(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("prefold.jobs.reader.CHUNK_BYTES", 10_000)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = ["x" * (6000 if i % 3 else 10) for i in range(20)]
    source.write_text("".join(json.dumps({"text": text, "k": "x"}) + "\n" for text in texts))
    job = table_job(source, out, streaming=streaming)
    chunks, prepare = [], job.tasks["embed"].prepare
    job.tasks["embed"].prepare = lambda items: chunks.append([len(i["text"]) for i in items]) or prepare(items)
    assert run_job(job, Progress()).records == 20
    assert sum(map(len, chunks)) == 20 and max(map(sum, chunks)) <= 10_000 and max(map(len, chunks)) > 1


def test_records_that_all_fail_load_no_model(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 20, bad=range(1, 21))
    summary = run_job(table_job(source, out, load=lambda: pytest.fail("loaded a model for nothing")), Progress())
    assert summary.errors == summary.records == 20
    check_complete(source, out)


def test_an_empty_input_is_a_job_too(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("")
    assert run_job(table_job(source, out), Progress()).records == 0
    assert out.read_text() == ""


def test_results_that_are_not_finite_become_errors(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 3)
    llm = fake_llm()
    run = llm.engine.run

    def broken(*arguments, **options):
        for i, (tag, result) in enumerate(run(*arguments, **options)):
            if i == 1:
                result.values[0] = np.nan
            yield tag, result

    llm.engine.run = broken
    assert run_job(table_job(source, out, llm=llm), Progress()).errors == 1
    assert [line.get("error", {}).get("code") for line in read_lines(out)].count("not_finite") == 1


def test_errors_of_loading_and_of_the_input_end_the_job(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 5000)
    before = set(threading.enumerate())

    def fail():
        raise CheckpointError("no such model")

    with pytest.raises(CheckpointError, match="no such model"):
        run_job(table_job(source, out, load=fail), Progress())
    zipped = tmp_path / "in.jsonl.gz"
    import gzip

    zipped.write_bytes(gzip.compress(source.read_bytes())[:-50])
    adapter = TableAdapter("embed", Columns(prompt=Template("text", "--prompt")))
    output = StreamOutput(sys.stderr.buffer)
    with pytest.raises(JobError, match="damaged"):
        run_job(Job(open_source(str(zipped)), adapter, {"embed": FakeTask()}, fake_llm, output), Progress())
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread


def test_a_batch_of_several_urls_runs_lane_by_lane(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [
        ("/v1/embeddings", {"model": "m", "input": "x"}),
        ("/rerank", {"query": "q", "documents": ["a", "b"]}),
        ("/v1/score", {"text_1": "q", "text_2": ["a", "b", "c"]}),
        ("/v1/images/generations", {"prompt": "x"}),
        ("/v1/embeddings", {"input": ""}),
        ("/rerank", {"query": "q" * 300, "documents": ["a"]}),
    ]
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": u, "body": b} for i, (u, b) in enumerate(bodies)]
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[0]]) + "nonsense\n")
    output = open_output(OutputOptions(out), FINGERPRINT)
    tasks = {"embed": FakeTask("embed"), "rerank": FakeTask("rerank", "logits")}
    job = Job(open_source(str(source)), OpenAIBatch("m"), tasks, fake_llm, output)
    summary = run_job(job, Progress())
    assert summary.records == 8 and summary.errors == 5 and summary.streams == 2
    got = read_lines(out)
    status = [(g["custom_id"], g["response"] and g["response"]["status_code"], bool(g["error"])) for g in got]
    assert sorted(status, key=str) == [
        ("c0", 200, False),
        ("c0", None, True),
        ("c1", 200, False),
        ("c2", 200, False),
        ("c3", None, True),
        ("c4", 400, False),
        ("c5", 400, False),
        (None, None, True),
    ]
    scores = next(g for g in got if g["custom_id"] == "c2")["response"]["body"]["data"]
    assert [s["score"] for s in scores] == [digest(b"qa"), digest(b"qb"), digest(b"qc")]
    assert len({g["id"] for g in got}) == 8


def test_a_task_that_the_model_is_not_made_for_fails_those_who_ask_for_it(tmp_path):
    class Unmade(dict):
        def __missing__(self, name):
            raise UnsupportedModelError("the checkpoint has no LM head") if name == "rerank" else KeyError(name)

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [("/v1/embeddings", {"input": "x"}), ("/rerank", {"query": "q", "documents": ["a"]})] * 2
    lines = [{"custom_id": f"c{i}", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = open_output(OutputOptions(out), FINGERPRINT)
    job = Job(open_source(str(source)), OpenAIBatch("m"), Unmade(embed=FakeTask()), fake_llm, output)
    assert run_job(job, Progress()).errors == 2
    got = {line["custom_id"]: line["response"] for line in read_lines(out)}
    assert [got[f"c{i}"]["status_code"] for i in range(4)] == [200, 400, 200, 400]
    assert "no LM head" in got["c1"]["body"]["error"]["message"]


def generate_job(source, out, *, seed=3, limit=None, llm=None, **options):
    adapter = TableAdapter("generate", Columns(prompt=Template("text", "--prompt"), id="k"))
    output = open_output(OutputOptions(out, limit=limit), FINGERPRINT)
    tasks = {"generate": FakeGenerateTask(temperature=1.0)}
    load = lambda: llm or fake_llm()  # noqa: E731
    return Job(open_source(str(source)), adapter, tasks, load, output, limit=limit, seed=seed, **options)


def test_text_is_generated_with_seeds_that_belong_to_the_records(tmp_path):
    source = tmp_path / "in.jsonl"
    write_records(source, 60, bad={7})
    with source.open("a") as file:
        file.write('{"text": "a bad one", "k": "id61"}\n' + '{"text": "same", "k": "a"}\n' * 2)
    summary = run_job(generate_job(source, tmp_path / "a.jsonl", collect=True), Progress())
    assert summary.records == 63 and summary.errors == 2
    assert summary.stats.generation.generated_tokens == 62 and summary.shape.num_requests == 62
    first = {line["record"]: line for line in read_lines(tmp_path / "a.jsonl")}
    assert first[61]["error"] == {"code": "bad_grammar", "message": "the grammar is wrong", "field": "grammar"}
    assert first[62]["text"] != first[63]["text"]
    # In two parts, in other windows, one is as if it had been done at once.
    for options in ({"limit": 20}, {"window": 200}):
        run_job(generate_job(source, tmp_path / "b.jsonl", **options), Progress())
    assert {line["record"]: line for line in read_lines(tmp_path / "b.jsonl")} == first
    run_job(generate_job(source, tmp_path / "c.jsonl", seed=4, streaming=True, window=100), Progress())
    other = {line["record"]: line for line in read_lines(tmp_path / "c.jsonl")}
    assert other.keys() == first.keys() and all(other[n] != first[n] for n in first if "text" in first[n])


def test_interrupted_generation_resumes(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 100)
    calls = []

    def interrupt(i):
        calls.append(i)
        if len(calls) == 40:
            os.kill(os.getpid(), signal.SIGINT)

    llm = fake_llm(before=interrupt)
    with pytest.raises(Interrupted):
        run_job(generate_job(source, out, llm=llm), Progress())
    assert llm.engine.closed == 1 and 40 <= len(calls) < 100
    assert len(read_lines(out)) == len(calls)  # all that the running step gave
    run_job(generate_job(source, out), Progress())
    run_job(generate_job(source, tmp_path / "whole.jsonl"), Progress())
    key = lambda line: line["record"]  # noqa: E731
    assert sorted(read_lines(out), key=key) == sorted(read_lines(tmp_path / "whole.jsonl"), key=key)


def test_a_pipe_that_pauses_gets_its_results(tmp_path):
    read, write = os.pipe()
    pipe = os.fdopen(write, "w")
    pipe.write('{"text": "a", "k": "id1"}\n{"text": "b", "k": "id2"}\n')
    pipe.flush()
    adapter = TableAdapter("embed", Columns(prompt=Template("text", "--prompt"), id="k"))
    out = tmp_path / "out.jsonl"
    source = open_source("-", stdin=os.fdopen(read, "rb"))
    output = open_output(OutputOptions(out, commit_seconds=0.1), FINGERPRINT)
    llm = fake_llm()
    job = Job(source, adapter, {"embed": FakeTask()}, lambda: llm, output, window=10_000, streaming=True)
    summaries = []
    thread = threading.Thread(target=lambda: summaries.append(run_job(job, Progress())))
    thread.start()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (out.exists() and out.read_text().count("\n") >= 2):
        time.sleep(0.01)
    assert [line["record"] for line in read_lines(out)] == [1, 2]
    pipe.write('{"text": "c", "k": "id3"}\n')
    pipe.close()
    thread.join(120)
    assert summaries[0].records == 3 and summaries[0].streams == 1
    assert [line["score"] for line in read_lines(out)] == [digest(b"a"), digest(b"b"), digest(b"c")]


def test_results_are_written_as_they_come(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 30)
    seen = []

    def watch(_):
        time.sleep(0.01)
        seen.append(len(out.read_text().splitlines()) if out.exists() else 0)

    run_job(table_job(source, out, llm=fake_llm(before=watch), commit_seconds=0.1), Progress())
    assert any(0 < n < 30 for n in seen)


def test_interrupted_it_writes_what_is_done_and_resumes(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 100)
    calls, before = [], signal.getsignal(signal.SIGINT)

    def interrupt(i):
        calls.append(i)
        if len(calls) == 40:
            os.kill(os.getpid(), signal.SIGINT)

    llm = fake_llm(before=interrupt)
    with pytest.raises(Interrupted):
        run_job(table_job(source, out, llm=llm, window=400), Progress())
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.engine.closed == 1
    assert 40 <= len(calls) < 100
    assert len(calls) <= len(read_lines(out)) <= len(calls) + 4  # all that the running step gave
    job = table_job(source, out)
    # Records that repeat one of these have its answer.
    assert len(calls) <= run_job(job, Progress()).resumed == 100 - job.tasks["embed"].prepared <= len(calls) + 4
    check_complete(source, out)


def test_what_was_done_before_an_engine_fails_is_kept(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 100)
    calls = []

    def fail(i):
        calls.append(i)
        if len(calls) == 40:
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        run_job(table_job(source, out, llm=fake_llm(before=fail)), Progress())
    done = len(read_lines(out))
    assert 33 <= done <= 37  # the steps before; records that repeat an answered one have its answer
    assert run_job(table_job(source, out), Progress()).resumed == done
    check_complete(source, out)


SIGNALS_TOGETHER = """
import signal, sys
from pathlib import Path
from fake_jobs import fake_llm
from job_tables import table_job
from prefold.jobs.run import Interrupted, run_job
from prefold.jobs.report.progress import Progress

source, out, place = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
calls = 0

def profile(frame, event, argument):
    # A second signal at the so-many-th function that is called or left while the first one is handled.
    global calls
    while event in ("call", "return") and frame is not None:
        if frame.f_code.co_name == "handle":
            calls += 1
            if calls == place:
                signal.raise_signal(signal.SIGTERM)
            return
        frame = frame.f_back

def interrupt(i):
    if i == 10:
        sys.setprofile(profile)
        signal.raise_signal(signal.SIGTERM)

try:
    run_job(table_job(source, out, llm=fake_llm(before=interrupt)), Progress())
except Interrupted:
    sys.exit(3 if calls < place else 4)
"""


def test_a_second_signal_while_the_first_is_handled(tmp_path):
    source = tmp_path / "in.jsonl"
    write_records(source, 40)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for place in range(1, 100):
        out = tmp_path / f"{place}.jsonl"
        command = [sys.executable, "-c", SIGNALS_TOGETHER, str(source), str(out), str(place)]
        done = subprocess.run(command, env=environment, timeout=600)  # a process that waits for itself is killed
        run_job(table_job(source, out), Progress())
        check_complete(source, out)
        if done.returncode == 3:  # nothing more is called while a signal is handled
            break
        assert done.returncode == 4
    assert 1 < place < 20


def test_a_second_signal_while_the_job_ends_changes_nothing(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 40)
    llm = fake_llm(before=lambda i: signal.raise_signal(signal.SIGTERM) if i == 10 else None)
    run = llm.engine.run

    def cleaning_up(*arguments, **options):
        try:
            yield from run(*arguments, **options)
        finally:
            signal.raise_signal(signal.SIGINT)

    llm.engine.run = cleaning_up
    with pytest.raises(Interrupted) as error:
        run_job(table_job(source, out, llm=llm), Progress())
    assert error.value.signal == signal.SIGTERM and llm.engine.closed == 1
    done = len(read_lines(out))
    assert done and run_job(table_job(source, out), Progress()).resumed == done
    check_complete(source, out)


def test_progress_says_that_the_output_is_written(tmp_path):
    source, shown = tmp_path / "in.jsonl", threading.Event()
    write_records(source, 5)

    class Watching(Progress):
        def tick(self, counts):
            if self.text(counts).startswith("writing the output: 5 records"):
                shown.set()

    job = table_job(source, tmp_path / "out.jsonl")
    finish = job.output.finish
    job.output.finish = lambda: (shown.wait(60), finish())
    run_job(job, Watching())
    assert shown.is_set()


def test_a_second_signal_while_the_engine_closes_changes_nothing(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 40)
    llm = fake_llm(before=lambda i: signal.raise_signal(signal.SIGTERM) if i == 10 else None)
    closed, before = [], signal.getsignal(signal.SIGINT)

    def close():
        signal.raise_signal(signal.SIGINT)
        closed.append(llm)

    llm.close = close
    with pytest.raises(Interrupted) as error:
        run_job(table_job(source, out, llm=llm), Progress())
    assert error.value.signal == signal.SIGTERM and closed == [llm] and signal.getsignal(signal.SIGINT) is before
    run_job(table_job(source, out), Progress())
    check_complete(source, out)


def test_two_signals_end_an_engine_that_takes_long_to_close(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 40)
    llm, closed = fake_llm(), []

    def close():
        signal.raise_signal(signal.SIGTERM)
        closed.append("not yet")
        signal.raise_signal(signal.SIGINT)
        closed.append("in the end")

    llm.close = close
    with pytest.raises(Interrupted) as error:
        run_job(table_job(source, out, llm=llm), Progress())
    assert error.value.signal == signal.SIGINT and closed == ["not yet"]
    check_complete(source, out)


def test_a_signal_that_compiled_code_makes_another_exception_of(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 20)

    def load():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of an object") from None

    with pytest.raises(Interrupted) as error:
        run_job(table_job(source, out, load=load), Progress())
    assert error.value.signal == signal.SIGTERM
    run_job(table_job(source, out), Progress())
    check_complete(source, out)


def test_a_job_on_a_fleet_says_while_no_replica_is_ready(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 20)
    seen = {WAITING: threading.Event(), "computing": threading.Event()}

    class Phases(Progress):
        def tick(self, counts):
            if counts.phase in seen:
                seen[counts.phase].set()

    def before(i):
        assert seen[WAITING].wait(60) and (llm.engine.is_ready or not seen["computing"].is_set())
        llm.engine.is_ready = True
        assert seen["computing"].wait(60)

    llm = fake_llm(before=before)
    llm.engine.is_ready = False
    run_job(table_job(source, out, llm=llm), Phases())
    check_complete(source, out)


def test_a_kill_in_the_first_seconds_of_loading_resumes(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 100, bad={1})

    def load():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    with pytest.raises(Interrupted) as error:
        run_job(table_job(source, out, load=load), Progress())
    assert error.value.signal == signal.SIGTERM
    run_job(table_job(source, out), Progress())
    check_complete(source, out)


def test_spools_are_closed(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 400)
    made = []

    def make():
        made.append(Spool(memory_bytes=20_000, directory=tmp_path))
        return made[-1]

    run_job(table_job(source, out, make_spool=make, window=3000), Progress())
    assert len(made) == 1 and not list(tmp_path.glob("prefold-spool-*"))
    out.unlink()
    with pytest.raises(RuntimeError, match="boom"):
        llm = fake_llm(before=lambda i: (_ for _ in ()).throw(RuntimeError("boom")))
        run_job(table_job(source, out, make_spool=make, llm=llm), Progress())
    assert not list(tmp_path.glob("prefold-spool-*"))


KILLED = """
import time
from pathlib import Path
from prefold.jobs.run import run_job
from prefold.jobs.report.progress import Progress
from fake_jobs import fake_llm
from job_tables import table_job
llm = fake_llm(before=lambda i: time.sleep(0.001))
print("start", flush=True)
out = Path("out.jsonl")
job = table_job(Path("in.jsonl"), out, llm=llm, commit_seconds=0.02, window=3000, streaming={streaming})
run_job(job, Progress())
print("end", flush=True)
"""


@pytest.mark.parametrize("streaming", [False, True])
def test_killed_at_random_moments_every_record_has_one_line(tmp_path, streaming):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 800, bad={3, 700})
    (tmp_path / "job.py").write_text(KILLED.format(streaming=streaming))
    said, rng, kills = tmp_path / "stdout", np.random.default_rng(7), 0
    for attempt in range(80):
        said.unlink(missing_ok=True)
        process = begin(["job.py"], tmp_path)
        while process.is_alive() and not (said.exists() and said.read_text()):
            time.sleep(0.005)
        # Later and later, so that a slow machine gets somewhere too.
        process.join(float(rng.uniform(0.03, 0.25)) + 0.02 * attempt if kills < 4 else None)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        if said.read_text().endswith("end\n"):
            break
    assert said.read_text() == "start\nend\n" and kills >= 3, (tmp_path / "stderr").read_text()
    check_complete(source, out)


def grown_job(source, out, **options):
    adapter = TableAdapter("embed", Columns(prompt=Template("text", "--prompt"), id="k"))
    opened = open_source(str(source))
    fingerprint = {"task": "embed", "input": opened.identity}
    output = open_output(OutputOptions(out, grown=partial(check_grown, opened), **options), fingerprint)
    return Job(opened, adapter, {"embed": FakeTask()}, fake_llm, output)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.jsonl.gz"])
def test_an_input_that_has_grown_goes_on_where_it_was(tmp_path, name):
    source, out = tmp_path / "in.jsonl", tmp_path / name
    write_records(source, 30, bad={3})
    lines = source.read_bytes().splitlines(keepends=True)
    for count in (10, 11, 30):
        source.write_bytes(b"".join(lines[:count]))
        job = grown_job(source, out)
        before = job.output.resumed
        summary = run_job(job, Progress())
        assert (before, summary.records, summary.errors) == ({10: 0, 11: 10, 30: 11}[count], count, 1)
        assert job.tasks["embed"].prepared == count - before - (before < 3)
    again = run_job(grown_job(source, out), Progress())
    assert again.records == again.resumed == 30
    if name == "out.jsonl":
        check_complete(source, out)
    # Without the option the job is of the input as it is now.
    fingerprint = {"task": "embed", "input": open_source(str(source)).identity}
    assert open_output(OutputOptions(out), fingerprint).ended


@pytest.mark.parametrize("zipped", [False, True])
def test_what_an_input_gets_while_it_is_read_belongs_to_the_next_run(tmp_path, zipped):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 20)
    lines = source.read_bytes().splitlines(keepends=True)
    pack = partial(gzip.compress, mtime=0) if zipped else bytes  # else a file made in another second is another file
    source.write_bytes(pack(b"".join(lines[:10])))
    job = grown_job(source, out)
    source.write_bytes(pack(b"".join(lines[:10])) + pack(lines[10][:9]))  # half a line, which is written just now
    first = run_job(job, Progress())
    assert (first.records, first.errors) == (10, 0)
    source.write_bytes(pack(b"".join(lines[:10])) + pack(b"".join(lines[10:])))
    whole = run_job(grown_job(source, out), Progress())
    assert (whole.records, whole.errors) == (20, 0)
    assert sorted(json.loads(line)["record"] for line in out.read_text().splitlines()) == list(range(1, 21))


@pytest.fixture
def whole_digests_of(monkeypatch):
    """Lets files of at most so many bytes be digested as a whole."""
    return lambda most: monkeypatch.setattr("prefold.jobs.source._WHOLE_DIGEST", most)


def test_a_large_input_that_was_edited_between_the_blocks_of_its_digest(tmp_path, monkeypatch, whole_digests_of):
    whole_digests_of(1 << 17)
    monkeypatch.setattr("prefold.jobs.source._DIGEST_BLOCKS", 2)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    padding = b" " * (1 << 16) + b"\n"
    write_records(source, 10)
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(padding + b"".join(lines[:9]) + padding)
    before = source.stat()
    run_job(grown_job(source, out), Progress())
    source.write_bytes(source.read_bytes().replace(b"common", b"Common", 1))
    assert source.stat().st_size == before.st_size
    with pytest.raises(JobError, match="--grown cannot continue"):
        grown_job(source, out)
    with pytest.raises(JobError, match=r"input\.modified: "):
        open_output(OutputOptions(out), {"task": "embed", "input": open_source(str(source)).identity})
    source.write_bytes(source.read_bytes().replace(b"Common", b"common", 1))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_output(OutputOptions(out), {"task": "embed", "input": open_source(str(source)).identity}).ended
    with source.open("ab") as file:
        file.write(lines[9])
    assert run_job(grown_job(source, out), Progress()).records == 10


@pytest.fixture
def large(monkeypatch, whole_digests_of):
    """All files are too large to be digested as a whole."""
    whole_digests_of(0)
    monkeypatch.setattr("prefold.spec.files._BLOCK", 16)


def forget_time(monkeypatch, source, out):
    """Runs a job as earlier versions did, which noted no time."""
    with monkeypatch.context() as patched:
        patched.setattr("prefold.jobs.source.input_identity", file_identity)
        run_job(grown_job(source, out), Progress())


def test_a_journal_that_notes_no_time_is_of_the_same_large_input(tmp_path, large, monkeypatch):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.csv"
    write_records(source, 9)
    forget_time(monkeypatch, source, out)
    fingerprint = {"task": "embed", "input": open_source(str(source)).identity}
    assert "modified" in fingerprint["input"]
    for grown in (None, partial(check_grown, open_source(str(source)))):
        output = open_output(OutputOptions(out, grown=grown), fingerprint)
        assert output.ended  # and is not taken for one that has grown
        output.close()
    source.write_bytes(source.read_bytes().replace(b"common", b"Common", 1))
    fingerprint["input"] = open_source(str(source)).identity
    with pytest.raises(JobError, match=r"input\.digest: "):
        open_output(OutputOptions(out), fingerprint)


def test_a_large_input_goes_on_from_a_journal_that_notes_no_time(tmp_path, large, monkeypatch):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 30)
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join(lines[:10]))
    forget_time(monkeypatch, source, out)
    source.write_bytes(b"".join(lines))
    assert run_job(grown_job(source, out), Progress()).resumed == 10
    check_complete(source, out)
    assert "modified" in read_lines(journal_path(out))[-3]["input"]  # behind it are one commit, and the end


@pytest.mark.parametrize("count", [1, 2])
def test_a_large_input_that_was_only_touched_is_told_so(tmp_path, large, count):
    names = [str(tmp_path / f"in {i}.jsonl") for i in range(count)]
    for name in names:
        write_records(Path(name), 5)
    before, old = open_sources(names).identity, os.stat(names[0])
    os.utime(names[0], ns=(0, 1_700_000_000_123_456_000))
    with pytest.raises(JobError, match="was modified after the last run") as refused:
        check_grown(open_sources(names), before)
    assert "does not start" not in str(refused.value)
    remedy = shlex.split(re.search(r"\((touch .*)\); else", str(refused.value))[1])
    assert remedy[-1] == names[0]
    os.utime(names[0], (old.st_atime, datetime.fromisoformat(remedy[2]).timestamp()))
    check_grown(open_sources(names), before)


def test_an_input_that_is_another_has_not_grown(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_records(source, 10)
    whole = source.read_bytes()
    run_job(grown_job(source, out), Progress())
    kept = out.read_bytes(), (tmp_path / "out.jsonl.journal").read_bytes()
    for changed in (whole[:-20], whole.replace(b"common", b"Common", 1) + whole[-60:]):
        source.write_bytes(changed)
        with pytest.raises(JobError, match="--grown cannot continue"):
            grown_job(source, out)
    for made in ("torn.jsonl", "torn.csv"):
        source.write_bytes(whole.rstrip())
        run_job(grown_job(source, tmp_path / made), Progress())
        source.write_bytes(whole.rstrip() + b" \n" + whole)
        with pytest.raises(JobError, match=r"the last record .* has become longer"):
            grown_job(source, tmp_path / made)
        source.write_bytes(whole + whole)
        assert run_job(grown_job(source, tmp_path / made), Progress()).records == 20
    assert (out.read_bytes(), (tmp_path / "out.jsonl.journal").read_bytes()) == kept


def test_a_folder_that_has_got_another_file_has_grown(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_records(folder / "b.jsonl", 10)
    lines = (folder / "b.jsonl").read_text().splitlines(keepends=True)

    def run():
        opened = open_sources([str(folder)])
        adapter = TableAdapter("embed", Columns(prompt=Template("text", "--prompt"), id="k"))
        options = OutputOptions(tmp_path / "out.jsonl", grown=partial(check_grown, opened))
        output = open_output(options, {"task": "embed", "input": opened.identity})
        summary = run_job(Job(opened, adapter, {"embed": FakeTask()}, fake_llm, output), Progress())
        return summary.resumed, summary.records

    assert run() == (0, 10)
    (folder / "c.jsonl").write_text("".join(lines[:5]))
    assert run() == (10, 15)
    (folder / "c.jsonl").write_text("".join(lines))
    (folder / "d.jsonl").write_text("".join(lines))
    assert run() == (15, 30)
    for change in (lambda: (folder / "a.jsonl").write_text(lines[0]), lambda: (folder / "d.jsonl").unlink()):
        change()
        with pytest.raises(JobError, match="--grown cannot continue"):
            run()
        (folder / "a.jsonl").unlink(missing_ok=True)


def test_a_table_whose_lines_are_gone_cannot_grow(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.csv"
    write_records(source, 10)
    opened = open_source(str(source))
    adapter = TableAdapter("embed", Columns(prompt=Template("text", "--prompt"), id="k"))
    output = open_output(OutputOptions(out), {"task": "embed", "input": opened.identity})
    run_job(Job(opened, adapter, {"embed": FakeTask()}, fake_llm, output), Progress())
    source.write_bytes(source.read_bytes() * 2)
    with pytest.raises(JobError, match="made without --grown"):
        grown_job(source, out)
