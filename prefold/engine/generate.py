"""Generation: requests in, samples out, one step at a time."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..cache import SlotPool
from ..device import free_cached, on
from ..errors import InputError
from ..schedule.generate import GenerateScheduler
from ..schedule.generate_step import GenerateStep, Running
from ..schedule.steps import MakeStore
from ..text import Tokenizer
from ..text.detokenize import Detokenizer
from ..text.grammar import GrammarCompiler
from ..types import Generated, GenerateRequest, GenerationStats, Readout, Request, Result, Stats
from ..worker.attend import heads_of
from ..worker.budget import count_compiling, kv_bytes, slot_bytes
from ..worker.graphs import DecodeGraphs
from ..worker.local import LocalWorker
from ..worker.picks import Flight, Reader, can_start, choose, start
from ..worker.probes import Probe
from ..worker.runner import Reads
from ..worker.sampler import Choice, Sampler
from ..worker.samples import Sample
from ..worker.slots import SlotAttend, make_store, prepare_slots, slot_step
from ..worker.team import Team
from .options import GenerateOptions

__all__ = ["Generator"]

Answer = list[Generated] | InputError


@dataclass(eq=False, slots=True)
class _Job:
    """A request on its way."""

    request: GenerateRequest
    samples: list[Sample]
    on_done: Callable[[Answer], None]
    missing: int
    cached_tokens: int = 0


class Generator:
    """Continuous batching of any requests, as they are added, from any thread.

    sharing   whether requests share rows
    worker    whose model, adapters and KV store are used; requests of two adapters share nothing
    stats     what to add to
    on_step   called with (step, when it began, requests it ended, rows they would have had alone)
    """

    def __init__(
        self,
        worker: LocalWorker | Team,
        options: GenerateOptions,
        *,
        sharing: bool,
        max_batch_rows: int,
        eos_ids: Sequence[int],
        stats: Callable[[], Stats],
        on_step: Callable[[GenerateStep, float, int, int], None] | None = None,
    ):
        local = worker.local if isinstance(worker, Team) else worker
        self.model = model = local.model
        self.options = options
        self._sharing = sharing
        self.eos_ids = tuple(eos_ids)
        self.adapters = adapters = local.adapters
        self.worker = worker
        self.slot_bytes = slot_bytes(model)
        slots = max(1, kv_bytes(options.kv_memory, model.device, model.ranks.size) // self.slot_bytes - 1)
        with worker.turn(MakeStore(slots + 1)):
            self.store = make_store(model, slots + 1)
        self.scheduler = GenerateScheduler(
            SlotPool(slots),
            max_batch_rows=max_batch_rows,
            max_running=options.max_running,
            cache=options.cache,
        )
        alone_on_gpu = model.device.type == "cuda" and model.ranks.size == 1 and not adapters
        self._graphs = DecodeGraphs(model, self.store) if options.graphs and alone_on_gpu else None
        self._stats = stats
        self._on_step = on_step
        self._sampler = Sampler()
        # A step is planned while the one before runs, and its tokens are still on the device.
        self._looks_ahead = model.device.type == "cuda" and model.ranks.size == 1
        self._flights: deque[Flight] = deque()  # at most two, and two within a step only
        self._finished = 0.0  # when the last step was
        self._again = 0  # rows counted that had been computed before, or were in vain
        self._jobs: dict[int, _Job | Probe] = {}
        self._keys = itertools.count()
        self._texts: _Texts | None = None
        self._lock = threading.RLock()

    def add(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer | None,
        on_done: Callable[[Answer], None],
        on_text: Callable[[int, str], None] | None = None,
        *,
        sharing: bool | None = None,
    ) -> int | None:
        """Take a request; returns its key. on_done is called once, from `step` or from here, with a Generated a
        sample, or with what is wrong with the request. on_text is called with (sample, piece of its text). sharing:
        whether it shares rows with others; None: as the generator does."""
        with self._lock:
            return self._add(request, tokenizer, on_done, on_text, self._sharing if sharing is None else sharing)

    def _add(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer | None,
        on_done: Callable[[Answer], None],
        on_text: Callable[[int, str], None] | None,
        sharing: bool,
    ) -> int | None:
        key = next(self._keys)
        sampling = request.sampling
        try:
            room = self.model.config.max_positions - len(request.tokens)
            limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
            if limit < 1:
                raise InputError(
                    f"the prompt has {len(request.tokens)} tokens, the context {self.model.config.max_positions}",
                    field="prompt",
                    remedy="shorten it",
                    code="too_long",
                )
            if request.adapter is not None and request.adapter not in self.adapters:
                known = ", ".join(self.adapters) or "none"
                message = f"there is no adapter {request.adapter!r}"
                raise InputError(message, field="adapter", remedy=f"those loaded: {known}", code="unknown_adapter")
            texts = self._texts_of(tokenizer, request)
            matcher = None if sampling.grammar is None else texts.grammars.matcher(sampling.grammar)
            seed = secrets.randbits(53) if sampling.seed is None else sampling.seed
            samples = [
                Sample(
                    request, number, seed=seed, limit=limit, eos_ids=self.eos_ids, tokenizer=tokenizer,
                    detokenizer=None if tokenizer is None else texts.detokenizer,
                    matcher=matcher if matcher is None or number == 0 else matcher.copy(), on_text=on_text,
                )
                for number in range(sampling.n)
            ]  # fmt: skip
            self.scheduler.submit(
                key,
                request.tokens,
                limit=limit,
                samples=sampling.n,
                reserve=self.options.reserve_output and sampling.max_tokens is not None,
                namespace=(request.adapter, request.salt, *(() if sharing else (key,))),
                priority=request.priority,
            )
        except InputError as error:
            on_done(error)
            return None
        self._jobs[key] = _Job(request, samples, on_done, len(samples))
        return key

    def add_probe(
        self, request: Request, readout: Readout, on_done: Callable[[Result | InputError], None]
    ) -> int | None:
        """Take a prompt whose last row is read; returns its key. on_done is called once, from `step` or from here."""
        with self._lock:
            key = next(self._keys)
            try:
                self.scheduler.submit(key, request.tokens, limit=1, namespace=(request.adapter, ""))
            except InputError as error:
                on_done(error)
                return None
            self._jobs[key] = Probe(request, readout, on_done)
            return key

    def cancel(self, key: int) -> None:
        """End a request; its samples come as they are, with finish_reason "cancelled". Of a probe nothing comes."""
        with self._lock:
            job = self._jobs.pop(key, None)
            if job is None:
                return
            self.scheduler.cancel(key)
            if isinstance(job, Probe):
                return
            for sample in job.samples:
                sample.cancel()
        job.on_done([sample.result(job.cached_tokens) for sample in job.samples])

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def step(self) -> bool:
        """Run one step, and tell of what it ended; False when there was nothing to run."""
        with self._lock, on(self.model.device):
            return self._step()

    def _step(self) -> bool:
        scheduler, stats = self.scheduler, self._stats()
        if stats.generation is None:
            stats.generation = scheduler.stats = GenerationStats()
            scheduler.rows_held_peak = scheduler.rows_unshared_peak = self._again = 0
        if len(self._flights) > 1:  # when the first was to be landed, Ctrl-C came
            self._land()
        started = time.perf_counter()
        self._tell_failed(scheduler.admit())
        step = scheduler.plan()
        if self._flights and (step is None or not self._can_start(step)):
            self._land()  # to be planned anew, with the tokens that it cannot do without
            return True
        if step is None:
            return False
        tell = None
        try:
            tell = self._run(step, started)
        except torch.OutOfMemoryError:
            if not self._shrink(step):
                raise
        if tell is None:  # not while the error is handled: it holds what the failed step made
            free_cached(self.model.device)
            return True
        tell()
        if self._flights and not scheduler.can_plan:  # nobody may come to ask for its tokens
            self._land()
        return True

    def _run(self, step: GenerateStep, started: float) -> Callable[[], object]:
        """Give a step to the device. Returns what tells of its tokens, or of those of the step before."""
        stats, before = self._stats(), self._flights[-1] if self._flights else None
        forward = self._forward(step, None if before is None else before.ids)
        planned = time.perf_counter()
        stats.add_seconds("plan", planned - started)
        readers = [self._reader(running) for running, _ in step.reads]
        head = any(reader is not None and reader.needs_logits for reader in readers)
        with self.worker.turn(slot_step(step, self.adapters, head)):
            with torch.inference_mode():
                hidden = forward()
            if self._can_start(step):
                ids = start(self.model, self._sampler, hidden, step, readers)
                flight = Flight(step, ids, Reads(ids), readers, started)
                self.scheduler.begin(step)
                self._flights.append(flight)
                stats.add_seconds("model", time.perf_counter() - planned)
                return self._land if before is not None else lambda: None
            choice, seconds = choose(self.model, self._sampler, hidden, step, readers, head=head)
        stats.add_seconds("model", time.perf_counter() - planned - seconds)
        stats.add_seconds("sample", seconds)
        self.scheduler.begin(step)
        return partial(self._finish, step, readers, choice, started)

    def _shrink(self, step: GenerateStep) -> bool:
        """Memory has run out in a step: later ones have at most half of its rows. False where nothing can be halved."""
        if step.num_rows < 2 or self.model.ranks.size > 1:
            return False
        self.scheduler.max_batch_rows = step.num_rows // 2
        return True

    def _forward(self, step: GenerateStep, given: Tensor | None) -> Callable[[], Tensor]:
        """What gives the hidden states of the rows that are read. given: tokens of the step before, on the device,
        where they are not known yet."""
        if self._graphs is not None and self._graphs.takes(step):
            return partial(self._graphs.run, step, given)
        config, device = self.model.config, self.model.device
        batch = prepare_slots(step, config.planes, heads_of(self.model), device, self.adapters, given)
        attend = SlotAttend(self.store, batch, config.planes, config.scale)
        return partial(self.model, batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters)

    def _reader(self, running: Running) -> Reader:
        job = self._jobs.get(running.key)
        if job is None or running.state == "ended":
            return None
        return job if isinstance(job, Probe) else job.samples[running.sample]

    def _can_start(self, step: GenerateStep) -> bool:
        readers = (self._reader(running) for running, _ in step.reads)
        return self._looks_ahead and can_start(self.model.device, readers)

    def _land(self) -> None:
        """Give the tokens of the step that has been in flight longest to their samples."""
        started = time.perf_counter()
        flight = self._flights[0]
        choice = flight.choice()
        self._flights.popleft()
        self._stats().add_seconds("model", time.perf_counter() - started)
        self._finish(flight.step, flight.readers, choice, flight.started)

    def _finish(self, step: GenerateStep, readers: list[Reader], choice: Choice, started: float) -> None:
        """Give the tokens to their samples, and count. started: when the step was; it counts from the end of the one
        before, if that came later.

        Where somebody who is told of a text raises an error, that text ends, all others get their tokens, and then the
        error is raised."""
        ended, failure = self._take(step, readers, choice)
        done, tokens = self._tell_ended(
            self.scheduler.commit(step, [max(token or 0, 0) for token in choice.ids], ended)
        )
        self._account(step)
        if self._on_step is not None:
            self._on_step(step, max(started, self._finished), done, tokens)
        self._finished = time.perf_counter()
        if failure is not None:
            raise failure

    def _take(
        self, step: GenerateStep, readers: list[Reader], choice: Choice
    ) -> tuple[list[bool], BaseException | None]:
        """Which reads end with their token, and the first error of somebody who was told of a text."""
        ended: list[bool] = []
        failure: BaseException | None = None
        for (running, _), reader, token, one in zip(step.reads, readers, choice.ids, choice.logprobs, strict=True):
            if not isinstance(reader, Sample) or running.state == "ended" or reader.finish_reason is not None:
                ended.append(True)
                continue
            before = len(reader.tokens)
            try:
                ended.append(reader.take(token, one))
            except BaseException as error:  # Ctrl-C among them
                failure = failure or error
                reader.drop()
                ended.append(True)
            self.scheduler.stats.generated_tokens += len(reader.tokens) - before
        return ended, failure

    def _tell_ended(self, done: Sequence[Running]) -> tuple[int, int]:
        """Tell of requests that end with these sequences; returns how many they are, and their tokens."""
        requests = tokens = 0
        for running in done:
            job = self._jobs.get(running.key)
            if job is None:  # cancelled meanwhile
                continue
            if isinstance(job, Probe):
                del self._jobs[running.key]
                requests += 1
                tokens += len(job.request.tokens)
                assert job.result is not None
                job.on_done(job.result)
                continue
            job.missing -= 1
            if running.sample == 0:
                job.cached_tokens = running.cached_tokens or 0
            if not job.missing:
                del self._jobs[running.key]
                failed = next((sample.error for sample in job.samples if sample.error is not None), None)
                answer = failed or [sample.result(job.cached_tokens) for sample in job.samples]
                requests += 1
                tokens += sum(len(job.request.tokens) + max(0, len(sample.tokens) - 1) for sample in job.samples)
                job.on_done(answer)
        return requests, tokens

    def _tell_failed(self, failed: Sequence[tuple[Hashable, InputError]]) -> None:
        for key, error in failed:
            job = self._jobs.pop(key, None)  # type: ignore[call-overload]
            if job is not None:
                job.on_done(error)
            self.scheduler.cancel(key)

    def _account(self, step: GenerateStep) -> None:
        stats, generation, scheduler = self._stats(), self.scheduler.stats, self.scheduler
        count_compiling(stats, self.model.device)
        again = generation.recomputed_rows + generation.discarded_rows - self._again
        self._again += again
        stats.steps += 1
        stats.rows_computed += step.num_rows
        stats.unique_tokens += step.num_rows - again
        generation.kv_bytes_now = scheduler.pool.used_slots * self.slot_bytes
        generation.kv_bytes_peak = scheduler.rows_held_peak * self.slot_bytes
        generation.kv_bytes_unshared_peak = scheduler.rows_unshared_peak * self.slot_bytes

    def _texts_of(self, tokenizer: Tokenizer | None, request: GenerateRequest) -> Any:
        """What turns tokens into text, kept for the tokenizer used last."""
        if tokenizer is None:
            for field in ("stop", "grammar"):
                if getattr(request.sampling, field):
                    message = f"{field!r} needs a tokenizer, and the model has none"
                    raise InputError(message, field=field, remedy="leave it out", code="no_tokenizer")
            return None
        if self._texts is None or self._texts.tokenizer is not tokenizer:
            self._texts = _Texts(tokenizer, self.model.config.vocab_size, self.eos_ids)
        return self._texts


class _Texts:
    """A tokenizer, with what is made of it when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self._vocab_size, self._eos_ids = vocab_size, eos_ids

    @cached_property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, self._vocab_size, self._eos_ids)
