"""Looped models in the engine: which exits it can follow, namespaces by route and rule, and the messages. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from ...engine.messages import kept_rows
from ...engine.protocol import EngineOptions, GenerateOptions
from ...engine.requests import KeptStates
from ...engine.schedule.generate_step import HoldsRows
from ...engine.schedule.parts import EnginePart, over_store
from ...engine.worker import Worker
from ...errors import InputError
from ...spec.requests import Asked, Exits, Namespace, Sharing, refuse_exits
from .scheduler import LoopedScheduler
from .steps import (
    AS_THE_MODEL,
    MODEL_ORDER,
    NO_EXITS,
    Asker,
    Keys,
    LoopedFacts,
    Passage,
    ReadAfter,
    Way,
    exits_row,
    may_leave,
)

NEVER = float("nan")
Rule = tuple[float, float, float, float]
STAYS: Rule = (NEVER, NEVER, 1, np.inf)  # a row of `Passage.leave_after` for a row that makes all visits
MOST_ROUTES = 1 << 16  # number of prompts with a remembered route


def engine_part(worker: Worker, options: EngineOptions) -> EnginePart:
    """Return the engine part for a worker's model. Raise InputError if `exits` lets rows leave but the model cannot."""
    facts, exits = worker.facts.of(LoopedFacts), options.generation.looped.exits
    if exits != "read" and (facts is None or not facts.is_whole):
        message = f"exits is {exits!r}, which needs a looped model that is not split over ranks"
        raise InputError(message, field="exits", remedy='use exits "read", and tensor_parallel=1', code="not_looped")
    return NotLooped() if facts is None else LoopedPart(worker, options.generation, facts)


class NotLooped(EnginePart):
    """The engine part for a model that is not looped: it refuses exits."""

    def check(self, asked: Asked, sharing: Sharing = "full") -> None:
        if asked.exits is not None:
            refuse_exits(asked.exits)


class Ways:
    """The ways of requests' rows through the model, and so their namespaces: by route, exit rule and router.

    Args:
        exits: the value of `LoopedSettings.exits`

    Attributes:
        leaves: rows leave for good, by rules or because a router says so. If false, rows make all visits of their
            route, and may only be read earlier
    """

    def __init__(self, facts: LoopedFacts, exits: str):
        self._facts, self.leaves = facts, facts.routed or exits != "read"
        self._routes: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()  # the router's choices, by prompt

    def asks(self, exits: Exits | None) -> bool:
        """Return whether a router chooses the route of a request."""
        return self._facts.routed and (exits is None or exits.route is None)

    def filled(self, exits: Exits | None) -> Exits:
        """Return exits with the model's threshold as the default."""
        exits = exits or Exits()
        return replace(exits, threshold=self._facts.threshold) if exits.threshold is None else exits

    def namespace_of(
        self, namespace: Namespace, asked: Asked | None, tokens: np.ndarray, key: Hashable = None
    ) -> Namespace:
        """Return the namespace of a prompt's rows.

        Args:
            key: the key of the request, needed if a router chooses its route
        """
        exits = None if asked is None else asked.exits
        if exits is not None and namespace.part(KeptStates, None) is not None:
            namespace = namespace.with_part(ReadAfter(exits))
        filled, asker = self.filled(exits), None
        route, rule = filled.route, replace(filled, route=None)
        if self.asks(exits):
            asker = Asker(key, filled.min_visits, filled.max_visits or len(self._facts.order))
        if not self._facts.routed and route == self._facts.order:
            route = None
        way = Way(route, rule if self.leaves and may_leave(filled) else None, asker)
        if asker is not None and (route := self._routes.get(_place(namespace, way, tokens))) is not None:
            way = replace(way, route=route, asker=None)
        return namespace if way == MODEL_ORDER else namespace.with_part(way)

    def remember(self, namespace: Namespace, tokens: np.ndarray, route: tuple[int, ...]) -> None:
        """Remember the router's choice for a prompt, for later requests with the same prompt."""
        self._routes[_place(namespace, namespace.part(Way, MODEL_ORDER), tokens)] = route
        if len(self._routes) > MOST_ROUTES:
            self._routes.popitem(last=False)


class LoopedPart(EnginePart):
    """The engine part for a looped model.

    The scheduler refers to its `ways`, not to the part, because the part refers to the worker.
    """

    def __init__(self, worker: Worker, options: GenerateOptions, facts: LoopedFacts):
        self._worker, self._options, self._facts = worker, options, facts
        self.ways = Ways(facts, options.looped.exits)
        self._keys: Keys = "project" if options.looped.exits == "project" else "last"
        self._leaving: tuple[object, np.ndarray] | None = None  # computed rows of the last step, and their rules

    def check(self, asked: Asked, sharing: Sharing = "full") -> None:
        exits = asked.exits
        if sharing == "mlp" and self.in_slots(asked):
            remedy = 'use full or off, or give the LLM looped={"exits": "read"}'
            raise InputError("rows that leave do not work with this sharing", field="sharing", remedy=remedy)
        if exits is None:
            return
        if self.ways.leaves:
            if exits.prompts and self.ways.asks(exits):
                message = "exit_prompts is given, but the router reads the prompt's rows after each visit"
                raise InputError(message, field="exit_prompts", remedy="leave it out, or give a route", code="no_exits")
            return
        for name in exits.given:
            if name in ("exit_change", "exit_prompts", "exit_visits"):
                message = f"{name} is given, but rows make all visits"
                raise InputError(message, field=name, remedy='give the LLM looped={"exits": "save"}', code="no_exits")
            if name in ("min_visits", "max_visits") and not self._facts.gate:
                message = f"{name} is given, but the model has no gate: its rows are read after the last visit"
                remedy = 'leave it out, or give the LLM looped={"exits": "save"}'
                raise InputError(message, field=name, remedy=remedy, code="no_gate")

    def in_slots(self, asked: Asked) -> bool:
        exits = asked.exits
        # A row stream shares rows by their tokens alone, and all its rows make all visits.
        return self.ways.asks(exits) or (self.ways.leaves and may_leave(self.ways.filled(exits)))

    def scheduler(self, max_batch_rows: int, holds_rows: HoldsRows | None) -> LoopedScheduler:
        hooks: dict[str, Any] = {"namespace_of": self.ways.namespace_of, "on_route": self.ways.remember}
        kind: Any = partial(LoopedScheduler, routed=self._facts.routed, **hooks)
        scheduler: LoopedScheduler = over_store(kind, self._worker, self._options, max_batch_rows, holds_rows)
        return scheduler

    def submit(self, request: Any) -> Mapping[str, Any]:
        namespace = self.ways.namespace_of(request.namespace, request.readers[0].asked, request.rows, request.key)
        return {"namespace": namespace}

    # ------------------------------------------------------------------------------------------- messages

    def message(self, step: Any, readers: Sequence[Any]) -> Mapping[str, Any]:
        ways = [(namespace.part(Way, MODEL_ORDER), first, stop) for namespace, first, stop in step.namespaces]
        numbers: dict[tuple[int, ...], int] = {}
        route = [numbers.setdefault(way.route or self._facts.order, len(numbers)) for way, _, _ in ways]
        own: dict[str, Any] = {"routes": tuple(numbers)}
        if len(numbers) > 1:
            own["route"] = np.repeat(route, [stop - first for _, first, stop in ways])
        if self.ways.leaves:
            own |= {"leave_after": self._leave_after(step, ways), "keys": self._keys}
        else:
            own["read_after"] = self._read_after(step, readers)
        askers = [(first, stop, way.asker) for way, first, stop in ways if way.asker is not None]
        if askers:
            own["asks"] = np.array([(first, stop, asker.fewest, asker.most) for first, stop, asker in askers], np.int64)
        return {"feature": Passage(**own)}

    def _read_after(self, step: Any, readers: Sequence[Any]) -> np.ndarray | None:
        kept = (namespace.part(ReadAfter, AS_THE_MODEL).exits for namespace, _ in kept_rows(step))
        exits = [*(reader.asked.exits for reader in readers), *kept]
        rows = [exits_row(one) for one in exits]
        if self._facts.threshold == 1 and all(row == NO_EXITS for row in rows):
            return None
        return np.array(rows, np.float64).reshape(-1, 3)  # None becomes nan

    def _leave_after(self, step: Any, ways: Sequence[tuple[Way, int, int]]) -> np.ndarray | None:
        """Return a step's `Passage.leave_after`. Rows of prompts leave only if their requests ask for it."""
        if self._leaving is not None and self._leaving[0] is step.computed_rows:
            return self._leaving[1]  # the same sequences continue by the same rules
        self._leaving = None
        if all(way.exits is None for way, _, _ in ways):
            return None
        rules, starts, has_lists = [STAYS] * step.num_rows, [first for _, first, _ in ways], False
        for way, first, stop in ways:
            if way.exits is not None and way.exits.prompts:
                rules[first:stop] = [_rule(way.exits)] * (stop - first)
        for node, count in step.computed_rows:
            stop = step.last_row[node] + 1
            exits = ways[bisect_right(starts, stop - 1) - 1][0].exits
            if exits is None or not isinstance(node.tokens, list):
                continue  # the rows make all visits, or belong to a prompt: only the tokens of a tail are a list
            listed = exits.visits[node.num_computed : node.num_computed + count]
            own: list[Rule] = [(NEVER, NEVER, visits, visits) for visits in listed]
            rules[stop - count : stop] = own if len(own) == count else (own + [_rule(exits)] * count)[:count]
            has_lists = has_lists or bool(exits.visits)
        found = np.array(rules, np.float64)
        if not has_lists:
            self._leaving = step.computed_rows, found
        return found


def _rule(exits: Exits) -> Rule:
    """Return a row of `Passage.leave_after`."""
    threshold = NEVER if exits.threshold in (None, 1) else float(exits.threshold)
    change = NEVER if exits.change is None else exits.change
    return threshold, change, exits.min_visits, exits.max_visits or np.inf


def _place(namespace: Namespace, way: Way, tokens: np.ndarray) -> Hashable:
    """Return the key of a prompt that the router routes. All requests with the prompt have this key."""
    assert way.asker is not None
    return (
        namespace.with_part(replace(way, asker=None)),
        way.asker.fewest,
        way.asker.most,
        blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=16).digest(),
    )
