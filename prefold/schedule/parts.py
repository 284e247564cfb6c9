"""What features add to an engine: their rooms enter it in a table, and an engine calls the hooks of what is there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..cache import SlotPool
from ..plugins import load_plugins
from ..types import Exits, Sharing
from .generate import GenerateScheduler
from .generate_step import Held
from .steps import MakeStore

MakePart = Callable[[Any, Any, Any, Sequence[object]], "EnginePart | None"]
_MAKERS: list[MakePart] = []
# What features make of the ModelOptions before a model is loaded, given its identity: each returns them.
SETTLERS: list[Callable[[Any, Mapping[str, Any]], Any]] = []


class EnginePart:
    """An EnginePart is what a feature adds to one engine. All of its hooks do nothing, and an engine calls those that a
    feature has of its own: in the thread of its steps, but for `check`, which any thread calls.

    in_slots    whether all numbers are read in the slots of the KV store
    held        which rows of images can be in a step; None: the feature gives no rows
    is_waiting  whether a request waits for what is done after the step that is planned
    """

    in_slots = False
    held: Held | None = None
    is_waiting = False

    def check(self, exits: Exits | None, sharing: Sharing = "full") -> None:
        """Raises InputError for exits of requests that the engine cannot follow, shared so."""

    def scheduler(self, max_batch_rows: int, held: Held | None) -> Any:
        """Returns the scheduler of what is generated; None: the feature leaves that to others. held: as of
        GenerateScheduler."""

    def set_tenants(self, tenant_of: Callable[[Hashable], Hashable]) -> None:
        """Says which tenant a namespace (adapter, salt) belongs to, from now on."""

    def submit(self, request: Any) -> Mapping[str, Any]:
        """Returns the further arguments with which the scheduler takes an OpenRequest."""
        return {}

    def forget(self, key: Hashable) -> None:
        """Forgets a request that has ended."""

    def before_plan(self, scheduler: Any, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Does what is to be done once sequences were admitted, and before a step is planned. requests: those that are
        open, by their keys. Returns the keys of requests that cannot go on, each with why."""
        return {}

    def after_plan(self, rows: int | None, seconds: float) -> Mapping[Hashable, Exception]:
        """Does what is to be done after a step of so many rows (None: there was none) that took so long, and returns
        what `before_plan` does."""
        return {}

    def message(self, step: Any, readers: Sequence[Any]) -> Mapping[str, Any]:
        """Returns further fields of a step's message. readers: of the step's takers."""
        return {}

    def using(self, tokens: np.ndarray) -> AbstractContextManager[None]:
        """Returns a context in which the worker can be given a step of a row stream with these tokens."""
        return nullcontext()


def add_engine_part(make: MakePart) -> None:
    """Adds a part to all engines that are made from now on.

    make  takes the worker, the EngineOptions, the Meter, and whatever else the engine was given; it returns the part,
          or None where the engine has no such feature. It raises InputError where the feature is asked for and cannot
          be
    """
    _MAKERS.append(make)


def settled(options: Any, identity: Mapping[str, Any]) -> Any:
    """Returns a model's options as features settle them before it is loaded. identity: as of LLM. Raises InputError for
    options that this model cannot have."""
    load_plugins()
    for settle in SETTLERS:
        options = settle(options, identity)
    return options


def engine_parts(worker: Any, options: Any, meter: Any, beside: Sequence[object] = ()) -> tuple[EnginePart, ...]:
    """Returns the parts of an engine; the arguments are those of `add_engine_part`."""
    load_plugins()
    return tuple(part for make in _MAKERS if (part := make(worker, options, meter, beside)) is not None)


def hooks(parts: Sequence[EnginePart], name: str) -> tuple[Callable[..., Any], ...]:
    """Returns the hooks of this name of those parts that have one of their own."""
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not getattr(EnginePart, name))


def make_scheduler(parts: Sequence[EnginePart], worker: Any, options: Any, max_batch_rows: int) -> Any:
    """Returns the scheduler of what is generated: the plain one, or that of a feature. Lets the worker make room for as
    many slots as it has. options: GenerateOptions"""
    held = next((part.held for part in parts if part.held is not None), None)
    for make in hooks(parts, "scheduler"):
        if (scheduler := make(max_batch_rows, held)) is not None:
            return scheduler
    return over_store(GenerateScheduler, worker, options, max_batch_rows, held)


def over_store(kind: type[Any], worker: Any, options: Any, max_batch_rows: int, held: Held | None) -> Any:
    """Returns a scheduler of this kind, over the slots of a store that the worker makes."""
    slots = worker.kv_slots(options.kv_memory, worker.facts.slot_bytes)
    worker.start(MakeStore(slots + 1)).result()
    limits = {"max_batch_rows": max_batch_rows, "max_running": options.max_running}
    slot_bytes = worker.facts.slot_bytes
    return kind(SlotPool(slots), **limits, cache=options.cache, slot_bytes=slot_bytes, held=held)
