"""The loop: plan, run, commit, over the windows of a job."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from ..device import compile_seconds, free_cached, runs_triton
from ..errors import InputError
from ..model import Adapter, CausalLM
from ..prefix import common_prefix_lengths, lexsort_sequences
from ..schedule import PrefillScheduler
from ..schedule.generate_step import GenerateStep
from ..schedule.split import split
from ..stream import Window
from ..stream.options import decode_options
from ..text import Tokenizer
from ..types import GenerateRequest, Readout, Request, Result, Sharing, Stats
from ..worker.attend import Path, heads_of
from ..worker.batch import Batch, prepare
from ..worker.budget import count_compiling
from ..worker.probes import can_probe
from ..worker.runner import Output, Reads, Runner
from ..worker.team import Prefill, Solo
from .generate import Answer, GenerateOptions, Generator

__all__ = ["Engine", "StepInfo"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What one step did, for progress and the report.

    rows went through the model; tokens is what the prompts that ended here held; path_rows were
    carried in; seconds is the forward pass with its read-outs; started is time.perf_counter();
    running sequences got a token each.
    """

    rows: int
    path_rows: int
    requests_done: int
    tokens_done: int
    started: float
    seconds: float
    running: int = 0


class Engine:
    """Runs windows of requests through a model.

    generation  how `generate` holds K/V and runs; eos_ids: what ends a text; adapters: LoRA adapters by name
    team        the ranks that have parts of the model, when it is split
    cache_prefill  `run` uses and fills the cache of `generation` too, where it reads last rows only
    on_step     called after every step
    stopping    set it, and `generate` ends after the step that runs, having yielded what is done

    `stats` adds up over runs until it is replaced.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        sharing: Sharing = "full",
        max_batch_rows: int = 4096,
        on_step: Callable[[StepInfo], None] | None = None,
        generation: GenerateOptions = GenerateOptions(),  # noqa: B008
        eos_ids: Sequence[int] = (),
        adapters: Mapping[str, Adapter] | None = None,
        team: Solo = Solo(),  # noqa: B008
        cache_prefill: bool = False,
    ):
        if max_batch_rows < 1:
            raise ValueError(f"max_batch_rows must be at least 1, not {max_batch_rows}")
        self.model = model
        self.sharing = sharing
        self.max_batch_rows = max_batch_rows
        self.on_step = on_step
        self.stopping = False
        self.stats = Stats()
        self.generation = generation
        self.eos_ids = tuple(eos_ids)
        self.adapters = dict(adapters or {})
        self.team = team
        self.cache_prefill = cache_prefill
        self._runner = Runner(model)
        # A GPU has the next step to do while the results of one are taken.
        self._steps_ahead = int(model.device.type == "cuda")
        if runs_triton(model.device):
            compile_seconds()  # from here on they are this engine's

    def run(self, windows: Iterable[Window], readout: Readout) -> Iterator[tuple[bytes, Result]]:
        """Yield (tag, result) of every request, as the steps that end them come in.

        With sharing "full" the windows must be consecutive pieces of one stream (`Spool.windows`).
        """
        if self.cache_prefill and self.sharing == "full":
            for window in windows:
                if can_probe(window, readout):
                    yield from self._run_probes(window, readout)
                else:  # the path that the window before left behind is not there
                    yield from self._run_stream([replace(window, carried=0)], readout)
        else:
            yield from self._run_stream(windows, readout)

    def _run_stream(self, windows: Iterable[Window], readout: Readout) -> Iterator[tuple[bytes, Result]]:
        """`run` a step of the row stream at a time."""
        path = Path()
        current: _WindowResults | None = None
        begun: deque[_Begun] = deque()
        for window, batch in _ahead(self._batches(windows, readout)):
            if current is None or current.window is not window:
                current = _WindowResults(window, readout)
                path = path.truncate(window.carried if self.sharing == "full" else 0)
            started = time.perf_counter()
            steps = self._run_step(batch, path, readout, window)
            for part, reads, path in steps:
                begun.append(_Begun(current, part, reads, path, started))
                while len(begun) > self._steps_ahead:
                    yield from self._finish(begun.popleft())
                started = time.perf_counter()
        while begun:
            yield from self._finish(begun.popleft())

    def _finish(self, step: _Begun) -> Iterator[tuple[bytes, Result]]:
        output = step.reads.output()
        self._account(step.batch, step.path, step.results.window, step.started)
        yield from step.results.take(step.batch, output)

    def _run_step(
        self, batch: Batch, path: Path, readout: Readout, window: Window
    ) -> Iterator[tuple[Batch, Reads, Path]]:
        """One step; where a GPU's memory is too small for it, as halves, and later steps then are no larger."""
        left = [batch]
        while left:
            part = left.pop()
            try:
                with self.team.turn(Prefill(part.step, path.rows, readout)):
                    reads, path = self._runner.start(part, path, readout, window.targets)
            except torch.OutOfMemoryError:
                if part.step.stop - part.step.start < 2 or self.model.ranks.size > 1:
                    raise
                reads = None
            if reads is not None:
                yield part, reads, path
                continue
            # Not while the error is handled: it holds what the failed step made.
            self.max_batch_rows = max(1, min(self.max_batch_rows, part.step.num_rows // 2))
            free_cached(self.model.device)
            place = (self.model.config.planes, self.model.device, heads_of(self.model))
            left += [prepare(half, *place) for half in reversed(split(part.step))]

    def _run_probes(self, window: Window, readout: Readout) -> Iterator[tuple[bytes, Result]]:
        """`run` one window among what is generated, in the slots of its KV store."""
        generator = self.generator
        self.stats.requests += window.num_requests
        finished: deque[tuple[int, Result | InputError]] = deque()
        running: dict[int, int] = {}  # request to key
        too_large: list[int] = []
        try:
            for number in range(window.num_requests):
                tokens = window.tokens[window.offsets[number] : window.offsets[number + 1]]
                targets = window.targets[window.target_offsets[number] : window.target_offsets[number + 1]]
                request = Request(tokens, targets if len(targets) else None)
                key = generator.add_probe(request, readout, lambda result, n=number: finished.append((n, result)))
                if key is not None:
                    running[number] = key
            while running or finished:
                for number, result in _drain(finished):
                    running.pop(number, None)
                    if isinstance(result, InputError):
                        too_large.append(number)
                    else:
                        yield window.tags[number], result
                if running and not generator.step() and not finished:
                    raise AssertionError("requests wait, and no step can be made")
        finally:
            for key in running.values():
                generator.cancel(key)
        if too_large:
            self.stats.requests -= len(too_large)
            yield from self._run_stream([window.take(np.array(sorted(too_large)))], readout)

    @cached_property
    def generator(self) -> Generator:
        """What generates text; it holds the KV store, and is made when first asked for."""
        if self.sharing == "mlp":
            raise InputError("text is generated with sharing full or off", field="sharing", remedy="use one of them")
        return Generator(
            self.model,
            self.generation,
            sharing=self.sharing == "full",
            max_batch_rows=self.max_batch_rows,
            eos_ids=self.eos_ids,
            adapters=self.adapters,
            stats=lambda: self.stats,
            on_step=self._tell,
            team=self.team,
        )

    def generate(self, windows: Iterable[Window], tokenizer: Tokenizer | None) -> Iterator[tuple[bytes, Answer]]:
        """Yield (tag, a Generated a sample) of every request, as they end; (tag, InputError) for one that cannot run.

        The next window is taken in when few requests wait, so that its prompts join those that still run.
        """
        generator = self.generator
        finished: deque[tuple[bytes, Answer]] = deque()
        running: set[int] = set()
        requests = self._requests(windows)
        more = True
        try:
            while more or running or finished:
                # Others' requests may wait too: ours must not wait for theirs.
                while more and (not running or generator.num_waiting <= generator.options.max_running):
                    found = next(requests, None)
                    more = found is not None
                    if found is not None:
                        for tag, request in found:
                            self._add(generator, request, tokenizer, tag, running, finished)
                yield from _drain(finished)
                if self.stopping:
                    return
                if running and not generator.step() and not finished:
                    raise AssertionError("requests wait, and no step can be made")
        finally:
            for key in list(running):
                generator.cancel(key)

    @staticmethod
    def _add(
        generator: Generator,
        request: GenerateRequest,
        tokenizer: Tokenizer | None,
        tag: bytes,
        running: set[int],
        finished: deque[tuple[bytes, Answer]],
    ) -> None:
        keys: list[int] = []

        def done(answer: Answer) -> None:
            running.difference_update(keys)
            finished.append((tag, answer))

        key = generator.add(request, tokenizer, done)
        if key is not None:
            keys.append(key)
            running.add(key)

    def _requests(self, windows: Iterable[Window]) -> Iterator[list[tuple[bytes, GenerateRequest]]]:
        for window in windows:
            self.stats.requests += window.num_requests
            requests = []
            for i, tag in enumerate(window.tags):
                tokens = window.tokens[window.offsets[i] : window.offsets[i + 1]]
                requests.append((tag, decode_options(window.options[i], tokens)))
            yield requests

    def _tell(self, step: GenerateStep, started: float, requests: int, tokens: int) -> None:
        self.stats.tokens += tokens
        if self.on_step is not None:
            seconds = time.perf_counter() - started
            path_rows = int(step.run_count.sum()) - step.num_rows
            self.on_step(StepInfo(step.num_rows, path_rows, requests, tokens, started, seconds, step.decode_rows))

    def _batches(self, windows: Iterable[Window], readout: Readout) -> Iterator[tuple[Window, Batch]]:
        """Host work: every step of every window, planned and as tensors."""
        device = next(self.model.parameters()).device
        for window in windows:
            started = time.perf_counter()
            self.stats.requests += window.num_requests
            self.stats.tokens += window.num_tokens
            if readout.kind == "first":
                window = first_tokens(window)
            self.stats.unique_tokens += unique_tokens(window)
            scheduler = PrefillScheduler(window, readout, sharing=self.sharing, max_batch_rows=self.max_batch_rows)
            while (step := scheduler.plan()) is not None:
                scheduler.commit(step)
                scheduler.max_batch_rows = self.max_batch_rows  # of the next: it falls when memory runs out
                batch = prepare(step, self.model.config.planes, device, heads_of(self.model))
                self.stats.add_seconds("plan", time.perf_counter() - started)
                yield window, batch
                started = time.perf_counter()

    def _account(self, batch: Batch, path: Path, window: Window, started: float) -> None:
        step, seconds = batch.step, time.perf_counter() - started
        self.stats.rows_computed += step.num_rows
        self.stats.steps += 1
        self.stats.path_rows_peak = max(self.stats.path_rows_peak, path.rows)
        self.stats.add_seconds("model", seconds)
        count_compiling(self.stats, self.model.device)
        if self.on_step is not None:
            tokens = int((window.offsets[step.done + 1] - window.offsets[step.done]).sum())
            self.on_step(StepInfo(step.num_rows, step.path, len(step.done), tokens, started, seconds))


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that the device was given, with where its results go, and the path behind it."""

    results: _WindowResults
    batch: Batch
    reads: Reads
    path: Path
    started: float


class _WindowResults:
    """Gathers a window's read-outs; targets of one request may be read in several steps."""

    def __init__(self, window: Window, readout: Readout):
        self.window = window
        self.pairs = readout.kind == "logprobs"
        self.values = np.empty(len(window.targets), np.float32)
        self.greedy = np.empty(len(window.targets), bool)

    def take(self, batch: Batch, output: Output) -> Iterator[tuple[bytes, Result]]:
        step, window = batch.step, self.window
        if not self.pairs:
            for sequence, values in zip(step.done.tolist(), output.values, strict=True):
                yield window.tags[sequence], Result(values)
            return
        self.values[step.pair_targets] = output.values
        self.greedy[step.pair_targets] = output.greedy
        for sequence in step.done.tolist():
            targets = slice(window.target_offsets[sequence], window.target_offsets[sequence + 1])
            yield window.tags[sequence], Result(self.values[targets].copy(), self.greedy[targets].copy())


def _drain(items: deque[T]) -> Iterator[T]:
    while items:
        yield items.popleft()


def unique_tokens(window: Window) -> int:
    """Rows of the stream that begin with this window, as if it were shared in full."""
    if window.is_sorted:
        return window.unique_tokens
    order = lexsort_sequences(window.tokens, window.offsets)
    return window.num_tokens - int(common_prefix_lengths(window.tokens, window.offsets, order).sum())


def first_tokens(window: Window) -> Window:
    """The window with every prompt cut to its first token: in a causal model its row sees nothing else."""
    return replace(
        window,
        tokens=window.tokens[window.offsets[:-1]],
        offsets=np.arange(window.num_requests + 1, dtype=np.int64),
        carried=0,
        # The row is computed again where two windows share it, once a window at most.
        common=min(window.common, 1),
    )


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The items of an iterator, each made in a thread while the one before is in use."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefold-plan") as pool:
        future = pool.submit(next, items, None)
        while (item := future.result()) is not None:
            future = pool.submit(next, items, None)
            yield item
