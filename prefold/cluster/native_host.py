"""The host of a replica that computes with prefold's own engine.

The caller's thread adds windows to the current run. The thread `prefold-replica` runs them in the engine and writes the
answers into the next report.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import Field, fields, replace
from queue import Empty, SimpleQueue
from typing import Any

from ..checkpoint.identity import model_identity
from ..engine.cache import CacheEvents, CacheReporter
from ..engine.meter import StepInfo
from ..engine.protocol import EngineFacts
from ..spec.requests import GenerationStats, Stats
from ..trie import Window, shared_by
from .replicas import Host, ReplicaFacts, ReplicaReport, RunCall, place_of

# If a row stream may have several steps in flight, the engine reads the last steps' results only when its input ends.
# So the host ends the input after this many seconds without a window.
_IDLE_SECONDS = 0.05


class _HostRun:
    """A run of a replica: its options, and the windows that the engine has not read yet."""

    def __init__(self, call: RunCall):
        self.call = call
        self.windows: SimpleQueue[Window | None] = SimpleQueue()
        self.has_ended = False
        self.open = 0  # requests that the engine has read and not answered yet
        self._last: tuple[Any, bytes] = (None, b"")  # namespace and tokens of the last request

    def give(self, window: Window) -> None:
        """Add a window. Set its `common` to the number of tokens that it shares with the end of the previous window."""
        (before, last), namespace = self._last, window.namespace
        common = shared_by(last, window.tokens[: window.offsets[1]].tobytes()) if before == namespace else 0
        self._last = namespace, window.tokens[window.offsets[-2] :].tobytes()
        self.windows.put(replace(window, common=common))

    def end(self) -> None:
        self.has_ended = True
        self.windows.put(None)

    def taken(self, *, in_slots: bool, timeout: float | None) -> Iterator[Window | None]:
        """Yield windows as they arrive, until the run ends.

        Args:
            in_slots: Requests run in the KV store. While any of them run, yield None instead of waiting for a window.
            timeout: Without `in_slots`, stop if no window arrives for this many seconds; None: wait forever.
        """
        while not self.has_ended:
            try:
                window = self.windows.get(block=not (in_slots and self.open), timeout=None if in_slots else timeout)
            except Empty:
                if not in_slots:
                    return
                yield None
                continue
            if window is None:
                return
            self.open += window.num_requests
            yield window


class ReplicaHost(Host):
    """A host that computes with the engine of `llm`: an LLM, or another object with the attribute `engine`."""

    def __init__(self, llm: Any, facts: ReplicaFacts):
        super().__init__()
        self.facts = facts
        self._engine, self._tokenizer = llm.engine, getattr(llm, "tokenizer", None)
        self._counted = self._engine.stats + Stats()
        inputs = getattr(llm, "images", None)
        self._pictures = None if inputs is None else inputs.replica_images()
        self._runs: SimpleQueue[_HostRun | None] = SimpleQueue()
        self._run: _HostRun | None = None
        self._tells_anew = False
        threading.Thread(target=self._work, name="prefold-replica", daemon=True).start()

    def begin(self, call: RunCall) -> None:
        self.end()
        if self._pictures is not None:
            self._pictures.clear()
        self._run = _HostRun(call)
        self._runs.put(self._run)

    def hold(self, pictures: list[Any], dropped: list[int]) -> None:
        assert self._pictures is not None, "the model accepts only text"
        self._pictures.hold(pictures, dropped)

    def give(self, windows: list[Window]) -> None:
        if self._run is not None:
            for window in windows:
                self._run.give(window if self._pictures is None else self._pictures.own(window))

    def end(self) -> None:
        if self._run is not None:
            self._run.end()
            self._run = None

    def report_anew(self) -> None:
        self._tells_anew = True

    def close(self) -> None:
        self.end()
        self._runs.put(None)

    def _complete(self, report: ReplicaReport) -> None:
        if report.steps or report.answers:
            # The engine's own counters are not reset, because a step in flight would count into the old ones.
            before, self._counted = self._counted, self._engine.stats + Stats()
            report.stats = _since(self._counted, before)

    def _work(self) -> None:
        while (run := self._runs.get()) is not None:
            try:
                self._serve(run)
            except BaseException as error:
                self._fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                return

    def _serve(self, run: _HostRun) -> None:
        call, engine = run.call, self._engine
        options: dict[str, Any] = {"sharing": call.sharing, "on_step": self._step, "stopping": lambda: run.has_ended}
        options |= {"max_batch_rows": call.max_batch_rows, "cache_prefill": call.in_slots or None}
        tokenizer = self._tokenizer if call.text else None
        timeout = None if engine.facts.depth == 1 else _IDLE_SECONDS
        with self._cache_watched(call.online and call.in_slots and call.sharing == "full"):
            while not run.has_ended:
                windows = run.taken(in_slots=call.in_slots, timeout=timeout)
                with closing(engine.run(windows, call.readout, tokenizer, **options)) as results:
                    for tag, answer in results:
                        run.open -= 1
                        with self._changed:
                            self._report.answers.append((*place_of(tag), answer))
                            self._changed.notify()
                        if run.has_ended:
                            return

    @contextmanager
    def _cache_watched(self, wanted: bool) -> Iterator[None]:
        """Return a context in which reports contain the events of the cache, if `wanted` and the replica has them."""
        if not (wanted and self.facts.reports_cache):
            yield
            return
        self._tells_anew = True  # the driver of this run has no earlier events, so report the whole cache first
        with self._engine.watching(on_cache=self._tell_cache):
            yield

    def _tell_cache(self, reporter: CacheReporter) -> None:
        events = reporter.snapshot() if self._tells_anew else reporter.drain()
        self._tells_anew = False
        if events is None:
            return
        if self._pictures is not None:
            events = self._pictures.translated(events)
        with self._changed:
            self._report.events = _joined(self._report.events, events)

    def _step(self, step: StepInfo) -> None:
        with self._changed:
            self._report.steps.append(step)
            self._changed.notify()


def _joined(before: CacheEvents | None, events: CacheEvents) -> CacheEvents:
    """Return the earlier and later events in one object. Drop the earlier events if the later ones start again."""
    if before is None or events.first != before.first + len(before.events):
        return events
    return replace(before, events=before.events + events.events)


def _since(now: Stats, before: Stats) -> Stats:
    """Return the difference of two snapshots of an engine's counters. Peaks come from the later snapshot."""
    counts = _difference(now, before, fields(now)[:-2])
    seconds = {part: spent - before.seconds.get(part, 0.0) for part, spent in now.seconds.items()}
    generation = now.generation
    if generation is not None and before.generation is not None:
        generation = GenerationStats(**_difference(generation, before.generation, fields(generation)))
    return Stats(**counts, seconds=seconds, generation=generation)


def _difference(now: object, before: object, of: Sequence[Field[Any]]) -> dict[str, int]:
    names = [field.name for field in of]
    return {n: getattr(now, n) - (0 if n.endswith("_peak") else getattr(before, n)) for n in names}


def facts_of(llm: Any) -> ReplicaFacts:
    """Return the ReplicaFacts of a replica that runs this LLM."""
    from .. import __version__

    identity = {
        "prefold": __version__,
        "executor": _with_version(llm.executor),
        "weights": model_identity(llm.checkpoint)["digest"],
        "dtype": str(llm.dtype).removeprefix("torch."),
        "adapters": ", ".join(llm.engine.facts.adapters),
    }
    facts: EngineFacts = llm.engine.facts
    generation = facts.options.generation
    return ReplicaFacts(
        identity,
        facts.max_rows,
        generation.max_running,
        dtype=identity["dtype"],
        cache_rows=llm.worker.kv_slots(generation.kv_memory, llm.worker.facts.slot_bytes),
        reports_cache=True,
        reserves_output=generation.reserve_output,
    )


def _with_version(executor: str) -> str:
    """Return the name of an executor. The name of the torch executor includes PyTorch's version."""
    if executor != "torch":
        return executor
    import torch

    return f"torch {torch.__version__}"
