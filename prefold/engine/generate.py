"""Requests in the slots of a KV store: text that is generated, and numbers read beside it, a step at a time. No torch.

Any thread may add a request, end one, or take a turn at stepping; a step serves all requests, whoever asked for them.
`plan`, `start`, `begin`, `land` are a step's stations. An exception may break off any of them (Ctrl-C falls anywhere):
what a station does it may do again, so that the next step goes on where the last one was broken off.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cache import SlotPool
from ..errors import InputError
from ..schedule.generate import GenerateScheduler
from ..schedule.generate_step import GenerateStep, Running
from ..schedule.steps import MakeStore, Numbers, SlotResult, SlotStep
from ..text import Tokenizer
from ..types import GenerationStats, Readout, Request, Result
from ..worker.protocol import Ticket, Worker
from .meter import Meter, StepBudget, StepInfo
from .options import GenerateOptions
from .requests import Answer, Job, Maker, NumberReader, Reader
from .samples import Sample
from .sampling import drawing_of

__all__ = ["Generator"]


@dataclass(eq=False, slots=True)
class _Flight:
    """A step that the worker was given.

    readers  of its reads; None: who has ended meanwhile
    ended    of the reads that were taken, whether their sequences end there
    """

    step: GenerateStep
    message: SlotStep
    readers: list[Reader | None]
    ticket: Ticket
    started: float
    ended: list[bool] = field(default_factory=list)
    failure: Exception | None = None


class Generator:
    """Continuous batching of any requests, as they are added, from any thread.

    worker   whose KV store is used; requests of two of its adapters share nothing
    sharing  whether requests share rows where they do not say
    budget   rows of a step
    """

    def __init__(
        self,
        worker: Worker,
        options: GenerateOptions,
        *,
        sharing: bool,
        budget: StepBudget,
        eos_ids: Sequence[int],
        meter: Meter,
    ):
        self.worker = worker
        self.options = options
        self.sharing = sharing
        slots = worker.kv_slots(options.kv_memory)
        worker.start(MakeStore(slots + 1)).result()
        self.scheduler = GenerateScheduler(
            SlotPool(slots), max_batch_rows=budget.rows, max_running=options.max_running, cache=options.cache
        )
        self.depth = worker.facts.slot_depth
        self._budget, self._meter = budget, meter
        self._maker = Maker(worker.facts, eos_ids, reserve=options.reserve_output)
        self._adapters = {name: i for i, name in enumerate(worker.facts.adapters)}
        self._jobs: dict[int, Job] = {}
        self._new: deque[Job] = deque()
        self._left: deque[int] = deque()
        self._keys = itertools.count()
        self._flights: deque[_Flight] = deque()
        self._is_broken = False  # or a step is being made
        self._finished = 0.0  # when the last step was
        self._again = 0  # rows counted that had been computed before, or were in vain
        # Who steps. Others wait until something has come to their inbox, or it is free.
        self.turn = threading.RLock()
        self.inboxes: dict[Any, None] = {}

    # ------------------------------------------------------------------------------------------- what is asked

    def new_key(self) -> int:
        return next(self._keys)

    def add(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        on_done: Callable[[Answer], None],
        on_text: Callable[[int, str], None] | None = None,
        *,
        readout: Readout | None = None,
        sharing: bool | None = None,
        key: int | None = None,
    ) -> int:
        """Take a request; returns its key. on_done is called from a step, or from here, with a Generated a sample, with
        the Result of a `readout`, or with what is wrong with the request; where a step is broken off perhaps twice.
        on_text is called with (sample, piece of its text).

        readout  what is read at the last row of a request that is not continued
        sharing  whether it shares rows with others; None: as the generator does
        key      from `new_key`; None: a new one
        """
        key = self.new_key() if key is None else key
        shares = self.sharing if sharing is None else sharing
        try:
            if request.sampling is None:
                assert readout is not None
                job = self._maker.numbers(key, request, readout, on_done, sharing=shares)
            else:
                job = self._maker.samples(key, request, tokenizer, on_done, on_text, sharing=shares)
        except InputError as error:
            on_done(error)
        else:
            self._new.append(job)
        return key

    def cancel(self, *keys: int) -> None:
        """End requests, where they are still there; samples come as they are, with finish_reason "cancelled". Done at
        once, or before the next step where another thread is making one."""
        self._left.extend(keys)
        if self.turn.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self.turn.release()

    def wake_another(self, inbox: Any) -> None:
        """Wake somebody else who may wait for a turn."""
        with suppress(RuntimeError):  # somebody comes or goes in this moment, and will step
            next((other for other in self.inboxes if other is not inbox and other.wake()), None)

    @property
    def has_work(self) -> bool:
        return bool(self._new) or self.scheduler.has_work

    @property
    def num_waiting(self) -> int:
        return len(self._new) + self.scheduler.num_waiting

    def _take_in(self) -> None:
        """Enter the requests that came, and end those that were left."""
        while self._new:
            job = self._new[0]
            self._jobs[job.key] = job
            request = job.request
            try:
                self.scheduler.submit(
                    job.key,
                    request.tokens,
                    limit=job.limit,
                    samples=len(job.readers),
                    reserve=job.reserve,
                    # What does not share is in a namespace of its own.
                    namespace=(request.adapter, request.salt, *(() if job.sharing else (job.key,))),
                    priority=request.priority,
                )
            except InputError as error:
                self._tell(job, error)
            self._new.popleft()
        left = tuple(self._left)
        if left:
            self.scheduler.cancel(*left)
        for key in left:
            job = self._jobs.get(key)
            if job is not None:
                for reader in job.readers:
                    reader.cancel()
                if job.is_done:  # of numbers nothing comes
                    self._tell(job, job.answer())
                self._jobs.pop(key, None)
            if self._left and self._left[0] == key:
                self._left.popleft()

    def _tell(self, job: Job, answer: Answer) -> None:
        """Tell of the end of a request. When that is interrupted, the job is still there and will be told again."""
        if job.is_telling:  # who is told ends the request once more
            return
        job.is_telling = True
        try:
            job.on_done(answer)
        except Exception:
            self._jobs.pop(job.key, None)
            raise
        finally:
            job.is_telling = False
        self._jobs.pop(job.key, None)

    # --------------------------------------------------------------------------------------------------- a step

    def step(self) -> bool:
        """Run one step, and tell of what it ended; False when there was nothing to run."""
        with self.turn:
            return self._step()

    def _step(self) -> bool:
        was_broken, self._is_broken = self._is_broken, True
        self._attach_stats()
        while self._flights and (was_broken or len(self._flights) >= max(2, self.depth)):
            self._land()
        started = time.perf_counter()
        self._take_in()
        for key, error in self.scheduler.admit():
            if key in self._jobs:
                self._tell(self._jobs[key], error)  # type: ignore[index]
            self.scheduler.cancel(key)
        step = self.scheduler.plan()
        moved = bool(self._flights) or step is not None
        if self._flights and (step is None or not self._is_known(step)):
            self._land()  # to be planned anew, with the tokens that it cannot do without
        elif step is not None:
            self._start(step, started)
        self._is_broken = False
        return moved

    def _start(self, step: GenerateStep, started: float) -> None:
        readers = [self._reader(running) for running, _ in step.reads]
        message = self._message(step, readers)
        planned = time.perf_counter()
        ticket = self._budget.start(self.worker, message, step.num_rows)
        if ticket is None:
            self.scheduler.max_batch_rows = min(self.scheduler.max_batch_rows, self._budget.rows)
            return
        self._meter.add(seconds={"plan": planned - started, "model": time.perf_counter() - planned})
        # Noted before it is booked: if that is broken off, `awaits` says whether it was.
        self._flights.append(_Flight(step, message, readers, ticket, started))
        self.scheduler.begin(step)
        # The last one is landed at once where nobody may come to ask for its tokens.
        while len(self._flights) >= self.depth or (self._flights and not self.scheduler.can_plan):
            self._land()

    def _reader(self, running: Running) -> Reader | None:
        job = self._jobs.get(running.key)  # type: ignore[call-overload]
        return None if job is None or running.state == "ended" else job.readers[running.sample]

    def _is_known(self, step: GenerateStep) -> bool:
        """Whether nothing in the choice of the step's tokens depends on tokens that are on their way."""
        for running, _ in step.reads:
            reader = self._reader(running) if running.unknown else None
            if isinstance(reader, Sample) and not reader.state.independent:
                return False
        return True

    def _message(self, step: GenerateStep, readers: Sequence[Reader | None]) -> SlotStep:
        states = [reader.state if isinstance(reader, Sample) else None for reader in readers]
        drawing = drawing_of(states, [running.unknown for running, _ in step.reads])
        adapters = None
        if self._adapters:
            adapters = np.full(step.num_rows, -1, np.int64)
            for namespace, first, stop in step.spans:
                adapters[first:stop] = self._adapters.get(namespace[0], -1)  # type: ignore[index]
        return SlotStep(
            step.tokens, step.positions, step.slots, step.run_start, step.run_count, step.run_position, step.run_first,
            step.run_last, step.read_rows, np.array([row for _, row in step.reads], np.int64), drawing,
            _numbers_of(readers), adapters,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------- what it brings

    def _land(self) -> None:
        """Give what the step that has been in flight longest has read to who reads it, and tell of what ends.

        Where somebody who is told of a text raises an error, that text ends, all others get their tokens, and then the
        error is raised."""
        flight, waiting = self._flights[0], time.perf_counter()
        step = flight.step
        if self.scheduler.awaits(step):
            try:
                result = flight.ticket.result()
            except Exception:  # what was in flight is lost, and with it the K/V of its rows
                self._flights.clear()
                self.scheduler.start_anew()
                raise
            self._meter.add(seconds={"model": time.perf_counter() - waiting})
            self._take(flight, result)
            self.scheduler.commit(step, np.maximum(result.ids, 0).tolist(), flight.ended)
        elif not flight.ended and step.reads:  # it was not begun
            self._flights.popleft()
            return
        requests, tokens = self._tell_ended(flight)
        self._flights.popleft()
        self._account(flight, requests, tokens)
        if flight.failure is not None:
            raise flight.failure

    def _take(self, flight: _Flight, result: SlotResult) -> None:
        step, stats = flight.step, self.scheduler.stats
        ids = result.ids.tolist()
        if not flight.ended:
            _give_numbers(flight, result)
        for i in range(len(flight.ended), len(ids)):
            running, reader, before = step.reads[i][0], flight.readers[i], step.tokens_before[i]
            ended = True
            if isinstance(reader, Sample) and running.state != "ended":
                had = len(reader.tokens)
                try:
                    ended = reader.take(before, None if ids[i] == -1 else ids[i], result.logprobs.get(i))
                except Exception as error:
                    flight.failure = flight.failure or error
                    reader.drop()
                stats.generated_tokens += len(reader.tokens) - had
            flight.ended.append(ended)

    def _tell_ended(self, flight: _Flight) -> tuple[int, int]:
        """Tell of requests that end with a step; returns how many they are, and their tokens."""
        requests = tokens = 0
        for (running, _), ended in zip(flight.step.reads, flight.ended, strict=True):
            job = self._jobs.get(running.key) if ended else None  # type: ignore[call-overload]
            if job is None:
                continue
            if running.sample == 0:
                job.cached_tokens = running.cached_tokens or 0
            if job.is_done:
                requests, tokens = requests + 1, tokens + job.tokens
                try:
                    self._tell(job, job.answer())
                except Exception as error:
                    flight.failure = flight.failure or error
        return requests, tokens

    def _attach_stats(self) -> None:
        stats = self._meter.stats
        if stats.generation is None:
            stats.generation = self.scheduler.stats = GenerationStats()
            self.scheduler.rows_held_peak = self.scheduler.rows_unshared_peak = self._again = 0

    def _account(self, flight: _Flight, requests: int, tokens: int) -> None:
        step, scheduler, generation = flight.step, self.scheduler, self.scheduler.stats
        again = generation.recomputed_rows + generation.discarded_rows - self._again
        self._again += again
        slot_bytes = self.worker.facts.slot_bytes
        generation.kv_bytes_now = scheduler.pool.used_slots * slot_bytes
        generation.kv_bytes_peak = scheduler.rows_held_peak * slot_bytes
        generation.kv_bytes_unshared_peak = scheduler.rows_unshared_peak * slot_bytes
        self._meter.add(
            seconds={"compile": self.worker.compile_seconds()},
            steps=1,
            rows_computed=step.num_rows,
            unique_tokens=step.num_rows - again,
            tokens=tokens,
        )
        # It counts from the end of the one before, if that came later than its start.
        started, self._finished = max(flight.started, self._finished), time.perf_counter()
        if self._meter.is_heard:
            path_rows = int(step.run_count.sum()) - step.num_rows
            seconds = self._finished - started
            info = StepInfo(step.num_rows, path_rows, requests, tokens, started, seconds, step.decode_rows)
            self._meter.tell(info)


def _numbers_of(readers: Sequence[Reader | None]) -> tuple[Numbers, ...]:
    """What of a step's reads are numbers, by readout."""
    found: dict[Readout, list[int]] = {}
    for i, reader in enumerate(readers):
        if isinstance(reader, NumberReader):
            found.setdefault(reader.readout, []).append(i)
    return tuple(
        Numbers(readout, np.array(reads, np.int64), np.array([readers[i].target or 0 for i in reads], np.int32))  # type: ignore[union-attr]
        for readout, reads in found.items()
    )


def _give_numbers(flight: _Flight, result: SlotResult) -> None:
    for asked, found in zip(flight.message.numbers, result.numbers, strict=True):
        for place, read in enumerate(asked.reads.tolist()):
            reader = flight.readers[read]
            assert isinstance(reader, NumberReader)
            if found.greedy is None:
                reader.result = Result(found.values[place].copy())
            else:
                reader.result = Result(found.values[place : place + 1].copy(), found.greedy[place : place + 1].copy())
