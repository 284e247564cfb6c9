"""The engine turns requests into steps for its worker, and what the steps give into results. No torch.

Numeric runs are in `stream.py`, text that is generated in `generate.py` and `calls.py`; here is what both share.
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
from .loop import EngineLoop
from .meter import Meter, StepBudget, StepInfo
from .options import EngineOptions
from .replies import Reply, events_of
from .requests import Answer
from .samples import TextPiece
from .stream import Probes, ProbeWindows, SharingChoice, last_rows, run_stream

P = TypeVar("P")


class Engine(EngineLoop):
    """An Engine runs requests on a worker: numeric runs, and text that is generated. Raises InputError for options that
    the worker's model cannot follow.

    Any thread may run requests. One thread makes all steps (see `EngineLoop`); others only wait, so that an interrupt
    of theirs breaks off nothing.
    """

    def __init__(
        self,
        worker: Worker,
        options: EngineOptions = EngineOptions(),  # noqa: B008
        *,
        beside: Sequence[object] = (),
    ):
        """beside: what features are to use in place of their own, where requests are made before the engine."""
        super().__init__()
        self.worker = worker
        self.options = options
        self.meter = Meter()
        self.parts = engine_parts(worker, options, self.meter, beside)
        self._choice = SharingChoice(cast(float, options.sharing_threshold))
        self._budget = self._budget_of(options.max_batch_rows or worker.facts.max_rows)

    def _budget_of(self, rows: int) -> StepBudget:
        """Returns the budget of steps of at most so many rows. Raises InputError where an image has no room in one."""
        span = self.worker.facts.span_rows
        if rows < span:
            raise InputError(
                f"max_batch_rows is {rows}, and the {span} rows of an image are computed in one step",
                field="max_batch_rows",
                remedy=f"give {span} or more",
            )
        return StepBudget(rows, least=max(1, span))

    def part(self, kind: type[P]) -> P | None:
        """Returns what a feature has added to this engine; None where it has added nothing."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Returns the names of the LoRA adapters that requests may run with."""
        return self.worker.facts.adapters

    @property
    def sharing(self) -> Sharing:
        """Returns how rows are shared between requests where a run does not say otherwise."""
        return cast(Sharing, self.options.sharing)

    @property
    def max_batch_rows(self) -> int:
        """Returns the most rows of a step: fewer for a while when memory runs out."""
        return self._budget.rows

    @property
    def stats(self) -> Stats:
        """Returns what was counted since the engine was made, or since `reset_stats`."""
        return self.meter.stats

    def reset_stats(self) -> Stats:
        """Begins to count anew, and returns what was counted until now."""
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
        """Yields (tag, result) of every request when the step that ends it has been computed; (tag, InputError) of one
        that cannot be read in the KV store, where it would be.

        With sharing "full" the windows must be consecutive pieces of one stream (`Spool.windows`). With cache_prefill
        a window may be None, as for `generate`.

        sharing, max_batch_rows, cache_prefill   of this run; None: the engine's, for sharing with its threshold;
                   max_batch_rows is of row streams: steps in the KV store are as large as the engine's
        on_step    called after every step of the engine, until the run ends
        stopping   called after every step: once it returns True, the run ends, having yielded what is done

        Raises InputError for an adapter that the worker has not, OutOfMemoryError where not even one row fits.
        """
        choice = self._choice if sharing is None else None
        sharing = sharing or self.sharing
        for part in self.parts:
            part.check(readout.exits, sharing)
        how: dict[str, Any] = {"stopping": stopping}
        if self.all_in_slots:
            with self.meter.heard_by(on_step):
                yield from self._run_probes(last_rows(windows, readout), readout, how, shares=sharing == "full")
            return
        how |= {"sharing": sharing, "meter": self.meter}
        how["loop"] = self
        how["choice"] = choice
        how["budget"] = self._budget if max_batch_rows is None else self._budget_of(max_batch_rows)
        with self.meter.heard_by(on_step):
            if sharing != "full" or not (self.options.cache_prefill if cache_prefill is None else cache_prefill):
                yield from run_stream(self.worker, windows, readout, **how)  # type: ignore[arg-type]
                return
            left = ProbeWindows(windows, readout, self.generator.scheduler.pool.num_slots)
            while not left.has_ended:
                yield from self._run_probes(left.probes(), readout, how, put_off=left.put_off)
                if stopping():
                    return
                yield from run_stream(self.worker, left.others(), readout, **how)
                if stopping():
                    return

    @property
    def all_in_slots(self) -> bool:
        """Returns whether all numbers are read there, jobs' too: of last rows alone."""
        return any(part.in_slots for part in self.parts)

    def _run_probes(
        self,
        windows: Probes,
        readout: Readout,
        how: dict[str, Any],
        *,
        shares: bool = True,
        put_off: Callable[[Window, int], None] | None = None,
    ) -> Iterator[tuple[bytes, Result | InputError]]:
        """Runs windows in the slots of the KV store, in one loop with what is generated.

        put_off  takes a request that the store has no room for, since what is pinned stays; None: it has an error
        """
        asked: dict[str, Any] = {"stopping": how["stopping"], "readout": readout, "share": shares}
        asked["most"] = self.options.generation.max_running
        probes = serve(self, windows, is_again=lambda tag: bool(tag[0].twins[tag[1]]), **asked)
        with closing(probes) as answers:
            for (window, number), result in answers:
                assert isinstance(result, Result | InputError)
                if put_off is not None and isinstance(result, InputError) and result.code == "kv_memory":
                    put_off(window, number)
                    self.meter.add(requests=-1)  # the stream counts it
                    continue
                yield window.tags[number], result

    def make_generator(self) -> Generator:
        """Returns what runs requests in the slots of the KV store, which it holds."""
        return Generator(self.worker, self.options, self._budget, self.meter, self.parts)

    def namespace_of(self, request: Request) -> tuple[Hashable, ...]:
        """Returns the namespace in which the KV store holds the rows of a request that is continued."""
        exits = None if request.sampling is None else request.sampling.exits
        namespace: tuple[Hashable, ...] = self.generator.scheduler.namespace_of((request.adapter, request.salt), exits)
        return namespace

    def held_rows(
        self, tokens: np.ndarray, adapter: str | None = None, salt: str = "", exits: Exits | None = None
    ) -> int:
        """Returns how many leading rows of a prompt, int32 [n], the KV store holds, or will hold, of requests with
        these exits. Another thread than that of the steps gets what it finds while they go on."""
        scheduler = self.generator.scheduler
        return scheduler.tree.match(scheduler.namespace_of((adapter, salt), exits), tokens)[1]

    def close(self) -> None:
        """Ends the thread of the steps, and what runs in other processes. Nothing can be run afterwards."""
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

        The next window is taken in when few requests wait, so that its prompts join those that still run. A window
        that is None says that nothing more is there yet: the iterator is asked again after the next step.

        sharing   of this run's requests, "full" or "off"; None: the engine's
        on_step   called after every step of the engine, until the run ends
        stopping  called after every step: once it returns True, the run ends, having yielded what is done
        """
        sharing = sharing or self.sharing
        check_sharing(sharing)
        how: dict[str, Any] = {"stopping": stopping, "on_step": on_step, "share": sharing == "full"}
        how["most"] = self.options.generation.max_running
        yield from serve(self, self._requests(windows), tokenizer, **how)  # type: ignore[misc]

    def stream(
        self, requests: Iterable[Request], tokenizer: Tokenizer | None
    ) -> Iterator[tuple[int, TextPiece | Answer]]:
        """Yields (number, TextPiece) of each request as its text comes, and (number, answer) when it ends."""
        yield from serve(self, [enumerate(requests)], tokenizer, most=0, text=True)

    async def astream(
        self, request: Request, tokenizer: Tokenizer | None, *, text: bool = True
    ) -> AsyncIterator[TextPiece | list[Generated]]:
        """Yields pieces of a text as they come (text: whether they are wanted), and last its samples.

        Left before its end, or cancelled, the request is cancelled. Raises InputError for one that cannot run.
        """
        reply = Reply(asyncio.get_running_loop(), len(request.tokens))
        try:
            await asyncio.to_thread(self.submit, [request], TOKENS, reply, tokenizer, text=text)
            async with aclosing(events_of([reply])) as events:
                async for _, event in events:
                    yield event
        finally:
            self.cancel(reply)

    def _requests(self, windows: Iterable[Window | None]) -> Iterator[list[tuple[bytes, Request]] | None]:
        for window in windows:
            if window is None:
                yield None
                continue
            yield [(tag, window.request(number)) for number, tag in enumerate(window.tags)]
