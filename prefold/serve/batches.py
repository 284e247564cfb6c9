"""Batches: files of requests that are answered beside live requests. Each line is answered once, even if the server is
killed.

The store contains all batches. One thread runs one batch at a time (see `batch.py`). A second thread validates batches
and ends cancelled and expired ones. In both threads tenants take turns, and a tenant's oldest batch is first. A large
batch pauses for another tenant's batch after a while, and continues later.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import JobError, RankError
from .batch import BatchWork, OpenBatch
from .handler import RequestHandler
from .http import Refusal
from .keys import Keys
from .store import Body, Store

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
RUNNING = ("in_progress", "finalizing")
LOOK_SECONDS = 0.25
RETRY_SECONDS = 5.0
# A batch pauses for another tenant's batch after this many lines, and at most this many times.
LINES_A_TURN, MOST_TURNS = 1024, 8


class Batches:
    """The open batches of a store, and the threads that run them.

    Args:
        log: receives errors of the server

    Attributes:
        look_seconds: a thread looks for work at least this often
        retry_seconds: a batch that failed is tried again after this time
        lines_a_turn: lines that a batch answers before it pauses for another tenant's batch
        work: the function that the threads call for a batch, once `start` was called
    """

    def __init__(self, store: Store, log: Callable[[Exception], None]):
        self._store, self._log = store, log
        self.look_seconds, self.retry_seconds, self.lines_a_turn = LOOK_SECONDS, RETRY_SECONDS, LINES_A_TURN
        self.open: dict[str, OpenBatch] = {}
        self._num_readers: Counter[str] = Counter()  # {file: number of open batches that read it}
        self._lock = threading.Lock()  # guards `open`, `_num_readers` and `is_taken`
        self._using = threading.Lock()  # a file must not be deleted while a batch that reads it is created
        self._turns: Counter[tuple[str, str]] = Counter()  # {(thread's name, tenant): the number of its last turn}
        self._wake, self._can_run = threading.Event(), threading.Event()
        self._is_stopping = False
        self._threads: list[threading.Thread] = []
        for tenant, body in store.all("batch"):
            if body["status"] in OPEN:
                self.hold(OpenBatch.of(tenant, body))
        for folder in store.batches.iterdir():
            if folder.name not in self.open:  # the server was killed after the batch had ended
                shutil.rmtree(folder, ignore_errors=True)

    def start(self, handler: RequestHandler, keys: Keys) -> None:
        self.work = BatchWork(self._store, handler, keys, lambda: self._is_stopping, self._gives_way)
        for name, loop in (("prefold-batches", self._run), ("prefold-keeper", self._keep)):
            self._threads.append(threading.Thread(target=loop, name=name, daemon=True))
            self._threads[-1].start()

    def begin_to_stop(self) -> None:
        """Make the running batch stop after its present step."""
        self._is_stopping = True
        self._wake.set()
        self._can_run.set()

    def stop(self) -> None:
        """Stop the threads, and wait until finished lines are written."""
        self.begin_to_stop()
        for thread in self._threads:
            thread.join(30)

    def create(self, tenant: str, body: Body) -> Body:
        """Store a new batch and return it. Raise Refusal (404) if its file is gone."""
        with self._using:
            if self._store.get("file", tenant, body["input_file_id"]) is None:
                message = f"there is no file {body['input_file_id']!r:.100} for a batch"
                remedy = "upload it again"
                raise Refusal(404, message, param="input_file_id", remedy=remedy, code="not_found")
            batch = OpenBatch.of(tenant, body)
            batch.is_taken = True
            self.hold(batch)  # before it is stored, because a stored batch can be cancelled
            try:
                self._store.add("batch", tenant, body)
            except BaseException:
                with self._lock:
                    self._drop(batch)
                raise
            batch.is_taken = False
        self._wake.set()
        return body

    def cancel(self, id: str) -> Body:
        """Start to cancel a batch, and return it. A batch that has ended stays as it is."""
        changes = {"status": "cancelling", "cancelling_at": int(time.time())}
        body = self._store.change("batch", id, changes, only=("validating", "in_progress"))
        if body is None:
            body = self._store.get("batch", None, id)
            assert body is not None
            return body
        with self._lock:
            if id in self.open:
                self.open[id].status = "cancelling"
        self._wake.set()
        return body

    def with_counts(self, body: Body) -> Body:
        """Return a batch for clients: with its present counts, without internal fields."""
        batch = self.open.get(body["id"])
        if batch is not None and (output := batch.output) is not None:
            counts = {"completed": output.count - output.errors, "failed": output.errors}
            body = body | {"request_counts": body["request_counts"] | counts}
        return {name: value for name, value in body.items() if name[0] != "_"}

    def open_counts(self) -> list[list[Any]]:
        """Return [id, status, lines, answered, failed] of each batch that has not ended."""
        bodies = (self._store.get("batch", None, id) for id in list(self.open))
        known = [self.with_counts(body) for body in bodies if body is not None]
        names = ("total", "completed", "failed")
        return [[body["id"], body["status"], *(body["request_counts"][name] for name in names)] for body in known]

    def uses(self, file: str) -> bool:
        """Return whether a batch that is open, or has just ended, reads a file."""
        return self._num_readers[file] > 0

    def forget_file(self, tenant: str, file: str) -> bool:
        """Delete a file and its content. Return False, and delete nothing, if a batch still reads the file."""
        with self._using:
            if self.uses(file) and any(self._reads(batch, file) for batch in list(self.open.values())):
                return False
            self._store.delete("file", tenant, file)
            self._store.drop_content(file)
        return True

    def _reads(self, batch: OpenBatch, file: str) -> bool:
        """Return whether a batch reads a file, by the status that clients see.

        A batch ends in the store a moment before it leaves the open batches.
        """
        body = self._store.get("batch", None, batch.id) if batch.file == file else None
        return body is not None and body["status"] in OPEN

    def _run(self) -> None:
        """Run batches one after the other."""
        while not self._is_stopping:
            batch = self.take(lambda entry: entry.status in RUNNING)
            if batch is None:
                self._can_run.wait(self.look_seconds)
                self._can_run.clear()
            else:
                self._attempt(self.work.finish, batch)

    def _keep(self) -> None:
        """Validate new batches, end cancelled and expired ones, delete expired files, and probe a failed store."""
        batch = None
        while not self._is_stopping:
            if batch is None:
                self._wake.wait(self.look_seconds)
                self._wake.clear()
            if self._store.troubles:
                self._store.probe()
            self._drop_ended()
            batch = self.take(lambda entry: entry.status == "validating" or entry.ending is not None)
            if batch is not None:
                validate = batch.status == "validating" and batch.ending is None
                self._attempt(self.work.validate if validate else self.work.finish, batch)

    def take(self, can: Callable[[OpenBatch], bool]) -> OpenBatch | None:
        """Return the batch that this thread works on next, or None.

        Among the free batches that `can` accepts, this is the oldest batch of the tenant with the least recent turn.
        """
        thread = threading.current_thread().name
        with self._lock:
            free = [batch for batch in self.open.values() if can(batch) and batch.is_free]
            if not free:
                return None
            batch = min(free, key=lambda batch: self._turns[thread, batch.tenant])
            self._turns[thread, batch.tenant] = 1 + max(self._turns.values(), default=0)
            batch.is_taken = True
        return batch

    def _gives_way(self, batch: OpenBatch, num_answered: int, total: int) -> bool:
        """Return whether a batch pauses for another tenant's batch.

        This is rare, because a paused batch reads its input again.

        Args:
            num_answered: lines that were answered in this turn
            total: all lines of the batch
        """
        if num_answered < max(self.lines_a_turn, total // MOST_TURNS):
            return False
        others = (other for other in list(self.open.values()) if other.tenant != batch.tenant)
        return any(other.status in RUNNING and other.is_free for other in others)

    def _attempt(self, work: Callable[[OpenBatch], Body | None], batch: OpenBatch) -> None:
        """Call work(batch) and record the batch's new status. After an error the call is repeated later."""
        trouble, troubles = f"batch {batch.id}", self._store.troubles
        try:
            if (body := work(batch)) is not None:
                self.note(batch, body)
            troubles.pop(trouble, None)
        except (Refusal, JobError, OSError, RankError, MemoryError) as error:  # the disk, the database, or the engine
            if trouble not in troubles:
                self._log(error)
            troubles[trouble] = f"a batch waits: {_public_reason(error)}"
            batch.retry_at = time.monotonic() + self.retry_seconds
        except Exception as error:
            self._log(error)
            batch.failures += 1
            batch.retry_at = time.monotonic() + self.retry_seconds
        finally:
            batch.output, batch.is_taken = None, False
            self._can_run.set()

    def _drop_ended(self) -> None:
        """Delete expired files, and responses that an earlier version stored."""
        try:
            for kind, tenant, id in self._store.ended(time.time()):
                if kind == "file":
                    self.forget_file(tenant, id)
                else:
                    self._store.delete(kind, tenant, id)
        except Refusal:
            return  # the store has recorded the failure

    def note(self, batch: OpenBatch, body: Body) -> None:
        """Record a batch's new status, unless the batch was cancelled meanwhile and has not ended."""
        with self._lock:
            if body["status"] not in OPEN:
                batch.status = body["status"]
                self._drop(batch)
            elif batch.status != "cancelling":
                batch.status = body["status"]

    def hold(self, batch: OpenBatch) -> None:
        """Add a batch to the open batches."""
        with self._lock:
            self.open[batch.id] = batch
            self._num_readers[batch.file] += 1

    def _drop(self, batch: OpenBatch) -> None:
        """Remove a batch from the open batches. The caller holds the lock."""
        if self.open.pop(batch.id, None) is not None:
            self._num_readers[batch.file] -= 1
            if not self._num_readers[batch.file]:
                del self._num_readers[batch.file]


def _public_reason(error: Exception) -> str:
    """Return the description of an error for clients, without paths and ids."""
    if isinstance(error, Refusal):
        return str(error)
    if isinstance(error, RankError):
        return "a rank of the model is gone"
    if isinstance(error, MemoryError):
        return "memory is full"
    cause = error if isinstance(error, OSError) else error.__cause__
    return f"the data folder fails: {getattr(cause, 'strerror', None) or 'see the log'}"
