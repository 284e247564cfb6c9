"""The engine: what is asked of it becomes steps for its worker, and what these give results. No torch.

Numeric runs are in `stream.py`; here is what they share with text that is generated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..errors import InputError
from ..schedule.generate_step import GenerateStep
from ..stream import Window
from ..stream.options import decode_options
from ..text import Tokenizer
from ..types import Generated, GenerateRequest, Readout, Request, Result, Sharing, Stats
from ..worker.protocol import Worker
from .meter import Meter, StepBudget, StepInfo
from .options import EngineOptions
from .stream import run_stream

if TYPE_CHECKING:
    from .generate import Generator

__all__ = ["Engine"]

Answer = list[Generated] | InputError
T = TypeVar("T")


class Engine:
    """Runs requests on a worker: numeric runs, and text that is generated.

    Where runs of several threads come at once, their steps take turns.
    """

    def __init__(self, worker: Worker, options: EngineOptions = EngineOptions()):  # noqa: B008
        self.worker = worker
        self.options = options
        self.meter = Meter()
        self._budget = StepBudget(options.max_batch_rows or worker.facts.max_rows)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that requests may run with."""
        return self.worker.facts.adapters

    @property
    def sharing(self) -> Sharing:
        return self.options.sharing

    @property
    def max_batch_rows(self) -> int:
        """Rows of a step; falls when memory runs out."""
        return self._budget.rows

    @property
    def stats(self) -> Stats:
        """What was done since the engine was made, or since `reset_stats`."""
        return self.meter.stats

    def reset_stats(self) -> Stats:
        """Begin to count anew; returns what was counted until now."""
        return self.meter.reset()

    def run(
        self,
        windows: Iterable[Window],
        readout: Readout,
        *,
        sharing: Sharing | None = None,
        max_batch_rows: int | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
    ) -> Iterator[tuple[bytes, Result]]:
        """Yield (tag, result) of every request, as the steps that end them come in.

        With sharing "full" the windows must be consecutive pieces of one stream (`Spool.windows`).
        sharing, max_batch_rows  of this run; None: the engine's
        on_step                  called after every step of the engine, until the run ends
        """
        sharing = sharing or self.sharing
        how: dict[str, Any] = {"sharing": sharing, "meter": self.meter}
        how["budget"] = self._budget if max_batch_rows is None else StepBudget(max_batch_rows)
        with self.meter.heard_by(on_step):
            if not self.options.cache_prefill or sharing != "full":
                yield from run_stream(self.worker, windows, readout, **how)
                return
            for window in windows:
                if can_probe(window, readout):
                    yield from self._run_probes(window, readout)
                else:
                    yield from run_stream(self.worker, [window], readout, **how)

    def _run_probes(self, window: Window, readout: Readout) -> Iterator[tuple[bytes, Result]]:
        """`run` one window among what is generated, in the slots of its KV store."""
        generator = self.generator
        self.meter.add(requests=window.num_requests)
        finished: deque[tuple[int, Result | InputError]] = deque()
        running: dict[int, int] = {}  # request to key
        too_large: list[int] = []
        try:
            for number in range(window.num_requests):
                tokens = window.tokens[window.offsets[number] : window.offsets[number + 1]]
                targets = window.targets[window.target_offsets[number] : window.target_offsets[number + 1]]
                request = Request(tokens, targets if len(targets) else None, window.adapter)
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
            self.meter.add(requests=-len(too_large))
            windows = [window.take(np.array(sorted(too_large)))]
            yield from run_stream(self.worker, windows, readout, sharing="full", budget=self._budget, meter=self.meter)

    @cached_property
    def generator(self) -> Generator:
        """What generates text; it holds the KV store, and is made when first asked for."""
        _check_sharing(self.sharing)
        from .generate import Generator  # it still needs torch

        return Generator(
            self.worker,
            self.options.generation,
            sharing=self.sharing == "full",
            max_batch_rows=self.max_batch_rows,
            eos_ids=self.options.eos_ids,
            # Of the engine itself nothing: a circle would keep the model until the garbage collector comes by.
            stats=partial(getattr, self.meter, "stats"),
            on_step=partial(_tell, self.meter),
        )

    def generate(
        self,
        windows: Iterable[Window],
        tokenizer: Tokenizer | None,
        *,
        sharing: Sharing | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yield (tag, a Generated a sample) of every request, as they end; (tag, InputError) for one that cannot run.

        The next window is taken in when few requests wait, so that its prompts join those that still run.
        sharing   of this run's requests, "full" or "off"; None: the engine's
        on_step   called after every step of the engine, until the run ends
        stopping  asked after every step: once it says so, the run ends, having yielded what is done
        """
        with self.meter.heard_by(on_step):
            yield from self._generate(windows, tokenizer, sharing or self.sharing, stopping)

    def _generate(
        self, windows: Iterable[Window], tokenizer: Tokenizer | None, sharing: Sharing, stopping: Callable[[], bool]
    ) -> Iterator[tuple[bytes, Answer]]:
        _check_sharing(sharing)
        generator, shares = self.generator, sharing == "full"
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
                            self._add(generator, request, tokenizer, shares, tag, running, finished)
                yield from _drain(finished)
                if stopping():
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
        shares: bool,
        tag: bytes,
        running: set[int],
        finished: deque[tuple[bytes, Answer]],
    ) -> None:
        keys: list[int] = []

        def done(answer: Answer) -> None:
            running.difference_update(keys)
            finished.append((tag, answer))

        key = generator.add(request, tokenizer, done, sharing=shares)
        if key is not None:
            keys.append(key)
            running.add(key)

    def _requests(self, windows: Iterable[Window]) -> Iterator[list[tuple[bytes, GenerateRequest]]]:
        for window in windows:
            self.meter.add(requests=window.num_requests)
            requests = []
            for i, tag in enumerate(window.tags):
                tokens = window.tokens[window.offsets[i] : window.offsets[i + 1]]
                requests.append((tag, decode_options(window.options[i], tokens)))
            yield requests


def _tell(meter: Meter, step: GenerateStep, started: float, requests: int, tokens: int) -> None:
    meter.add(tokens=tokens)
    seconds = time.perf_counter() - started
    path_rows = int(step.run_count.sum()) - step.num_rows
    meter.tell(StepInfo(step.num_rows, path_rows, requests, tokens, started, seconds, step.decode_rows))


def _check_sharing(sharing: Sharing) -> None:
    if sharing == "mlp":
        raise InputError("text is generated with sharing full or off", field="sharing", remedy="use one of them")


def _drain(items: deque[T]) -> Iterator[T]:
    while items:
        yield items.popleft()


def can_probe(window: Window, readout: Readout) -> bool:
    """Whether nothing but last rows of the window's prompts is read: rows that are kept have K/V and no results."""
    if readout.kind == "logprobs":
        return bool((np.diff(window.target_offsets) == 1).all())
    return readout.kind in ("last", "head", "logits")
