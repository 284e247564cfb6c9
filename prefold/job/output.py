"""Where the lines of a job go: a file with its journal, or standard output.

Lines are gathered and written together, at most a second (or a megabyte) later, so that small
records stay cheap; each such group is one commit of the journal.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from ..errors import JobError
from ..records.recordset import RecordSet
from .finish import finish_for
from .journal import Journal, journal_path

__all__ = ["FileOutput", "Output", "OutputOptions", "StreamOutput", "open_output"]

COMMIT_SECONDS = 1.0
COMMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """path None: standard output. only_resume: there must be something to resume."""

    path: Path | None
    keep_order: bool = False
    overwrite: bool = False
    only_resume: bool = False
    limit: int | None = None


class Output(Protocol):
    """Takes each record's line once, from any thread.

    done     records that had their line when the output was opened, and those written since
    count    how many records have their line, committed or not; errors: error lines among them
    resumed  how many had it when the output was opened
    ended    an earlier run has done everything this one would
    """

    done: RecordSet
    count: int
    errors: int
    resumed: int
    ended: bool

    def write(self, number: int, line: str, failed: bool) -> None: ...
    def commit(self, *, due_only: bool = False) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


def open_output(options: OutputOptions, job: dict[str, Any], stream: TextIO | None = None) -> Output:
    """Open the output of the job named by the fingerprint `job`; resumes when its journal is there.

    Raises JobError when the output exists and is not this job's.
    """
    if options.path is None:
        if options.keep_order:
            raise JobError("--keep-order needs an output file: add -o FILE")
        return StreamOutput(stream or sys.stdout)
    return FileOutput(options, job)


class StreamOutput:
    """Lines to a stream, as they come: no journal, nothing to resume."""

    def __init__(self, stream: TextIO):
        self.done = RecordSet()
        self.count = self.errors = self.resumed = 0
        self.ended = False
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, number: int, line: str, failed: bool) -> None:
        with self._lock:
            self._stream.write(line + "\n")
            self.done.add(number)
            self.count += 1
            self.errors += failed

    def commit(self, *, due_only: bool = False) -> None:
        with self._lock:
            self._stream.flush()

    def finish(self) -> None:
        self.commit()

    def close(self) -> None:
        pass


class FileOutput:
    """Lines to a file, each record's exactly once whenever the process dies.

    JSONL is written as results come. Other formats, and --keep-order, are written to NAME.partial
    and made from it when all is there.
    """

    def __init__(self, options: OutputOptions, job: dict[str, Any]):
        assert options.path is not None
        self.path = options.path
        self.limit = options.limit
        self._finish = finish_for(self.path, options.keep_order)
        self.lines_path = self.path if self._finish is None else self.path.with_name(self.path.name + ".partial")
        job = {**job, "output": {"keep_order": options.keep_order}}
        if self._finish is not None:
            job["output"]["limit"] = options.limit  # what is made at the end is made of a known set of records
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._numbers: list[int] = []
        self._bytes = 0
        self._last = time.monotonic()
        self._broken: JobError | None = None
        self.journal = self._open_journal(options, job)
        self.done, self.errors = self.journal.done, self.journal.errors
        self.count = self.resumed = len(self.done)
        self.ended = self._has_ended()
        self._file = None if self.ended else self._open_lines()

    def _has_ended(self) -> bool:
        ended = self.journal.ended
        if ended is None:
            return False
        return ended["limit"] is None or (self.limit is not None and self.limit <= ended["limit"])

    def _open_journal(self, options: OutputOptions, job: dict[str, Any]) -> Journal:
        path = journal_path(self.path)
        if options.overwrite:
            self.path.unlink(missing_ok=True)
            self.lines_path.unlink(missing_ok=True)
            return Journal.create(path, job)
        if path.exists():
            size = self.lines_path.stat().st_size if self.lines_path.exists() else 0
            made = self._finish is not None and self.path.exists()
            return Journal.resume(path, job, size, made=made)
        if self.path.exists():
            raise JobError(
                f"{self.path} exists and no journal says that it is this job's; "
                "--overwrite replaces it, -o NAME writes elsewhere"
            )
        if options.only_resume:
            raise JobError(f"there is nothing to resume: {path} does not exist; leave out --resume to start the job")
        return Journal.create(path, job)

    def _open_lines(self) -> Any:
        try:
            file = self.lines_path.open("ab", buffering=0)
        except OSError as error:
            raise JobError(f"cannot write {self.lines_path}: {error.strerror}") from error
        file.truncate(self.journal.offset)
        return file

    def write(self, number: int, line: str, failed: bool) -> None:
        data = (line + "\n").encode()
        if self._finish is not None:
            data = b"%d\t" % number + data
        with self._lock:
            self._pending.append(data)
            self._numbers.append(number)
            self._bytes += len(data)
            self.count += 1
            self.errors += failed
            if self._bytes >= COMMIT_BYTES or time.monotonic() - self._last >= COMMIT_SECONDS:
                self._commit()

    def commit(self, *, due_only: bool = False) -> None:
        with self._lock:
            if not due_only or time.monotonic() - self._last >= COMMIT_SECONDS:
                self._commit()

    def _commit(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._last = time.monotonic()
        if not self._numbers:
            return
        assert self._file is not None
        data = b"".join(self._pending)
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
            self.journal.commit(self._numbers, self.journal.offset + len(data), self.errors)
        except OSError as error:
            self._broken = JobError(
                f"cannot write {self.lines_path}: {error.strerror}; what is written is kept: "
                "make room and give the same command to resume"
            )
            raise self._broken from error
        self._pending, self._numbers, self._bytes = [], [], 0

    def finish(self) -> None:
        """Commit what is left, make the final file, and mark the job as ended."""
        if self.ended:
            return
        self.commit()
        if self._finish is not None:
            self._finish(self.lines_path, self.path)
        self.journal.finish(self.limit)
        if self._finish is not None:
            self.lines_path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self.journal.close()
