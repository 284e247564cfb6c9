"""The output of a job: its lines go to a file with a journal, or to standard output.

Lines wait until one second has passed or 1 MiB has come together. Then they are written together, as one commit of the
journal, because a commit waits for the disk. If needed, a last pass sorts the lines into input order, or converts them
to CSV, Parquet or gzip. The converted file appears under its name only when it is complete.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from ..errors import JobError
from ..spec.files import replacing, writing
from .columns import TableForm, cell, need_pyarrow, write_parquet
from .journal import Journal, covers, journal_path
from .record import Extra, RecordSet
from .source import as_noted

COMMIT_SECONDS = 1.0
COMMIT_BYTES = 1 << 20
HELD_BYTES = 16 << 20
RESUME = "give the same command to resume"


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The options of an output: where to write, and what to do with existing files."""

    path: Path | None  # the output file; None: standard output
    keep_order: bool = False
    overwrite: bool = False
    only_resume: bool = False  # raise JobError if there is no job to resume
    limit: int | None = None
    # With --grown: receives the journal's identity of the earlier input. Raises JobError unless the input starts with
    # this earlier input.
    grown: Callable[[dict[str, Any]], None] | None = None
    form: TableForm = field(default_factory=TableForm)  # the columns of a table, as known before the job
    commit_seconds: float | None = None  # maximum delay before a line is durable; None: COMMIT_SECONDS


class Output:
    """The destination of a job's lines. Any thread may call it; each record's line is written once.

    Attributes:
        done: the records whose lines are durable, from earlier runs and from this run
        count: number of records that have a line, durable or not
        errors: number of these lines that are errors
        resumed: number of records that had a line when the output was opened
        ended: True if earlier runs have finished the job, so that nothing remains to do
        begun: True if this run has written to a file
        notes: notes for the user about the final file
        first_error: the first error line of this run
        before_commit: called before lines are made durable
    """

    def __init__(self) -> None:
        self.before_commit: Callable[[], None] = lambda: None
        self.done = RecordSet()
        self.count = self.errors = self.resumed = 0
        self.ended = self.begun = False
        self.notes: list[str] = []
        self.first_error: str | None = None
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Keep lines in memory until `release`, so that a job that cannot run leaves all files unchanged."""

    def release(self) -> None:
        """Allow commits again after `hold`. The next commit writes the held lines and replaces an old output."""

    def write(self, number: int, line: str, failed: bool, extra: Extra | None = None) -> None:
        """Accept the line of a record. Subclasses write it.

        Args:
            number: The number of the record.
            line: The record's line, without a line end.
            failed: Whether the line is an error.
            extra: JSON data about the record that the job reads again at its end (see `extras`).
        """
        self.count += 1
        self.errors += failed
        self.first_error = self.first_error or (line if failed else None)

    def commit(self, *, due_only: bool = False) -> None:
        """Make the accepted lines durable.

        Args:
            due_only: Do nothing if the last commit was less than `OutputOptions.commit_seconds` ago.
        """

    def finish(self) -> None:
        """Commit the remaining lines, and end the output."""
        self.commit()

    def extras(self) -> Iterable[Extra]:
        """Return the `extra` of every record that has a line, including records of earlier runs."""
        return ()

    def close(self) -> None: ...


def open_output(options: OutputOptions, job: dict[str, Any]) -> Output:
    """Open the output of a job. If a file has the journal of this job, the job resumes.

    Raise JobError if the output belongs to another job, or cannot be written.

    Args:
        job: The fingerprint of the job, as in its journal.
    """
    if options.path is None:
        if options.keep_order:
            raise JobError("--keep-order needs an output file: add -o FILE")
        if sys.stdout is None or sys.stdout.closed:
            raise JobError("standard output is closed; add -o FILE")
        return StreamOutput(sys.stdout.buffer)
    return FileOutput(options, job)


def partial_path(output: Path) -> Path:
    """Return the path of the file with a job's lines before the last pass converts them."""
    return output.with_name(output.name + ".partial")


class StreamOutput(Output):
    """An output to a stream, in UTF-8, in the order of the calls. It has no journal, so the job cannot resume."""

    def __init__(self, stream: BinaryIO):
        super().__init__()
        self._stream = stream
        self._extras: list[Extra] = []

    def write(self, number: int, line: str, failed: bool, extra: Extra | None = None) -> None:
        with self._lock, writing("standard output"):
            self._stream.write((line + "\n").encode())
            self.done.add(number)
            self._extras += [] if extra is None else [extra]
            super().write(number, line, failed)

    def extras(self) -> Iterable[Extra]:
        return self._extras

    def commit(self, *, due_only: bool = False) -> None:
        with self._lock, writing("standard output"):
            self.before_commit()
            self._stream.flush()


class FileOutput(Output):
    """An output to a file. Each record has exactly one line in it, even if the process is killed and resumed.

    JSONL is written as results come. For other formats, and with --keep-order, lines go to NAME.partial, and `finish`
    converts them to the final file.

    The journal is locked before any file is examined, and no file is changed before the first commit. After `hold`,
    nothing is committed until `release`, or until HELD_BYTES of lines have arrived.
    """

    def __init__(self, options: OutputOptions, job: dict[str, Any]):
        super().__init__()
        assert options.path is not None
        self.path = options.path
        self.limit = options.limit
        self._commit_seconds = COMMIT_SECONDS if options.commit_seconds is None else options.commit_seconds
        if self.path.is_dir():
            raise JobError(f"{self.path} is a folder; name a file in it")
        self._finish = finish_for(self.path, options.keep_order, options.form)
        self.lines_path = self.path if self._finish is None else partial_path(self.path)
        self._job = {**job, "output": {"keep_order": options.keep_order}}
        # Number, line and extra of a record are one tuple, because a signal can interrupt between two appends.
        self._pending: list[tuple[int, bytes, Extra | None]] = []
        self._bytes = 0
        self._last = time.monotonic()
        self._broken: JobError | None = None
        self._file: Any = None
        self._is_locked = self._grew = False
        self._keeps_lines = options.grown is not None or options.limit is not None
        self._replaces = options.overwrite and self.path.exists()
        self.journal = Journal(journal_path(self.path))
        try:
            self._resumes = not options.overwrite and self._resume(options)
        except BaseException:
            self.journal.close()
            raise
        self.done, self.errors = self.journal.done, self.journal.errors
        self.count = self.resumed = len(self.done)
        self.ended = covers(self.journal.end_entry, self.limit)
        if self.ended and self.journal.end_entry is not None and not self.journal.end_entry.get("keeps_lines", True):
            self._remove_lines()  # the earlier run was killed before it removed them

    @property
    def num_bytes(self) -> int:
        """Return the number of committed bytes of lines."""
        return self.journal.offset

    def _resume(self, options: OutputOptions) -> bool:
        """Read the journal of earlier runs. Return whether the job resumes."""
        self.journal.read()
        if self.journal.job is not None:
            size = self.lines_path.stat().st_size if self.lines_path.exists() else 0
            has_final = self._finish is not None and self.path.exists()
            before = self.journal.job.get("input")
            if before and self._job.get("input"):  # missing for a server's batch whose input was deleted
                self._job["input"] = as_noted(self._job["input"], before)
            if options.grown is not None and before != self._job["input"]:
                options.grown(before)
                self.journal.job["input"] = self._job["input"]
                self._grew = True
            self.journal.resume(self._job, size, options.limit, has_final=has_final)
            if self._grew:
                self._check_lines(size)
            return True
        if self.path.exists() and self.path.stat().st_size:
            raise JobError(
                f"{self.path} exists, and no journal shows that it belongs to this job; "
                "--overwrite replaces it, -o NAME writes elsewhere"
            )
        if options.only_resume:
            raise JobError(
                f"there is nothing to resume: {self.journal.path} does not exist; leave out --resume to start the job"
            )
        return False

    def _check_lines(self, size: int) -> None:
        """Raise JobError if an ended job cannot continue with --grown, because its lines were not kept."""
        self.journal.end_entry = None
        if size < self.journal.offset:
            raise JobError(
                f"{self.path} was made without --grown, so its lines were not kept; "
                "start again with --overwrite --grown, and later runs can continue"
            )

    def hold(self) -> None:
        self._is_locked = True

    def release(self) -> None:
        self._is_locked = False

    def _begin(self) -> None:
        """Open the lines file for writing, once. A new job replaces old lines; a resumed job cuts uncommitted lines."""
        if self.begun:
            return
        if self._resumes:
            self.journal.cut()
            if self._grew:
                self.journal.grow(self._job["input"])
        else:
            self.journal.start(self._job)
            if self._replaces and self._finish is None:
                partial_path(self.path).unlink(missing_ok=True)  # left by a job with other output options
        self._file = self.lines_path.open("ab", buffering=0)
        self._file.truncate(self.journal.offset)
        self.begun = True

    def write(self, number: int, line: str, failed: bool, extra: Extra | None = None) -> None:
        data = (line + "\n").encode()
        if self._finish is not None:
            data = b"%d\t" % number + data
        with self._lock:
            self._pending.append((number, data, extra))
            self._bytes += len(data)
            super().write(number, line, failed)
            if self._bytes >= COMMIT_BYTES or time.monotonic() - self._last >= self._commit_seconds:
                self._commit()

    def commit(self, *, due_only: bool = False) -> None:
        with self._lock:
            if not due_only or time.monotonic() - self._last >= self._commit_seconds:
                self._commit()

    def _commit(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._is_locked and self._bytes < HELD_BYTES:
            return
        self._last = time.monotonic()
        if not self._pending:
            return
        self.before_commit()
        data = b"".join(line for _, line, _ in self._pending)
        try:
            with writing(self.lines_path, "written lines are kept", RESUME):
                self._begin()
                num_bytes = 0
                while num_bytes < len(data):
                    num_bytes += self._file.write(data[num_bytes:])
                os.fsync(self._file.fileno())
                numbers = [number for number, _, _ in self._pending]
                extras = [extra for _, _, extra in self._pending if extra is not None]
                self.journal.commit(numbers, self.journal.offset + len(data), self.errors, extras)
            self._pending, self._bytes = [], 0
        except JobError as error:
            self._broken = error
            raise
        except BaseException:  # for example a second Ctrl-C: a later commit must not write these lines again
            self._broken = JobError(f"writing {self.lines_path} was interrupted; written lines are kept")
            raise

    def finish(self) -> None:
        """Commit the remaining lines, make the final file, and mark the job as ended."""
        if self.ended:
            return
        self.release()
        self.commit()
        with writing(self.path, "the records are done and kept", RESUME):
            self._begin()  # only has an effect if there was nothing to commit
            if self._finish is not None:
                self.notes = self._finish(self.lines_path, self.path)
            # With --limit or --grown a later run continues from the lines, so keep them.
            keeps_lines = self._finish is None or self._keeps_lines
            self.journal.finish(self.limit, keeps_lines=keeps_lines)
            if not keeps_lines:
                self._remove_lines()

    def extras(self) -> Iterable[Extra]:
        return self.journal.extras()

    def _remove_lines(self) -> None:
        """Remove the lines file if it is separate from the output and the output exists."""
        if self.path != self.lines_path and self.path.exists():
            self.lines_path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self.journal.close()


# (lines file, final file) -> notes for the user: converts the lines to the final file
Finish = Callable[[Path, Path], list[str]]


def finish_for(path: Path, keep_order: bool, form: TableForm | None = None) -> Finish | None:
    """Return the function that converts the lines to the format of `path`, or None if the lines are the final file.

    Raise JobError for an unknown file extension. Raise MissingExtraError if the format needs pyarrow.

    Args:
        form: The columns of a table, as known before the job.
    """
    suffixes = [s.lower() for s in path.suffixes]
    is_gzip = suffixes[-1:] == [".gz"]
    format = (suffixes[:-1] if is_gzip else suffixes)[-1:]
    open_file: Any = gzip.open if is_gzip else open
    if format in ([".csv"], [".tsv"]):
        write: Any = partial(_write_csv, open_file, "\t" if format == [".tsv"] else ",")
    elif format == [".parquet"]:
        if is_gzip:
            raise JobError(f"{path.name} cannot be written: Parquet has its own compression; name it {path.stem}")
        need_pyarrow(f"writing {path}")  # fail before the work, not after it
        write = write_parquet
    elif format not in ([".jsonl"], [".ndjson"], [".json"]):
        name = f"the extension {''.join(format)} is unknown" if format else "it has no extension"
        raise JobError(
            f"{path.name} cannot be written, because {name}; name it .jsonl, .csv, .tsv or .parquet "
            "(.gz may follow, but not after .parquet)"
        )
    elif keep_order or is_gzip:
        write = partial(_write_jsonl, open_file)
    else:
        return None

    def finish(lines: Path, path: Path) -> list[str]:
        with replacing(path) as temporary, lines.open("rb") as file:
            notes = write(_OutputLines(file, keep_order), temporary, form or TableForm())
        return notes

    return finish


class _OutputLines:
    """The lines of the lines file without their numbers. Iteration may start again.

    Args:
        keep_order: Whether to yield lines in the order of the input, instead of the order of the file.
    """

    def __init__(self, file: BinaryIO, keep_order: bool):
        self._file = file
        self._starts = self._in_order() if keep_order else None

    def _in_order(self) -> np.ndarray:
        numbers, starts, place = array("q"), array("q"), 0
        for line in self._file:
            numbers.append(int(line[: line.index(b"\t")]))
            starts.append(place)
            place += len(line)
        return np.array(starts, np.int64)[np.argsort(np.array(numbers, np.int64))]

    def __iter__(self) -> Iterator[bytes]:
        if self._starts is None:
            self._file.seek(0)
            for line in self._file:
                yield line.split(b"\t", 1)[1]
            return
        for start in self._starts.tolist():
            self._file.seek(start)
            yield self._file.readline().split(b"\t", 1)[1]


def _write_jsonl(open_file: Any, lines: _OutputLines, path: Path, form: TableForm) -> list[str]:
    with open_file(path, "wb") as file:
        for line in lines:
            file.write(line)
    return []


def _write_csv(open_file: Any, delimiter: str, lines: _OutputLines, path: Path, form: TableForm) -> list[str]:
    columns = list(dict.fromkeys((*form.head, *(name for line in form.objects(lines) for name in line))))
    columns.sort(key="error".__eq__)  # put the column of errors last
    with open_file(path, "wb") as raw, TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        table = csv.DictWriter(_UnixLines(file), columns, delimiter=delimiter, lineterminator="\r\n")
        table.writeheader()
        for line in lines:
            table.writerow({name: cell(name, value) for name, value in json.loads(line).items()})
    return []


class _UnixLines:
    """A text file that replaces the line end "\\r\\n" of each record by "\\n".

    The csv writer must use "\\r\\n": before Python 3.13, it quotes a carriage return in a cell only if its line end
    contains one.
    """

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, record: str) -> int:
        return self._file.write(record[:-2] + "\n")
