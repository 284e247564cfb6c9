"""The engine of one model: it turns requests into steps for its worker, and the results of steps into answers. No
torch.

Jobs and calls from Python read numbers by row streams (`stream.py`). Generation, and numbers for a server, run in the
slots of the KV store (`generate.py`, called through `calls.py`). This module offers both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, TypeVar, cast

import numpy as np

from ..errors import InputError
from ..schedule.parts import engine_parts
from ..stream import Window
from ..text import Tokenizer
from ..types import Exits, Generated, Readout, Request, Result, Sharing, Stats
from ..worker.protocol import Worker
from .calls import TOKENS, serve
from .generate import Generator, check_sharing
from .handles import ResponseStream, events_of
from .loop import EngineLoop
from .meter import Meter, StepBudget, StepInfo
from .options import EngineOptions
from .requests import Answer
from .samples import TextPiece
from .stream import SharingChoice, SlotWindows, TaggedRequests, last_rows, run_stream

P = TypeVar("P")


class Engine(EngineLoop):
    """An Engine runs requests on a worker: it reads numbers, and generates text. Raises InputError for options that the
    worker's model cannot follow.

    Any thread may run requests. One thread makes all steps (see `EngineLoop`), and the others only wait, so that an
    interrupt breaks off no step.
    """

    def __init__(
        self,
        worker: Worker,
        options: EngineOptions = EngineOptions(),  # noqa: B008
        *,
        beside: Sequence[object] = (),
    ):
        """Makes an engine, without a KV store, which the first generation makes.

        beside  objects that features use in place of their own, when requests are made before the engine
        """
        super().__init__()
        self.worker = worker
        self.options = options
        self.meter = Meter()
        self.parts = engine_parts(worker, options, self.meter, beside)
        self._choice = SharingChoice(cast(float, options.sharing_threshold))
        self._budget = self._budget_of(options.max_batch_rows or worker.facts.max_rows)

    def _budget_of(self, rows: int) -> StepBudget:
        """Returns a StepBudget of so many rows. Raises InputError if an image has no room in such a step."""
        span = self.worker.facts.span_rows
        if rows < span:
            raise InputError(
                f"max_batch_rows is {rows}, and the {span} rows of an image are computed in one step",
                field="max_batch_rows",
                remedy=f"give {span} or more",
            )
        return StepBudget(rows, least=max(1, span))

    def part(self, kind: type[P]) -> P | None:
        """Returns this engine's part of a kind, which a feature has added; None if the feature has added none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Returns the names of the LoRA adapters that requests may run with."""
        return self.worker.facts.adapters

    @property
    def sharing(self) -> Sharing:
        """Returns how requests share rows in a run that does not set `sharing`."""
        return cast(Sharing, self.options.sharing)

    @property
    def max_batch_rows(self) -> int:
        """Returns the most rows of a step now; they are fewer for a while after memory ran out."""
        return self._budget.rows

    @property
    def stats(self) -> Stats:
        """Returns the counters since the engine was made, or since `reset_stats`."""
        return self.meter.stats

    def reset_stats(self) -> Stats:
        """Sets the counters to zero, and returns what they were."""
        return self.meter.reset()

    def run(
        self,
        windows: Iterable[Window | None],
        readout: Readout,
        *,
        sharing: Sharing | None = None,
        max_batch_rows: int | None = None,
        cache_prefill: bool | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[bytes, Result | InputError]]:
        """Yields (tag, result) of every request when the step that ends it has been computed. In the KV store a request
        may be too long, and yields (tag, InputError).

        With sharing "full" the windows must be consecutive pieces of one stream (`Spool.windows`). With cache_prefill
        a window may be None, as for `generate`.

        sharing         how rows are shared; None: as the engine's options say, with their threshold
        max_batch_rows  the most rows of a step of the row stream; None: the engine's
        cache_prefill   whether last rows are read in the KV store; None: as the engine's options say
        on_step         called after every step of the engine, until the run ends
        stopping        called after every step: once it returns True, the run ends, after it has yielded the results
                        that are there

        Raises InputError for an unknown adapter, and OutOfMemoryError if not even one row fits.
        """
        choice = self._choice if sharing is None else None
        sharing = sharing or self.sharing
        for part in self.parts:
            part.check(readout.exits, sharing)
        if self.all_in_slots:
            with self.meter.listening(on_step):
                yield from self._run_in_slots(last_rows(windows, readout), readout, stopping, shares=sharing == "full")
            return
        budget = self._budget if max_batch_rows is None else self._budget_of(max_batch_rows)
        options: dict[str, Any] = {"sharing": sharing, "choice": choice, "budget": budget, "stopping": stopping}
        with self.meter.listening(on_step):
            if sharing != "full" or not (self.options.cache_prefill if cache_prefill is None else cache_prefill):
                yield from run_stream(self, self.worker, windows, readout, **options)  # type: ignore[arg-type]
                return
            split = SlotWindows(windows, readout, self.generator.scheduler.pool.num_slots)
            while not split.has_ended:
                yield from self._run_in_slots(split.in_slots(), readout, stopping, put_off=split.put_off)
                if stopping():
                    return
                yield from run_stream(self, self.worker, split.in_stream(), readout, **options)
                if stopping():
                    return

    @property
    def all_in_slots(self) -> bool:
        """Returns whether all numbers are read in the slots of the KV store, those of jobs too; only last rows are."""
        return any(part.in_slots for part in self.parts)

    def _run_in_slots(
        self,
        windows: TaggedRequests,
        readout: Readout,
        stopping: Callable[[], bool],
        *,
        shares: bool = True,
        put_off: Callable[[Window, int], None] | None = None,
    ) -> Iterator[tuple[bytes, Result | InputError]]:
        """Reads the last rows of windows in the slots of the KV store, in the same steps as generation.

        put_off  called with (window, number) of a request that finds no room in the store because of pinned rows; None:
                 such a request is answered with an error
        """
        options: dict[str, Any] = {"stopping": stopping, "readout": readout, "share": shares}
        options["max_waiting"] = self.options.generation.max_running
        with closing(serve(self, windows, is_again=lambda tag: bool(tag[0].twins[tag[1]]), **options)) as answers:
            for (window, number), result in answers:
                assert isinstance(result, Result | InputError)
                if put_off is not None and isinstance(result, InputError) and result.code == "kv_memory":
                    put_off(window, number)
                    self.meter.add(requests=-1)  # the stream counts the request again
                    continue
                yield window.tags[number], result

    def make_generator(self) -> Generator:
        """Returns a new generator with a KV store of its own; EngineLoop calls this once."""
        return Generator(self.worker, self.options, self._budget, self.meter, self.parts)

    def namespace_of(self, request: Request) -> tuple[Hashable, ...]:
        """Returns the namespace in which the KV store holds the rows of a request that generates."""
        exits = None if request.sampling is None else request.sampling.exits
        namespace: tuple[Hashable, ...] = self.generator.scheduler.namespace_of((request.adapter, request.salt), exits)
        return namespace

    def held_rows(
        self, tokens: np.ndarray, adapter: str | None = None, salt: str = "", exits: Exits | None = None
    ) -> int:
        """Returns how many leading rows of a prompt, int32 [n], the KV store holds or is about to compute, for requests
        with these exits. Any thread may call it; steps go on meanwhile, so that the number may already be old."""
        scheduler = self.generator.scheduler
        return scheduler.tree.match(scheduler.namespace_of((adapter, salt), exits), tokens)[1]

    def close(self) -> None:
        """Ends the engine's thread and the worker's other processes. The engine runs nothing afterwards."""
        self.close_loop()
        self.worker.close()

    def generate(
        self,
        windows: Iterable[Window | None],
        tokenizer: Tokenizer | None,
        *,
        sharing: Sharing | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yields (tag, answer) of every request as it ends: a list with a Generated for each sample, or the InputError
        that says why the request cannot run.

        The next window is submitted when few requests wait, so that its prompts join the running sequences. A window of
        None means that no request is there yet: the iterator is asked again after the next step.

        sharing   "full" or "off"; None: as the engine's options say
        on_step   called after every step of the engine, until the run ends
        stopping  called after every step: once it returns True, the run ends, after it has yielded the answers that are
                  there
        """
        sharing = sharing or self.sharing
        check_sharing(sharing)
        options: dict[str, Any] = {"stopping": stopping, "on_step": on_step, "share": sharing == "full"}
        options["max_waiting"] = self.options.generation.max_running
        yield from serve(self, self._requests(windows), tokenizer, **options)  # type: ignore[misc]

    def stream(
        self, requests: Iterable[Request], tokenizer: Tokenizer | None
    ) -> Iterator[tuple[int, TextPiece | Answer]]:
        """Yields (number, TextPiece) of each request as its text comes, and (number, answer) when it ends."""
        yield from serve(self, [enumerate(requests)], tokenizer, max_waiting=0, text=True)

    async def astream(
        self, request: Request, tokenizer: Tokenizer | None, *, text: bool = True
    ) -> AsyncIterator[TextPiece | list[Generated]]:
        """Yields pieces of a text as they come (text: whether they are wanted), and last the list of its samples.

        When the caller leaves before the end, or is cancelled, the request is cancelled. Raises InputError for a
        request that cannot run.
        """
        response = ResponseStream(asyncio.get_running_loop(), len(request.tokens))
        try:
            await asyncio.to_thread(self.submit, [request], TOKENS, response, tokenizer, text=text)
            async with aclosing(events_of([response])) as events:
                async for _, event in events:
                    yield event
        finally:
            self.cancel(response)

    def _requests(self, windows: Iterable[Window | None]) -> Iterator[list[tuple[bytes, Request]] | None]:
        for window in windows:
            if window is None:
                yield None
                continue
            yield [(tag, window.request(number)) for number, tag in enumerate(window.tags)]
