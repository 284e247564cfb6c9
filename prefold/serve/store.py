"""Clients' files and batches on disk: API objects in SQLite, and the contents of files beside it.

When a method of `Store` returns, its change is on disk. SQLite's log (WAL) is synchronised at every change, and a
content is synchronised before the object that names it is written. A killed server has therefore lost nothing that it
confirmed.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import JobError
from ..jobs.journal import lock
from ..spec.files import replacing
from .http import Refusal

LOCKED_SECONDS = 2.0  # a thread waits this long for a database that another process has locked
_TABLES = """
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, tenant TEXT NOT NULL,
    body TEXT NOT NULL, drop_at REAL
);
CREATE INDEX IF NOT EXISTS by_kind ON objects (kind, tenant, number);
CREATE INDEX IF NOT EXISTS by_end ON objects (drop_at) WHERE drop_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS probe (number INTEGER PRIMARY KEY, content BLOB);
"""
# While the database is open, a temporary table counts the bytes of each tenant's objects and contents.
_CONTENT = "CASE {0}.kind WHEN 'file' THEN coalesce(json_extract({0}.body, '$.bytes'), 0) ELSE 0 END"
_SIZE = "length(CAST({0}.body AS BLOB)) + " + _CONTENT
_NEW, _OLD = _SIZE.format("new"), _SIZE.format("old")
_STORED = f"""
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE stored (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
INSERT INTO stored SELECT tenant, {_SIZE.format("objects")} FROM objects WHERE true
    ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
CREATE TEMP TRIGGER added AFTER INSERT ON objects BEGIN
    INSERT INTO stored VALUES (new.tenant, {_NEW}) ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TEMP TRIGGER changed AFTER UPDATE OF body ON objects BEGIN
    UPDATE stored SET bytes = bytes + {_NEW} - ({_OLD}) WHERE tenant = new.tenant;
END;
CREATE TEMP TRIGGER dropped AFTER DELETE ON objects BEGIN
    UPDATE stored SET bytes = bytes - ({_OLD}) WHERE tenant = old.tenant;
END;
"""
PROBE_BYTES = 1 << 16
Body = dict[str, Any]


class Store:
    """Objects of several kinds ("file", "batch", "response"), each of one tenant, and the contents of files.

    Methods may be called from any thread. They raise Refusal (503) if the disk or the database fails.

    Attributes:
        troubles: present failures, {where: description}; `probe` removes failures that are over
        receiving: {tenant: bytes of its files that are being received}; the event loop counts them
    """

    def __init__(self, folder: Path, most_of: Callable[[str], int | None] = lambda tenant: None):
        """Open or create the folder. Raise JobError if another server uses it or it cannot be written.

        Args:
            most_of: returns how many bytes a tenant may store; None: half of the disk
        """
        self._most_of = most_of
        self.folder, self.files, self.batches = folder, folder / "files", folder / "batches"
        self.troubles: dict[str, str] = {}
        self.receiving: Counter[str] = Counter()
        self._lock = threading.RLock()
        try:
            for subfolder in (self.files, self.batches):
                subfolder.mkdir(parents=True, exist_ok=True)
            self._lock_file = _hold(folder / "lock")
            self._db = sqlite3.connect(
                folder / "prefold.sqlite", timeout=LOCKED_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_TABLES + _STORED)
            self._half = shutil.disk_usage(folder).total // 2
        except (OSError, sqlite3.Error) as error:
            raise JobError(f"the folder {folder} cannot be used: {error}; give another --data-dir") from None
        self._sweep()

    def _sweep(self) -> None:
        """Remove contents without an object. A killed server had not confirmed them."""
        ids = {row[0] for row in self._db.execute("SELECT id FROM objects")}
        for path in [*self.files.iterdir()]:
            if path.name not in ids:
                path.unlink()

    def add(self, kind: str, tenant: str, body: Body, drop_at: float | None = None) -> None:
        """Store an object. Its body contains its id; an object with the same id is replaced.

        Args:
            drop_at: when it expires, in time.time() (see `ended`); None: never
        """
        self.add_all([(kind, tenant, body, drop_at)], is_bounded=True)

    def add_all(self, objects: Iterable[tuple[str, str, Body, float | None]], *, is_bounded: bool = False) -> None:
        """Store objects (kind, tenant, body, drop_at), all of them or none.

        Args:
            is_bounded: whether to raise Refusal (413) if the tenant would store more than it may
        """
        with self._changing() as db:
            for kind, tenant, body, drop_at in objects:
                db.execute(
                    "INSERT INTO objects (id, kind, tenant, body, drop_at) VALUES (?, ?, ?, ?, ?)"
                    " ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                    (body["id"], kind, tenant, json.dumps(body), drop_at),
                )
                if is_bounded and (bytes_left := self.bytes_left(tenant)) < 0:
                    raise self.full(-bytes_left)

    def bytes_left(self, tenant: str) -> int:
        """Return how many more bytes a tenant may store.

        The result is negative if the tenant stores more than it may.
        """
        with self._reading() as db:
            row = db.execute("SELECT bytes FROM stored WHERE tenant = ?", (tenant,)).fetchone()
        most = self._most_of(tenant)
        return (self._half if most is None else most) - (row[0] if row else 0)

    @staticmethod
    def full(excess: int) -> Refusal:
        """Return the Refusal for a tenant that would exceed its quota by `excess` bytes."""
        message = f"your stored files and batches would exceed the quota by {excess} bytes"
        remedy = "delete files, or ask the server's admin for a larger max_stored_bytes"
        return Refusal(413, message, remedy=remedy, code="storage_quota")

    def get(self, kind: str, tenant: str | None, id: str) -> Body | None:
        """Return an object, or None.

        Args:
            tenant: None matches any tenant
        """
        with self._reading() as db:
            row = db.execute("SELECT kind, tenant, body FROM objects WHERE id = ?", (id,)).fetchone()
        if row is None or row[0] != kind or tenant not in (None, row[1]):
            return None
        body: Body = json.loads(row[2])
        return body

    def change(self, kind: str, id: str, changes: Mapping[str, Any], *, only: Iterable[str] = ()) -> Body | None:
        """Change fields of an object, and return it.

        Return None if there is no such object, or if its status is not one of `only`.
        """
        with self._changing() as db:
            row = db.execute("SELECT body FROM objects WHERE id = ? AND kind = ?", (id, kind)).fetchone()
            body: Body | None = None if row is None else json.loads(row[0])
            if body is None or (only and body["status"] not in only):
                return None
            body |= changes
            db.execute("UPDATE objects SET body = ? WHERE id = ?", (json.dumps(body), id))
        return body

    def delete(self, kind: str, tenant: str, id: str) -> bool:
        """Delete an object, and return whether it existed."""
        with self._changing() as db:
            sql = "DELETE FROM objects WHERE id = ? AND kind = ? AND tenant = ?"
            return db.execute(sql, (id, kind, tenant)).rowcount > 0

    def page(
        self,
        kind: str,
        tenant: str,
        *,
        after: str | None = None,
        limit: int = 20,
        newest: bool = True,
        purpose: str | None = None,
    ) -> tuple[list[Body], bool]:
        """Return (at most `limit` objects of a tenant after the object `after`, whether there are more).

        Raise Refusal (404) for an unknown `after`.
        """
        order, sign = ("DESC", "<") if newest else ("ASC", ">")
        sql, values = "SELECT body FROM objects WHERE kind = ? AND tenant = ?", [kind, tenant]
        if purpose is not None:
            sql, values = f"{sql} AND json_extract(body, '$.purpose') = ?", [*values, purpose]
        with self._reading() as db:
            if after is not None:
                place = db.execute("SELECT number FROM objects WHERE id = ? AND tenant = ?", (after, tenant)).fetchone()
                if place is None:
                    message, remedy = f"there is no {after!r:.100}", "use the last id of the previous page"
                    raise Refusal(404, message, param="after", remedy=remedy, code="not_found")
                sql, values = f"{sql} AND number {sign} ?", [*values, place[0]]
            rows = db.execute(f"{sql} ORDER BY number {order} LIMIT ?", (*values, limit + 1)).fetchall()
        return [json.loads(row[0]) for row in rows[:limit]], len(rows) > limit

    def ended(self, now: float) -> list[tuple[str, str, str]]:
        """Return (kind, tenant, id) of the expired objects."""
        with self._reading() as db:
            return db.execute("SELECT kind, tenant, id FROM objects WHERE drop_at <= ?", (now,)).fetchall()

    def all(self, kind: str) -> Iterator[tuple[str, Body]]:
        """Yield (tenant, object) of all objects of a kind, oldest first. They are not all in memory at once."""
        with self._reading() as db:
            rows = db.execute("SELECT tenant, body FROM objects WHERE kind = ? ORDER BY number", (kind,))
            yield from ((tenant, json.loads(body)) for tenant, body in rows)

    def path(self, id: str) -> Path:
        """Return the path of a file's content."""
        return self.files / id

    def path_of(self, tenant: str, id: str) -> Path | None:
        """Return the path of the content of a tenant's file; None if the tenant has no such file."""
        return None if self.get("file", tenant, id) is None else self.path(id)

    @contextmanager
    def writing_content(self, id: str) -> Iterator[Path]:
        """Return a context with the path to write a file's content to. After the context the content is on disk."""
        with self._failures("files"):
            with replacing(self.path(id)) as temporary:
                yield temporary
            number = os.open(self.files, os.O_RDONLY)
            try:
                os.fsync(number)  # the names in the folder
            finally:
                os.close(number)

    def drop_content(self, id: str) -> None:
        """Remove a file's content. If that fails, the next start removes it."""
        with suppress(OSError):
            self.path(id).unlink(missing_ok=True)

    def probe(self) -> None:
        """Test whether the database and the folder can be written, and update `troubles`."""
        with suppress(Refusal), self._changing() as db:
            db.execute("INSERT OR REPLACE INTO probe VALUES (1, randomblob(?))", (PROBE_BYTES,))
        with suppress(Refusal), self._failures("files"):
            path = self.folder / "probe"
            try:
                with path.open("wb") as file:
                    file.write(os.urandom(PROBE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _failures(self, condition: str | None) -> Iterator[None]:
        """Raise Refusal for an error of the disk or the database in the context.

        Args:
            condition: the key of `troubles` under which the error is recorded, or removed after success
        """
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if condition is not None:
                self.troubles[condition] = f"the data folder fails: {reason}"
            message, remedy = f"the server's data folder fails: {reason}", "send the request again later"
            raise Refusal(503, message, remedy=remedy, code="storage", headers={"retry-after": "5"}) from error
        if condition is not None:
            self.troubles.pop(condition, None)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._failures(None):
            yield self._db

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._failures("database"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the database, and unlock the folder."""
        with self._lock:
            self._db.close()
            self._lock_file.close()


def _hold(path: Path) -> Any:
    """Return a file that is locked while it is open. Raise OSError if another process has locked it."""
    file = path.open("a")
    if not lock(file):
        file.close()
        raise OSError("another server uses it")
    return file
