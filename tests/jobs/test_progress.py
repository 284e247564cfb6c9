"""Progress: plain lines in a log, and figures that hold."""

from __future__ import annotations

import io
import threading

from prefold.jobs.report.progress import (
    Counts,
    PlainProgress,
    Progress,
    format_bytes,
    format_count,
    format_seconds,
    open_progress,
)


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


def test_plain_lines_come_every_few_seconds():
    clock = Clock()
    stream = io.StringIO()
    progress = PlainProgress(stream, clock.monotonic)
    counts = Counts(phase="reading", records_read=1200, tokens=34_000)
    for _ in range(100):
        clock.now += 0.11
        progress.tick(counts)
    # A line that says nothing new is left out.
    assert stream.getvalue().splitlines() == ["prefold: reading: 1,200 records, 34,000 tokens"]
    counts.records_read += 1
    for _ in range(100):
        clock.now += 0.11
        progress.tick(counts)
    assert stream.getvalue().splitlines()[1:] == ["prefold: reading: 1,201 records, 34,000 tokens"]


def test_rate_share_and_time_left():
    clock = Clock()
    progress = Progress(clock.monotonic)
    counts = Counts(phase="computing", records_read=200, read_all=True, tokens=10_000)
    assert progress.text(counts) == "0/200 records, 0 rows"
    clock.now += 10
    counts.records_done, counts.rows, counts.tokens_done, counts.errors = 50, 1000, 2500, 2
    assert progress.text(counts) == "50/200 records, 1,000 rows, 100 rows/s, 60.0% saved, 2 errors, 30 s left"
    counts.read_all = False
    assert "left" not in progress.text(counts) and "50 records" in progress.text(counts)


def test_generation_is_as_far_as_its_requests():
    clock = Clock()
    progress = Progress(clock.monotonic)
    counts = Counts(phase="computing", records_read=4, read_all=True, tokens=100, requests=4, tokens_generated=40)
    progress.text(counts)
    clock.now += 10
    # Outputs count as tokens done, so those may be more than the prompts'.
    counts.rows, counts.requests_done, counts.tokens_done, counts.records_done = 150, 1, 200, 1
    assert counts.share_done == 0.25
    text = progress.text(counts)
    assert text == "1/4 records, 150 rows, 15 rows/s, 40 tokens generated (4/s), 25.0% saved, 30 s left"


def test_figures():
    assert [format_bytes(n) for n in (0, 1023, 2048, 5 * 2**20, 3 * 2**30, 2**41)] == [
        "0 bytes", "1023 bytes", "2 KiB", "5 MiB", "3 GiB", "2,048 GiB"
    ]  # fmt: skip
    assert [format_count(n) for n in (0, 999_999, 1_234_567, 5.6e9)] == ["0", "999,999", "1.23M", "5.60G"]
    assert [format_seconds(s) for s in (1.23, 59.4, 61, 3725)] == ["1.2 s", "59 s", "1 min 01 s", "1 h 02 min"]


def test_a_terminal_gets_a_bar_and_a_log_lines():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert type(open_progress(False)) is Progress
    assert type(open_progress(stream=io.StringIO())) is PlainProgress
    stream, threads = Terminal(), threading.active_count()
    bar = open_progress(stream=stream)
    bar.tick(Counts(phase="computing", records_read=3, read_all=True, tokens=10, tokens_done=5, records_done=1))
    bar.note("hello")
    assert "prefold: hello\n" in stream.getvalue()
    shown = stream.getvalue().split("\r")[-1]
    assert "1/3 records" in shown and 10 < shown.count("#") < 14  # a half of 24
    bar.close(Counts())
    assert not stream.getvalue().split("\r")[-1].strip() and threading.active_count() == threads
