"""The lane of batches: an engine, as a job sees it, on the thread of a server whose live requests go first.

Texts are generated beside those of live requests, in the same steps, and the policy of admission and the pace see to
it that they give way. Numbers are read in a stream of their own, when nothing live is there to do: a step stops between
two of its parts for as long as there is, and where that is always so, it gets a small share of the time. Of a looped
model whose rows leave, or take routes, numbers are read as texts are generated.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..engine.calls import serve
from ..engine.engine import Engine
from ..engine.loop import Background
from ..engine.meter import StepBudget
from ..engine.pace import Pace
from ..engine.probes import last_rows
from ..errors import InputError, OutOfMemoryError, RankError
from ..stream import Window
from ..text import Tokenizer
from ..types import Owner, Readout, Request, Result, Sharing
from .narrow import narrowed

__all__ = ["Lane"]


class Lane:
    """An engine for one job: `run` and `generate` as `Engine` has them, called from the job's thread.

    owner  for whom the job is run
    pace   says how large its steps may be, and how often they come
    """

    def __init__(self, engine: Engine, owner: Owner, pace: Pace):
        self._engine, self._owner, self._pace = engine, owner, pace

    @property
    def engine(self) -> Lane:
        """Returns this: a job asks what it loads for an engine."""
        return self

    @property
    def sharing(self) -> Sharing:
        return self._engine.sharing

    def generate(
        self,
        windows: Iterable[Window],
        tokenizer: Tokenizer | None,
        *,
        stopping: Callable[[], bool],
        on_step: Any = None,
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields (tag, a Generated a sample) of every request, as they end; (tag, InputError) for one that cannot run.
        A request whose step fails is (tag, InputError) too. Raises what no request is at fault for: RankError and
        OutOfMemoryError."""
        upcoming = ((window, i) for window in windows for i in range(window.num_requests))
        return self._in_slots(upcoming, tokenizer, stopping)

    def _in_slots(
        self,
        upcoming: Iterator[tuple[Window, int]],
        tokenizer: Tokenizer | None,
        stopping: Callable[[], bool],
        readout: Readout | None = None,
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields what becomes of requests in the slots of the KV store: of their texts, or of what is read of them."""
        answers = serve(
            self._engine,
            self._counted(upcoming),
            tokenizer,
            most=self._engine.options.generation.max_running,
            stopping=stopping,
            is_again=lambda place: bool(place[0].twins[place[1]]),
            readout=readout,
            owner=self._owner,
            failed=_internal_error,
        )
        with closing(answers):  # type: ignore[type-var]
            for (window, number), answer in answers:
                yield window.tags[number], answer

    def _counted(self, upcoming: Iterator[tuple[Window, int]]) -> Iterator[list[tuple[tuple[Window, int], Request]]]:
        for window, number in upcoming:
            self._engine.meter.add(requests=int(not window.twins[number]))
            yield [((window, number), window.request(number))]

    def run(
        self, windows: Iterable[Window], readout: Readout, *, stopping: Callable[[], bool], on_step: Any = None
    ) -> Iterator[tuple[bytes, Result | InputError]]:
        """Yields (tag, result) of every request, as the steps that end them come in; (tag, InputError) of one that
        cannot be read, or that steps fail for. Raises what no request is at fault for."""
        if self._engine.all_in_slots:
            upcoming = (tag for probes in last_rows(windows, readout) for tag, _ in probes or ())
            yield from self._in_slots(upcoming, None, stopping, readout)
            return
        left = iter(windows)
        first = next(left, None)  # here, since it sorts all of them
        if first is None:
            return
        read = partial(self._read, readout=readout, stopping=stopping)
        yield from narrowed(read, itertools.chain([first], left), stopping)

    def _read(
        self, windows: Iterable[Window], *, readout: Readout, stopping: Callable[[], bool]
    ) -> Iterator[tuple[bytes, Result | InputError]]:
        """Yields (tag, result) of every request. Raises what a step raises."""
        numbers = _BatchNumbers(self._engine, self._pace, windows, readout, stopping)
        self._engine.work_beside(numbers)
        try:
            while (event := numbers.came.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
                if numbers.came.empty():
                    self._engine.wake()
        finally:
            numbers.leave()


def _internal_error(error: Exception) -> InputError:
    return InputError(f"the step failed: {error}", remedy="send it again", code="internal_error")


class _Left(Exception):
    """Ends a step of a batch that nobody waits for any more."""


class _BatchNumbers(Background):
    """Numbers of a batch that are being read. All but `leave` is called by the engine's thread.

    A step is begun when the lines of the one before are made: they are made in Python, and a step that computes
    meanwhile waits for the interpreter at each of its operations.
    """

    def __init__(
        self,
        engine: Engine,
        pace: Pace,
        windows: Iterable[Window],
        readout: Readout,
        stopping: Callable[[], bool],
    ):
        self.came: SimpleQueue[Any] = SimpleQueue()  # (tag, result); an exception, or None, is the last
        self._engine, self._pace = engine, pace
        self._has_left, self._stopping = False, stopping
        self._is_in_step = False
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._began = time.perf_counter()  # when what it computes now was begun
        self._due_at = self._began
        facts = engine.worker.facts
        self._results = engine.run(
            windows,
            readout,
            cache_prefill=False,
            budget=StepBudget(
                engine.max_batch_rows,
                partial(pace.stream_rows, parts=facts.parts),
                least=max(1, facts.span_rows),
                before=self._wait_for_lines,
                between=self._give_way,
            ),
            on_step=self._between,
            stopping=self._is_stopping,
        )

    def leave(self) -> None:
        """Ends it, and waits until no step works for it any more."""
        self._has_left = True
        self._engine.wake()
        self._ended.get()

    def is_due(self) -> bool:
        return time.perf_counter() >= self._due_at

    def advance(self) -> bool:
        """Computes until the next result; live requests are served between steps. Returns whether there may be more."""
        self._is_in_step = True
        try:
            found = None if self._has_left else next(self._results, None)
        except _Left:
            self.came.put(None)
        except Exception as error:
            if isinstance(error, (RankError, OutOfMemoryError)):  # else a line may be at fault
                self._engine.note_failure(error)
            self.came.put(error)
        else:
            self.came.put(found)
            if found is not None:
                return True
        finally:
            self._is_in_step = False
        self._results.close()  # type: ignore[attr-defined]
        self._ended.put(None)
        return False

    def _between(self, step: Any) -> None:
        """Takes note of a step of the batch."""
        if self._is_in_step:  # else it is one of live requests
            self._engine.failure = None
            self._pace.stream_times.note(step.rows, step.seconds)
            self._give_way()

    def _is_stopping(self) -> bool:
        return self._has_left or self._stopping()

    def _give_way(self) -> None:
        """Serves live requests until there are none, or the batch's share is due. Raises _Left where the batch ends."""
        if self._is_stopping():
            raise _Left
        now = time.perf_counter()
        self._due_at = now + (now - self._began) * (1 / self._pace.batch_share - 1)
        self._is_in_step = False
        self._engine.serve_live(self._due_at)
        self._began, self._is_in_step = time.perf_counter(), True

    def _wait_for_lines(self) -> None:
        """Serves live requests until what the steps before have given is written, and then as `_give_way` does."""
        self._is_in_step = False
        self._engine.serve_live(self._due_at, waits=lambda: not (self._has_left or self.came.empty()))
        self._began, self._is_in_step = time.perf_counter(), True
