"""What looped models add to an engine: which exits can be followed, in one pass a step or in a visit a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np

from ..cache import SlotPool
from ..engine.messages import adapter_of, kept_rows
from ..engine.options import EngineOptions, GenerateOptions
from ..errors import InputError
from ..model.config import refuse_exits
from ..schedule.generate_step import HoldsRows
from ..schedule.parts import EnginePart
from ..types import Exits, Sharing
from ..worker.protocol import Facts, Worker
from .scheduler import VisitScheduler
from .sequence import ExitRecord
from .steps import NO_EXITS, LoopedFacts, MakeVisitStore, VisitOptions, exits_row


class UnloopedPart(EnginePart):
    """An UnloopedPart is the EnginePart for a model that is not looped; it refuses requests with exits."""

    def check(self, exits: Exits | None, sharing: Sharing = "full") -> None:
        if exits is not None:
            refuse_exits(exits)


class Passes(EnginePart):
    """A Passes is the EnginePart for a looped model whose steps are whole passes through all visits."""

    def __init__(self, looped: LoopedFacts):
        self._looped = looped

    def check(self, exits: Exits | None, sharing: Sharing = "full") -> None:
        if exits is None:
            return
        for name in exits.given:
            if name in ("exit_change", "exit_prompts", "exit_visits"):
                message = f"{name} is given, and rows make all visits"
                raise InputError(message, field=name, remedy='give the LLM looped={"exits": "save"}', code="no_exits")
            if name in ("min_visits", "max_visits") and not self._looped.gate:
                message = f"{name} is given, and the model has no gate: its rows are read after the last visit"
                raise InputError(
                    message, field=name, remedy='leave it out, or give the LLM looped={"exits": "save"}', code="no_gate"
                )
        if exits.route is not None and not self._looped.routes:
            message = "a route is given, and the model's blocks differ in windows or rotary settings"
            raise InputError(message, field="route", remedy='give the LLM looped={"exits": "save"}', code="no_exits")

    def submit(self, request: Any) -> Mapping[str, Any]:
        exits = request.readers[0].exits
        return {} if exits is None or exits.route is None else {"route": exits.route}

    def message(self, step: Any, readers: Sequence[Any]) -> Mapping[str, Any]:
        exits = [*(reader.exits for reader in readers), *(exits for exits, _ in kept_rows(step))]
        rows = [exits_row(rule) for rule in exits]
        if all(row == NO_EXITS for row in rows):
            return {}
        return {"exits": np.array(rows, np.float64)}  # None becomes nan


class Visits(EnginePart):
    """A Visits is the EnginePart for a looped model whose rows go through it a visit at a time.

    visits  how rows go through the model
    """

    in_slots = True

    def __init__(self, worker: Worker, options: GenerateOptions, visits: VisitOptions):
        self._worker, self._options, self.visits = worker, options, visits

    def check(self, exits: Exits | None, sharing: Sharing = "full") -> None:
        if sharing == "mlp":
            remedy = 'use full or off, or give the LLM looped={"exits": "read"}'
            raise InputError("rows that leave share all or nothing", field="sharing", remedy=remedy)
        if exits is not None and exits.prompts and self.visits.routed and exits.route is None:
            message = "exit_prompts is given, and the router reads the prompt's rows after each visit"
            raise InputError(message, field="exit_prompts", remedy="leave it out, or give a route", code="no_exits")

    def scheduler(self, max_batch_rows: int, holds_rows: HoldsRows | None) -> VisitScheduler:
        worker, options, looped = self._worker, self._options, self._worker.facts.of(LoopedFacts)
        assert looped is not None
        slots = worker.kv_slots(options.kv_memory, looped.visit_bytes)
        worker.start(MakeVisitStore(slots + 1)).result()
        limits: dict[str, Any] = {"max_batch_rows": max_batch_rows, "max_running": options.max_running}
        slot_bytes = looped.visit_bytes
        return VisitScheduler(SlotPool(slots), self.visits, **limits, cache=options.cache, slot_bytes=slot_bytes)

    def submit(self, request: Any) -> Mapping[str, Any]:
        return {"exits": request.readers[0].exits, "exit_record": request.notes.setdefault("exit_record", ExitRecord())}

    def message(self, step: Any, readers: Sequence[Any]) -> Mapping[str, Any]:
        facts = self._worker.facts
        if not facts.adapters:
            return {}
        projected = [adapter_of(facts, namespace) for namespace in step.projects]
        return {"project_adapters": np.array(projected, np.int64)}


def engine_part(worker: Worker, options: EngineOptions) -> EnginePart:
    """Returns the EnginePart for a worker's model. Raises InputError where rows should leave, and cannot."""
    looped, visits = worker.facts.of(LoopedFacts), visits_of(worker.facts, options.generation)
    if looped is None:
        return UnloopedPart()
    return Passes(looped) if visits is None else Visits(worker, options.generation, visits)


def visits_of(facts: Facts, options: GenerateOptions) -> VisitOptions | None:
    """Returns the VisitOptions of a model whose rows go a visit at a time; None where a step is a whole pass.

    Raises InputError where rows should leave, and the model is not looped or split over ranks.
    """
    looped = facts.of(LoopedFacts)
    visits = None if looped is None else looped.visits
    if visits is None and options.looped.exits != "read":
        message = f"exits is {options.looped.exits!r}, which is for looped models in one piece"
        raise InputError(message, field="exits", remedy='use exits "read", and tensor_parallel=1', code="not_looped")
    if visits is None or not (visits.routed or options.looped.exits != "read"):
        return None
    keys: Literal["last", "project"] = "project" if options.looped.exits == "project" else "last"
    settings = {name: value for name, value in asdict(options.looped).items() if name != "exits"}
    return replace(visits, keys=keys, **settings)
