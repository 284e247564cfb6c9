"""Brings a job's records through an engine to their lines: source -> records -> requests -> stream -> engine -> lines.
Requests of an input that goes on run as they come: a live window feeds the engine. The caller provides the engine,
stops the job, and shows progress: the command line (`run.py`), or a server, whose engine answers other requests at the
same time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

from ..engine.protocol import Engine
from ..errors import InputError
from ..spec.requests import Owner
from ..tasks.base import attempt
from ..tasks.run import finish, results_of
from ..trie import LiveInput, Windows
from ..trie.live_windows import See, watched
from .reader import DoneRecord, Gather, Job, Reader, ReadyBatch
from .record import dumps, error_text
from .report.progress import Counts


class Flow:
    """A Flow turns the records of one job into lines.

    reader  reads them, in a thread of its own; the caller starts it, and closes it
    gather  holds records of which some results are still missing
    """

    def __init__(self, job: Job, counts: Counts):
        self.job = job
        self.gather = Gather()
        self.reader = Reader(job, counts)

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
                record = self.gather.add(tag, result)
                if record is not None:
                    self._write(task, record)
                if stopping():
                    return False
        return not stopping()  # the engine may have stopped for it

    def _results(self, engine: Engine, task: Any, batch: ReadyBatch, see: See | None, **run: Any) -> Any:
        window, spool = self.job.window, batch.spool
        if batch.feed is None:
            assert spool is not None
            windows = spool.windows(max_tokens=window, share=engine.facts.sharing == "full")
            return results_of(engine, task, windows if engine.facts.divides else watched(windows, see), **run)

        def rest() -> Windows:
            """Returns the windows of the spool, which is complete when this is called."""
            assert spool is not None
            if self.reader.error is not None:
                raise self.reader.error
            return spool.windows(max_tokens=window)

        exits = task.sampling.exits if task.readout.kind == "tokens" else task.readout.exits
        source = LiveInput(batch.feed, window, None if spool is None else rest, see, exits=exits)
        return results_of(engine, task, source, **run)

    def check(self) -> None:
        """Raises AssertionError if a record has no line after everything was computed."""
        if self.gather.waiting:
            raise AssertionError(f"{self.gather.waiting} records have results missing")

    def _write(self, task: Any, record: DoneRecord) -> None:
        adapter, answer = self.job.adapter, attempt(self._line, task, record)
        if isinstance(answer, InputError):
            line = error_text(adapter, record.number, record.meta, answer)
            self.job.output.write(record.number, line, failed=True)
        else:
            self.job.output.write(record.number, answer, failed=False)

    def _line(self, task: Any, record: DoneRecord) -> str:
        """Returns the output line of a record with all results. Raises InputError as the task's `finish` does."""
        answers = [finish(task, note, values) for note, values in record.items]
        return dumps(self.job.adapter.line(record.number, record.meta, answers))


def run_beside(
    job: Job, owner: Owner, on_failure: Callable[[Exception], InputError], stopping: Callable[[], bool]
) -> bool:
    """Runs a job on an engine that others use too, from any thread. Returns whether all its lines are written.

    What is done is committed when this returns or raises; the output stays open, and is not marked as ended.

    owner       for whom the job runs
    on_failure  takes the error of a step that fails for a request, and returns the request's answer
    stopping    asked after every step: once it says so, this returns False
    """
    flow = Flow(job, Counts())
    try:
        flow.reader.start()
        engine = job.load().engine
        for batch in flow.reader.batches():
            with batch.spool or nullcontext():
                if not flow.compute(engine, batch, owner=owner, on_failure=on_failure, stopping=stopping):
                    return False
        flow.check()
        return not stopping()
    finally:
        flow.reader.close()
        job.output.commit()
