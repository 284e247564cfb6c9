"""The SQLite file of kept answers. Any number of processes may use it at the same time.

A row is an answer under its key, a digest of everything that the answer depends on. Rows are written in transactions of
a write-ahead log. If a process is killed, its last transaction is complete or absent. Each row has a checksum, and a
row with a wrong checksum counts as missing. Above a limit in bytes, the least recently used rows are deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import JobError
from ..spec.files import sampled_digest

NAME = "answers.sqlite"
_APPLICATION, _VERSION = 0x70664B41, 1  # stored in the file's header
_BUSY_SECONDS = 60.0
_AT_ONCE = 500  # maximum keys of a query, and rows of a deletion
_BYTES, _SECONDS = 4 << 20, 1.0  # new answers are written at this size or age
_ROW = 96  # bytes of a row besides its answer (an estimate)
_TABLES = """
CREATE TABLE models(id INTEGER PRIMARY KEY, digest BLOB UNIQUE NOT NULL, identity TEXT NOT NULL);
CREATE TABLE answers(id INTEGER PRIMARY KEY, key BLOB UNIQUE NOT NULL, model INTEGER NOT NULL, used INTEGER NOT NULL,
    size INTEGER NOT NULL, answer BLOB NOT NULL);
CREATE INDEX answers_used ON answers(used);
CREATE TABLE requests(key BLOB PRIMARY KEY, request BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE files(path TEXT PRIMARY KEY, state TEXT NOT NULL, digest TEXT NOT NULL);
CREATE TABLE total(bytes INTEGER NOT NULL);
INSERT INTO total VALUES(0);
CREATE TRIGGER answer_added AFTER INSERT ON answers BEGIN UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER answer_deleted AFTER DELETE ON answers BEGIN
    UPDATE total SET bytes = bytes - old.size; DELETE FROM requests WHERE key = old.key; END;
CREATE TRIGGER answer_changed AFTER UPDATE OF size ON answers BEGIN
    UPDATE total SET bytes = bytes - old.size + new.size; END;
CREATE TRIGGER request_added AFTER INSERT ON requests BEGIN
    UPDATE total SET bytes = bytes + length(new.request); END;
CREATE TRIGGER request_deleted AFTER DELETE ON requests BEGIN
    UPDATE total SET bytes = bytes - length(old.request); END;
"""
# The key may exist: another process wrote it, or the checksum of its row is wrong.
_KEEP = """INSERT INTO answers(key, model, used, size, answer) VALUES(?, ?, ?, ?, ?)
    ON CONFLICT(key) DO UPDATE SET used = excluded.used, size = excluded.size, answer = excluded.answer"""


class ModelRows(NamedTuple):
    """The answers of one model."""

    number: int
    identity: Mapping[str, object]  # the result of `answers_identity`
    answers: int  # number of answers
    bytes: int  # size of all answers
    used: int  # last use of any answer, in seconds since 1970


class AnswersFile:
    """The opened SQLite file of a folder. Any thread may call its methods."""

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        notify: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.time,
    ):
        """Open the file. Raise JobError for a folder or file that cannot be used.

        Args:
            folder: The folder of the file. It is created if it does not exist.
            most_bytes: Maximum size of all answers.
            notify: Called once with a line for the user if the file is damaged or cannot be written.
            clock: Returns the time in seconds since 1970.
        """
        self._clock = clock
        self.path, self._most_bytes, self._notify = folder / NAME, most_bytes, notify
        self._lock = threading.Lock()
        self._new: dict[bytes, tuple[int, bytes]] = {}
        self._used: set[bytes] = set()
        self._requests: dict[bytes, bytes] = {}
        self._waiting = 0  # bytes that are not written yet
        self._written_at = time.monotonic()
        self._is_damaged = self._is_off = False
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise JobError(f"cannot make the folder {folder}: {error.strerror}; give another --answers") from None
        self._db = self._opened()

    def _opened(self) -> sqlite3.Connection:
        deadline, attempt = time.monotonic() + _BUSY_SECONDS, 0
        while True:
            before = self._inode()
            try:
                return self._connect()
            except sqlite3.OperationalError as error:
                if "locked" in str(error) and time.monotonic() < deadline:  # SQLite does not wait to create a log
                    time.sleep(0.05)
                    continue
                raise JobError(f"cannot use {self.path}: {error}; give another --answers") from None
            except sqlite3.DatabaseError as error:
                if attempt or self._inode() != before:
                    raise JobError(f"{self.path} is damaged ({error}); remove it") from None
                self._set_aside(str(error))
                attempt += 1

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            with _transaction(db):
                (application,), (version,) = (db.execute(f"PRAGMA {name}").fetchone() for name in _HEAD)
                (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if not tables and not application:
                    for statement in _statements(_TABLES):
                        db.execute(statement)
                    for name, value in zip(_HEAD, (_APPLICATION, _VERSION), strict=True):
                        db.execute(f"PRAGMA {name} = {value}")
                elif application != _APPLICATION:
                    raise JobError(f"{self.path} is an SQLite file of another program; give another --answers")
                elif version != _VERSION:
                    raise JobError(f"{self.path} is of another version of prefold; remove it, or use another folder")
                db.execute("SELECT bytes FROM total").fetchone()
        except BaseException:
            db.close()
            raise
        return db

    def _inode(self) -> int | None:
        try:
            return os.stat(self.path).st_ino
        except OSError:
            return None

    def _set_aside(self, reason: str) -> None:
        """Rename a damaged file, and tell the user once."""
        aside = self.path.with_name(f"{NAME}.damaged")
        for suffix in ("-wal", "-shm"):
            self.path.with_name(NAME + suffix).unlink(missing_ok=True)
        self.path.replace(aside)
        self._tell(f"{self.path} is damaged ({reason}): kept answers are computed again. It is now {aside.name}")

    def _tell(self, line: str) -> None:
        notify, self._notify = self._notify, lambda line: None
        notify(line)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Return a context in which an SQLite error disables the file. The job continues and computes everything."""
        try:
            yield
        except sqlite3.Error as error:
            self._is_off = True
            self._is_damaged = not isinstance(error, sqlite3.OperationalError)
            state = "is damaged" if self._is_damaged else "cannot be used"
            self._tell(f"{self.path} {state} ({error}): from here on, no answers are kept or found")

    # ------------------------------------------------------------------------------------------------ answers

    def find(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return {key: answer} of the keys that have an answer."""
        wanted = list(dict.fromkeys(keys))
        with self._lock, self._guarded():
            found = {key: self._new[key][1] for key in wanted if key in self._new}
            rest = [] if self._is_off else [key for key in wanted if key not in found]
            for start in range(0, len(rest), _AT_ONCE):
                part = rest[start : start + _AT_ONCE]
                marks = ",".join("?" * len(part))
                for key, answer in self._db.execute(f"SELECT key, answer FROM answers WHERE key IN ({marks})", part):
                    if answer[:8] == _checksum(key, answer[8:]):
                        found[key] = answer[8:]
            self._used.update(found)
            return found
        return {}

    def add(self, model: int, key: bytes, answer: bytes) -> None:
        """Keep an answer. It reaches the disk within about a second, or with the next `commit`."""
        with self._lock:
            if self._is_off:
                return
            self._new[key] = (model, answer)
            self._waiting += len(answer)

    def add_request(self, key: bytes, request: bytes) -> None:
        """Store the request of an answer, so that `prefold answers --verify` can compute it again."""
        with self._lock:
            if not self._is_off:
                self._requests[key] = request
                self._waiting += len(request)

    def commit(self, *, due_only: bool = False) -> None:
        """Write the new rows.

        Args:
            due_only: Only if there are many, or after about a second.
        """
        with self._lock:
            is_due = self._waiting >= _BYTES or time.monotonic() - self._written_at >= _SECONDS
            if self._is_off or (due_only and not is_due):
                return
            self._written_at = time.monotonic()
            if not (self._new or self._used or self._requests):
                return
            with self._guarded():
                self._write()

    def _write(self) -> None:
        now = int(self._clock())
        rows = [
            (key, model, now, len(answer) + _ROW, _checksum(key, answer) + answer)
            for key, (model, answer) in self._new.items()
        ]
        kept = [(key, request) for key, request in self._requests.items() if key in self._new]
        used = [(now, key) for key in self._used.difference(self._new)]
        with _transaction(self._db):
            self._db.executemany(_KEEP, rows)
            self._db.executemany("INSERT OR IGNORE INTO requests VALUES(?, ?)", kept)
            self._db.executemany("UPDATE answers SET used = ? WHERE key = ?", used)
            self._evict(self._most_bytes)
        for key, _ in kept:
            del self._requests[key]
        self._new, self._used, self._waiting = {}, set(), 0

    @property
    def num_bytes(self) -> int:
        """Return the size of all written answers, in bytes."""
        with self._lock:
            return int(self._db.execute("SELECT bytes FROM total").fetchone()[0])

    def _evict(self, most: int) -> int:
        """If all answers exceed `most` bytes, delete the least recently used ones, down to 9/10 of `most`.

        Return the number of deleted answers.
        """
        (total,) = self._db.execute("SELECT bytes FROM total").fetchone()
        deleted = 0
        while total > most * (9 if deleted else 10) // 10:
            rows = self._db.execute("SELECT id, size FROM answers ORDER BY used, id LIMIT ?", (_AT_ONCE,)).fetchall()
            if not rows:
                break
            taken = 0
            while taken < len(rows) and total > most * 9 // 10:
                total -= rows[taken][1]
                taken += 1
            self._db.executemany("DELETE FROM answers WHERE id = ?", [row[:1] for row in rows[:taken]])
            deleted += taken
            (total,) = self._db.execute("SELECT bytes FROM total").fetchone()
        if deleted:
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
        return deleted

    # ------------------------------------------------------------------------------------------------ models

    def model(self, digest: bytes, identity: str) -> int:
        """Return the number of a model. Add the model if the file does not have it.

        Args:
            identity: The result of `answers_identity`, as JSON.
        """
        with self._lock, _transaction(self._db):
            self._db.execute("INSERT OR IGNORE INTO models(digest, identity) VALUES(?, ?)", (digest, identity))
            return int(self._db.execute("SELECT id FROM models WHERE digest = ?", (digest,)).fetchone()[0])

    def file_digest(self, path: Path) -> str:
        """Return a digest of a whole file. The file is read again only if its size or time has changed."""
        stat = path.stat()
        name, state = str(path.resolve()), f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        with self._lock:
            row = self._db.execute("SELECT digest FROM files WHERE path = ? AND state = ?", (name, state)).fetchone()
        if row is not None:
            return str(row[0])
        digest = sampled_digest(path, stat.st_size, 1, stat.st_size)
        with self._lock, _transaction(self._db):
            self._db.execute("INSERT OR REPLACE INTO files VALUES(?, ?, ?)", (name, state, digest))
        return digest

    def models(self) -> list[ModelRows]:
        """Return the models that have answers, the most recently used first."""
        query = """SELECT m.id, m.identity, count(*), sum(a.size), max(a.used) FROM answers a JOIN models m
            ON m.id = a.model GROUP BY m.id ORDER BY max(a.used) DESC"""
        with self._lock:
            rows = self._db.execute(query).fetchall()
        return [ModelRows(number, json.loads(identity), *counts) for number, identity, *counts in rows]

    def with_requests(self, model: int, count: int) -> list[tuple[bytes, bytes, bytes]]:
        """Return (key, request, answer) of at most `count` random answers of a model.

        Only answers that were stored with their request are returned.
        """
        query = """SELECT r.key, r.request, a.answer FROM requests r JOIN answers a ON a.key = r.key
            WHERE a.model = ? ORDER BY random() LIMIT ?"""
        with self._lock:
            rows = self._db.execute(query, (model, count)).fetchall()
        return [(key, request, answer[8:]) for key, request, answer in rows if answer[:8] == _checksum(key, answer[8:])]

    def prune(self, *, most_bytes: int | None = None, unused_since: int | None = None) -> int:
        """Delete answers, and return how many were deleted.

        Args:
            most_bytes: Delete the least recently used answers until the rest has at most this size.
            unused_since: Delete answers that were not used since this time, in seconds since 1970.
        """
        with self._lock, _transaction(self._db):
            deleted = 0
            if unused_since is not None:
                deleted += self._db.execute("DELETE FROM answers WHERE used < ?", (unused_since,)).rowcount
            if most_bytes is not None:
                deleted += self._evict(most_bytes)
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
        return deleted

    def check(self) -> list[str]:
        """Return one line for each fault of the file. The list is empty if the file is intact."""
        with self._lock:
            wrong = [str(line) for (line,) in self._db.execute("PRAGMA integrity_check(20)") if line != "ok"]
            broken = sum(
                answer[:8] != _checksum(key, answer[8:])
                for key, answer in self._db.execute("SELECT key, answer FROM answers")
            )
        return wrong + ([f"{broken:,} answers do not match their checksum"] if broken else [])

    def close(self) -> None:
        """Write the new rows and close the file.

        A damaged file is renamed, so that the next process starts a new one.
        """
        self.commit()
        with self._lock:
            with suppress(sqlite3.Error):
                self._db.close()
            if self._is_damaged:
                with suppress(OSError):
                    self._set_aside("see above")


_HEAD = ("application_id", "user_version")


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script. (`executescript` would end the transaction.)"""
    statement = ""
    for line in script.strip().splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _checksum(key: bytes, answer: bytes) -> bytes:
    return hashlib.blake2b(answer, digest_size=8, key=key).digest()
