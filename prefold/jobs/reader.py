"""Reads the records of a job in the background, and tokenises them in chunks. Their requests are spooled while the
model loads, or put into feeds, from which engines take them as they come."""

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

# Gathers the results of a record's requests, which run at different times, by the tags that the requests carry.
#
# A record holds items (a rerank record has an item for each document), and an item holds requests. The tag of a request
# says which one it is. The tag of an item's first request also carries the item's note, and the tag of a record's first
# request what the output line needs. So nothing of a record is held in memory while its requests wait on disk.

_HEAD = struct.Struct("<QIIII")  # record, item, items of the record, part, parts of the item


def with_tags(number: int, meta: Any, works: list[Any], seed: int = 0) -> list[tuple[Request, bytes]]:
    """Returns every request of a record with its tag. works: the Work of each of its items; seed: the job's"""
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
    """A DoneRecord is a record with all results: the note of each item, and its results in order.

    A result is what the engine gives for a request (see `results_of`).
    """

    number: int
    meta: Any = None
    items: list[tuple[Any, list[Any]]] = field(default_factory=list)


@dataclass(slots=True)
class _Item:
    num_missing: int
    results: list[Any]
    note: Any = None


@dataclass(slots=True)
class _PartialRecord:
    """A _PartialRecord is a record of which some results are missing."""

    num_missing: int
    items: list[_Item | None]
    meta: Any = None


class Gather:
    """A Gather collects results by record. waiting: how many records have some of their results, but not all"""

    def __init__(self) -> None:
        self._records: dict[int, _PartialRecord] = {}

    @property
    def waiting(self) -> int:
        return len(self._records)

    def add(self, tag: bytes, result: Any) -> DoneRecord | None:
        """Takes a result. Returns its record if that has all results now, else None."""
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


# Records are tokenised together up to so many texts, and so many bytes: a token takes far more memory than its text.
CHUNK_TEXTS = 512
CHUNK_BYTES = 8 << 20
IDLE_SECONDS = 0.05
_POLL = 0.005
TURN_SECONDS = 0.5  # that requests of one task wait for those of another


WINDOW_TOKENS = 1 << 20


@dataclass(frozen=True)
class Job:
    """A Job holds everything a job needs.

    tasks     the tasks by name, as the adapter asks for them
    load      returns the LLM (or another object with an `engine`); called while records are being read. `run_job`
              closes it at the job's end
    window    how many tokens a window may have
    streaming whether requests run as they come, out of one live window; otherwise the whole input is one stream
    early     whether the engine takes requests before the input is read to its end, where it is one stream
    collect   whether to keep the shape of the stream and the steps, for the report
    seed      what the seeds of records that sample without a seed of their own are made of
    has_seed  whether the user gave that seed; answers that were drawn with another one are not kept
    kept      has answers of earlier jobs, and keeps the answers of this job; None: nothing is kept
    review    what keeps something of each record's answers for the end of the job, and ends it; None: nothing does
    """

    source: Source
    adapter: RecordAdapter
    tasks: Mapping[str, Any]
    load: Callable[[], Any]
    output: Output
    limit: int | None = None
    window: int = WINDOW_TOKENS
    streaming: bool = False
    early: bool = False
    collect: bool = False
    seed: int = 0
    has_seed: bool = False
    kept: KeptAnswers | None = None
    review: Review | None = None
    make_spool: Callable[[], Spool] = Spool


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A ReadyBatch holds the requests of one task that are ready to run.

    spool  all of them, but for those in the feed
    feed   those that come while others run. Where there is a spool too, the feed ends when the spool is complete
    """

    task: str
    spool: Spool | None
    feed: Feed | None = None


@dataclass(slots=True)
class _Chunk:
    """A _Chunk holds records of one task, and their items, that wait to be tokenised together."""

    records: list[tuple[int, ParsedRecord]] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    texts: int = 0
    bytes: int = 0


class Reader:
    """A Reader reads the source of a job in a thread of its own, in one of three ways:

                 requests go into         `batches` yields                what waits
        spooled  a spool for each task    the spools, when all is read    the owner for the end of the input
        early    the same; of the first   the first task with its feed    the engines for requests in the feed, which
                 task, what engines want  at once, the other spools when  ends with the input; then its spool is
                 goes into a feed         all is read                     complete
        live     a feed for each task     whichever feed has waited       the reader for room in a feed, the owner for a
                                          longest, again and again        request in any of them

    Spooled and early make one stream of all input; live makes one of what is there. A job that is `streaming` is read
    live, and a job that is `early` in the second way.

    has_work  is set at the first request, or when it is known that there is none; `has_requests` then says which. The
              owner waits for it before it loads a model
    has_ended is set when everything is read (live: so that no feed will get more), or the reading failed
    is_loaded set by the owner when the job's model is loaded

    Known answers (`Job.kept`) reach `deliver`, called with the task, the tag and the answer.

    The owner sets `stopping` to end the reading early. It is a plain flag, since a signal handler sets it: an Event has
    a lock, and a second signal that comes while the handler holds it would wait for it for ever.
    """

    def __init__(self, job: Job, counts: Counts, deliver: Callable[[str, bytes, Answer], None] | None = None):
        self._job, self._counts, self._deliver = job, counts, deliver
        self._live, self._early = job.streaming, job.early and not job.streaming
        self._spools: dict[str, Spool] = {}
        self._feeds: dict[str, Feed] = {}
        self.error: BaseException | None = None  # why the reading ended
        self._chunks: dict[str, _Chunk] = {}
        # It holds one item at most. An exception that a signal raises within its `get` leaves no lock taken.
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
        """Yields the batches as they become ready. Raises what the reading raised."""
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
        """Yields the feed whose requests have waited longest, again and again until all feeds are over."""
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
        """Ends the reading, and drops spooled requests that were not taken."""
        self.stopping = True
        if self._thread.ident is not None:
            self._thread.join(2)  # not longer: it may wait for a pipe, and as a daemon it does not keep the process
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
                    self._spools[task].order(joins=True)  # sorted here, while engines have work
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
                    return  # a pipe's writer may not send another record for long
            if record is None or self._is_wanted():
                self._flush_all()

    def _is_wanted(self) -> bool:
        """Returns whether records are tokenised at once: the task has no requests yet, or engines have no work."""
        is_first = any(task not in self._feeds for task in self._chunks) if self._live else not self._feeds
        return ((self._live or self._early) and is_first) or any(feed.is_hungry for feed in self._feeds.values())

    def _read_ahead(self, records: Iterator[Record]) -> Iterator[Record | None]:
        """Yields the records, and None whenever none has come for a moment (for example from a pipe)."""
        pipe: queue.Queue[Record | BaseException | None] = queue.Queue(maxsize=CHUNK_TEXTS)
        put_bytes = taken_bytes = 0  # bytes of the records that went into the pipe, and of those that came out of it

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
        parsed = self._job.adapter.read(record)  # also for records that are done: it looks for duplicate ids
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
        """Tokenises the waiting records, and spools their requests."""
        chunk = self._chunks.pop(task)
        works = iter(self._works(task, chunk.items))
        for number, parsed in chunk.records:
            parts = [next(works) for _ in parsed.items]
            # All tags of a record are made before its first request is spooled, as that may fail: of a record that
            # was spooled in part, the missing results would be waited for.
            requests = _first_error(parts) or attempt(with_tags, number, parsed.meta, parts, self._job.seed)
            if isinstance(requests, InputError):
                self._fail(number, parsed.meta, requests)
                continue
            if self._job.kept is not None:
                requests = self._unknown(task, requests, [request for work in parts for request in work.requests])
                if not requests:
                    continue
            for part, is_new in enumerate(self._pass_on(task, requests)):
                if is_new or part == 0:  # a record may repeat the one before
                    request, _ = requests[part]
                    self._counts.tokens += len(request.tokens)
                    self._counts.requests += 1
            self.has_requests = True
            self.has_work.set()

    def _unknown(
        self, task: str, requests: list[tuple[Request, bytes]], asked: list[Request]
    ) -> list[tuple[Request, bytes]]:
        """Delivers the known answers of a record's requests. Returns the other requests, with the keys of their answers
        before their tags. asked: the requests without seeds that were made of the job's"""
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
        """Puts a record's requests into the task's feed or spool. Returns for each whether it is a new prompt."""
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
        """Returns whether requests of another task have waited for long."""
        late = time.monotonic() - TURN_SECONDS
        starts = [feed.since for name, feed in list(self._feeds.items()) if name != task]
        return any(since is not None and since < late for since in starts)

    def _works(self, task: str, items: list[Any]) -> list[Any]:
        """Returns the Work of each item, or its InputError. If the model cannot do the task, all items get that
        error."""
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
    """Returns about how many texts an item has: the length of its longest list, or one."""
    lists = [len(value) for value in item.values() if isinstance(value, list)] if isinstance(item, dict) else []
    return max(lists, default=1)


def _first_error(works: list[Any]) -> InputError | None:
    for i, work in enumerate(works):
        if isinstance(work, InputError):
            return work.renamed(f"{work.field}[{i}]") if len(works) > 1 and work.field else work
    return None if works else InputError("the record holds no prompts", remedy="give it a text", code="empty")
