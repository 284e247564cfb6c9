"""Run a job: source -> records -> requests -> engine -> lines.

`Job` does this with an engine that its caller provides: the command line here, with signals, progress and a summary at
the end, or a server, whose engine answers other requests at the same time. Requests of an input that goes on run as
they come: a live window feeds the engine.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..engine.protocol import Engine
from ..engine.requests import Answer
from ..errors import InputError, JobError
from ..spec.requests import Owner, Stats
from ..tasks.base import Task, attempt
from ..tasks.run import finish, results_of
from ..trie import LiveInput, Windows
from ..trie.live_windows import See, watched
from .output import Output
from .reader import DoneRecord, Gather, Job, Reader, ReadyBatch
from .record import Extra, RecordAdapter, Source, dumps, error_text
from .report.icicle import StreamShape
from .report.page import StepLog
from .report.progress import Counts, Progress

if TYPE_CHECKING:
    from .review import Conclusion


class Flow:
    """A Flow turns the records of one job into lines.

    reader  reads them, in a thread of its own; the caller starts it, and closes it
    gather  holds records of which some results are still missing
    """

    def __init__(self, job: Job, counts: Counts):
        self.job = job
        self.gather = Gather()
        self.reader = Reader(job, counts, self._deliver)
        self._counts = counts
        self._lock = threading.Lock()  # of the gather: the reader delivers known answers
        if job.kept is not None:
            job.output.before_commit = job.kept.file.commit  # an answer is kept before its line is durable

    def compute(
        self, engine: Engine, batch: ReadyBatch, *, see: See | None = None, stopping: Callable[[], bool], **run: Any
    ) -> bool:
        """Computes a batch and writes the lines of its records. Returns whether it came to the end.

        see       is shown the windows as they are taken
        stopping  asked after every step and every result: once it says so, no more lines are written
        run       as in `results_of`
        """
        task = self.job.tasks[batch.task]
        with closing(self._results(engine, task, batch, see, stopping=stopping, **run)) as results:
            for tag, result in results:
                self._take(task, tag, result)
                if stopping():
                    return False
        return not stopping()  # the engine may have stopped for it

    def _take(self, task: Task, tag: bytes, result: Answer) -> None:
        """Takes the result of a request, and writes its record's line if all results are there."""
        with self._lock:
            record = self.gather.add(tag, result)
            if record is not None:
                self._write(task, record)

    def _deliver(self, task: str, tag: bytes, answer: Answer) -> None:
        self._take(self.job.tasks[task], tag, answer)

    def _results(self, engine: Engine, task: Any, batch: ReadyBatch, see: See | None, **run: Any) -> Any:
        window, spool = self.job.window, batch.spool
        run["on_repeat"] = self._count_repeat
        run["kept"] = None if self.job.kept is None else self.job.kept.of(task.readout)
        if batch.feed is None:
            assert spool is not None
            windows = spool.windows(max_tokens=window, share=engine.facts.sharing == "full", joins=True)
            return results_of(engine, task, windows if engine.facts.divides else watched(windows, see), **run)

        def rest() -> Windows:
            """Returns the windows of the spool, which is complete when this is called."""
            assert spool is not None
            if self.reader.error is not None:
                raise self.reader.error
            return spool.windows(max_tokens=window, joins=True)

        asked = task.sampling if task.readout.kind == "tokens" else task.readout
        source = LiveInput(batch.feed, window, None if spool is None else rest, see, asked=asked)
        return results_of(engine, task, source, **run)

    def _count_repeat(self, tokens: int) -> None:
        self._counts.tokens_done += tokens
        self._counts.requests_done += 1

    def check(self) -> None:
        """Raises AssertionError if a record has no line after everything was computed."""
        if self.gather.waiting:
            raise AssertionError(f"{self.gather.waiting} records have results missing")

    def _write(self, task: Task, record: DoneRecord) -> None:
        adapter, answer = self.job.adapter, attempt(self._line, task, record)
        if isinstance(answer, InputError):
            line = error_text(adapter, record.number, record.meta, answer)
            self.job.output.write(record.number, line, failed=True)
        else:
            line, extra = answer
            self.job.output.write(record.number, line, failed=False, extra=extra)

    def _line(self, task: Task, record: DoneRecord) -> tuple[str, Extra | None]:
        """Return (the output line of a record with all results, what the end of the job needs of it). Raise InputError
        as the task's `finish` does."""
        answers = [finish(task, note, values) for note, values in record.items]
        review = self.job.review
        extra = None if review is None else review.extra(record.number, record.meta, answers)
        return dumps(self.job.adapter.line(record.number, record.meta, answers)), extra


def run_beside(
    job: Job, owner: Owner, on_failure: Callable[[Exception], InputError], stopping: Callable[[], bool]
) -> bool:
    """Runs a job on an engine that others use too, from any thread. Returns whether all its lines are written.

    Lines reach the disk within about a second, and all lines when this returns or raises. The output stays open, and is
    not marked as ended.

    owner       for whom the job runs
    on_failure  takes the error of a step that fails for a request, and returns the request's answer
    stopping    asked after every step: once it says so, this returns False
    """
    flow = Flow(job, Counts())
    try:
        flow.reader.start()
        engine = job.load().engine
        flow.reader.is_loaded.set()
        with _committing(job.output):
            for batch in flow.reader.batches():
                with batch.spool or nullcontext():
                    if not flow.compute(engine, batch, owner=owner, on_failure=on_failure, stopping=stopping):
                        return False
        flow.check()
        return not stopping()
    finally:
        flow.reader.close()
        job.output.commit()


def write_errors(source: Source, adapter: RecordAdapter, output: Output, error: InputError) -> None:
    """Writes an error for each record that has no line, of a job that ends before all records are computed.

    adapter  an adapter that has read no records
    """
    for record in source.records():
        meta = adapter.read(record).meta
        if record.number not in output.done:
            output.write(record.number, error_text(adapter, record.number, meta, error), failed=True)


TICK_SECONDS = 0.25


@contextmanager
def _committing(output: Output, show: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Calls `show` and commits lines a few times a second, in a thread of its own."""
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(TICK_SECONDS):
            with contextlib.suppress(OSError):  # a terminal that is gone
                show()
            try:
                output.commit(due_only=True)
            except (JobError, OSError):
                return  # the next write raises it where it can be handled

    thread = threading.Thread(target=tick, name="prefold-tick", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


WAITING = "waiting for the replicas"  # what a job on a fleet does before the first is ready
ENDING_SECONDS = 1.0


class Interrupted(JobError):
    """An Interrupted is raised when a signal, with the number `signal`, has stopped the job. Finished lines are
    written."""

    def __init__(self, number: int):
        super().__init__("the job was interrupted; what is done is written")
        self.signal = number


@dataclass
class Summary:
    """A Summary summarises a job. records, errors and resumed count all lines of the output; other fields count this
    run."""

    records: int = 0
    errors: int = 0
    resumed: int = 0
    stats: Stats = field(default_factory=Stats)
    streams: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    read_seconds: float = 0.0
    shape: StreamShape | None = None
    steps: StepLog | None = None
    sharing: str | None = None
    dtype: str | None = None
    passes: str = ""  # in words, what computed forward passes
    replicas: str = ""  # what became of them, in words, where there are several
    first_error: str | None = None  # the line of the first record that failed in this run
    conclusion: Conclusion | None = None  # of a job whose answers are reviewed

    @property
    def computed(self) -> int:
        """Returns how many records got their line in this run."""
        return self.records - self.resumed

    @property
    def excess(self) -> int:
        """Returns how many rows were computed more than once, within the streams of this run."""
        return max(0, self.stats.rows_computed - self.stats.unique_tokens)


def run_job(job: Job, progress: Progress) -> Summary:
    """Runs a job to its end, closes the output, and returns its Summary.

    Raises Interrupted after a signal (everything finished by then is written), and JobError or another PrefoldError
    when the job cannot go on.
    """
    return _Run(job, progress).run()


class _Run:
    def __init__(self, job: Job, progress: Progress):
        self.job = job
        self.progress = progress
        self.output = job.output
        self.counts = Counts(resumed=job.output.resumed)
        self.summary = Summary(resumed=job.output.resumed)
        self._llm: Any = None
        self._engine: Engine
        self.signal: int | None = None
        self.hard = False  # stopped in the middle of something: leave the output as it is
        self.graceful = False  # a signal waits for the end of the step
        self.ending: float | None = None  # since when the job is ending because of a signal
        if job.collect:
            self.summary.shape, self.summary.steps = StreamShape(), StepLog()
        self.flow = Flow(job, self.counts)
        self.reader = self.flow.reader

    def run(self) -> Summary:
        if self.output.ended:
            try:
                self._conclude()
            finally:
                self.output.close()
            self.summary.records, self.summary.errors = self.output.count, self.output.errors
            return self.summary
        try:
            with self._signals():
                return self._run()
        except KeyboardInterrupt:  # a second signal, in what cleans up
            raise Interrupted(self.signal or signal.SIGINT) from None

    def _run(self) -> Summary:
        started_at = time.perf_counter()
        try:
            with _committing(self.output, lambda: self.progress.tick(self._count())):
                self.output.hold()
                self.reader.start()
                self._work(started_at)
                if self.signal is not None and not self.counts.read_all:
                    raise Interrupted(self.signal)  # it came when all that had been read was computed
                self.graceful, self.counts.phase = True, "writing the output"
                self.output.finish()
                self._conclude()
        except BaseException as error:
            # What the handler of a signal raises within compiled code may come out as any other exception.
            if self.ending is not None or isinstance(error, KeyboardInterrupt):
                if not self.hard:
                    self.output.commit()
                raise Interrupted(self.signal or signal.SIGINT) from None
            with contextlib.suppress(JobError):
                self.output.commit()  # what came before the failure is done
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                place = tempfile.gettempdir()
                message = f"no room for temporary files in {place} ({error.strerror}); what is done is kept: "
                raise JobError(message + "name another folder in TMPDIR and give the same command to resume") from error
            raise
        finally:
            self.reader.close()
            self.output.close()
            if self.job.kept is not None:
                self.job.kept.close()
            if hasattr(self._llm, "close"):
                self._llm.close()
            with contextlib.suppress(OSError):
                self.progress.close(self._count())
        self.summary.records, self.summary.errors = self.output.count, self.output.errors
        self.summary.first_error = self.output.first_error
        self.summary.seconds = time.perf_counter() - started_at
        return self.summary

    def _conclude(self) -> None:
        """End the review of the answers, when all lines are written. A job that is killed here does so when it is run
        again."""
        if self.job.review is not None:
            self.summary.conclusion = self.job.review.conclude(self.output.extras())

    def _work(self, started_at: float) -> None:
        self.reader.has_work.wait()
        engine = self._load() if self.reader.has_requests else None
        self.output.release()
        for batch in self.reader.batches():
            self.summary.read_seconds = self.summary.read_seconds or time.perf_counter() - started_at
            self.summary.streams += batch.spool is not None or not self.summary.streams
            with batch.spool or contextlib.nullcontext():
                self._compute(batch)
        known = Stats(requests=self.counts.kept, tokens=self.counts.kept_tokens, kept=self.counts.kept)
        self.summary.stats = known
        if engine is not None:
            self.summary.stats = known + engine.stats
            self.summary.dtype = str(getattr(self._llm, "dtype", "")).removeprefix("torch.") or None
            self.summary.passes = getattr(self._llm, "passes", "")
            self.summary.replicas = engine.snapshot().replicas
        self.flow.check()

    def _load(self) -> Any:
        started_at = time.perf_counter()
        self.counts.phase = "loading the model, reading"
        self._llm = llm = self.job.load()
        self._engine = engine = llm.engine
        engine.reset_stats()
        self.summary.sharing = engine.facts.sharing
        self.reader.is_loaded.set()
        self.summary.load_seconds = time.perf_counter() - started_at
        self.counts.phase = "reading"
        return engine

    def _compute(self, batch: ReadyBatch) -> None:
        engine, shape, facts = self._engine, self.summary.shape, self._engine.facts
        # What is given away in ranges, or does not share, is looked at in its order afterwards; a stream as it goes by.
        watches = shape is not None and (batch.spool is None or (facts.sharing == "full" and not facts.divides))
        self.counts.phase, self.graceful = "computing" if engine.snapshot().is_ready else WAITING, True
        see = shape.see if shape is not None and watches else None
        if not self.flow.compute(engine, batch, see=see, on_step=self._step, stopping=self._stopping):
            assert self.signal is not None
            raise Interrupted(self.signal)
        if shape is not None and not watches and batch.spool is not None:
            for _ in shape.watch(batch.spool.windows(max_tokens=self.job.window, share=True)):
                pass
        self.graceful = False

    def _stopping(self) -> bool:
        """Returns whether a signal has come, and then starts to end the job."""
        if self.signal is not None and self.ending is None:
            self.ending = time.monotonic()
        return self.signal is not None

    def _step(self, info: Any) -> None:
        self.counts.rows += info.rows
        self.counts.tokens_done += info.tokens_done
        self.counts.requests_done += info.requests_done
        if (generation := self._engine.stats.generation) is not None:
            self.counts.tokens_generated = generation.generated_tokens
        if self.summary.steps is not None:
            self.summary.steps.add(info.started_at, info.seconds, info.rows, info.path_rows, info.running)

    def _count(self) -> Counts:
        self.counts.records_done, self.counts.errors = self.output.count, self.output.errors
        if self.counts.phase == WAITING and self._engine.snapshot().is_ready:
            self.counts.phase = "computing"
        return self.counts

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handles Ctrl-C, SIGTERM and a closed terminal.

        After the first signal the step is ended and what is done is written; a second one ends the job at once. Of a
        job that has just begun to end it changes nothing: an exception would fall into what cleans up.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: Any) -> None:
            now = time.monotonic()
            if self.ending is not None and now - self.ending < ENDING_SECONDS:
                return
            self.hard = self.graceful and self.signal is not None
            waits = self.graceful and self.signal is None
            self.signal = number
            self.reader.stopping = True
            if not waits:
                self.ending = now
                raise KeyboardInterrupt
            self.progress.note("stopping after this step (once more: at once)")

        names = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
        # A signal that is ignored (SIGHUP under nohup) stays ignored.
        numbers = [number for number in names if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in dict.fromkeys(numbers)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
