"""--limit ends a job at its last record, also where nobody sends another."""

from __future__ import annotations

from fake_jobs import fake_llm
from job_tables import read_lines, table_job, write_records

from prefold.jobs.report.progress import Progress
from prefold.jobs.run import run_job


def test_no_record_behind_the_last_is_waited_for(tmp_path):
    write_records(tmp_path / "in.jsonl", 9)
    job = table_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", limit=4, llm=fake_llm())
    records = job.source.records

    def four(columns=None):
        for record in records(columns):
            yield record
            assert record.number < 4, "a fifth record was asked for"

    job.source.records = four
    assert run_job(job, Progress()).records == 4
    assert sorted(line["record"] for line in read_lines(tmp_path / "out.jsonl")) == [1, 2, 3, 4]
