"""The journal of a job: which records are written, so that a killed job goes on where it was.

A file beside the output, append-only, one JSON object a line. The first names the job; each of the
others commits a piece of the output:

    {"to": 81234, "done": "1-400,402", "errors": 3, "crc": "9a0b1c2d"}

says that the output's bytes up to 81,234 hold the lines of these records (and of those committed
before), three of them errors so far. Lines reach the output in one write, then the disk, and only
then is their commit written; so what lies behind the last commit is cut off on resuming and computed
again, and every record has exactly one line whenever the process dies.

`crc` is the CRC-32 of the entry without it, begun with that of the line before: an entry that is damaged,
missing or out of its place shows. The last line may be torn, and then does not count; damage before it is an error.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import JobError
from ..records.recordset import RecordSet, format_ranges, parse_ranges

__all__ = ["Journal", "covers", "differences", "journal_path", "recorded_job"]

_VERSION = 2
_SEAL = len(',"crc":"01234567"}\n')


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def recorded_job(output: Path) -> dict[str, Any]:
    """The fingerprint in the journal beside an output; {} when there is none that can be read."""
    try:
        with journal_path(output).open("rb") as file:
            entry = _unseal(file.readline(), 0)[0]
    except OSError:
        return {}
    job = (entry or {}).get("job")
    return job if isinstance(job, dict) else {}


class Journal:
    """An open journal, locked against a second process. Opening changes nothing that is there.

    job        the fingerprint of the job it is of; None when it has none yet (see `start`)
    done       records committed
    offset     bytes of the lines file that are committed
    errors     error lines among them
    ended      how the job ended, {"limit": its --limit or None}; None while records of it are missing
    """

    def __init__(self, path: Path):
        """Open and lock the journal; makes an empty one where there is none, which `close` takes away again.

        Raises JobError when another process has it, or when it cannot be written.
        """
        self.path = path
        self.done = RecordSet()
        self.offset = 0
        self.errors = 0
        self.ended: dict[str, Any] | None = None
        self.job: dict[str, Any] | None = None
        self._crc = 0
        self._end = 0
        self._file = _open_locked(path)

    def read(self) -> None:
        """Find out whose journal it is. Raises JobError when it is damaged; the last line may be torn."""
        for _, entry, _ in self._entries():
            if "job" in entry:
                self.job = entry["job"]
            elif "input" in entry:
                assert self.job is not None
                self.job["input"] = entry["input"]

    def start(self, job: dict[str, Any]) -> None:
        """Begin the journal of a new job, in place of what is there. Raises OSError, and then the old one stays."""
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
            with suppress(OSError):  # what could not be written is still held, and fails once more
                file.close()
            raise
        old.close()
        self.job = job

    def resume(self, job: dict[str, Any], output_bytes: int, limit: int | None, *, made: bool = False) -> None:
        """Take in what is committed. `output_bytes`: the present size of the lines file; `limit`: the present --limit.

        Commits beyond that size (the disk lost them) do not count, unless the job has ended and the
        file made of the lines is there (`made`). Raises JobError naming what differs when the journal
        is of another job.
        """
        assert self.job is not None
        found = differences(self.job, job)
        if found:
            raise JobError(
                f"{self.path} belongs to another job:\n  "
                + "\n  ".join(found)
                + "\ngive the same options to resume it, --overwrite to start again, or -o NAME to write elsewhere"
            )
        ended = None
        for _, entry, _ in self._entries():
            ended = entry.get("ended")
        self._replay(output_bytes, whole=made and covers(ended, limit))

    def cut(self) -> None:
        """Take away what lies behind the last entry that counts."""
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def commit(self, numbers: list[int], offset: int, errors: int) -> None:
        """Record that the lines of `numbers` are on disk, up to `offset`."""
        for number in numbers:
            if not self.done.add(number):
                raise AssertionError(f"record {number} has a second line")
        self.offset, self.errors = offset, errors
        self._append({"to": offset, "done": format_ranges(numbers), "errors": errors})

    def grow(self, input: dict[str, Any]) -> None:
        """Record that the job's input has become longer; `input`: its identity now."""
        self.ended = None
        self._append({"input": input})

    def finish(self, limit: int | None) -> None:
        """Mark the job as ended: every record up to `limit` (None: all) has its line."""
        self.ended = {"limit": limit}
        self._append({"ended": self.ended})

    def close(self) -> None:
        """Let go of the lock. A journal in which nothing was written leaves no file."""
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
        """Each whole entry, the byte behind it, and its checksum. A torn last line ends them; other damage raises."""
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
                        f"line {number} of {self.path} is damaged: its checksum does not hold; --overwrite starts the "
                        f"job again, and without that and all lines behind it (head -n {number - 1}) it goes on there"
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
            self.ended = entry.get("ended")
            self._end, self._crc = end, crc


def covers(ended: dict[str, Any] | None, limit: int | None) -> bool:
    """Whether a job that ended so has done all that one with this --limit would."""
    if ended is None:
        return False
    return ended["limit"] is None or (limit is not None and limit <= ended["limit"])


def _seal(entry: dict[str, Any], before: int) -> tuple[bytes, int]:
    """An entry's line, and its checksum. `before`: that of the line before."""
    body = json.dumps(entry, separators=(",", ":")).encode()
    crc = zlib.crc32(body, before)
    return body[:-1] + b',"crc":"%08x"}\n' % crc, crc


def _unseal(line: bytes, before: int) -> tuple[dict[str, Any] | None, int]:
    """The entry of a line, and its checksum; None when the line is not whole, or not as it was written."""
    body = line[:-_SEAL] + b"}"
    crc = zlib.crc32(body, before)
    if line[-_SEAL:] != b',"crc":"%08x"}\n' % crc:
        return None, before
    return json.loads(body), crc


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two fingerprints, one line each."""
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
        # Who had the lock until now has put another file in this one's place, or has taken it away.
        file.close()


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise JobError(f"another process writes this job ({path}); wait for it, or write to another -o") from None
    except OSError:  # nor on this file system
        return
