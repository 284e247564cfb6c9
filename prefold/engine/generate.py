"""The generator: makes one step after the other for all open requests, in the slots of the KV store. No torch.

It generates text and reads values. Any thread may add or cancel a request. The engine's thread makes the steps:

    admit -> plan -> start the step on the worker -> begin      `step`, `_start_step`
    result of the oldest step in flight -> commit -> answers    `_finish_oldest`

Only the open requests and the tokens of their samples are primary state. If a step fails after its rows were booked,
the scheduler's books are rebuilt from the open requests: no step is in flight then, the cache is empty, and all rows
are computed again.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..errors import InputError
from ..spec.requests import GenerationStats, Owner, Readout, Request, Sharing
from ..text import Tokenizer
from .messages import Change, InFlightStep, is_known, message_of
from .meter import Meter, StepBudget, StepInfo
from .pace import StepPace, StepPolicy
from .protocol import EngineOptions
from .requests import Answer, OpenRequest, Reader, RequestBuilder, check_asked
from .samples import OnText
from .schedule.admission import InOrder
from .schedule.generate_step import NO_OWNER, GenerateStep
from .schedule.parts import EnginePart, hooks, make_scheduler
from .worker import Worker


class Generator:
    """Runs requests by continuous batching.

    Args:
        worker: Computes the steps, and holds the KV store.
        engine: The engine's options.
        budget: The maximum number of rows of a step.
        meter: Counts steps, rows, tokens and seconds.
        parts: The parts that features add to the engine.
    """

    def __init__(
        self, worker: Worker, engine: EngineOptions, budget: StepBudget, meter: Meter, parts: Sequence[EnginePart] = ()
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
        self.depth = worker.facts.slot_depth
        self._budget, self._meter = budget, meter
        check = partial(check_asked, parts)
        self._builder = RequestBuilder(worker.facts, engine.eos_ids, reserve=options.reserve_output, check=check)
        self._keys = itertools.count()
        self._new: deque[OpenRequest] = deque()  # added by any thread, not yet submitted to the scheduler
        self._cancelled: deque[int] = deque()  # keys that any thread cancelled, not yet ended
        self.open: dict[int, OpenRequest] = {}
        self.on_hold: dict[int, OpenRequest] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self._holds_requests = False  # True: added or cancelled requests wait for now
        self._change = Change(self._rebuild_books)
        self._has_failed = False  # the last step raised an error
        self._last: InFlightStep | None = None  # the step started last; None if a request has ended since
        self._finished_at = 0.0  # time.perf_counter() at the end of the last step
        self._pace = StepPace(self.scheduler, budget)

    # ------------------------------------------------------------------------------------------------- requests

    def new_key(self) -> int:
        """Return a key that no other request of this generator has."""
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
        owner: Owner = NO_OWNER,
        again: bool = False,
    ) -> int:
        """Add a request, and return its key.

        Args:
            on_done: Called with the answer: a list with a Generated per sample, the Result of a `readout`, the
                InputError of an invalid request, or the error of the steps that fail because of the request. It is
                called from a step, or before `add` returns, and must not raise.
            on_text: Called with every piece of text.
            readout: The read-out of a request that is not continued; None for generation.
            sharing: The request shares rows with others; None: as set by the engine's options.
            key: A key from `new_key`; None: a new one.
            owner: The tenant and the class (interactive or batch) of the request.
            again: The request is a twin: another read of a prompt that is counted already (see `Window.twins`).
        """
        key = self.new_key() if key is None else key
        sharing = self.sharing if sharing is None else sharing
        try:
            if readout is None:
                check_sharing(self._sharing)
            new = self._builder.build(
                key, request, tokenizer, on_done, on_text, readout=readout, sharing=sharing, owner=owner
            )
        except InputError as error:
            on_done(error)
        else:
            new.again = again
            self._new.append(new)
        return key

    def cancel(self, *keys: int) -> None:
        """End requests before the next step; keys of ended requests are ignored.

        Samples are answered with the tokens so far and finish_reason "cancelled". A request for values gets no answer.
        """
        self._cancelled.extend(keys)

    @property
    def open_keys(self) -> list[int]:
        """The keys of the requests that take part in steps: submitted, not answered, not on hold."""
        return list(self.open)

    def progress(self, keys: Iterable[int]) -> dict[int, int | None]:
        """Return {key: total tokens of the request's samples}; None for a request that is not open."""
        return {key: sum(len(r.tokens) for r in self.open[key].readers) if key in self.open else None for key in keys}

    def hold(self, *keys: int) -> None:
        """Keep open requests out of steps until `release`. Their samples keep their tokens."""
        with self._change:
            for key in keys:
                if key in self.open:
                    self.scheduler.cancel(key)
                    self.on_hold[key] = self.open.pop(key)

    def release(self, *keys: int) -> None:
        """Let requests on hold continue; without keys, all of them."""
        with self._change:
            for key in keys or list(self.on_hold):
                if key in self.on_hold:
                    self.open[key] = self.on_hold.pop(key)
                    self._submit(self.open[key])

    def end(self, key: int, answer: Answer | Exception) -> None:
        """End an open request with this answer."""
        with self._change:
            self._end_requests({key: answer})

    def end_all(self, error: Exception) -> None:
        """Answer all requests with an error, and empty the books, because the error left them in an unknown state."""
        for request in (*self._new, *self.open.values(), *self.on_hold.values()):
            request.on_done(error)
            self._forget(request.key)
        for requests in (self._new, self._cancelled, self.open, self.on_hold, self.in_flight):
            requests.clear()
        self.scheduler.clear()
        self._change.is_open = False

    def set_step_policy(self, policy: StepPolicy | None) -> None:
        """Admit requests and size steps by a policy from now on.

        With None, requests run in order of arrival, and a step has as many rows as there are, within the budget.
        """
        self._pace.policy = policy
        self.scheduler.admit_by(InOrder() if policy is None else policy.admission)
        self._pace.reset()
        if policy is not None:
            policy.admission.read_shares(self.scheduler.cache)

    @contextmanager
    def holding_requests(self) -> Iterator[None]:
        """Return a context in which steps serve only the requests that are open now, ignoring the step policy.

        Requests that are added or cancelled meanwhile wait until the context ends.
        """
        with self._pace.without_policy():
            self._holds_requests = True
            try:
                yield
            finally:
                self._holds_requests = False

    @property
    def has_work(self) -> bool:
        """True if a request is open or waits to be ended, or a step is in flight."""
        return bool(self._new or self._cancelled or self.open or self.in_flight)

    @property
    def num_waiting(self) -> int:
        """The number of requests not yet submitted and sequences not yet admitted."""
        return len(self._new) + self.scheduler.num_waiting

    def take_in(self) -> None:
        """Submit the added requests, and end the cancelled ones."""
        if self._holds_requests or not (self._new or self._cancelled):
            return
        with self._change:
            while self._new:
                request = self._new.popleft()
                self.open[request.key] = request
                self._submit(request)
            while self._cancelled:
                self._cancel(self._cancelled.popleft())

    def _cancel(self, key: int) -> None:
        self.scheduler.cancel(key)
        request = self.open.pop(key, None) or self.on_hold.pop(key, None)
        if request is None:
            return
        self._forget(key)
        for reader in request.readers:
            reader.cancel()
        if request.is_done:  # a request for values is not done, and gets no answer
            request.on_done(request.answer())

    def _submit(self, new: OpenRequest) -> None:
        own: dict[str, Any] = {"namespace": new.namespace}
        for submit in self._on_submit:
            own |= submit(new)
        try:
            self.scheduler.submit(
                new.key,
                new.rows,
                limit=new.limit,
                reserve=new.reserve,
                priority=new.request.priority,
                outputs={reader.number: reader.tokens for reader in new.readers if not reader.is_done},
                owner=new.owner,
                **own,
            )
        except InputError as error:
            self._answer(new, error)

    def _answer(self, request: OpenRequest, answer: Answer | Exception) -> None:
        """Give a request its answer; the request is no longer open."""
        self.open.pop(request.key, None)
        self._forget(request.key)
        request.on_done(answer)

    def _forget(self, key: int) -> None:
        self._last = None
        for forget in self._on_forget:
            forget(key)

    def _end_requests(self, answers: Mapping[Any, Answer | Exception]) -> None:
        """End requests that cannot continue: `answers` maps their keys to their answers."""
        for key, answer in answers.items():
            self.scheduler.cancel(key)
            if key in self.open:
                self._answer(self.open[key], answer)

    def _rebuild_books(self) -> None:
        """Rebuild the scheduler's books from the open requests."""
        self._change.is_open = True
        self.in_flight.clear()
        self.scheduler.clear()
        for request in list(self.open.values()):
            if request.is_done:
                self._answer(request, request.answer())
            else:
                self._submit(request)
        self._change.is_open = False

    # --------------------------------------------------------------------------------------------------- a step

    def step(self) -> bool:
        """Make one step, and answer the requests that it ends. Return False if there was nothing to run."""
        if self._meter.stats.generation is None:  # in the first step, and after a reset of the counters
            self._meter.stats.generation = self.scheduler.stats = GenerationStats()
        has_failed, self._has_failed = self._has_failed, True
        # After a failure the worker may have lost parts of a step, so no step may depend on tokens still in flight.
        while self.in_flight and (has_failed or len(self.in_flight) >= self.depth):
            self._finish_oldest()
        start = time.perf_counter()
        self._pace.before_admission()
        self.take_in()
        with self._change:
            for key, error in self.scheduler.admit(self._pace.limits):
                if key in self.open:
                    self._answer(self.open[key], error)
            self._pace.before_plan()
            for before_plan in self._before_plan:
                self._end_requests(before_plan(self.scheduler, self.open))
            step = self.scheduler.plan(self._pace.limits)
        has_moved = bool(self.in_flight) or step is not None or any(part.is_waiting for part in self._parts)
        readers = () if step is None else self._readers(step)
        if self.in_flight and (step is None or not is_known(step, readers)):
            self._finish_oldest()  # plan the step again, with the tokens that its sampling needs
        elif step is not None:
            self._start_step(step, readers, start)
        for after_plan in self._after_plan:
            if answers := after_plan(None if step is None else step.num_rows, time.perf_counter() - start):
                with self._change:
                    self._end_requests(answers)
        self._has_failed = False
        return has_moved

    def _start_step(self, step: GenerateStep, readers: Sequence[Reader], started_at: float) -> None:
        message = message_of(self.worker.facts, step, readers, self._on_message, before=self._last)
        planned_at = time.perf_counter()
        ticket = self._budget.start(self.worker, message, step.num_rows)
        if ticket is None:
            self._pace.shrink()
            return
        seconds = planned_at - started_at, time.perf_counter() - planned_at
        with self._change:
            self.scheduler.begin(step)
            self._last = InFlightStep(step, message, readers, ticket, started_at, *seconds)
            self.in_flight.append(self._last)
        # If no further step can be planned, finish the last one at once: nothing else would fetch its tokens.
        while len(self.in_flight) >= self.depth or (self.in_flight and not self.scheduler.can_plan):
            self._finish_oldest()

    def _readers(self, step: GenerateStep) -> Sequence[Reader]:
        if step.message.follows and self._last is not None:
            return self._last.readers
        return [self.open[sequence.key].readers[sequence.sample] for sequence in step.consumers]  # type: ignore[index]

    def _finish_oldest(self) -> None:
        """Wait for the oldest step in flight, give its results to the readers, and answer the requests that end."""
        oldest, waiting = self.in_flight[0], time.perf_counter()
        try:
            result = oldest.ticket.result()
        except BaseException:  # all steps in flight are lost, including the K/V of their rows
            self._rebuild_books()
            raise
        oldest.model += time.perf_counter() - waiting
        tokens = result.ids.tolist()
        stats = self.scheduler.stats
        before = stats.recomputed_rows + stats.discarded_rows
        with self._change:
            self.in_flight.popleft()
            ended, failures = oldest.take(result, tokens, stats)
            self.scheduler.commit(oldest.step, tokens, ended, result)
            answered = self._answer_done(oldest.step, ended) if True in ended else (0, 0)
            self._end_requests(failures)
        repeated_rows = stats.recomputed_rows + stats.discarded_rows - before
        self._count(oldest, *answered, repeated_rows)

    def _answer_done(self, step: GenerateStep, ended: Sequence[bool]) -> tuple[int, int]:
        """Answer the requests that end with a step. Return their number, and their total tokens."""
        requests = tokens = 0
        for sequence, ends in zip(step.consumers, ended, strict=True):
            request = self.open.get(sequence.key) if ends else None  # type: ignore[call-overload]
            if request is None:
                continue
            if sequence.sample == 0:
                request.cached_tokens = sequence.cached_tokens or 0
            if request.is_done:
                if not request.again:
                    requests, tokens = requests + 1, tokens + request.num_tokens
                self._answer(request, request.answer())
        return requests, tokens

    def _count(self, flight: InFlightStep, requests: int, tokens: int, repeated_rows: int) -> None:
        """Count a step, and notify the listeners. `repeated_rows` of its rows had been computed before."""
        step, rows = flight.step, flight.step.num_rows
        spent = {"plan": flight.plan, "model": flight.model, "compile": self.worker.compile_seconds()}
        self._meter.add_step(rows, rows - repeated_rows, tokens, spent)
        # Steps in flight overlap, so the time of a step starts no earlier than the end of the previous step.
        started_at, self._finished_at = max(flight.started_at, self._finished_at), time.perf_counter()
        seconds = self._finished_at - started_at
        self._pace.note(step.num_rows, seconds)
        if self._meter.has_listeners:
            path_rows = sum(step.message.run_count.tolist()) - step.num_rows
            info = StepInfo(rows, path_rows, requests, tokens, started_at, seconds, step.decode_rows)
            self._meter.notify(info)


def check_sharing(sharing: Sharing) -> None:
    """Raise InputError if text cannot be generated with this sharing."""
    if sharing == "mlp":
        raise InputError("generation supports only sharing full or off", field="sharing", remedy="use one of them")
