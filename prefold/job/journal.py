"""The journal of a job: which records are written, so that a killed job goes on where it was.

A file beside the output, append-only, one JSON object a line. The first names the job; each of the
others commits a piece of the output:

    {"to": 81234, "done": "1-400,402", "errors": 3}

says that the output's bytes up to 81,234 hold the lines of these records (and of those committed
before), three of them errors so far. Lines reach the output in one write, then the disk, and only
then is their commit written; so what lies behind the last commit is cut off on resuming and computed
again, and every record has exactly one line whenever the process dies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import JobError
from ..records.recordset import RecordSet, format_ranges, parse_ranges

__all__ = ["Journal", "differences", "journal_path", "recorded_job"]

_VERSION = 1


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def recorded_job(output: Path) -> dict[str, Any]:
    """The fingerprint in the journal beside an output; {} when there is none that can be read."""
    try:
        with journal_path(output).open("rb") as file:
            entry = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    job = entry.get("job") if isinstance(entry, dict) else None
    return job if isinstance(job, dict) else {}


class Journal:
    """An open journal, locked against a second process.

    done       records committed
    offset     bytes of the lines file that are committed
    errors     error lines among them
    ended      None, or how the job ended: {"limit": its --limit or None}
    """

    def __init__(self, path: Path, file: BinaryIO):
        self.path = path
        self._file = file
        self.done = RecordSet()
        self.offset = 0
        self.errors = 0
        self.ended: dict[str, Any] | None = None

    @classmethod
    def create(cls, path: Path, job: dict[str, Any]) -> Journal:
        """Start a new journal, in place of one that is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
        _lock(file, path)
        journal = cls(path, file)
        journal._start(job)
        return journal

    @classmethod
    def resume(cls, path: Path, job: dict[str, Any], output_bytes: int, *, made: bool = False) -> Journal:
        """Open the journal of the same job. `output_bytes`: the present size of the lines file.

        Commits beyond that size (the disk lost them) do not count, unless the job has ended and the
        file made of the lines is there (`made`). Raises JobError naming what differs when the journal
        is of another job, or when it cannot be read.
        """
        file = path.open("r+b")
        _lock(file, path)
        journal = cls(path, file)
        if not output_bytes and next(journal._entries(), None) is None:
            journal._start(job)  # killed before its first line was whole
            return journal
        try:
            journal._check_job(job)
        except JobError:
            file.close()
            raise
        end = journal._replay(output_bytes, made)
        file.truncate(end)
        file.seek(end)
        return journal

    def commit(self, numbers: list[int], offset: int, errors: int) -> None:
        """Record that the lines of `numbers` are on disk, up to `offset`."""
        for number in numbers:
            if not self.done.add(number):
                raise AssertionError(f"record {number} has a second line")
        self.offset, self.errors = offset, errors
        self._append({"to": offset, "done": format_ranges(numbers), "errors": errors})

    def finish(self, limit: int | None) -> None:
        """Mark the job as ended: every record up to `limit` (None: all) has its line."""
        self.ended = {"limit": limit}
        self._append({"ended": self.ended})

    def close(self) -> None:
        self._file.close()

    def _start(self, job: dict[str, Any]) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._append({"prefold_journal": _VERSION, "job": job})

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each whole entry with the byte behind it; a torn last line ends them."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            end += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except ValueError:
                return
            if not isinstance(entry, dict):
                return
            yield end, entry

    def _check_job(self, job: dict[str, Any]) -> None:
        first = next(self._entries(), None)
        if first is None or first[1].get("prefold_journal") != _VERSION:
            raise JobError(
                f"{self.path} is not a journal this version can read; "
                "--overwrite starts the job again, -o NAME writes elsewhere"
            )
        found = differences(first[1].get("job", {}), job)
        if found:
            raise JobError(
                f"{self.path} belongs to another job:\n  "
                + "\n  ".join(found)
                + "\ngive the same options to resume it, --overwrite to start again, or -o NAME to write elsewhere"
            )

    def _replay(self, output_bytes: int, made: bool) -> int:
        ended = made and any("ended" in entry for _, entry in self._entries())
        good = 0
        for end, entry in self._entries():
            if "to" in entry:
                if entry["to"] > output_bytes and not ended:
                    break
                for number in parse_ranges(entry["done"]):
                    self.done.add(number)
                self.offset, self.errors = entry["to"], entry["errors"]
            elif "ended" in entry:
                self.ended = entry["ended"]
            good = end
        return good


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
