"""How a generator goes through its model: in one pass a step, or a visit a step where rows leave or take routes."""

from __future__ import annotations

from dataclasses import asdict, replace

from ..cache import SlotPool
from ..engine.options import GenerateOptions
from ..errors import InputError
from ..schedule.generate_step import Held
from ..types import Exits
from ..worker.protocol import Facts, Worker
from .requests import check_exits
from .scheduler import VisitOptions, VisitScheduler
from .steps import LoopedFacts, MakeVisitStore

__all__ = ["check_visits", "visit_scheduler", "visits_of"]


def visits_of(facts: Facts, options: GenerateOptions) -> VisitOptions | None:
    """Returns how rows go through the model a visit at a time; None where a step is a whole pass.

    Raises InputError where rows should leave, and the model is not looped or split over ranks.
    """
    looped = facts.of(LoopedFacts)
    visits = None if looped is None else looped.visits
    if visits is None and options.looped.exits != "read":
        message = f"exits is {options.looped.exits!r}, which is for looped models in one piece"
        raise InputError(message, field="exits", remedy='use exits "read", and tensor_parallel=1', code="not_looped")
    if visits is None or not (visits.routed or options.looped.exits != "read"):
        return None
    keys = "project" if options.looped.exits == "project" else "last"
    how = {name: value for name, value in asdict(options.looped).items() if name != "exits"}
    return replace(visits, keys=keys, **how)


def visit_scheduler(
    worker: Worker, options: GenerateOptions, max_batch_rows: int, held: Held | None = None
) -> VisitScheduler | None:
    """Returns the scheduler of rows that go through the model a visit at a time; None where a step is a whole pass."""
    visits, looped = visits_of(worker.facts, options), worker.facts.of(LoopedFacts)
    if visits is None or looped is None:
        return None
    slots = worker.kv_slots(options.kv_memory, looped.visit_bytes)
    worker.start(MakeVisitStore(slots + 1)).result()
    limits = {"max_batch_rows": max_batch_rows, "max_running": options.max_running}
    return VisitScheduler(SlotPool(slots), visits, **limits, cache=options.cache, slot_bytes=looped.visit_bytes)


def check_visits(exits: Exits | None, facts: Facts, visits: VisitOptions | None) -> None:
    """Raises InputError for exits and routes of a request that cannot be followed.

    visits: how rows go through the model a visit at a time; None: a step is a whole pass
    """
    if exits is None:
        return
    looped = facts.of(LoopedFacts)
    if looped is None:
        check_exits(exits, None)
    elif visits is None:
        for name in exits.given:
            if name in ("exit_change", "exit_prompts", "exit_visits"):
                message = f"{name} is given, and rows make all visits"
                raise InputError(message, field=name, remedy='give the LLM looped={"exits": "save"}', code="no_exits")
            if name in ("min_visits", "max_visits") and not looped.gate:
                message = f"{name} is given, and the model has no gate: its rows are read after the last visit"
                raise InputError(
                    message, field=name, remedy='leave it out, or give the LLM looped={"exits": "save"}', code="no_gate"
                )
        if exits.route is not None and not looped.routes:
            message = "a route is given, and the model's blocks differ in windows or rotary settings"
            raise InputError(message, field="route", remedy='give the LLM looped={"exits": "save"}', code="no_exits")
    elif exits.prompts and visits.routed and exits.route is None:
        message = "exit_prompts is given, and the router reads the prompt's rows after each visit"
        raise InputError(message, field="exit_prompts", remedy="leave it out, or give a route", code="no_exits")
