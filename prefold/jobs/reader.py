"""Read the records of a job in the background, and tokenise them in chunks.

Requests are spooled while the model loads, or put into feeds, from which engines take them as they come.
"""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine.requests import Answer
from ..errors import InputError, UnsupportedModelError
from ..spec.requests import Request
from ..tasks.base import attempt
from ..tasks.kept import KeptAnswers
from ..tasks.run import as_known, same_prompt, tokens_of, with_seed
from ..trie import Feed, Spool
from .output import Output
from .record import ParsedRecord, Record, RecordAdapter, Source, error_text
from .report.progress import Counts

if TYPE_CHECKING:
    from .review import Review

# How results find their record:
#
# A record has items (a rerank record has an item for each document), and an item has requests. The requests of a record
# run at different times, so each request carries a tag that identifies it. The tag of an item's first request also has
# the item's note. The tag of a record's first request also holds `meta`, which the output line needs. So no part of a
# record is in memory while its requests wait on disk.

_HEAD = struct.Struct("<QIIII")  # record, item, number of items, part (request of the item), number of parts


def with_tags(number: int, meta: Any, works: list[Any], seed: int = 0) -> list[tuple[Request, bytes]]:
    """Return every request of a record with its tag.

    Args:
        works: the Work of each item of the record
        seed: the seed of the job
    """
    requests = []
    for item, work in enumerate(works):
        for part, request in enumerate(work.requests):
            tag = _HEAD.pack(number, item, len(works), part, len(work.requests))
            if part == 0:
                tag += _encode([work.note, meta] if item == 0 else [work.note])
            requests.append((with_seed(request, seed, number, item, part), tag))
    return requests


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _encode(value: Any) -> bytes:
    return _json(value).encode("utf-8", "surrogatepass")


@dataclass(slots=True)
class DoneRecord:
    """A record with all its results."""

    number: int
    meta: Any = None
    # (note, results) of each item; results are as in `results_of`
    items: list[tuple[Any, list[Any]]] = field(default_factory=list)


@dataclass(slots=True)
class _Item:
    num_missing: int
    results: list[Any]
    note: Any = None


@dataclass(slots=True)
class _PartialRecord:
    """A record with missing results."""

    num_missing: int
    items: list[_Item | None]
    meta: Any = None


class Gather:
    """Collects the results of each record until they are complete."""

    def __init__(self) -> None:
        self._records: dict[int, _PartialRecord] = {}

    @property
    def waiting(self) -> int:
        """Return how many records have some of their results, but not all."""
        return len(self._records)

    def add(self, tag: bytes, result: Any) -> DoneRecord | None:
        """Add a result. Return its record if the record is complete now, else None."""
        number, item, items, part, parts = _HEAD.unpack_from(tag)
        head = json.loads(tag[_HEAD.size :].decode("utf-8", "surrogatepass")) if part == 0 else None
        if items == 1 and parts == 1:
            note, meta = head
            return DoneRecord(number, meta, [(note, [result])])
        record = self._records.get(number)
        if record is None:
            record = self._records[number] = _PartialRecord(items, [None] * items)
        entry = record.items[item]
        if entry is None:
            entry = record.items[item] = _Item(parts, [None] * parts)
        if head is not None:
            entry.note = head[0]
            if item == 0:
                record.meta = head[1]
        entry.results[part] = result
        entry.num_missing -= 1
        record.num_missing -= entry.num_missing == 0
        if record.num_missing:
            return None
        del self._records[number]
        return DoneRecord(number, record.meta, [(entry.note, entry.results) for entry in record.items])  # type: ignore[union-attr, misc]


# Limits of a chunk that is tokenised together. Bytes are limited because tokens need far more memory than their text.
CHUNK_TEXTS = 512
CHUNK_BYTES = 8 << 20
IDLE_SECONDS = 0.05
_POLL = 0.005
TURN_SECONDS = 0.5  # longest wait of a task's requests while another task runs


WINDOW_TOKENS = 1 << 20


@dataclass(frozen=True)
class Job:
    """Everything that a job needs."""

    source: Source
    adapter: RecordAdapter
    tasks: Mapping[str, Any]  # the tasks by name, as the adapter asks for them
    # returns the LLM (or another object with an `engine`); called while records are read. `run_job` closes it
    load: Callable[[], Any]
    output: Output
    limit: int | None = None
    window: int = WINDOW_TOKENS  # maximum tokens of a window
    streaming: bool = False  # run requests as they come, from a live window; otherwise the whole input is one stream
    early: bool = False  # without `streaming`: the engine accepts requests before the whole input is read
    collect: bool = False  # keep the shape of the stream and the steps, for the report
    seed: int = 0  # base of the seeds of records that sample without their own seed
    has_seed: bool = False  # the user gave `seed`; otherwise sampled answers are not kept
    # has answers of earlier jobs, and keeps the answers of this job; None: nothing is kept
    kept: KeptAnswers | None = None
    # collects data of each record's answers, and evaluates it at the end of the job; None: no review
    review: Review | None = None
    make_spool: Callable[[], Spool] = Spool


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """The requests of one task that are ready to run."""

    task: str
    spool: Spool | None  # all requests, except those in the feed
    # requests that arrive while others run. If there is also a spool, the feed ends when the spool is complete
    feed: Feed | None = None


@dataclass(slots=True)
class _Chunk:
    """Records of one task, and their items, that wait to be tokenised together."""

    records: list[tuple[int, ParsedRecord]] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    texts: int = 0
    bytes: int = 0


class Reader:
    """Reads the source of a job in its own thread, in one of three modes.

    - spooled: requests of each task go into a spool. `batches` yields the spools after the whole input is read.
    - early: as spooled, but the first task also has a feed, which `batches` yields at once. Requests that engines ask
      for go into the feed, the others into the spool. The feed ends with the input; then the spool is complete.
    - live (`Job.streaming`): requests of each task go into a feed. `batches` yields the feed that has waited longest,
      again and again. The reader waits for free capacity in a feed.

    Spooled and early make one stream of the whole input. Live makes streams of the requests that wait.

    Known answers (`Job.kept`) go to `deliver`, called with the task, the tag and the answer.

    The owner sets `stopping` to end the reading early. It is a plain flag, because a signal handler sets it. An Event
    has a lock: a second signal during the handler would wait for it forever.

    Attributes:
        has_work: set at the first request, or when it is certain that there is none; the owner waits for it before it
            loads a model
        has_requests: True if there is a request; valid after `has_work` is set
        has_ended: set when everything is read (live: no feed gets more requests), or when reading failed
        is_loaded: set by the owner when the job's model is loaded
    """

    def __init__(self, job: Job, counts: Counts, deliver: Callable[[str, bytes, Answer], None] | None = None):
        self._job, self._counts, self._deliver = job, counts, deliver
        self._live, self._early = job.streaming, job.early and not job.streaming
        self._spools: dict[str, Spool] = {}
        self._feeds: dict[str, Feed] = {}
        self.error: BaseException | None = None  # why the reading ended
        self._chunks: dict[str, _Chunk] = {}
        # At most one item. A signal that raises inside `get` leaves no lock held.
        self._ready: queue.SimpleQueue[ReadyBatch | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefold-reader", daemon=True)
        self.stopping = False
        self.has_requests = False
        self.has_ended = threading.Event()
        self.has_work = threading.Event()
        self.is_loaded = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def batches(self) -> Iterator[ReadyBatch]:
        """Yield the batches as they become ready. Raise the exception that ended the reading."""
        if self._live:
            yield from self._turns()
            return
        while True:
            item = self._ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _turns(self) -> Iterator[ReadyBatch]:
        """Yield the feed whose requests have waited longest, again and again until all feeds have ended."""
        while True:
            has_ended = self.has_ended.is_set()
            waiting = [(feed.since, task) for task, feed in list(self._feeds.items()) if feed.since is not None]
            if waiting:
                task = min(waiting)[1]  # type: ignore[type-var]
                yield ReadyBatch(task, None, self._feeds[task])
            elif has_ended:
                break
            else:
                time.sleep(_POLL)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stop the reading, and drop spooled requests that were not taken."""
        self.stopping = True
        if self._thread.ident is not None:
            self._thread.join(2)  # no longer: it may wait for a pipe; as a daemon it does not block the process's end
        while not self._ready.empty():
            item = self._ready.get_nowait()
            if isinstance(item, ReadyBatch) and item.spool is not None:
                item.spool.close()
        for spool in self._spools.values():
            spool.close()

    def _run(self) -> None:
        try:
            self._read()
            self._flush_all()
            self._counts.read_all = not self.stopping
            for task, feed in self._feeds.items():
                if task in self._spools:
                    self._spools[task].order(joins=True)  # sort here, while engines have work
                    del self._spools[task]
                feed.end()
            self.has_ended.set()
            for task in list(self._spools):
                self._put(ReadyBatch(task, self._spools.pop(task)))
            self._put(None)
        except BaseException as error:
            self.error = error
            self._end()
            self._put(error)
        finally:
            self._end()

    def _end(self) -> None:
        for feed in self._feeds.values():
            feed.end()
        self.has_work.set()
        self.has_ended.set()

    def _read(self) -> None:
        limit = self._job.limit
        records = self._job.source.records(self._job.adapter.columns)
        for record in self._read_ahead(records) if self._live or self._early else records:
            if self.stopping or (record is not None and limit is not None and record.number > limit):
                return
            if record is not None:
                self._take(record)
                if record.number == limit:
                    return  # do not wait for another record, a pipe may send it much later
            if record is None or self._is_wanted():
                self._flush_all()

    def _is_wanted(self) -> bool:
        """Return whether to tokenise at once: a task has no requests yet, or engines have no work."""
        is_first = any(task not in self._feeds for task in self._chunks) if self._live else not self._feeds
        return ((self._live or self._early) and is_first) or any(feed.is_hungry for feed in self._feeds.values())

    def _read_ahead(self, records: Iterator[Record]) -> Iterator[Record | None]:
        """Yield the records, and None if no record has come for a moment (for example from a pipe)."""
        pipe: queue.Queue[Record | BaseException | None] = queue.Queue(maxsize=CHUNK_TEXTS)
        put_bytes = taken_bytes = 0  # bytes of records put into the pipe, and taken out of it

        def put(item: Record | BaseException | None) -> None:
            nonlocal put_bytes
            while put_bytes - taken_bytes > CHUNK_BYTES and not self.stopping:
                time.sleep(0.01)
            put_bytes += item.size if isinstance(item, Record) else 0
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
            taken_bytes += item.size
            yield item

    def _take(self, record: Record) -> None:
        self._counts.records_read += 1
        parsed = self._job.adapter.read(record)  # also for done records: the adapter finds duplicate ids
        if record.number in self._job.output.done:
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
        """Tokenise the waiting records, and pass their requests on."""
        chunk = self._chunks.pop(task)
        works = iter(self._works(task, chunk.items))
        for number, parsed in chunk.records:
            parts = [next(works) for _ in parsed.items]
            # Make all tags of a record before its first request is spooled, because making them can fail. A record
            # that is spooled in part would wait for the missing results forever.
            requests = _first_error(parts) or attempt(with_tags, number, parsed.meta, parts, self._job.seed)
            if isinstance(requests, InputError):
                self._fail(number, parsed.meta, requests)
                continue
            if self._job.kept is not None:
                requests = self._unknown(task, requests, [request for work in parts for request in work.requests])
                if not requests:
                    continue
            for part, is_new in enumerate(self._pass_on(task, requests)):
                if is_new or part == 0:  # also count a record that repeats the one before it
                    request, _ = requests[part]
                    self._counts.tokens += len(request.tokens)
                    self._counts.requests += 1
            self.has_requests = True
            self.has_work.set()

    def _unknown(
        self, task: str, requests: list[tuple[Request, bytes]], asked: list[Request]
    ) -> list[tuple[Request, bytes]]:
        """Deliver the known answers of a record's requests. Return the other requests.

        The tag of a returned request starts with the key of its answer.

        Args:
            asked: the same requests without seeds derived from the job's seed
        """
        job = self._job
        assert job.kept is not None and self._deliver is not None
        reads = job.kept.of(job.tasks[task].readout)
        found = reads.find([request for request, _ in requests], asked, job.has_seed)
        unknown = []
        for part, (keyed, (request, tag)) in enumerate(zip(found, requests, strict=True)):
            if keyed.answer is None:
                unknown.append((request, keyed.key + tag))
                continue
            if job.tasks[task].calibration_items() and not self.is_loaded.is_set():
                self.has_requests = True
                self.has_work.set()
                while not (self.is_loaded.wait(0.1) or self.stopping):
                    pass
                if self.stopping:
                    return []
            if part == 0 or request.sampling is not None or not same_prompt(request, requests[part - 1][0]):
                self._counts.kept += 1
                self._counts.kept_tokens += tokens_of(keyed.answer, request.tokens.size)
            self._deliver(task, tag, as_known(keyed.answer, request.tokens.size))
        return unknown

    def _pass_on(self, task: str, requests: list[tuple[Any, bytes]]) -> list[bool]:
        """Put a record's requests into the task's feed or spool. Return for each whether it is a new prompt."""
        feed = self._feeds.get(task)
        if self._live:
            if feed is None:
                feed = self._feeds[task] = Feed(is_urgent=partial(self._others_wait, task), joins=True)
            while not feed.has_room and not self.stopping:
                time.sleep(_POLL)
            return feed.put(requests)
        spool = self._spools.get(task)
        if spool is None:
            spool = self._spools[task] = self._job.make_spool()
            if self._early and not self._feeds:
                feed = self._feeds[task] = Feed(0, joins=True)
                self._put(ReadyBatch(task, spool, feed))
        if feed is not None and feed.has_room:
            return feed.put(requests)
        return [spool.add(request, tag) for request, tag in requests]

    def _others_wait(self, task: str) -> bool:
        """Return whether another task's requests have waited too long."""
        late = time.monotonic() - TURN_SECONDS
        starts = [feed.since for name, feed in list(self._feeds.items()) if name != task]
        return any(since is not None and since < late for since in starts)

    def _works(self, task: str, items: list[Any]) -> list[Any]:
        """Return the Work of each item, or its InputError.

        If the model cannot do the task, all items get that error.
        """
        try:
            return self._job.tasks[task].prepare(items)
        except (InputError, UnsupportedModelError) as error:
            remedy = "leave such records out, or use a model and options that fit them"
            message = f"the task {task!r} cannot be run: {error}"
            return [InputError(message, remedy=remedy, code="unsupported")] * len(items)

    def _fail(self, number: int, meta: Any, error: InputError) -> None:
        self._job.output.write(number, error_text(self._job.adapter, number, meta, error), failed=True)

    def _put(self, item: ReadyBatch | BaseException | None) -> None:
        while not self._ready.empty():
            if self.stopping:
                if isinstance(item, ReadyBatch) and item.spool is not None:
                    item.spool.close()
                return
            time.sleep(0.01)
        self._ready.put(item)


def _texts_of(item: Any) -> int:
    """Return about how many texts an item has: the length of its longest list, or one."""
    lists = [len(value) for value in item.values() if isinstance(value, list)] if isinstance(item, dict) else []
    return max(lists, default=1)


def _first_error(works: list[Any]) -> InputError | None:
    for i, work in enumerate(works):
        if isinstance(work, InputError):
            return work.renamed(f"{work.field}[{i}]") if len(works) > 1 and work.field else work
    return None if works else InputError("the record holds no prompts", remedy="give it a text", code="empty")
