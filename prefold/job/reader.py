"""Reads the records of a job in the background: they are tokenised in chunks and spooled while the model loads."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, UnsupportedModelError
from ..records.adapter import Parsed, RecordAdapter, error_text
from ..records.record import Record, Source
from ..report.progress import Counts
from ..stream import Spool
from ..tasks.base import attempt
from .gather import tagged
from .output import Output

__all__ = ["Reader", "Ready"]

# Records are tokenised together up to so many texts, and so many bytes: a token takes far more memory than its text.
CHUNK_TEXTS = 512
CHUNK_BYTES = 8 << 20
IDLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ready:
    """Holds the requests of one task that are ready to run."""

    task: str
    spool: Spool


@dataclass(slots=True)
class _Chunk:
    """Holds records of one task that wait to be tokenised together, and all their items."""

    records: list[tuple[int, Parsed]] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    texts: int = 0
    bytes: int = 0


class Reader:
    """Reads a source in a thread of its own.

    fill    None: the whole input is spooled before the first batch, so that all of it is one stream. A number of
            tokens: a batch is handed on when it holds as many, when no record has come for a moment, or when the
            engine has waited for a while
    seed    the job's, for requests that sample without a seed of their own

    The owner sets `stopping` to end the reading early. It is a plain flag, since a signal handler sets it: an Event has
    a lock, and a second signal that comes while the handler holds it would wait for it for ever.
    """

    def __init__(
        self,
        source: Source,
        adapter: RecordAdapter,
        prepare: Callable[[str, list[Any]], list[Any]],
        output: Output,
        counts: Counts,
        *,
        limit: int | None = None,
        fill: int | None = None,
        seed: int = 0,
        make_spool: Callable[[], Spool] = Spool,
    ):
        self._source = source
        self._adapter = adapter
        self._prepare = prepare
        self._output = output
        self._counts = counts
        self._limit = limit
        self._fill = fill
        self._seed = seed
        self._make_spool = make_spool
        self._spools: dict[str, Spool] = {}
        self._chunks: dict[str, _Chunk] = {}
        # It holds one item at most. An exception that a signal raises within its `get` leaves no lock taken.
        self._ready: queue.SimpleQueue[Ready | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefold-reader", daemon=True)
        self._wanted: float | None = None  # since when the owner waits for a batch
        self.stopping = False
        self.found = False  # whether there was a request
        self.has_ended = threading.Event()  # everything is read, and waits to be taken
        self.has_work = threading.Event()  # there is a request, or it is known that there will be none

    def start(self) -> None:
        self._thread.start()

    def batches(self) -> Iterator[Ready]:
        """Yields the batches as they become ready. Raises what the reading raised."""
        while True:
            self._wanted = time.monotonic()
            item = self._ready.get()
            self._wanted = None
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Ends the reading, and drops what is spooled and not taken."""
        self.stopping = True
        if self._thread.ident is not None:
            self._thread.join(2)  # not longer: it may wait for a pipe, and as a daemon it does not keep the process
        while not self._ready.empty():
            item = self._ready.get_nowait()
            if isinstance(item, Ready):
                item.spool.close()
        for spool in self._spools.values():
            spool.close()

    def _run(self) -> None:
        try:
            self._read()
            self._flush_all()
            self._counts.read_all = not self.stopping
            self.has_ended.set()
            for task in list(self._spools):
                self._hand_on(task)
            self._put(None)
        except BaseException as error:
            self.has_work.set()
            self.has_ended.set()
            self._put(error)
        finally:
            self.has_work.set()
            self.has_ended.set()

    def _read(self) -> None:
        records = self._source.records(self._adapter.columns)
        for record in records if self._fill is None else self._pumped(records):
            if self.stopping or (record is not None and self._limit is not None and record.number > self._limit):
                return
            if record is not None:
                self._take(record)
            if self._fill is not None and (record is None or self._engine_waits()):
                self._flush_all()
                for task in list(self._spools):
                    self._hand_on(task)

    def _pumped(self, records: Iterator[Record]) -> Iterator[Record | None]:
        """Yields the records, and None whenever none has come for a moment (as from a pipe that goes on later)."""
        pipe: queue.Queue[Record | BaseException | None] = queue.Queue(maxsize=CHUNK_TEXTS)
        given = taken = 0  # bytes of the records that went into the pipe, and of those that came out of it

        def put(item: Record | BaseException | None) -> None:
            nonlocal given
            while given - taken > CHUNK_BYTES and not self.stopping:
                time.sleep(0.01)
            given += item.size if isinstance(item, Record) else 0
            while not self.stopping:
                with contextlib.suppress(queue.Full):
                    return pipe.put(item, timeout=0.1)

        def pump() -> None:
            try:
                for record in records:
                    put(record)
                    if self.stopping:
                        return
                put(None)
            except BaseException as error:
                put(error)

        threading.Thread(target=pump, name="prefold-source", daemon=True).start()
        while not self.stopping:
            try:
                item = pipe.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            taken += item.size
            yield item

    def _engine_waits(self) -> bool:
        wanted = self._wanted
        return wanted is not None and self.found and time.monotonic() - wanted > IDLE_SECONDS

    def _take(self, record: Record) -> None:
        self._counts.read += 1
        parsed = self._adapter.read(record)  # also for records that are done: it looks for duplicate ids
        if record.number in self._output.done:
            return
        if parsed.error is not None:
            self._fail(record.number, parsed.meta, parsed.error)
            return
        if parsed.task in self._chunks and self._chunks[parsed.task].bytes + record.size > CHUNK_BYTES:
            self._flush(parsed.task)
        chunk = self._chunks.setdefault(parsed.task, _Chunk())
        chunk.records.append((record.number, parsed))
        chunk.items += parsed.items
        chunk.texts += sum(map(_texts_of, parsed.items))
        chunk.bytes += record.size
        if chunk.texts >= CHUNK_TEXTS or chunk.bytes >= CHUNK_BYTES:
            self._flush(parsed.task)

    def _flush_all(self) -> None:
        for task in list(self._chunks):
            self._flush(task)

    def _flush(self, task: str) -> None:
        """Tokenises the records that wait, and spools their requests."""
        chunk = self._chunks.pop(task)
        works = iter(self._works(task, chunk.items))
        for number, parsed in chunk.records:
            mine = [next(works) for _ in parsed.items]
            # All tags of a record are made before its first request is spooled, as that may fail: of a record that
            # was spooled in part, the missing results would be waited for.
            found = _first_error(mine) or attempt(_tagged, number, parsed.meta, mine, self._seed)
            if isinstance(found, InputError):
                self._fail(number, parsed.meta, found)
                continue
            spool = self._spools.get(task)
            if spool is None:
                spool = self._spools[task] = self._make_spool()
            for request, tag in found:
                if spool.add(request, tag):
                    self._counts.tokens += len(request.tokens)
                    self._counts.requests += 1
            self.found = True
            self.has_work.set()
            if self._fill is not None and spool.num_tokens >= self._fill:
                self._hand_on(task)

    def _works(self, task: str, items: list[Any]) -> list[Any]:
        """Returns what the task makes of each item; where the model is not made for the task, an InputError each."""
        try:
            return self._prepare(task, items)
        except (InputError, UnsupportedModelError) as error:
            remedy = "leave such records out, or use a model and options that fit them"
            message = f"the task {task!r} cannot be run: {error}"
            return [InputError(message, remedy=remedy, code="unsupported")] * len(items)

    def _fail(self, number: int, meta: Any, error: InputError) -> None:
        self._output.write(number, error_text(self._adapter, number, meta, error), failed=True)

    def _hand_on(self, task: str) -> None:
        self._put(Ready(task, self._spools.pop(task)))
        self._wanted = None

    def _put(self, item: Ready | BaseException | None) -> None:
        while not self._ready.empty():
            if self.stopping:
                if isinstance(item, Ready):
                    item.spool.close()
                return
            time.sleep(0.01)
        self._ready.put(item)


def _texts_of(item: Any) -> int:
    """Returns about how many texts an item holds: one, or as many as its longest list has."""
    lists = [len(value) for value in item.values() if isinstance(value, list)] if isinstance(item, dict) else []
    return max(lists, default=1)


def _tagged(number: int, meta: Any, works: list[Any], seed: int) -> list[tuple[Any, bytes]]:
    return list(tagged(number, meta, works, seed))


def _first_error(works: list[Any]) -> InputError | None:
    for i, work in enumerate(works):
        if isinstance(work, InputError):
            return work.renamed(f"{work.field}[{i}]") if len(works) > 1 and work.field else work
    return None if works else InputError("the record holds no prompts", remedy="give it a text", code="empty")
