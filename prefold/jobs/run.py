"""Run a job: source -> records -> requests -> engine -> lines.

The caller provides the engine. For a command, `run_job` adds signals, progress and a summary. For a server,
`run_beside` uses an engine that also answers other requests. If the input has no known end, requests run as they come:
a live window feeds the engine.
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
    """Turns the records of one job into lines.

    Attributes:
        reader: reads the records in its own thread; the caller starts and closes it
        gather: the records with missing results
    """

    def __init__(self, job: Job, counts: Counts):
        self.job = job
        self.gather = Gather()
        self.reader = Reader(job, counts, self._deliver)
        self._counts = counts
        self._lock = threading.Lock()  # guards `gather`, because the reader's thread delivers known answers
        if job.kept is not None:
            job.output.before_commit = job.kept.file.commit  # keep an answer before its line is durable

    def compute(
        self, engine: Engine, batch: ReadyBatch, *, see: See | None = None, stopping: Callable[[], bool], **run: Any
    ) -> bool:
        """Compute a batch and write the lines of its records. Return whether the batch was completed.

        Args:
            engine: The engine.
            batch: The requests.
            see: Called with each window when the engine takes it.
            stopping: Called after every step. If it returns True, no more steps start. The results of the steps that
                ran are written.
            run: As in `results_of`.
        """
        task = self.job.tasks[batch.task]
        with closing(self._results(engine, task, batch, see, stopping=stopping, **run)) as results:
            for tag, result in results:
                self._take(task, tag, result)
        return not stopping()  # the engine may have stopped because of it

    def _take(self, task: Task, tag: bytes, result: Answer) -> None:
        """Store the result of a request, and write its record's line if the record is complete."""
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
            """Return the windows of the spool, which is complete when this is called."""
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
        """Raise AssertionError if a record has no line after everything was computed."""
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
        """Return (the output line of a complete record, its extra data).

        Raise InputError as the task's `finish` does.
        """
        answers = [finish(task, note, values) for note, values in record.items]
        review = self.job.review
        extra = None if review is None else review.extra(record.number, record.meta, answers)
        return dumps(self.job.adapter.line(record.number, record.meta, answers)), extra


def run_beside(
    job: Job, owner: Owner, on_failure: Callable[[Exception], InputError], stopping: Callable[[], bool]
) -> bool:
    """Run a job on an engine that others also use, from any thread. Return whether all its lines are written.

    Lines reach the disk within about a second, and all of them before this returns or raises. The output stays open,
    and is not marked as ended.

    Args:
        job: The job.
        owner: The owner of the job's requests.
        on_failure: Converts the error of a failed step to the answer of its requests.
        stopping: Called after every step. If it returns True, this returns False.
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
    """Write an error for each record without a line, if a job ends before all records are computed.

    Args:
        adapter: An adapter that has read no records.
    """
    for record in source.records():
        meta = adapter.read(record).meta
        if record.number not in output.done:
            output.write(record.number, error_text(adapter, record.number, meta, error), failed=True)


TICK_SECONDS = 0.25


@contextmanager
def _committing(output: Output, show: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Call `show` and commit lines every TICK_SECONDS, in a separate thread."""
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(TICK_SECONDS):
            with contextlib.suppress(OSError):  # the terminal was closed
                show()
            try:
                output.commit(due_only=True)
            except (JobError, OSError):
                return  # the next write raises the error again, in the job's thread

    thread = threading.Thread(target=tick, name="prefold-tick", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


WAITING = "waiting for the replicas"  # phase of a job on a fleet until the first replica is ready
ENDING_SECONDS = 1.0


class Interrupted(JobError):
    """Raised if a signal has stopped the job. Finished lines are written. `signal` is the number of the signal."""

    def __init__(self, number: int):
        super().__init__("the job was interrupted; finished records are written")
        self.signal = number


@dataclass
class Summary:
    """The summary of a job.

    `records`, `errors` and `resumed` count all lines of the output, other fields count this run.
    """

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
    passes: str = ""  # text about how forward passes were computed
    replicas: str = ""  # text about the replicas of a fleet
    first_error: str | None = None  # line of the first record that failed in this run
    conclusion: Conclusion | None = None  # result of a review

    @property
    def computed(self) -> int:
        """Return how many records got their line in this run."""
        return self.records - self.resumed

    @property
    def excess(self) -> int:
        """Return how many rows were computed more than once, within the streams of this run."""
        return max(0, self.stats.rows_computed - self.stats.unique_tokens)


def run_job(job: Job, progress: Progress) -> Summary:
    """Run a job to its end, close the output, and return the Summary.

    Raise Interrupted after a signal; everything that was finished is written. Raise JobError or another PrefoldError if
    the job cannot continue.
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
        self.hard = False  # the second signal stopped a step: leave the output as it is
        self.graceful = False  # the first signal waits for the end of the step
        self.ending: float | None = None  # time at which a signal started to end the job
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
        except KeyboardInterrupt:  # a second signal, during cleanup
            raise Interrupted(self.signal or signal.SIGINT) from None

    def _run(self) -> Summary:
        started_at = time.perf_counter()
        try:
            with _committing(self.output, lambda: self.progress.tick(self._count())):
                self.output.hold()
                self.reader.start()
                self._work(started_at)
                if self.signal is not None and not self.counts.read_all:
                    raise Interrupted(self.signal)  # the reading stopped, and everything read is computed
                self.graceful, self.counts.phase = True, "writing the output"
                self.output.finish()
                self._conclude()
        except BaseException as error:
            # Compiled code may turn the KeyboardInterrupt of the signal handler into any other exception.
            if self.ending is not None or isinstance(error, KeyboardInterrupt):
                if not self.hard:
                    self.output.commit()
                raise Interrupted(self.signal or signal.SIGINT) from None
            with contextlib.suppress(JobError):
                self.output.commit()  # keep what was finished before the failure
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                place = tempfile.gettempdir()
                message = f"no space for temporary files in {place} ({error.strerror}); finished records are kept: "
                raise JobError(message + "set TMPDIR to another folder and give the same command to resume") from error
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
        """Finish the review of the answers, after all lines are written.

        If the job is killed here, the next run does it.
        """
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
        # Windows of a stream are recorded as they run. If the engine divides the stream, or shares nothing, the shape
        # is recorded afterwards from the spool.
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
        """Return whether a signal has come. If so, start to end the job."""
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
        """Handle Ctrl-C, SIGTERM and a closed terminal.

        The first signal ends the step and writes finished lines. A second one ends the job at once. A signal within
        ENDING_SECONDS after the job started to end is ignored: an exception would interrupt the cleanup.
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
            self.progress.note("stopping after this step (press again to discard the step)")

        names = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
        # A signal that is ignored already (SIGHUP under nohup) stays ignored.
        numbers = [number for number in names if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in dict.fromkeys(numbers)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
