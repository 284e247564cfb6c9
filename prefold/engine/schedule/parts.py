"""The parts that features add to an engine. A feature's room enters its part in a table, and an engine calls the part's
hooks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ...spec.plugins import load_plugins
from ...spec.requests import Asked, Sharing
from ..cache import SlotPool
from .generate_step import HoldsRows
from .scheduler import Scheduler
from .steps import MakeStore, StepResult
from .windows import StreamPlanner, WindowPlanner

MakePlanner = Callable[..., StreamPlanner]
MakePart = Callable[[Any, Any, Any, Sequence[object]], "EnginePart | None"]
MAKERS: list[MakePart] = []
# Functions of features that take the ModelSpec and the identity of a model before it is loaded, and return the
# options.
SETTLERS: list[Callable[[Any, Mapping[str, Any]], Any]] = []


class EnginePart:
    """An EnginePart is what a feature adds to one engine. Its hooks do nothing; an engine calls those that a feature
    overrides. The engine's thread calls them, except `check`, which any thread calls.

    holds_rows  says which rows of images can be in a step; None: the feature has no such rows
    is_waiting  whether a request waits for work that the feature does after a step is planned (`after_plan`)
    """

    holds_rows: HoldsRows | None = None
    is_waiting = False

    def check(self, asked: Asked, sharing: Sharing = "full") -> None:
        """Raise InputError if the engine cannot do with this sharing what is asked of a request."""

    def in_slots(self, asked: Asked) -> bool:
        """Return whether numbers that are asked for run in the slots of the KV store, in jobs too."""
        return False

    def scheduler(self, max_batch_rows: int, holds_rows: HoldsRows | None) -> Any:
        """Returns the feature's own scheduler of generation, or None. Arguments: those of Scheduler."""

    def stream_scheduler(self, inner: MakePlanner) -> MakePlanner:
        """Return what makes the planner of each window of a new row stream, in turn, with the arguments of
        WindowPlanner. inner: what makes it without this feature"""
        return inner

    def take_result(self, result: StepResult) -> None:
        """Take the result of a step of a row stream, in the thread that runs the stream."""

    def set_tenants(self, tenant_of: Callable[[Hashable], Hashable]) -> None:
        """Sets the function that returns the tenant of a namespace."""

    def submit(self, request: Any) -> Mapping[str, Any]:
        """Return arguments of the scheduler's `submit` that replace fields of the OpenRequest."""
        return {}

    def forget(self, key: Hashable) -> None:
        """Forgets a request that has ended."""

    def before_plan(self, scheduler: Any, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Works after sequences have been admitted, and before a step is planned. Returns {key of a request that
        cannot go on: its error}. requests: the open requests, by their keys."""
        return {}

    def after_plan(self, rows: int | None, seconds: float) -> Mapping[Hashable, Exception]:
        """Works after a step was planned and started; returns what `before_plan` returns. rows: of the step; None
        without a step. seconds: since its planning began."""
        return {}

    def message(self, step: Any, readers: Sequence[Any]) -> Mapping[str, Any]:
        """Returns further fields of a step's message. readers: the reader of each of the step's consumers."""
        return {}

    def using(self, tokens: np.ndarray) -> AbstractContextManager[None]:
        """Returns a context in which the worker can start a step of a row stream with these tokens."""
        return nullcontext()


def add_engine_part(make: MakePart) -> None:
    """Adds a part to all engines that are made from now on.

    make  takes the worker, the EngineOptions, the Meter, and the engine's `resources`; returns the part, or None if
    this
          engine does not have the feature. Raises InputError if the feature is wanted and impossible
    """
    MAKERS.append(make)


def settle_options(options: Any, identity: Mapping[str, Any]) -> Any:
    """Returns a model's options after features have replaced values that depend on the model. identity: as of LLM.
    Raises InputError for options that this model cannot have."""
    load_plugins()
    for settle in SETTLERS:
        options = settle(options, identity)
    return options


def engine_parts(worker: Any, options: Any, meter: Any, resources: Sequence[object] = ()) -> tuple[EnginePart, ...]:
    """Returns the parts of an engine, made by the functions of `add_engine_part`."""
    load_plugins()
    return tuple(part for make in MAKERS if (part := make(worker, options, meter, resources)) is not None)


def hooks(parts: Sequence[EnginePart], name: str) -> tuple[Callable[..., Any], ...]:
    """Returns the hooks of this name that parts override."""
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not getattr(EnginePart, name))


def stream_scheduler(parts: Sequence[EnginePart]) -> MakePlanner:
    """Returns what makes the planner of each window of a new row stream."""
    make: MakePlanner = WindowPlanner
    for hook in hooks(parts, "stream_scheduler"):
        make = hook(make)
    return make


def make_scheduler(parts: Sequence[EnginePart], worker: Any, options: Any, max_batch_rows: int) -> Any:
    """Returns the scheduler of generation: that of a feature, or a Scheduler. options: GenerateOptions"""
    holds_rows = next((part.holds_rows for part in parts if part.holds_rows is not None), None)
    for make in hooks(parts, "scheduler"):
        if (scheduler := make(max_batch_rows, holds_rows)) is not None:
            return scheduler
    return over_store(Scheduler, worker, options, max_batch_rows, holds_rows)


def over_store(kind: type[Any], worker: Any, options: Any, max_batch_rows: int, holds_rows: HoldsRows | None) -> Any:
    """Returns a scheduler of this class, over the slots of a KV store that the worker makes now."""
    slots = worker.kv_slots(options.kv_memory, worker.facts.slot_bytes)
    worker.start(MakeStore(slots + 1)).result()
    limits = {"max_batch_rows": max_batch_rows, "max_running": options.max_running}
    slot_bytes = worker.facts.slot_bytes
    return kind(SlotPool(slots), **limits, cache=options.cache, slot_bytes=slot_bytes, holds_rows=holds_rows)
