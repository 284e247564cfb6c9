"""A job whose requests run as they come: one live window feeds the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from ..engine.requests import PROBED
from ..stream import LiveInput, LiveWindows
from ..stream.live_windows import See

_STEPS = 2  # an engine is given about what fills so many steps at a time
_HELD = 0.3  # of a bucket's prefix, from which on the engine counts as holding it


def takes_ranges(engine: Any) -> bool:
    """Returns whether an engine divides a stream itself, among replicas."""
    return getattr(engine, "takes_ranges", False)


def reads_last_rows(task: Any) -> bool:
    """Returns whether most of what a task reads are last rows of prompts, so that they can be read in the KV store."""
    return task.readout.kind in PROBED or task.readout.kind == "logprobs"


def live_results(
    engine: Any,
    task: Any,
    some: LiveInput,
    *,
    stopping: Callable[[], bool],
    **run: Any,
) -> Iterator[tuple[bytes, Any]]:
    """Yields (tag, result) of every request that comes, as `results_of` does.

    What is generated, and what is read at last rows only, runs in the KV store: requests join those that run, and find
    the rows of those before. All else runs bucket by bucket.
    """
    share, generates = engine.sharing == "full", task.readout.kind == "tokens"
    in_slots = generates or (share and reads_last_rows(task))
    rows = getattr(engine, "max_batch_rows", 4096)
    live = LiveWindows(
        some.feed,
        max_tokens=some.max_tokens,
        most=min(some.max_tokens, _STEPS * rows),
        share=share,
        busy=engine.options.generation.max_running // 2 if in_slots and hasattr(engine, "options") else 1,
        is_held=_holds(engine, task) if in_slots and share and hasattr(engine, "held_rows") else None,
        stopping=stopping,
    )
    run["stopping"] = stopping
    try:
        if generates:
            yield from _counted(live, engine.generate(watched(live, some.see), task.inputs.tokenizer, **run))
        elif in_slots:
            yield from _counted(live, engine.run(watched(live, some.see), task.readout, cache_prefill=True, **run))
        while not (in_slots or live.is_done or stopping()):
            windows = watched(live.steady(ahead=_computes_ahead(engine)), some.see)
            yield from _counted(live, engine.run(windows, task.readout, **run))
    finally:
        live.close()


def watched(windows: Iterable[Any], see: See | None) -> Iterable[Any]:
    """Returns the windows as they are; `see` is shown each as it is taken."""
    return windows if see is None else _shown(windows, see)


def _shown(windows: Iterable[Any], see: See) -> Iterator[Any]:
    for window in windows:
        if window is not None:
            see(window)
        yield window


def _counted(live: LiveWindows, results: Any) -> Iterator[tuple[bytes, Any]]:
    with closing(results):
        for one in results:
            live.answered += 1
            yield one


def _holds(engine: Any, task: Any) -> Callable[[Any, np.ndarray], bool]:
    """Returns what says whether an engine holds a good part of a prefix, by the exits that the task's requests have
    where they do not say others."""
    exits = task.sampling.exits if task.readout.kind == "tokens" else task.readout.exits

    def is_held(namespace: tuple[str, str], prefix: np.ndarray) -> bool:
        adapter, salt = namespace
        return engine.held_rows(prefix, adapter or None, salt, exits) >= max(1, _HELD * len(prefix))

    return is_held


def _computes_ahead(engine: Any) -> bool:
    return getattr(getattr(getattr(engine, "worker", None), "facts", None), "depth", 1) > 1
