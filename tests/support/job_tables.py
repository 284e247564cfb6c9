"""Jobs over a table of made-up records, and a check of their output."""

from __future__ import annotations

import json

import numpy as np
from fake_jobs import FakeTask, digest, fake_llm

from prefold.jobs.output import OutputOptions, open_output
from prefold.jobs.run import Job
from prefold.jobs.source import open_source
from prefold.jobs.tables import TableAdapter
from prefold.tasks.rows import Columns
from prefold.text.fields import Template

FINGERPRINT = {"task": "embed"}


def write_records(path, count, bad=()):
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(1, count + 1):
            text = f"common {i % 7} part of all prompts {rng.integers(1000)}"
            record = {"text": None if i in bad else text, "k": f"id{i}"}
            file.write(json.dumps(record) + "\n")


def table_job(source, out, *, limit=None, llm=None, load=None, commit_seconds=None, **options):
    adapter = TableAdapter("embed", Columns(prompt=Template("text", "--prompt"), id="k"))
    output = open_output(OutputOptions(out, limit=limit, commit_seconds=commit_seconds), FINGERPRINT)
    load = load or (lambda: llm or fake_llm())
    return Job(open_source(str(source)), adapter, {"embed": FakeTask()}, load, output, limit=limit, **options)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_complete(source, out):
    """Every record of the input has one line, with the result its text gives."""
    lines = {line["record"]: line for line in read_lines(out)}
    records = read_lines(source)
    assert len(read_lines(out)) == len(lines) == len(records)
    for number, record in enumerate(records, 1):
        assert lines[number]["id"] == record["k"]
        if record["text"] is None:
            assert lines[number]["error"]["code"] == "null" and lines[number]["error"]["field"] == "text"
        else:
            assert lines[number]["score"] == digest(record["text"].encode())
