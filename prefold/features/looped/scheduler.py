"""The scheduler of looped models: it counts visits, and moves a routed prompt's rows to the router's route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...engine.cache import SlotPool
from ...engine.cache.tree import Node
from ...engine.schedule.admission import NO_LIMITS, StepLimits
from ...engine.schedule.generate_step import GenerateStep, SequenceState, StepPlan
from ...engine.schedule.scheduler import Scheduler
from ...engine.schedule.steps import SlotResult
from ...spec.requests import Asked, Namespace
from ...trie import token_bytes
from .steps import MODEL_ORDER, PassResult, Way

# (the request's namespace, its options, the tokens of a prompt) -> the namespace of the prompt's rows
NamespaceOf = Callable[[Namespace, Asked | None, np.ndarray], Namespace]
# Called with (namespace, tokens, route) of a prompt after its router was asked.
OnRoute = Callable[[Namespace, np.ndarray, tuple[int, ...]], None]


def namespace_at(node: Node) -> Namespace:
    """Return the namespace of a node's rows."""
    while node.parent is not None:
        node = node.parent
    return node.namespace  # type: ignore[return-value]


@dataclass(slots=True)
class RoutedPlan(StepPlan):
    """The plan of a step for a model with a router.

    The router is asked about whole prompts, so all rows of such a prompt are in one step. At most one such prompt may
    exceed the step's limit of rows.
    """

    has_asked: bool = False

    def _add_prompt(self, sequence: SequenceState) -> None:
        leaf = sequence.leaf
        if namespace_at(leaf).part(Way, MODEL_ORDER).asker is None:
            StepPlan._add_prompt(self, sequence)
            return
        missing = leaf.num_pending - self.computed_rows.get(leaf, 0)
        if missing > self.room and self.has_asked:
            return
        self.has_asked, self.room = True, max(self.room, missing)
        if sequence.tail.tokens:  # rows of generated tokens wait until the route is known
            self.computed_rows[leaf] = len(leaf)
            self.room -= missing
        else:
            StepPlan._add_prompt(self, sequence)


class LoopedScheduler(Scheduler):
    """A Scheduler for a looped model. `NamespaceOf` and `OnRoute` describe its two callbacks."""

    def __init__(self, pool: SlotPool, *, namespace_of: NamespaceOf, on_route: OnRoute, routed: bool, **options: Any):
        self._namespace_of, self._on_route, self._routed = namespace_of, on_route, routed
        super().__init__(pool, **options)

    def namespace_of(self, namespace: Namespace, asked: Asked | None, tokens: np.ndarray) -> Namespace:
        return self._namespace_of(namespace, asked, tokens)

    def plan(self, limits: StepLimits = NO_LIMITS) -> GenerateStep | None:
        if self._routed and any(_asks(step) for step in self._in_flight):
            return None  # the router's answer decides the route of the next step's rows
        return super().plan(limits)

    def _new_plan(self, limits: StepLimits) -> StepPlan:
        return RoutedPlan(self._max_rows(limits), self._holds_rows) if self._routed else super()._new_plan(limits)

    def commit(
        self, step: GenerateStep, tokens: Sequence[int], ended: Sequence[bool], result: SlotResult | None = None
    ) -> list[SequenceState]:
        if isinstance(result, PassResult) and self._in_flight and self._in_flight[0] is step:
            self.stats.block_calls += int(result.visits.sum())
            self.stats.block_calls_saved += result.saved
            for namespace, route in zip(_asks(step), result.routes, strict=True):
                self._settle(namespace, route)
        return super().commit(step, tokens, ended, result)

    def _settle(self, namespace: Namespace, route: tuple[int, ...]) -> None:
        """Move the rows of a prompt to its route, so that later prompts find them."""
        way = namespace.part(Way, MODEL_ORDER)
        assert way.asker is not None
        sequences = list(self.requests.get(way.asker.key, ()))
        # The request has ended, waits again after it was on hold, or ends because its values are not finite.
        if not sequences or sequences[0].leaf.num_pending or not route:
            return
        old = sequences[0].leaf
        tokens, own_slots = np.asarray(old.tokens), self.tree.drop(old)
        self._on_route(namespace, tokens, route)
        old.users = 0
        self.tree.remove(old)
        leaf = self.tree.insert(namespace.with_part(replace(way, route=route, asker=None)), token_bytes(tokens))
        path = leaf.path()
        if self.cache is not None:
            self.cache.take(path)
            self.cache.use(path)
        for node in path:
            node.users += len(sequences)
            node.priority = max(node.priority, *[sequence.priority for sequence in sequences])
            self._fill(node, own_slots[node.start : node.stop])
        for sequence in sequences:
            sequence.leaf = sequence.tail.parent = leaf
        self._repeated = None  # the step to repeat refers to the old rows

    def _fill(self, node: Node, slots: np.ndarray) -> None:
        """Use these slots for the rows of a node that are not computed, and free the rest."""
        computed = node.num_computed
        spare = slots[:computed]
        if computed < len(node):
            kept, pending = node.slots[:computed].copy(), node.slots[computed:].copy()
            node.give_up()
            node.claim(np.concatenate((kept, slots[computed:])))
            node.num_computed = len(node)
            self.tree.stored(node)
            spare = np.concatenate((spare, pending))
        self.pool.free(spare)

    def _let_go(self, node: Node) -> None:
        if namespace_at(node).part(Way, MODEL_ORDER).asker is None:
            super()._let_go(node)
        else:  # no other request can find these rows
            self.pool.free(self.tree.drop(node))
            self.tree.remove(node)

    def _is_prompt_like(self, sequence: SequenceState) -> bool:
        exits = namespace_at(sequence.leaf).part(Way, MODEL_ORDER).exits
        return exits is None or (exits.prompts and not exits.visits)


def _asks(step: GenerateStep) -> list[Namespace]:
    """Return the namespaces of a step's prompts that the router routes, in the order of their rows."""
    return [namespace for namespace, _, _ in step.namespaces if namespace.part(Way, MODEL_ORDER).asker is not None]
