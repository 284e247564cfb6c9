"""The parts that features add to an engine. A feature adds its part to a table; engines call the part's hooks."""

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
# Functions of features that adapt options to a model before it is loaded: (ModelSpec, identity) -> options.
SETTLERS: list[Callable[[Any, Mapping[str, Any]], Any]] = []


class EnginePart:
    """The part that a feature adds to one engine.

    The hooks here do nothing; an engine calls only hooks that a feature overrides. The engine's thread calls them; only
    `check` may be called by any thread.

    Attributes:
        holds_rows: Tells which image rows can be in a step; None: the feature has no such rows.
        is_waiting: A request waits for work that the feature does after a step is planned (`after_plan`).
    """

    holds_rows: HoldsRows | None = None
    is_waiting = False

    def check(self, asked: Asked, sharing: Sharing = "full") -> None:
        """Raise InputError if the engine does not support a request's question with this sharing."""

    def in_slots(self, asked: Asked) -> bool:
        """Return True if such read-outs use the slots of the KV store even in jobs."""
        return False

    def scheduler(self, max_batch_rows: int, holds_rows: HoldsRows | None) -> Any:
        """Return the feature's own scheduler of generation, or None. The arguments are Scheduler's."""

    def stream_scheduler(self, inner: MakePlanner) -> MakePlanner:
        """Return the function that creates the planner of each window; its arguments are WindowPlanner's.

        `inner` is this function without the feature.
        """
        return inner

    def take_result(self, result: StepResult) -> None:
        """Process the result of a step of a row stream, in the thread that runs the stream."""

    def set_tenants(self, tenant_of: Callable[[Hashable], Hashable]) -> None:
        """Set the function that returns the tenant of a namespace."""

    def submit(self, request: Any) -> Mapping[str, Any]:
        """Return arguments of the scheduler's `submit` that replace fields of the OpenRequest."""
        return {}

    def forget(self, key: Hashable) -> None:
        """Forget a request that has ended."""

    def before_plan(self, scheduler: Any, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Work after admission and before a step is planned. Return {key of a request that cannot continue: its error}.

        `requests` are the open requests by key.
        """
        return {}

    def after_plan(self, rows: int | None, seconds: float) -> Mapping[Hashable, Exception]:
        """Work after a step was planned and started; return errors like `before_plan`.

        `rows` are the rows of the step, None without a step. `seconds` is the time since its planning began.
        """
        return {}

    def message(self, step: Any, readers: Sequence[Any]) -> Mapping[str, Any]:
        """Return further fields of a step's message, given the reader of each of its consumers."""
        return {}

    def using(self, tokens: np.ndarray) -> AbstractContextManager[None]:
        """Return a context in which the worker can start a step of a row stream with these tokens."""
        return nullcontext()


def add_engine_part(make: MakePart) -> None:
    """Add a part to all engines created from now on.

    `make(worker, EngineOptions, Meter, resources of the engine)` returns the part, or None if this engine does not have
    the feature. It raises InputError if the feature is requested but impossible.
    """
    MAKERS.append(make)


def settle_options(options: Any, identity: Mapping[str, Any]) -> Any:
    """Return a model's options after features have replaced values that depend on the model.

    Raise InputError for options that this model does not support. `identity` comes from `model_identity`.
    """
    load_plugins()
    for settle in SETTLERS:
        options = settle(options, identity)
    return options


def engine_parts(worker: Any, options: Any, meter: Any, resources: Sequence[object] = ()) -> tuple[EnginePart, ...]:
    """Return the parts of an engine, created by the functions given to `add_engine_part`."""
    load_plugins()
    return tuple(part for make in MAKERS if (part := make(worker, options, meter, resources)) is not None)


def hooks(parts: Sequence[EnginePart], name: str) -> tuple[Callable[..., Any], ...]:
    """Return the hooks of this name that parts override."""
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not getattr(EnginePart, name))


def stream_scheduler(parts: Sequence[EnginePart]) -> MakePlanner:
    """Return the function that creates the planner of each window of a new row stream."""
    make: MakePlanner = WindowPlanner
    for hook in hooks(parts, "stream_scheduler"):
        make = hook(make)
    return make


def make_scheduler(parts: Sequence[EnginePart], worker: Any, options: Any, max_batch_rows: int) -> Any:
    """Return the scheduler of generation: a feature's, or a Scheduler. `options` are GenerateOptions."""
    holds_rows = next((part.holds_rows for part in parts if part.holds_rows is not None), None)
    for make in hooks(parts, "scheduler"):
        if (scheduler := make(max_batch_rows, holds_rows)) is not None:
            return scheduler
    return over_store(Scheduler, worker, options, max_batch_rows, holds_rows)


def over_store(kind: type[Any], worker: Any, options: Any, max_batch_rows: int, holds_rows: HoldsRows | None) -> Any:
    """Return a scheduler of this class over the slots of a new KV store, which the worker creates."""
    slots = worker.kv_slots(options.kv_memory, worker.facts.slot_bytes)
    worker.start(MakeStore(slots + 1)).result()
    limits = {"max_batch_rows": max_batch_rows, "max_running": options.max_running}
    slot_bytes = worker.facts.slot_bytes
    return kind(SlotPool(slots), **limits, cache=options.cache, slot_bytes=slot_bytes, holds_rows=holds_rows)
