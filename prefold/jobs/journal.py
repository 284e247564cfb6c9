"""The journal of a job: the records whose lines are written, so that a killed job can continue.

The journal is a file beside the output, one JSON object per line. Lines are only appended. The first line identifies
the job. Each other line commits a part of the output. For example

    {"to": 81234, "done": "1-400,402", "errors": 3, "crc": "9a0b1c2d"}

says that the first 81,234 bytes of the output hold the lines of these records and of all records committed before.
Three of all these lines are errors. First the lines are written to the output, then they are synced to disk, and
only then is their commit written. A resumed job truncates the output after the last commit and computes the rest again.
So every record gets exactly one line, whenever the process dies. An entry may also have `extras`: data that the end of
the job needs about these records.

`crc` is the CRC-32 of the entry without `crc`, started with the checksum of the line before. It detects entries that
are damaged, missing or out of order. The last line may be torn, and is then ignored. Damage before the last line is an
error.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from ..errors import JobError
from .record import Extra, RecordSet, format_ranges, parse_ranges

_VERSION = 3  # version 2 had options as written on the command line, such as "labels": "a,b"
_SEAL = len(',"crc":"01234567"}\n')


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def recorded_job(output: Path) -> dict[str, Any]:
    """Return the fingerprint in the journal beside an output, or {} if there is no readable journal."""
    try:
        with journal_path(output).open("rb") as file:
            entry = _unseal(file.readline(), 0)[0]
    except OSError:
        return {}
    job = (entry or {}).get("job")
    return job if isinstance(job, dict) else {}


class Journal:
    """The journal of a job. It is locked against other processes while it is open. Opening it does not change the file.

    Attributes:
        job: the fingerprint of the journal's job; None: no job yet (see `start`)
        done: the committed records
        offset: committed bytes of the lines file
        errors: number of committed lines that are errors
        end_entry: how the job ended, {"limit": its --limit or None}; None: records are missing
    """

    def __init__(self, path: Path):
        """Open and lock the journal, and create an empty one if it does not exist. `close` removes an empty journal.

        Raise JobError if another process has locked it, or if it cannot be written.
        """
        self.path = path
        self.done = RecordSet()
        self.offset = 0
        self.errors = 0
        self.end_entry: dict[str, Any] | None = None
        self.job: dict[str, Any] | None = None
        self._version: Any = _VERSION
        self._crc = 0
        self._end = 0
        self._file = _open_locked(path)

    def read(self) -> None:
        """Read the fingerprint of the journal's job. Raise JobError if the journal is damaged before its last line."""
        for _, entry, _ in self._entries():
            if "job" in entry:
                self.job, self._version = entry["job"], entry.get("prefold_journal")
            elif "input" in entry:
                assert self.job is not None
                self.job["input"] = entry["input"]

    def start(self, job: dict[str, Any]) -> None:
        """Start the journal of a new job. It replaces an old journal, which stays if this raises OSError."""
        new = self.path.with_name(self.path.name + ".tmp")
        file = new.open("w+b")
        try:
            _lock(file, self.path)
            old, self._file, self._crc = self._file, file, 0
            self._append({"prefold_journal": _VERSION, "job": job})
            new.replace(self.path)
        except OSError:
            self._file = old
            new.unlink(missing_ok=True)
            with suppress(OSError):  # closing tries again to write the rest of the buffer
                file.close()
            raise
        old.close()
        self.job = job

    def resume(self, job: dict[str, Any], output_bytes: int, limit: int | None, *, has_final: bool = False) -> None:
        """Read the committed records. Raise JobError, listing the differences, if the journal belongs to another job.

        Args:
            job: The fingerprint of the present job.
            output_bytes: The present size of the lines file. Commits beyond it were lost by the disk and do not count.
            limit: The present --limit.
            has_final: The final file, made from the lines, exists. Then all commits of an ended job count.
        """
        assert self.job is not None
        differing = differences(self.job, job)
        if differing:
            lines = "\n  ".join(differing)
            earlier = ""
            if self._version != _VERSION:
                earlier = " (an earlier version wrote it, with other names for some options)"
            raise JobError(
                f"{self.path} belongs to another job{earlier}:\n  {lines}\n"
                "give the same input and options to resume it (--grown: the input may have become longer), "
                "--overwrite to start again, or -o NAME to write elsewhere"
            )
        end_entry = None
        for _, entry, _ in self._entries():
            end_entry = entry.get("ended")
        self._replay(output_bytes, whole=has_final and covers(end_entry, limit))

    def cut(self) -> None:
        """Remove everything after the last valid entry."""
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def commit(self, numbers: list[int], offset: int, errors: int, extras: Sequence[Extra] = ()) -> None:
        """Record that the lines of the records `numbers` are on disk, up to byte `offset`.

        Args:
            errors: number of error lines so far
            extras: the `extra` values of these records (see `Output.extras`)
        """
        for number in numbers:
            if not self.done.add(number):
                raise AssertionError(f"record {number} got a second line")
        self.offset, self.errors = offset, errors
        entry = {"to": offset, "done": format_ranges(numbers), "errors": errors}
        self._append(entry | ({"extras": extras} if extras else {}))

    def extras(self) -> Iterator[Extra]:
        """Yield the extras of all entries. Entries that do not count are removed before a job continues."""
        try:
            for _, entry, _ in self._entries():
                yield from entry.get("extras", ())
        finally:
            self._file.seek(0, os.SEEK_END)

    def grow(self, input: dict[str, Any]) -> None:
        """Record that the job's input has become longer.

        Args:
            input: the present identity of the input
        """
        self.end_entry = None
        self._append({"input": input})

    def finish(self, limit: int | None, *, keeps_lines: bool = True) -> None:
        """Mark the job as ended: every record up to `limit` (None: all) has its line.

        Args:
            keeps_lines: the lines file is kept after the output was made from it
        """
        self.end_entry = {"limit": limit, "keeps_lines": keeps_lines}
        self._append({"ended": self.end_entry})

    def close(self) -> None:
        """Unlock the journal, and remove it if it is empty."""
        if self._file.closed:
            return
        if os.fstat(self._file.fileno()).st_size == 0:
            self.path.unlink(missing_ok=True)
        with suppress(OSError):  # on a full disk, the commit has already failed
            self._file.close()

    def _append(self, entry: dict[str, Any]) -> None:
        line, self._crc = _seal(entry, self._crc)
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _entries(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """Yield (end offset, entry, checksum), without a torn last line. Raise JobError for any other damage."""
        self._file.seek(0)
        number = end = crc = 0
        while line := self._file.readline():
            number, end = number + 1, end + len(line)
            entry, crc = _unseal(line, crc)
            if entry is None:
                if number == 1 and (self._file.readline() or line.endswith(b"\n")):
                    raise JobError(
                        f"{self.path} is not a journal this version can read; "
                        "--overwrite starts the job again, -o NAME writes elsewhere"
                    )
                if self._file.readline():
                    raise JobError(
                        f"line {number} of {self.path} is damaged: its checksum is wrong; --overwrite starts the job "
                        f"again, or keep only the lines before it (head -n {number - 1}), and the job continues there"
                    )
                return
            yield end, entry, crc

    def _replay(self, output_bytes: int, whole: bool) -> None:
        for end, entry, crc in self._entries():
            if "to" in entry:
                if entry["to"] > output_bytes and not whole:
                    break
                for number in parse_ranges(entry["done"]):
                    self.done.add(number)
                self.offset, self.errors = entry["to"], entry["errors"]
            self.end_entry = entry.get("ended")
            self._end, self._crc = end, crc


def covers(end_entry: dict[str, Any] | None, limit: int | None) -> bool:
    """Return whether an ended job has done everything that a job with this --limit would do.

    Args:
        end_entry: as in Journal
    """
    if end_entry is None:
        return False
    return end_entry["limit"] is None or (limit is not None and limit <= end_entry["limit"])


def _seal(entry: dict[str, Any], before: int) -> tuple[bytes, int]:
    """Return (line of an entry, its checksum).

    Args:
        before: the checksum of the line before
    """
    body = json.dumps(entry, separators=(",", ":")).encode()
    crc = zlib.crc32(body, before)
    return body[:-1] + b',"crc":"%08x"}\n' % crc, crc


def _unseal(line: bytes, before: int) -> tuple[dict[str, Any] | None, int]:
    """Return (entry of a line, its checksum). The entry is None if the line is torn or damaged."""
    body = line[:-_SEAL] + b"}"
    crc = zlib.crc32(body, before)
    if line[-_SEAL:] != b',"crc":"%08x"}\n' % crc:
        return None, before
    return json.loads(body), crc


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the differences between two fingerprints, one line for each."""
    out: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key}: {_short(a)} in the journal, {_short(b)} now")
    return out


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _open_locked(path: Path) -> BinaryIO:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
        except OSError as error:
            raise JobError(f"cannot write {path}: {error.strerror}; give another -o") from error
        _lock(file, path)
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        # The process that held the lock has replaced or removed the file, so this lock is on a stale file.
        file.close()


def lock(file: IO[Any]) -> bool:
    """Lock a file until it is closed. Return False if another process has locked it, else True.

    Systems and file systems without such locks never refuse.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def _lock(file: BinaryIO, path: Path) -> None:
    if not lock(file):
        file.close()
        raise JobError(f"another process writes this job ({path}); wait for it, or write to another -o")
