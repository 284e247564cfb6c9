"""The engine of one model: turns requests into steps for its worker, and results of steps into answers. No torch.

Jobs and calls from Python read values from row streams (`stream.py`). Generation, and values for a server, use the
slots of the KV store (`generate.py`, called through `calls.py`). This module offers both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar, cast

import numpy as np

from ..errors import InputError
from ..spec.requests import NO_NAMESPACE, Asked, Namespace, Owner, Readout, Request, Sharing, Stats
from ..text import Tokenizer
from ..trie import LiveInput, LiveWindows, Window, token_bytes
from ..trie.live_windows import watched
from .calls import serve
from .generate import Generator, check_sharing
from .loop import EngineLoop
from .meter import Meter, StepBudget, StepInfo
from .protocol import EngineFacts, EngineOptions
from .requests import LAST_ROW_KINDS, Answer, check_asked, joint_readout
from .schedule.generate_step import NO_OWNER
from .schedule.parts import engine_parts
from .stream import run_stream
from .worker import Worker

P = TypeVar("P")
T = TypeVar("T")
_STEPS = 2  # a live input is submitted in windows of about this many steps
_HELD = 0.3  # share of a bucket's prefix that the KV store must contain to count as holding the prefix


class ModelEngine(EngineLoop):
    """Runs requests on the worker of one model: read-outs and generation.

    Any thread may run requests. One thread makes all steps (see `EngineLoop`), and the others only wait, so that an
    interrupt never breaks off a step. Raise InputError for options that the worker's model does not support.
    """

    def __init__(
        self,
        worker: Worker,
        options: EngineOptions = EngineOptions(),  # noqa: B008
        *,
        resources: Sequence[object] = (),
    ):
        """Create an engine without a KV store; the first generation creates the store.

        `resources` are objects that features use instead of their own, if requests are built before the engine.
        """
        super().__init__()
        self.worker = worker
        self.options = options
        self.meter = Meter()
        self.parts = engine_parts(worker, options, self.meter, resources)
        self.budget = self._budget_of(options.max_batch_rows or worker.facts.max_rows)
        facts: dict[str, Any] = {"adapters": worker.facts.adapters, "depth": worker.facts.depth}
        self.facts = EngineFacts(cast(Sharing, options.sharing), options=options, max_rows=self.budget.rows, **facts)

    def _budget_of(self, rows: int) -> StepBudget:
        """Return a StepBudget of this many rows. Raise InputError if an image does not fit in a step."""
        span = self.worker.facts.span_rows
        if rows < span:
            raise InputError(
                f"max_batch_rows is {rows}, but the {span} rows of an image must be computed in one step",
                field="max_batch_rows",
                remedy=f"give {span} or more",
            )
        return StepBudget(rows, least=max(1, span))

    def part(self, kind: type[P]) -> P | None:
        """Return the part of this kind that a feature added to the engine, or None."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def max_batch_rows(self) -> int:
        """The current limit on the rows of a step. It is lower for a while after memory ran out."""
        return self.budget.rows

    @property
    def stats(self) -> Stats:
        """The counters since the engine was created, or since `reset_stats`."""
        return self.meter.stats

    def count(self, **counts: int) -> None:
        """Add to counters, by field of Stats, for requests that a caller answers without a run."""
        self.meter.add(**counts)

    def reset_stats(self) -> Stats:
        """Set the counters to zero, and return their old values."""
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
        """Yield (tag, answer) of every request when the step that ends it is computed (see `Engine.run`).

        With sharing "full", windows for row streams must be consecutive pieces of one stream (`Spool.windows`). In the
        KV store, the next window is submitted when few requests wait, so that its prompts join the running sequences. A
        window of None means that no request is ready yet; the iterator is asked again after the next step.

        `cache_prefill` makes read-outs use the KV store; None: as set by the engine's options. Without `on_step` and
        `stopping`, no step wakes the caller's thread. Raise InputError for an unknown adapter, and OutOfMemoryError if
        not even one row fits.
        """
        if isinstance(windows, LiveInput):
            run: dict[str, Any] = {"sharing": sharing, "max_batch_rows": max_batch_rows, "on_step": on_step}
            run |= {"owner": owner, "on_failure": on_failure}
            yield from self._run_live(windows, readout, tokenizer, stopping or _never, **run)
            return
        share = None
        if owner is None:
            sharing = sharing or self.facts.sharing
            share = sharing == "full"
            if readout.kind == "tokens":
                check_sharing(sharing)
            else:
                check_asked(self.parts, readout, sharing)
                if not self._is_scheduled(readout, share, cache_prefill):
                    budget = self.budget if max_batch_rows is None else self._budget_of(max_batch_rows)
                    options: dict[str, Any] = {"sharing": sharing, "budget": budget, "stopping": stopping or _never}
                    with self.meter.listening(on_step):
                        yield from run_stream(self, self.worker, windows, readout, **options)  # type: ignore[arg-type]
                    return
        options = {"owner": owner or NO_OWNER, "on_failure": on_failure, "stopping": stopping, "on_step": on_step}
        yield from self._run_scheduled(windows, readout, tokenizer, share=share, **options)

    def _is_scheduled(self, readout: Readout, share: bool, cache_prefill: bool | None) -> bool:
        """Return True to read values in the KV store, in which earlier and later requests share their rows.

        If False, the planner reads them from a row stream.
        """
        if any(part.in_slots(readout) for part in self.parts):
            return True
        return share and (self.options.cache_prefill if cache_prefill is None else cache_prefill)

    def _run_live(
        self, source: LiveInput, readout: Readout, tokenizer: Any, stopping: Callable[[], bool], **run: Any
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yield (tag, answer) of every request that arrives.

        Generation and read-outs of last rows only run in the KV store: requests join the running ones, and find the
        rows of earlier ones. All other requests run bucket by bucket.
        """
        share = (run["sharing"] or self.facts.sharing) == "full"
        in_slots = readout.kind == "tokens" or (share and readout.kind in (*LAST_ROW_KINDS, "logprobs"))

        def is_held(namespace: Namespace, prefix: np.ndarray) -> bool:
            """Return True if the KV store contains enough of a prefix."""
            return self.held_rows(prefix, namespace, source.asked) >= max(1, _HELD * len(prefix))

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

    def _run_scheduled(
        self,
        windows: Iterable[Window | None],
        readout: Readout,
        tokenizer: Tokenizer | None,
        *,
        owner: Owner,
        **options: Any,
    ) -> Iterator[tuple[bytes, Answer]]:
        """Yield (tag, answer) of every request, run in the KV store, beside the requests of other callers.

        The first window decides if prompts keep the hidden states of all rows. Requests of an owner are submitted one
        by one, so that few of them wait. `options` are options of `serve`.
        """
        remaining = iter(windows)
        first = next(remaining, None)
        if first is not None:
            readout = joint_readout(readout, np.diff(first.target_offsets))
        requests = (None if window is None else _tagged(window, readout) for window in _chain(first, remaining))
        if owner is not NO_OWNER:
            requests = _one_by_one(requests)
        options |= {"readout": readout, "owner": owner, "max_waiting": self.options.generation.max_running}
        with closing(serve(self, requests, tokenizer, is_again=lambda tag: tag[1], **options)) as answers:
            for (tag, _), answer in answers:
                yield tag, cast(Answer, answer)

    def make_generator(self) -> Generator:
        """Return a new generator with its own KV store. Only EngineLoop calls this, once."""
        return Generator(self.worker, self.options, self.budget, self.meter, self.parts)

    def held_rows(self, tokens: np.ndarray, namespace: Namespace = NO_NAMESPACE, asked: Asked | None = None) -> int:
        """Return how many leading rows of a prompt, int32 [n], the KV store contains or is about to compute.

        `asked` is the question of the requests: only rows kept for such requests count. Any thread may call this. Steps
        run meanwhile, so the result may be outdated already.
        """
        scheduler = self.generator.scheduler
        namespace = scheduler.namespace_of(namespace, asked, tokens)
        return sum(same for _, same in scheduler.tree.match(namespace, token_bytes(tokens)))

    def close(self) -> None:
        """End the engine's thread and the worker's other processes. The engine runs nothing afterwards."""
        self.close_loop()
        self.worker.close()


def _never() -> bool:
    return False


Tagged = tuple[tuple[bytes, bool], Request]  # ((tag, True for a twin), request)


def _tagged(window: Window, readout: Readout) -> list[Tagged]:
    """Return the requests of a window, without references to it: it may contain images, and generation is slow."""
    twins = [False] * window.num_requests if readout.kind == "tokens" else window.twins.tolist()
    return [((tag, twins[number]), window.request(number)) for number, tag in enumerate(window.tags)]


def _one_by_one(windows: Iterable[list[Tagged] | None]) -> Iterator[list[Tagged] | None]:
    for window in windows:
        yield from ([None] if window is None else [[one] for one in window])


def _chain(first: T | None, remaining: Iterator[T | None]) -> Iterator[T | None]:
    yield first
    yield from remaining
