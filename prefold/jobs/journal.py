"""Keeps the journal of a job, which lists the written records, so that a killed job can go on.

The journal is a file beside the output, one JSON object a line, to which lines are only appended. The first line names
the job; each of the others commits a piece of the output. For example

    {"to": 81234, "done": "1-400,402", "errors": 3, "crc": "9a0b1c2d"}

says that the output's bytes up to 81,234 hold the lines of these records (and of those committed before), and that
three of all these lines are errors. The lines reach the output, then the disk, and only then is their commit written.
A job that is resumed cuts off what lies behind the last commit and computes it again, so every record has exactly one
line whenever the process dies. An entry may also have `extras`, what the end of the job needs of these records beside
their lines.

`crc` is the CRC-32 of the entry without `crc`, begun with the checksum of the line before, so that an entry which is
damaged, missing or in the wrong place is noticed. The last line may be torn, and then does not count; damage before it
is an error.
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

_VERSION = 3  # 2 named options by what the command line was given, such as "labels": "a,b"
_SEAL = len(',"crc":"01234567"}\n')


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def recorded_job(output: Path) -> dict[str, Any]:
    """Returns the fingerprint in the journal beside an output; {} if there is no readable journal."""
    try:
        with journal_path(output).open("rb") as file:
            entry = _unseal(file.readline(), 0)[0]
    except OSError:
        return {}
    job = (entry or {}).get("job")
    return job if isinstance(job, dict) else {}


class Journal:
    """A Journal is locked against other processes while it is open. Opening it changes nothing in the file.

    job        the fingerprint of the journal's job; None when it has none yet (see `start`)
    done       the records that are committed
    offset     how many bytes of the lines file are committed
    errors     how many of the committed lines are errors
    end_entry  how the job ended, {"limit": its --limit or None}; None while records of it are missing
    """

    def __init__(self, path: Path):
        """Opens and locks the journal, and makes an empty one where there is none, which `close` removes again.

        Raises JobError when another process has it, or when it cannot be written.
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
        """Reads the fingerprint of the journal's job. Raises JobError if the journal is damaged; the last line may be
        torn."""
        for _, entry, _ in self._entries():
            if "job" in entry:
                self.job, self._version = entry["job"], entry.get("prefold_journal")
            elif "input" in entry:
                assert self.job is not None
                self.job["input"] = entry["input"]

    def start(self, job: dict[str, Any]) -> None:
        """Begins the journal of a new job, in place of an old journal, which stays if this raises OSError."""
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
            with suppress(OSError):  # the buffer still holds what could not be written, and closing tries once more
                file.close()
            raise
        old.close()
        self.job = job

    def resume(self, job: dict[str, Any], output_bytes: int, limit: int | None, *, has_final: bool = False) -> None:
        """Reads the committed records. Raises JobError, naming the differences, if the journal is of another job.

        output_bytes  the present size of the lines file. Commits beyond it, which the disk has lost, do not count
        limit         the present --limit
        has_final     whether the final file, which is made of the lines, is there; commits of an ended job then count
                      anyway
        """
        assert self.job is not None
        differing = differences(self.job, job)
        if differing:
            lines = "\n  ".join(differing)
            earlier = ""
            if self._version != _VERSION:
                earlier = " (an earlier version wrote it, which named some options otherwise)"
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
        """Cuts off everything after the last valid entry."""
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def commit(self, numbers: list[int], offset: int, errors: int, extras: Sequence[Extra] = ()) -> None:
        """Record that the lines of the records `numbers` are on disk, up to `offset`; `errors` of them are errors.
        extras: what the end of the job needs of them"""
        for number in numbers:
            if not self.done.add(number):
                raise AssertionError(f"record {number} has a second line")
        self.offset, self.errors = offset, errors
        entry = {"to": offset, "done": format_ranges(numbers), "errors": errors}
        self._append(entry | ({"extras": extras} if extras else {}))

    def extras(self) -> Iterator[Extra]:
        """Yield the extras of all entries. Entries that do not count are cut off before a job goes on."""
        try:
            for _, entry, _ in self._entries():
                yield from entry.get("extras", ())
        finally:
            self._file.seek(0, os.SEEK_END)

    def grow(self, input: dict[str, Any]) -> None:
        """Records that the job's input has become longer. input: its present identity"""
        self.end_entry = None
        self._append({"input": input})

    def finish(self, limit: int | None, *, keeps_lines: bool = True) -> None:
        """Marks the job as ended: every record up to `limit` (None: all) has its line.

        keeps_lines: whether the lines file is kept when the output was made of it
        """
        self.end_entry = {"limit": limit, "keeps_lines": keeps_lines}
        self._append({"ended": self.end_entry})

    def close(self) -> None:
        """Unlocks the journal, and removes it if nothing was written."""
        if self._file.closed:
            return
        if os.fstat(self._file.fileno()).st_size == 0:
            self.path.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk has failed the commit already
            self._file.close()

    def _append(self, entry: dict[str, Any]) -> None:
        line, self._crc = _seal(entry, self._crc)
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _entries(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """Yields (entry, the byte behind it, its checksum), without a torn last line. Raises JobError for other
        damage."""
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
                        f"line {number} of {self.path} is damaged, as its checksum does not hold; --overwrite starts "
                        f"the job again, or keep only the lines before it (head -n {number - 1}), and the job goes on "
                        "from there"
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
    """Returns whether an ended job has done all that a job with this --limit would do. end_entry: as of Journal"""
    if end_entry is None:
        return False
    return end_entry["limit"] is None or (limit is not None and limit <= end_entry["limit"])


def _seal(entry: dict[str, Any], before: int) -> tuple[bytes, int]:
    """Returns (an entry's line, its checksum). before: the checksum of the line before."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    crc = zlib.crc32(body, before)
    return body[:-1] + b',"crc":"%08x"}\n' % crc, crc


def _unseal(line: bytes, before: int) -> tuple[dict[str, Any] | None, int]:
    """Returns (the entry of a line, its checksum); None in place of the entry if the line is torn or damaged."""
    body = line[:-_SEAL] + b"}"
    crc = zlib.crc32(body, before)
    if line[-_SEAL:] != b',"crc":"%08x"}\n' % crc:
        return None, before
    return json.loads(body), crc


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Returns the differences between two fingerprints, a line for each."""
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
        # The process that had the lock until now has replaced or removed the file, so the lock is on a stale one.
        file.close()


def lock(file: IO[Any]) -> bool:
    """Locks a file until it is closed, and returns True; returns False if another process has locked it. Systems and
    file systems without such locks never refuse."""
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
