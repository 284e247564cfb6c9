"""Keeps what clients leave with a server: objects of its API in SQLite, and beside them the contents of files.

What a method of `Store` has returned from is on disk: SQLite's log (WAL) is synchronised at every change, and a content
is synchronised before the object that names it is written. So a server that is killed has lost nothing it confirmed.
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
from ..files import replacing
from ..job.journal import lock
from .http import Refusal

# How long a thread waits for a database that another process has locked.
LOCKED_SECONDS = 2.0
_TABLES = """
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, tenant TEXT NOT NULL,
    body TEXT NOT NULL, drop_at REAL
);
CREATE INDEX IF NOT EXISTS by_kind ON objects (kind, tenant, number);
CREATE INDEX IF NOT EXISTS by_end ON objects (drop_at) WHERE drop_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS probe (number INTEGER PRIMARY KEY, content BLOB);
"""
# What each tenant stores is counted while the database is open: its objects, and the contents of its files.
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
    """Objects of several kinds ("file", "batch", "response"), each of one tenant, and a folder for files' contents.

    Methods may be called from any thread, and raise Refusal (503) where the disk or the database fails.

    troubles   what fails at present, {where: what and why}; `probe` looks whether it still does
    receiving  {tenant: bytes of its files that are coming}, which the event loop counts
    """

    def __init__(self, folder: Path, most_of: Callable[[str], int | None] = lambda tenant: None):
        """Opens the folder, and makes it where there is none. Raises JobError where another server has it, or it cannot
        be written.

        most_of  returns how many bytes a tenant may store; None: the half of the disk
        """
        self._most_of = most_of
        self.folder, self.files, self.batches = folder, folder / "files", folder / "batches"
        self.troubles: dict[str, str] = {}
        self.receiving: Counter[str] = Counter()
        self._lock = threading.RLock()
        try:
            for each in (self.files, self.batches):
                each.mkdir(parents=True, exist_ok=True)
            self._held = _hold(folder / "lock")
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
        """Removes contents that no object names: the server was killed before it had confirmed them."""
        ids = {row[0] for row in self._db.execute("SELECT id FROM objects")}
        for path in [*self.files.iterdir()]:
            if path.name not in ids:
                path.unlink()

    # ------------------------------------------------------------------------------------------------- objects

    def add(self, kind: str, tenant: str, body: Body, drop_at: float | None = None) -> None:
        """Keeps a new object, whose id is in its body; one with this id is replaced.

        drop_at  when it is to be forgotten, in time.time() (see `ended`); None: never
        """
        self.add_all([(kind, tenant, body, drop_at)], is_bounded=True)

    def add_all(self, objects: Iterable[tuple[str, str, Body, float | None]], *, is_bounded: bool = False) -> None:
        """Keeps objects (kind, tenant, body, drop_at), all of them or, where that fails, none.

        is_bounded  whether Refusal (413) is raised where their tenant would store more than it may
        """
        with self._changing() as db:
            for kind, tenant, body, drop_at in objects:
                db.execute(
                    "INSERT INTO objects (id, kind, tenant, body, drop_at) VALUES (?, ?, ?, ?, ?)"
                    " ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                    (body["id"], kind, tenant, json.dumps(body), drop_at),
                )
                if is_bounded and (left := self.left(tenant)) < 0:
                    raise self.full(-left)

    def left(self, tenant: str) -> int:
        """Returns how many bytes a tenant may still store; less than 0 where it stores more than it may."""
        with self._reading() as db:
            row = db.execute("SELECT bytes FROM stored WHERE tenant = ?", (tenant,)).fetchone()
        most = self._most_of(tenant)
        return (self._half if most is None else most) - (row[0] if row else 0)

    @staticmethod
    def full(more: int) -> Refusal:
        """Returns the Refusal for a tenant that would store so many bytes more than it may."""
        message = f"what you store here would be {more} bytes more than it may be"
        remedy = "delete files that you need no more, or ask for a larger max_stored_bytes"
        return Refusal(413, message, remedy=remedy, code="storage_quota")

    def get(self, kind: str, tenant: str | None, id: str) -> Body | None:
        """Returns the object; None where there is none of this kind and tenant. tenant None: of any."""
        with self._reading() as db:
            row = db.execute("SELECT kind, tenant, body FROM objects WHERE id = ?", (id,)).fetchone()
        if row is None or row[0] != kind or tenant not in (None, row[1]):
            return None
        body: Body = json.loads(row[2])
        return body

    def change(self, kind: str, id: str, changes: Mapping[str, Any], *, only: Iterable[str] = ()) -> Body | None:
        """Changes fields of an object, and returns it. With `only`, its status must be one of these, else None is
        returned; so is it where there is no such object."""
        with self._changing() as db:
            row = db.execute("SELECT body FROM objects WHERE id = ? AND kind = ?", (id, kind)).fetchone()
            body: Body | None = None if row is None else json.loads(row[0])
            if body is None or (only and body["status"] not in only):
                return None
            body |= changes
            db.execute("UPDATE objects SET body = ? WHERE id = ?", (json.dumps(body), id))
        return body

    def delete(self, kind: str, tenant: str, id: str) -> bool:
        """Forgets an object; returns whether there was one."""
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
        """Returns (objects of a tenant, whether there are more), at most `limit`, those that come behind `after`.

        Raises Refusal (404) where there is no object `after`.
        """
        order, sign = ("DESC", "<") if newest else ("ASC", ">")
        sql, values = "SELECT body FROM objects WHERE kind = ? AND tenant = ?", [kind, tenant]
        if purpose is not None:
            sql, values = f"{sql} AND json_extract(body, '$.purpose') = ?", [*values, purpose]
        with self._reading() as db:
            if after is not None:
                place = db.execute("SELECT number FROM objects WHERE id = ? AND tenant = ?", (after, tenant)).fetchone()
                if place is None:
                    message, remedy = f"there is no {after!r:.100}", "give the last id of the page before"
                    raise Refusal(404, message, param="after", remedy=remedy, code="not_found")
                sql, values = f"{sql} AND number {sign} ?", [*values, place[0]]
            rows = db.execute(f"{sql} ORDER BY number {order} LIMIT ?", (*values, limit + 1)).fetchall()
        return [json.loads(row[0]) for row in rows[:limit]], len(rows) > limit

    def ended(self, now: float) -> list[tuple[str, str, str]]:
        """Returns (kind, tenant, id) of the objects that are to be forgotten by now."""
        with self._reading() as db:
            return db.execute("SELECT kind, tenant, id FROM objects WHERE drop_at <= ?", (now,)).fetchall()

    def all(self, kind: str) -> Iterator[tuple[str, Body]]:
        """Yields (tenant, object) of all objects of a kind, the oldest first; one at a time is in memory."""
        with self._reading() as db:
            rows = db.execute("SELECT tenant, body FROM objects WHERE kind = ? ORDER BY number", (kind,))
            yield from ((tenant, json.loads(body)) for tenant, body in rows)

    # ------------------------------------------------------------------------------------------------ contents

    def path(self, id: str) -> Path:
        """Returns where the content of a file lies."""
        return self.files / id

    def path_of(self, tenant: str, id: str) -> Path | None:
        """Returns where the content of a tenant's file lies; None where it has no such file."""
        return None if self.get("file", tenant, id) is None else self.path(id)

    @contextmanager
    def writing_content(self, id: str) -> Iterator[Path]:
        """Gives the path to which a file's content is to be written; behind the context it is on disk."""
        with self._failures("files"):
            with replacing(self.path(id)) as temporary:
                yield temporary
            number = os.open(self.files, os.O_RDONLY)
            try:
                os.fsync(number)  # the names in the folder
            finally:
                os.close(number)

    def drop_content(self, id: str) -> None:
        """Removes a file's content. Where that fails, the next start does it."""
        with suppress(OSError):
            self.path(id).unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------ failures

    def probe(self) -> None:
        """Looks whether what failed works again: writes, and takes back, some bytes to the database and the folder."""
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
    def _failures(self, where: str | None) -> Iterator[None]:
        """Raises Refusal where the disk or the database fails, and notes it. where: None: it is not noted."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if where is not None:
                self.troubles[where] = f"the data folder fails: {why}"
            message, remedy = f"the server's data folder fails: {why}", "send the request again later"
            raise Refusal(503, message, remedy=remedy, code="storage", headers={"retry-after": "5"}) from error
        if where is not None:
            self.troubles.pop(where, None)

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
        """Closes the database, and lets another server have the folder."""
        with self._lock:
            self._db.close()
            self._held.close()


def _hold(path: Path) -> Any:
    """Returns a file that is locked while it is open. Raises OSError where another process has it."""
    file = path.open("a")
    if not lock(file):
        file.close()
        raise OSError("another server uses it")
    return file
