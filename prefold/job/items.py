"""A few items through a task and an engine, in memory: for direct use, samples and probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from ..stream import Spool
from ..types import Result
from .gather import Gather, tagged

__all__ = ["calibrated", "finish_items", "run_items", "run_works"]


def run_works(engine: Any, task: Any, works: Sequence[Any], *, window: int = 1 << 20) -> list[list[Result] | None]:
    """The results of each Work's requests, in order; None where `works` holds an InputError."""
    out: list[list[Result] | None] = [None] * len(works)
    gather = Gather()
    with Spool() as spool:
        for number, work in enumerate(works):
            if not isinstance(work, InputError):
                for request, tag in tagged(number, None, [work]):
                    spool.add(request, tag)
        windows = spool.windows(max_tokens=window, share=engine.sharing == "full", read=task.readout.kind)
        for tag, result in engine.run(windows, task.readout):
            done = gather.add(tag, result)
            if done is not None:
                out[done.number] = done.items[0][1]
    return out


def finish_items(task: Any, works: Sequence[Any], results: Sequence[list[Result] | None]) -> list[Any]:
    """What the task makes of each item's results, or the item's InputError."""
    return [
        work if isinstance(work, InputError) else task.finish(work.note, result)
        for work, result in zip(works, results, strict=True)
    ]


def run_items(engine: Any, task: Any, items: Sequence[Any]) -> list[Any]:
    """The task's result of each item, or its InputError, in order."""
    works = task.prepare(items)
    return finish_items(task, works, run_works(engine, task, works))


def calibrated(engine: Any, task: Any) -> Any:
    """The task itself, or where it asks for a calibration (classify), the task after it."""
    items = task.calibration_items() if hasattr(task, "calibration_items") else []
    if not items:
        return task
    outputs = run_items(engine, task, items)
    for output in outputs:
        if isinstance(output, InputError):
            raise output
    return task.with_calibration(outputs)
