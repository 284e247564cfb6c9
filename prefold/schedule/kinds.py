"""Which scheduler decides what is generated: the plain one, or that of a feature, where what is asked for needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cache import SlotPool
from ..plugins import load_plugins
from .generate import GenerateScheduler
from .generate_step import Held
from .steps import MakeStore

__all__ = ["add_scheduler", "check_schedulers", "make_scheduler", "over_store"]

_KINDS: list[tuple[Callable[..., Any], Callable[..., None]]] = []


def add_scheduler(make: Callable[..., Any], check: Callable[..., None] = lambda facts, options, sharing: None) -> None:
    """Adds the scheduler of a feature.

    make   is called as `make_scheduler` is, and returns None where it is not asked for
    check  takes a worker's Facts, the GenerateOptions and the sharing of an engine; it raises InputError where the
           feature is asked for and cannot be
    """
    _KINDS.append((make, check))


def check_schedulers(facts: Any, options: Any, sharing: str) -> None:
    """Raises InputError where the options of an engine ask for what its worker or its sharing cannot do."""
    load_plugins()
    for _, check in _KINDS:
        check(facts, options, sharing)


def make_scheduler(worker: Any, options: Any, max_batch_rows: int, held: Held | None = None) -> Any:
    """Returns the scheduler of what is generated, and lets the worker make room for as many slots as it has.

    options: GenerateOptions; held: as of GenerateScheduler
    """
    load_plugins()
    for make, _ in _KINDS:
        if (scheduler := make(worker, options, max_batch_rows, held)) is not None:
            return scheduler
    return over_store(GenerateScheduler, worker, options, max_batch_rows, held)


def over_store(kind: type[Any], worker: Any, options: Any, max_batch_rows: int, held: Held | None) -> Any:
    """Returns a scheduler of this kind, over the slots of a store that the worker makes."""
    slots = worker.kv_slots(options.kv_memory, worker.facts.slot_bytes)
    worker.start(MakeStore(slots + 1)).result()
    limits = {"max_batch_rows": max_batch_rows, "max_running": options.max_running}
    slot_bytes = worker.facts.slot_bytes
    return kind(SlotPool(slots), **limits, cache=options.cache, slot_bytes=slot_bytes, held=held)
