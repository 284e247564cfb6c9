"""The engine of one model: it turns requests into steps for its worker, and the results of steps into answers. No
torch.

Jobs and calls from Python read numbers by row streams (`stream.py`). Generation, and numbers for a server, run in the
slots of the KV store (`generate.py`, called through `calls.py`). This module offers both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar, cast

import numpy as np

from ..errors import InputError
from ..prefix import token_bytes
from ..schedule.parts import engine_parts
from ..stream import LiveInput, LiveWindows, Window
from ..stream.live_windows import watched
from ..text import Tokenizer
from ..types import Exits, Owner, Readout, Request, Sharing, Stats
from ..worker.protocol import Worker
from .calls import serve
from .generate import Generator, check_sharing
from .loop import EngineLoop
from .meter import Meter, StepBudget, StepInfo
from .options import EngineOptions
from .protocol import EngineFacts
from .requests import LAST_ROW_KINDS, Answer, joint_readout
from .stream import TaggedRequests, last_rows, run_stream

P = TypeVar("P")
_STEPS = 2  # of a live input, about what fills so many steps is submitted at a time
_HELD = 0.3  # of the prefix of a bucket, from which on the KV store counts as holding it


class ModelEngine(EngineLoop):
    """A ModelEngine runs requests on the worker of one model: it reads numbers, and generates text. Raises InputError
    for options that the worker's model cannot follow.

    Any thread may run requests. One thread makes all steps (see `EngineLoop`), and the others only wait, so that an
    interrupt breaks off no step.
    """

    def __init__(
        self,
        worker: Worker,
        options: EngineOptions = EngineOptions(),  # noqa: B008
        *,
        resources: Sequence[object] = (),
    ):
        """Makes an engine, without a KV store, which the first generation makes.

        resources  objects that features use in place of their own, when requests are made before the engine
        """
        super().__init__()
        self.worker = worker
        self.options = options
        self.meter = Meter()
        self.parts = engine_parts(worker, options, self.meter, resources)
        self._budget = self._budget_of(options.max_batch_rows or worker.facts.max_rows)
        facts: dict[str, Any] = {"adapters": worker.facts.adapters, "depth": worker.facts.depth}
        self.facts = EngineFacts(cast(Sharing, options.sharing), options=options, max_rows=self._budget.rows, **facts)

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
        windows: Iterable[Window | None] | LiveInput,
        readout: Readout,
        tokenizer: Tokenizer | None = None,
        *,
        sharing: Sharing | None = None,
        max_batch_rows: int | None = None,
        cache_prefill: bool | None = None,
        owner: Owner | None = None,
        on_failure: Callable[[Exception], InputError] | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yields (tag, answer) of every request when the step that ends it has been computed (see `Engine.run`).

        With sharing "full" the windows of numbers must be consecutive pieces of one stream (`Spool.windows`). In the KV
        store the next window is submitted when few requests wait, so that its prompts join the running sequences; a
        window of None means that no request is there yet: the iterator is asked again after the next step.

        cache_prefill  whether last rows are read in the KV store; None: as the engine's options say; those of a
                       LiveInput are

        Without `on_step` and `stopping` no step wakes the caller's thread.

        Raises InputError for an unknown adapter, and OutOfMemoryError if not even one row fits.
        """
        if isinstance(windows, LiveInput):
            run: dict[str, Any] = {"sharing": sharing, "max_batch_rows": max_batch_rows, "on_step": on_step}
            run |= {"owner": owner, "on_failure": on_failure}
            yield from self._run_live(windows, readout, tokenizer, stopping or _never, **run)
            return
        if owner is not None:
            options: dict[str, Any] = {
                "owner": owner,
                "on_failure": on_failure,
                "stopping": stopping,
                "on_step": on_step,
            }
            yield from self._run_beside(windows, readout, tokenizer, **options)
            return
        sharing = sharing or self.facts.sharing
        slots: dict[str, Any] = {"stopping": stopping}
        if readout.kind == "tokens":
            check_sharing(sharing)
            slots |= {"share": sharing == "full", "on_step": on_step}
            slots["max_waiting"] = self.options.generation.max_running
            yield from serve(self, map(_by_tag, windows), tokenizer, **slots)  # type: ignore[misc]
            return
        for part in self.parts:
            part.check(readout.exits, sharing)
        if self.all_in_slots:
            with self.meter.listening(on_step):
                requests = last_rows(windows, readout)
                yield from self._run_in_slots(requests, readout, share=sharing == "full", **slots)
            return
        if sharing == "full" and (self.options.cache_prefill if cache_prefill is None else cache_prefill):
            yield from self._run_beside(windows, readout, tokenizer, stopping=stopping, on_step=on_step)
            return
        budget = self._budget if max_batch_rows is None else self._budget_of(max_batch_rows)
        options = {"sharing": sharing, "budget": budget, "stopping": stopping or _never}
        with self.meter.listening(on_step):
            yield from run_stream(self, self.worker, windows, readout, **options)  # type: ignore[arg-type]

    @property
    def all_in_slots(self) -> bool:
        """Returns whether all numbers are read in the slots of the KV store, those of jobs too; only last rows are."""
        return any(part.in_slots for part in self.parts)

    def _run_live(
        self, source: LiveInput, readout: Readout, tokenizer: Any, stopping: Callable[[], bool], **run: Any
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yields (tag, answer) of every request that comes. What is generated, and what is read at last rows only, runs
        in the KV store: requests join those that run, and find the rows of those before. All else runs bucket by
        bucket."""
        share = (run["sharing"] or self.facts.sharing) == "full"
        in_slots = readout.kind == "tokens" or (share and readout.kind in (*LAST_ROW_KINDS, "logprobs"))

        def is_held(namespace: Any, prefix: np.ndarray) -> bool:
            """Returns whether the KV store holds a good part of a prefix."""
            adapter, salt = namespace
            return self.held_rows(prefix, adapter or None, salt, source.exits) >= max(1, _HELD * len(prefix))

        live = LiveWindows(
            source.feed,
            max_tokens=source.max_tokens,
            most=min(source.max_tokens, _STEPS * self.max_batch_rows),
            share=share,
            busy=self.options.generation.max_running // 2 if in_slots else 1,
            is_held=is_held if in_slots and share else None,
            stopping=stopping,
        )
        run |= {"cache_prefill": in_slots or None, "stopping": stopping}
        with closing(live):
            while not (live.is_done or stopping()):
                windows = live if in_slots else live.without_pauses(ahead=self.facts.depth > 1)
                with closing(self.run(watched(windows, source.see), readout, tokenizer, **run)) as answers:  # type: ignore[type-var]
                    for answer in answers:
                        live.num_answered += 1
                        yield answer

    def _run_beside(
        self, windows: Iterable[Window | None], readout: Readout, tokenizer: Tokenizer | None, **options: Any
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yields (tag, answer) of every request of an owner, beside the requests of others. All run in the KV store,
        with the sharing of the engine's options and the read-out that the first window needs, and are submitted one by
        one, so that few of them wait. options: of `serve`"""
        remaining = iter(windows)
        first = next(remaining, None)
        if first is not None:
            readout = joint_readout(readout, np.diff(first.target_offsets))
            windows = filter(None, itertools.chain([first], remaining))
            each = ([((window, i), window.request(i))] for window in windows for i in range(window.num_requests))
            yield from self._run_in_slots(each, readout, tokenizer, **options)

    def _run_in_slots(
        self,
        windows: TaggedRequests,
        readout: Readout,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Iterator[tuple[bytes, Answer]]:
        """Runs the requests of windows in the slots of the KV store. options: of `serve`"""
        options |= {"readout": readout, "max_waiting": self.options.generation.max_running}
        again: Callable[[tuple[Window, int]], bool] = lambda place: bool(place[0].twins[place[1]])  # noqa: E731
        with closing(serve(self, windows, tokenizer, is_again=again, **options)) as answers:
            for (window, number), answer in answers:
                yield window.tags[number], cast(Answer, answer)

    def make_generator(self) -> Generator:
        """Returns a new generator with a KV store of its own; EngineLoop calls this once."""
        return Generator(self.worker, self.options, self._budget, self.meter, self.parts)

    def held_rows(
        self, tokens: np.ndarray, adapter: str | None = None, salt: str = "", exits: Exits | None = None
    ) -> int:
        """Returns how many leading rows of a prompt, int32 [n], the KV store holds or is about to compute, for requests
        with these exits. Any thread may call it; steps go on meanwhile, so that the number may already be old."""
        scheduler = self.generator.scheduler
        namespace = scheduler.namespace_of((adapter, salt), exits)
        return sum(same for _, same in scheduler.tree.match(namespace, token_bytes(tokens)))

    def close(self) -> None:
        """Ends the engine's thread and the worker's other processes. The engine runs nothing afterwards."""
        self.close_loop()
        self.worker.close()


def _never() -> bool:
    return False


def _by_tag(window: Window | None) -> list[tuple[bytes, Request]] | None:
    """Returns a window's requests by tag. Texts take long: what waits for them does not hold the window's images."""
    return None if window is None else [(tag, window.request(number)) for number, tag in enumerate(window.tags)]
