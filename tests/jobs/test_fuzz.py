"""Random records through real adapters and tasks: exactly one line each, and no exception ends the job."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from prefold.engine.protocol import EngineFacts, Snapshot
from prefold.jobs import Columns, OpenAIBatch, TableAdapter, Template, open_source
from prefold.jobs.output import StreamOutput
from prefold.jobs.report.progress import Progress
from prefold.jobs.run import Job, run_job
from prefold.spec.requests import Generated, Result, Stats, TokenLogprobs
from prefold.tasks import make_task
from prefold.text import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from fuzzed_records import batch_lines, csv_lines, table_lines
from task_inputs import FakeCheckpoint, tokenizer

CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
PLAIN = tokenizer()
TOKENIZER = Tokenizer(PLAIN.backend, special_tokens=PLAIN.special_tokens, chat_templates={"default": CHAT})


class AnyEngine:
    """An engine that answers every request with values of the right shape, and now and then with NaN."""

    facts = EngineFacts("full")

    def __init__(self):
        self.stats = Stats()

    def reset_stats(self):
        return self.stats

    def snapshot(self):
        return Snapshot(self.stats)

    def count(self, **counts):
        self.stats += Stats(**counts)

    def run(self, windows, readout, tokenizer=None, **_):
        if readout.kind == "tokens":
            yield from self.generated(windows)
            return
        for window in windows:
            for i, tag in enumerate(window.tags):
                size = int(np.diff(window.target_offsets)[i]) if readout.kind == "logprobs" else 8
                size = len(readout.ids) if readout.kind == "logits" else size
                values = np.full(size, np.nan if i % 97 == 96 else -0.5, np.float32)
                yield tag, Result(values, np.ones(size, bool) if readout.kind == "logprobs" else None)

    def generated(self, windows):
        for window in windows:
            for i, tag in enumerate(window.tags):
                sampling = window.request(i).sampling
                top = tuple((token, -1.0) for token in range(sampling.logprobs or 0))
                logprobs = None if sampling.logprobs is None else (TokenLogprobs(-0.5, top),)
                yield tag, [Generated((5,), "\ud800\u2028", "length", logprobs=logprobs)] * sampling.n


def tasks_for(names, **options):
    made = {name: make_task(name, FakeCheckpoint(), TOKENIZER, **options.get(name, {})) for name in names}
    return made


def run(lines, adapter, tasks, *, format="jsonl", end=b"\n"):
    """The output lines of a job on these lines, and how many records its source has."""
    data = b"".join(line + end for line in lines)
    out = io.BytesIO()
    job = Job(
        open_source("-", format, stdin=io.BytesIO(data)), adapter, tasks, lambda: SimpleNamespace(engine=AnyEngine()),
        StreamOutput(out),
    )  # fmt: skip
    summary = run_job(job, Progress())
    text = out.getvalue().decode()  # UTF-8 can hold all of it
    found = [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n")[:-1]]
    assert len(found) == summary.records and len(text.splitlines()) == len(found)
    return found, sum(1 for _ in open_source("-", format, stdin=io.BytesIO(data)).records())


def check_batch(count, seed):
    lines = list(batch_lines(count, seed))
    found, records = run(lines, OpenAIBatch("m", adapters=()), tasks_for(("embed", "rerank", "generate")))
    assert len(found) == records == count
    # Nothing that fuzzing finds is left to the net that catches any exception.
    errors = [line["error"] or line["response"]["body"].get("error") for line in found]
    unexpected = Counter(error["message"][:150] for error in errors if error and error["code"] == "unexpected")
    assert not unexpected, unexpected
    assert sum(error is None for error in errors) > count / 5


TABLES = {
    "embed": ({}, {"prompt": Template("text", "--prompt"), "id": "id"}),
    "rerank": ({}, {"query": Template("{query}?", "--query"), "document": Template("documents", "--document")}),
    "classify": ({"labels": ["yes", "no"]}, {"prompt": Template("{k}: {text}", "--prompt"), "keep": {"kept": "k"}}),
    "score": ({}, {"prompt": Template("text", "--prompt"), "continuation": Template("documents", "--continuation")}),
    "generate": ({}, {"messages": "messages", "keep_all": True}),
}


def check_table(task, count, seed, format, empty):
    options, columns = TABLES[task]
    adapter = TableAdapter(task, Columns(**columns), keep_empty=empty)
    lines = list((table_lines if format == "jsonl" else csv_lines)(count, seed))
    found, records = run(lines, adapter, tasks_for((task,), **{task: options}), format=format)
    assert sorted(line["record"] for line in found) == list(range(1, records + 1))
    assert records == count or format == "csv"
    unexpected = [line["error"] for line in found if line.get("error", {}).get("code") == "unexpected"]
    assert not unexpected, unexpected[:3]
    assert sum("error" not in line for line in found) > count / 10


def test_fuzzed_batch_lines():
    check_batch(700, seed=0)


@pytest.mark.parametrize("format", ["jsonl", "csv"])
@pytest.mark.parametrize("task", TABLES)
def test_fuzzed_tables(task, format):
    check_table(task, 150, 1, format, empty=task != "embed")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_many_fuzzed_batch_lines(seed):
    check_batch(10_000, seed)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["jsonl", "csv"])
@pytest.mark.parametrize("task", TABLES)
def test_many_fuzzed_tables(task, format):
    check_table(task, 5000, 7, format, empty=task == "score")
