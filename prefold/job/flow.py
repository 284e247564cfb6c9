"""Brings a job's records through an engine to their lines: source -> records -> requests -> stream -> engine -> lines.

Whose engine that is, when it stops, and what is shown meanwhile, its caller says: the command line (`run.py`), which
has the process to itself, or a server, whose engine answers others at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

from ..errors import InputError
from ..records.lines import dumps
from ..records.record import error_text
from ..report.progress import Counts
from ..stream import LiveInput, Spool, Windows
from ..stream.live_windows import See
from ..tasks.base import attempt
from ..tasks.run import finish, results_of
from .gather import Done, Gather
from .live import live_results, takes_ranges, watched
from .reader import Job, Reader, Ready


class Flow:
    """The way of one job's records to their lines.

    reader  reads them, in a thread of its own; the caller starts it, and closes it
    gather  holds records of which some results are still missing
    """

    def __init__(self, job: Job, counts: Counts):
        self.job = job
        self.gather = Gather()
        self.reader = Reader(job, counts)

    def compute(
        self,
        engine: Any,
        batch: Ready,
        *,
        see: See | None = None,
        on_step: Callable[[Any], None] | None = None,
        stopping: Callable[[], bool],
    ) -> bool:
        """Computes a batch and writes the lines of its records; returns whether it came to the end.

        see       is shown the windows as they are taken
        stopping  asked after every step and every result: once it says so, no more lines are written
        """
        task = self.job.tasks[batch.task]
        with closing(self._results(engine, task, batch, see, on_step=on_step, stopping=stopping)) as results:
            for tag, result in results:
                done = self.gather.add(tag, result)
                if done is not None:
                    self._write(task, done)
                if stopping():
                    return False
        return not stopping()  # the engine may have stopped for it

    def _results(self, engine: Any, task: Any, batch: Ready, see: See | None, **run: Any) -> Any:
        window, spool = self.job.window, batch.spool
        if batch.feed is None:
            assert spool is not None
            windows = spool.windows(max_tokens=window, share=engine.sharing == "full")
            return results_of(engine, task, windows if takes_ranges(engine) else watched(windows, see), **run)
        rest = None if spool is None else self._rest(spool)
        some = LiveInput(batch.feed, window, rest, see)
        return (
            results_of(engine, task, some, **run) if takes_ranges(engine) else live_results(engine, task, some, **run)
        )

    def _rest(self, spool: Spool) -> Callable[[], Windows]:
        """Returns a function that gives the windows of a spool, which is complete when it is called."""

        def rest() -> Windows:
            if self.reader.error is not None:
                raise self.reader.error
            return spool.windows(max_tokens=self.job.window)

        return rest

    def check(self) -> None:
        """Raises AssertionError where a record has no line, though everything was computed."""
        if self.gather.waiting:
            raise AssertionError(f"{self.gather.waiting} records have results missing")

    def _write(self, task: Any, done: Done) -> None:
        adapter, answer = self.job.adapter, attempt(self._line, task, done)
        if isinstance(answer, InputError):
            line = error_text(adapter, done.number, done.meta, answer)
            self.job.output.write(done.number, line, failed=True)
        else:
            self.job.output.write(done.number, answer, failed=False)

    def _line(self, task: Any, done: Done) -> str:
        """Returns the output line of a record whose results are all there. Raises InputError where `finish` does."""
        results = [finish(task, note, values) for note, values in done.items]
        return dumps(self.job.adapter.line(done.number, done.meta, results))


def run_beside(job: Job, stopping: Callable[[], bool]) -> bool:
    """Runs a job on an engine that others use too, from any thread; returns whether all its lines are written.

    What is done is committed when this returns or raises; the output stays open, and is not marked as ended.

    stopping  asked after every step: once it says so, this returns False
    """
    flow = Flow(job, Counts())
    try:
        flow.reader.start()
        engine = job.load().engine
        for batch in flow.reader.batches():
            with batch.spool or nullcontext():
                if not flow.compute(engine, batch, stopping=stopping):
                    return False
        flow.check()
        return not stopping()
    finally:
        flow.reader.close()
        job.output.commit()
