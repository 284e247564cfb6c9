"""Requests in the slots of a KV store: text that is generated, and numbers read beside it, a step at a time. No torch.

Any thread may add a request or cancel it; the engine's thread makes the steps, and a step serves all requests.

What cannot be derived are the open requests with the tokens that their samples have. Where a step fails whose rows were
booked, everything else (the scheduler's books) is made anew from the open requests: nothing is in flight then, all rows
are computed again, and the cache is empty.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import InputError
from ..schedule.admission import InOrder
from ..schedule.generate_step import NOBODY, GenerateStep, Running
from ..schedule.parts import EnginePart, hooks, make_scheduler
from ..text import Tokenizer
from ..types import GenerationStats, Owner, Readout, Request, Sharing
from ..worker.protocol import Worker
from .messages import Flight, is_known, message_of
from .meter import Meter, StepBudget, StepInfo
from .options import EngineOptions
from .pace import Pace
from .requests import Answer, Maker, OpenRequest, Reader
from .samples import OnText
from .step_size import StepRows


class Generator:
    """A Generator runs requests by continuous batching.

    worker   computes the steps, and holds the KV store
    budget   the most rows of a step
    meter    counts what is done
    parts    what features add to the engine
    """

    def __init__(
        self,
        worker: Worker,
        engine: EngineOptions,
        budget: StepBudget,
        meter: Meter,
        parts: Sequence[EnginePart] = (),
    ):
        self.worker = worker
        self.options = options = engine.generation
        self._sharing = engine.sharing
        self.sharing = engine.sharing == "full"
        self.scheduler: Any = make_scheduler(parts, worker, options, budget.rows)
        self._parts = parts
        self._on_submit, self._on_forget = hooks(parts, "submit"), hooks(parts, "forget")
        self._before_plan, self._after_plan = hooks(parts, "before_plan"), hooks(parts, "after_plan")
        self._on_message = hooks(parts, "message")
        self.depth = worker.facts.slot_depth if self.scheduler.makes_passes else 1
        self._budget, self._meter = budget, meter
        self._keeps = self.scheduler.makes_passes
        how: dict[str, Any] = {"checks": hooks(parts, "check"), "keeps": self._keeps}
        self._maker = Maker(worker.facts, engine.eos_ids, reserve=options.reserve_output, **how)
        self._keys = itertools.count()
        self._new: deque[OpenRequest] = deque()
        self._left: deque[int] = deque()
        self._open: dict[int, OpenRequest] = {}
        self._held: dict[int, OpenRequest] = {}
        self._flights: deque[Flight] = deque()
        self._is_undisturbed = False  # nobody comes or goes for now
        self._is_changing = False  # the books are being changed, or an exception left them half changed
        self._has_failed = False  # whether the last step raised an error
        self._finished = 0.0  # when the last step was
        # Where nobody says how many rows a step may have, it is found where the worker is one for which that helps.
        learns = engine.max_batch_rows is None and worker.facts.learns_rows and self.scheduler.makes_passes
        self._rows = StepRows(self.scheduler, budget, learns=learns)

    # ------------------------------------------------------------------------------------------- what is asked

    def new_key(self) -> int:
        """Returns a key for a request that no other request of this generator has."""
        return next(self._keys)

    def add(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        on_done: Callable[[Answer], None],
        on_text: OnText | None = None,
        *,
        readout: Readout | None = None,
        sharing: bool | None = None,
        key: int | None = None,
        owner: Owner = NOBODY,
        again: bool = False,
    ) -> int:
        """Takes a request, and returns its key.

        on_done  called with the answer: a list with a Generated for each sample, the Result of a `readout`, the
                 InputError that says what is wrong with the request, or the error of the steps that fail for it. It is
                 called from a step, or before `add` returns, and raises nothing
        on_text  called with every piece of a text
        readout  what is read of a request that is not continued
        sharing  whether the request shares rows with others; None: as the engine's options say
        key      from `new_key`; None: a new one
        owner    for whom it runs
        again    whether it is a further read of a prompt that another request counts (see `Window.twins`)
        """
        key = self.new_key() if key is None else key
        sharing = self.sharing if sharing is None else sharing
        try:
            if readout is None:
                check_sharing(self._sharing)
            one = self._maker.make(
                key, request, tokenizer, on_done, on_text, readout=readout, sharing=sharing, owner=owner
            )
        except InputError as error:
            on_done(error)
        else:
            one.again = again
            self._new.append(one)
        return key

    def cancel(self, *keys: int) -> None:
        """Ends those of the requests that are still there, before the next step.

        Their samples are told as they are, with finish_reason "cancelled"; of numbers nothing is told.
        """
        self._left.extend(keys)

    @property
    def open_keys(self) -> list[int]:
        """Of requests that were taken in, have no answer, and are not held."""
        return list(self._open)

    def owner_of(self, key: int) -> Owner:
        """Returns for whom an open request runs."""
        return self._open[key].owner if key in self._open else NOBODY

    def progress(self, keys: Iterable[int]) -> dict[int, int | None]:
        """Returns {key: tokens that its samples have}, None of a request that is not open."""
        return {key: sum(len(r.tokens) for r in self._open[key].readers) if key in self._open else None for key in keys}

    def hold(self, *keys: int) -> None:
        """Let open requests have no part in steps, until `release`; what their samples have stays."""
        with self._change():
            for key in keys:
                if key in self._open:
                    self.scheduler.cancel(key)
                    self._held[key] = self._open.pop(key)

    def release(self, *keys: int) -> None:
        """Let requests that were held go on where they were; without keys all of them."""
        with self._change():
            for key in keys or list(self._held):
                if key in self._held:
                    self._open[key] = one = self._held.pop(key)
                    self._submit(one)

    def end(self, key: int, answer: Answer | Exception) -> None:
        """Answer an open request, and do no more for it."""
        with self._change():
            self.scheduler.cancel(key)
            if key in self._open:
                self._tell(self._open[key], answer)

    def end_all(self, error: Exception) -> None:
        """Answers all requests with an error that left the books as nobody knows, and begins anew without them."""
        for one in (*self._new, *self._open.values(), *self._held.values()):
            one.on_done(error)
            self._forget(one.key)
        for some in (self._new, self._left, self._open, self._held, self._flights):
            some.clear()
        self.scheduler.clear()
        self._is_changing = False

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Returns a context in which the books are changed; where an exception left them half changed, they are made
        anew before."""
        if self._is_changing:
            self._begin_anew()
        self._is_changing = True
        yield
        self._is_changing = False

    @property
    def pace(self) -> Pace | None:
        """Returns what says how many rows a step may have; None: as many as there are, within the budget."""
        return self._rows.pace

    def set_pace(self, pace: Pace | None) -> None:
        """Admits and steps as a pace says from now on; None: as they come, with as many rows as there are."""
        self._rows.pace = pace
        self.scheduler.admit_by(InOrder() if pace is None else pace.admission)
        self._rows.reset()
        if pace is not None:
            pace.admission.read_shares(self.scheduler.cache)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Returns a context in which steps are made for the requests that are open, batches or not. Requests that are
        added or cancelled meanwhile wait for its end."""
        with self._rows.unpaced():
            self._is_undisturbed = True
            try:
                yield
            finally:
                self._is_undisturbed = False

    @property
    def has_work(self) -> bool:
        """Returns whether a request has no answer yet or is to be ended, or a step is in flight."""
        return bool(self._new or self._left or self._open or self._flights)

    @property
    def num_waiting(self) -> int:
        """Returns how many requests are still to be taken in, and sequences to be admitted."""
        return len(self._new) + self.scheduler.num_waiting

    def take_in(self) -> None:
        """Submits the requests that were added, and ends those that were cancelled."""
        if self._is_undisturbed or not (self._new or self._left):
            return
        with self._change():
            while self._new:
                one = self._new.popleft()
                self._open[one.key] = one
                self._submit(one)
            while self._left:
                self._cancel(self._left.popleft())

    def _cancel(self, key: int) -> None:
        self.scheduler.cancel(key)
        one = self._open.pop(key, None) or self._held.pop(key, None)
        if one is None:
            return
        self._forget(key)
        for reader in one.readers:
            reader.cancel()
        if one.is_done:  # of numbers nothing comes
            one.on_done(one.answer())

    def _submit(self, one: OpenRequest) -> None:
        request = one.request
        how: dict[str, Any] = {}
        for submit in self._on_submit:
            how |= submit(one)
        try:
            self.scheduler.submit(
                one.key,
                one.rows,
                limit=one.limit,
                reserve=one.reserve,
                namespace=one.namespace,
                priority=request.priority,
                made={reader.number: reader.tokens for reader in one.readers if not reader.is_done},
                owner=one.owner,
                **how,
            )
        except InputError as error:
            self._tell(one, error)

    def _tell(self, one: OpenRequest, answer: Answer | Exception) -> None:
        """Tells the answer to a request, which is then no longer open."""
        self._open.pop(one.key, None)
        self._forget(one.key)
        one.on_done(answer)

    def _forget(self, key: int) -> None:
        for forget in self._on_forget:
            forget(key)

    def _fail(self, failed: Mapping[Hashable, Exception]) -> None:
        """Ends requests that cannot go on, by their keys, each with its error."""
        for key, error in failed.items():
            self.scheduler.cancel(key)
            if key in self._open:
                self._tell(self._open[key], error)  # type: ignore[index]

    def _begin_anew(self) -> None:
        """Makes the scheduler's books anew from the open requests."""
        self._is_changing = True
        self._flights.clear()
        self.scheduler.clear()
        for one in list(self._open.values()):
            if one.is_done:
                self._tell(one, one.answer())
            else:
                self._submit(one)
        self._is_changing = False

    # --------------------------------------------------------------------------------------------------- a step

    def step(self) -> bool:
        """Makes one step, and tells of what it ended. Returns False when there was nothing to run."""
        self._attach_stats()
        has_failed, self._has_failed = self._has_failed, True
        # Of a step that could not be started the worker may have something: none is planned ahead on its tokens.
        while self._flights and (has_failed or len(self._flights) >= self.depth):
            self._land()
        started = time.perf_counter()
        self._rows.before_admission(is_idle=not self._open and not self._flights)
        self.take_in()
        with self._change():
            for key, error in self.scheduler.admit(self._rows.most):
                if key in self._open:
                    self._tell(self._open[key], error)  # type: ignore[index]
            self._rows.before_plan()
            for before_plan in self._before_plan:
                self._fail(before_plan(self.scheduler, self._open))
            step = self.scheduler.plan(self._rows.most)
        moved = bool(self._flights) or step is not None or any(part.is_waiting for part in self._parts)
        if self._flights and (step is None or not is_known(step, self._readers(step))):
            self._land()  # to be planned anew, with the tokens that it cannot do without
        elif step is not None:
            self._start(step, started)
        for after_plan in self._after_plan:
            if failed := after_plan(None if step is None else step.num_rows, time.perf_counter() - started):
                with self._change():
                    self._fail(failed)
        self._has_failed = False
        return moved

    def _start(self, step: GenerateStep, started: float) -> None:
        readers = self._readers(step)
        message = message_of(self.worker.facts, step, readers, self._on_message, keeps=self._keeps)
        planned = time.perf_counter()
        ticket = self._budget.start(self.worker, message, step.num_rows)
        if ticket is None:
            self._rows.shrink()
            return
        spent = {"plan": planned - started, "model": time.perf_counter() - planned}
        with self._change():
            self.scheduler.begin(step)
            self._flights.append(Flight(step, message, readers, ticket, started, spent))
        # The last one is landed at once where nobody may come to ask for its tokens.
        while len(self._flights) >= self.depth or (self._flights and not self.scheduler.can_plan):
            self._land()

    def _readers(self, step: GenerateStep) -> list[Reader]:
        return [self._open[running.key].readers[running.sample] for running in step.takers]  # type: ignore[index]

    # ------------------------------------------------------------------------------------------- what it brings

    def _land(self) -> None:
        """Waits for the step that has been in flight longest, gives what it read to the readers, and tells of what
        ends."""
        flight, waiting = self._flights[0], time.perf_counter()
        try:
            result = flight.ticket.result()
        except BaseException:  # what was in flight is lost, and with it the K/V of its rows
            self._begin_anew()
            raise
        flight.seconds["model"] += time.perf_counter() - waiting
        stats = self.scheduler.stats
        before = stats.recomputed_rows + stats.discarded_rows
        with self._change():
            self._flights.popleft()
            ended, failed = flight.take(result, stats)
            ids = np.maximum(result.ids, 0).tolist()
            done = self.scheduler.commit(flight.step, ids, ended, result)
            requests, tokens = self._tell_ended(flight, ended)
            self._fail(failed)
        again = stats.recomputed_rows + stats.discarded_rows - before
        self._account(flight, requests, tokens, again, done)

    def _tell_ended(self, flight: Flight, ended: Sequence[bool]) -> tuple[int, int]:
        """Tells of the requests that end with a step, and returns how many they are, and their tokens."""
        requests = tokens = 0
        for running, ends in zip(flight.step.takers, ended, strict=True):
            one = self._open.get(running.key) if ends else None  # type: ignore[call-overload]
            if one is None:
                continue
            if running.sample == 0:
                one.cached_tokens = running.cached_tokens or 0
            if one.is_done:
                if not one.again:
                    requests, tokens = requests + 1, tokens + one.num_tokens
                self._tell(one, one.answer())
        return requests, tokens

    def _attach_stats(self) -> None:
        stats = self._meter.stats
        if stats.generation is None:
            stats.generation = self.scheduler.stats = GenerationStats()

    def _account(self, flight: Flight, requests: int, tokens: int, again: int, done: list[Running]) -> None:
        step, rows = flight.step, flight.step.first_rows
        self._meter.add(
            seconds=flight.seconds | {"compile": self.worker.compile_seconds()},
            steps=1,
            rows_computed=rows,
            unique_tokens=rows - again,
            tokens=tokens,
        )
        # It counts from the end of the one before, if that came later than its start.
        started, self._finished = max(flight.started, self._finished), time.perf_counter()
        seconds = self._finished - started
        self._rows.note(step, seconds, done)
        if self._meter.is_heard:
            path_rows = sum(step.message.run_count.tolist()) - step.num_rows
            info = StepInfo(rows, path_rows, requests, tokens, started, seconds, step.decode_rows)
            self._meter.tell(info)


def check_sharing(sharing: Sharing) -> None:
    """Raises InputError for a sharing that no text is generated with."""
    if sharing == "mlp":
        raise InputError("text is generated with sharing full or off", field="sharing", remedy="use one of them")
