"""The progress of a job on standard error: a live line on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(slots=True)
class Counts:
    """The counts that progress shows."""

    phase: str = "reading"  # "reading", "loading the model", "computing", "writing the output", ...
    records_read: int = 0
    read_all: bool = False  # True if `records_read` counts the whole input
    records_done: int = 0  # records with an output line, including lines of earlier runs
    resumed: int = 0  # records with an output line of an earlier run
    errors: int = 0  # error lines among `records_done`
    tokens: int = 0  # tokens spooled
    tokens_done: int = 0  # prompt tokens of requests with results, and generated tokens
    requests: int = 0  # requests spooled
    requests_done: int = 0  # requests with results
    rows: int = 0  # rows computed
    tokens_generated: int = 0
    kept: int = 0  # prompts answered from kept answers, without computing
    kept_tokens: int = 0  # tokens of the prompts that `kept` counts, and of their generated texts

    @property
    def saved(self) -> float | None:
        """Return the share of the finished tokens that was not computed, in (0, 1).

        Return None if nothing was saved yet, or no row was computed.
        """
        return 1 - self.rows / self.tokens_done if self.tokens_done > self.rows > 0 else None

    @property
    def share_done(self) -> float:
        """Return the finished share of the work read so far, in [0, 1].

        The share counts tokens. If text is generated, it counts requests, because the lengths of the texts are unknown.
        """
        done, all_ = (self.requests_done, self.requests) if self.tokens_generated else (self.tokens_done, self.tokens)
        return min(1.0, done / all_) if all_ else 0.0


class Progress:
    """Receives the counts of a job, and shows nothing. One thread calls `tick` a few times a second.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.started = clock()
        self._computing: float | None = None

    def tick(self, counts: Counts) -> None: ...

    def note(self, text: str) -> None:
        """Print a text between the lines of progress."""

    def close(self, counts: Counts) -> None: ...

    def text(self, counts: Counts) -> str:
        """Return the line to show, such as "12 records, 340 rows, 85 rows/s, 41.2% saved". Omit unknown values."""
        if counts.phase == "computing" and self._computing is None:
            self._computing = self._clock()
        total = f"/{format_count(counts.records_read)}" if counts.read_all else ""
        if counts.phase != "computing":
            return f"{counts.phase}: {format_count(counts.records_read)} records, {format_count(counts.tokens)} tokens"
        seconds = self._clock() - (self._computing or self.started)
        parts = [f"{format_count(counts.records_done)}{total} records", f"{format_count(counts.rows)} rows"]
        if seconds > 0.5 and counts.rows:
            parts.append(f"{format_count(counts.rows / seconds)} rows/s")
        if counts.tokens_generated:
            rate = f" ({format_count(counts.tokens_generated / seconds)}/s)" if seconds > 0.5 else ""
            parts.append(f"{format_count(counts.tokens_generated)} tokens generated{rate}")
        if counts.saved is not None:
            parts.append(f"{counts.saved:.1%} saved")
        if counts.errors:
            parts.append(f"{format_count(counts.errors)} error{'s' * (counts.errors != 1)}")
        seconds_left = self.seconds_left(counts)
        if seconds_left is not None:
            parts.append(f"{format_seconds(seconds_left)} left")
        return ", ".join(parts)

    def seconds_left(self, counts: Counts) -> float | None:
        if self._computing is None or not counts.read_all or not counts.share_done:
            return None
        seconds = self._clock() - self._computing
        if seconds < 1:
            return None
        return seconds * (1 - counts.share_done) / counts.share_done


class PlainProgress(Progress):
    """Prints a line every 5 s at first; the interval grows to 60 s. Skips an unchanged line unless computing."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        super().__init__(clock)
        self._stream = stream
        self._next = self.started + 5
        self._last = ""

    def note(self, text: str) -> None:
        with suppress(OSError):  # a full log must not end the job
            print(f"prefold: {text}", file=self._stream, flush=True)

    def tick(self, counts: Counts) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + min(60.0, max(5.0, 0.05 * (now - self.started)))
        text = self.text(counts)
        if text != self._last or counts.phase == "computing":
            self.note(text)
        self._last = text


class LiveProgress(Progress):
    """Shows a progress bar on a terminal, drawn by tqdm."""

    def __init__(self, stream: TextIO):
        super().__init__()
        from tqdm import tqdm

        class Bar(tqdm):
            monitor_interval = 0  # keeps tqdm from starting a thread

        Bar.set_lock(threading.RLock())  # tqdm's default is a lock shared between processes
        # Some terminals report zero lines, so set `nrows`.
        form = "{bar:24} {desc}"
        self._bar: Any = Bar(bar_format=form, file=stream, leave=False, dynamic_ncols=True, nrows=100)

    def tick(self, counts: Counts) -> None:
        is_known = counts.phase == "computing" and counts.read_all and counts.tokens
        self._bar.total, self._bar.n = (1, counts.share_done) if is_known else (None, 0)
        with suppress(OSError):
            self._bar.set_description_str(self.text(counts))

    def note(self, text: str) -> None:
        with suppress(OSError):
            self._bar.write(f"prefold: {text}", file=self._bar.fp)

    def close(self, counts: Counts) -> None:
        with suppress(OSError):
            self._bar.close()


def open_progress(show: bool | None = None, stream: TextIO | None = None) -> Progress:
    """Return the display of progress for a stream: a bar on a terminal, else lines.

    Args:
        show: False: return a Progress that shows nothing.
        stream: The stream (default: standard error).
    """
    stream = stream or sys.stderr
    if show is False:
        return Progress()
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


def format_count(number: float) -> str:
    """Return a number as text: in full below a million (12,345), else in millions or more (1.23M, 4.56G)."""
    for limit, unit in ((1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.2f}{unit}"
    return f"{number:,.0f}"


def format_bytes(number: float) -> str:
    """Return a number of bytes as text: 12.3 KiB, 4.56 MiB, ..."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:,.3g} {unit}" if unit != "bytes" else f"{number:.0f} bytes"
        number /= 1024
    return f"{number:,.3g} GiB" if number < 1000 else f"{number:,.0f} GiB"


def format_seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
