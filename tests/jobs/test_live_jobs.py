"""Streams on a real engine: results as of a job that is sorted whole, and nothing waits that could run."""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.jobs.output import OutputOptions, open_output
from prefold.jobs.report.progress import Progress
from prefold.jobs.run import Job, run_job
from prefold.jobs.source import open_source
from prefold.jobs.tables import TableAdapter
from prefold.tasks import make_task
from prefold.tasks.rows import Columns
from prefold.text.fields import Template


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=256))


def small_llm(folder: str, **options) -> LLM:
    place = {"dtype": "float32", "device": "cpu", "threads": 1, "max_batch_rows": 64, "kv_memory": 1 << 20}
    return LLM(folder, **place | options)


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [
        f"the prefix {rng.integers(4)} of all, " + "yes no "[: rng.integers(1, 7)] * 3 + str(i) for i in range(count)
    ]


def live_job(folder, task, source, out, *, streaming=True, llm=None, **options):
    llm = llm or small_llm(folder, cache=CacheOptions(min_overlap=0) if streaming else "off")
    adapter = TableAdapter(task, Columns(prompt=Template("text", "--prompt"), id="k"))
    output = open_output(OutputOptions(out, commit_seconds=0.1), {"task": task})
    made = make_task(task, llm.checkpoint, llm.tokenizer, **options)
    return Job(source, adapter, {task: made}, lambda: llm, output, streaming=streaming, window=2000, collect=True)


def lines_of(path) -> dict:
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_equal_records_of_a_stream_wait_for_one_answer(tmp_path, folder):
    source = tmp_path / "in.jsonl"
    repeated = ["the yes", "no no", "the yes no"] * 20
    source.write_text("".join(json.dumps({"text": text, "k": str(i)}) + "\n" for i, text in enumerate(repeated)))
    job = live_job(folder, "generate", open_source(str(source)), tmp_path / "out.jsonl", max_tokens=20, ignore_eos=True)
    stats = run_job(job, Progress()).stats
    lines = lines_of(tmp_path / "out.jsonl")
    assert len(lines) == 60 and len({line["text"] for line in lines.values()}) == 3
    for i, text in enumerate(repeated):
        assert lines[str(i)]["text"] == lines[str(repeated.index(text))]["text"]
    # A record that is read while an equal one runs waits for it: 57 of them, and fewer on a busy machine.
    assert stats.requests == 60 and 30 <= stats.repeats <= 57
    assert stats.generation.generated_tokens == 20 * (60 - stats.repeats)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("embed", {"pooling": "last"}),
        ("embed", {"pooling": "mean"}),
        ("classify", {"labels": ["yes", "no"]}),
        ("classify", {"labels": ["yes yes no", "no", "the"]}),
        ("generate", {"max_tokens": 7, "ignore_eos": True}),
    ],
)
def test_results_of_a_stream_are_those_of_a_sorted_job(tmp_path, folder, task, options):
    found, source = {}, tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text, "k": f"id{i}"}) + "\n" for i, text in enumerate(texts(80))))
    for streaming in (False, True):
        out = tmp_path / f"{streaming}.jsonl"
        job = live_job(folder, task, open_source(str(source)), out, streaming=streaming, **options)
        summary = run_job(job, Progress())
        assert summary.records == 80 and not summary.errors and summary.streams == 1
        assert summary.shape.num_requests == summary.stats.requests
        found[streaming] = (lines_of(out), summary.stats)
    (plain, before), (live, stats) = found[False], found[True]
    assert plain.keys() == live.keys()
    for key, line in plain.items():
        for name, value in line.items():
            if isinstance(value, (list, dict)):
                value, other = (list(v.values()) if isinstance(v, dict) else v for v in (value, live[key][name]))
                np.testing.assert_allclose(other, value, atol=1e-4)
            elif name != "cached_tokens":
                assert live[key][name] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value)
    assert stats.requests == before.requests and stats.tokens == before.tokens
    assert stats.rows_computed < 0.8 * stats.tokens, "a stream shares too"


def test_the_first_record_is_answered_while_the_input_is_open(tmp_path, folder):
    read, write = os.pipe()
    out = tmp_path / "out.jsonl"
    llm = small_llm(folder, cache=CacheOptions(min_overlap=0))
    pipe = os.fdopen(write, "w")

    def tell(number: int) -> None:
        pipe.write(json.dumps({"text": "the yes", "k": str(number)}) + "\n")
        pipe.flush()

    tell(0)  # the source looks at its beginning
    job = live_job(folder, "generate", open_source("-", stdin=os.fdopen(read, "rb")), out, llm=llm, max_tokens=3)
    thread = threading.Thread(target=run_job, args=(job, Progress()))
    thread.start()
    for number in range(1, 4):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (out.exists() and out.read_text().count("\n") == number):
            time.sleep(0.02)
        assert out.read_text().count("\n") == number
        tell(number)
    pipe.close()
    thread.join(60)
    assert not thread.is_alive() and len(lines_of(out)) == 4


def test_a_steady_source_is_answered_from_its_first_record_on(tmp_path, folder):
    """Records that come so fast that there is never a pause, and too few to fill a chunk."""
    read, write = os.pipe()
    out = tmp_path / "out.jsonl"
    llm = small_llm(folder, cache=CacheOptions(min_overlap=0))
    pipe = os.fdopen(write, "w")
    answered, written = [], []

    def tell_all() -> None:
        end = time.monotonic() + 60
        while not answered and time.monotonic() < end:
            written.append(len(written))
            pipe.write(json.dumps({"text": "the yes", "k": str(len(written))}) + "\n")
            pipe.flush()
            time.sleep(0.01)
            if out.exists() and out.stat().st_size > 0:
                answered.append(len(written))
        pipe.close()

    threading.Thread(target=tell_all, daemon=True).start()
    job = live_job(folder, "generate", open_source("-", stdin=os.fdopen(read, "rb")), out, llm=llm, max_tokens=3)
    run_job(job, Progress())
    assert answered and len(lines_of(out)) == len(written), "nothing was answered before the input had ended"
