"""The scheduler of generation for hybrids: which states the rows of a step start from, and which states are stored.

A state belongs to a node of the trie, a prompt's node or a tail, and to a number of the node's rows: it is the state
after these rows. Each running sequence has the deepest state on its path. The other states are an LRU cache with a
fixed number of slots. If a row is to be computed and the state before it is missing, the rows from the nearest state
above are computed again. Their K/V exists already and is not written again.

A prompt's last token has its own node, so that the state before it can be stored. A later request with the same prompt
computes that row again from there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from ...engine.cache import SlotPool
from ...engine.cache.tree import Node
from ...engine.schedule.admission import StepLimits
from ...engine.schedule.generate_step import GenerateStep, RepeatedStep, SequenceState, StepPlan, lay_out
from ...engine.schedule.scheduler import Scheduler
from ...engine.schedule.steps import SlotStep
from ...spec.requests import Namespace
from ...trie import token_bytes
from .steps import ZERO, StateRuns, StateSlotStep


@dataclass(frozen=True, slots=True)
class State:
    """A stored state."""

    slot: int
    rows: int  # number of rows of the node before the state, at least 1


@dataclass(eq=False, slots=True)
class StateStep(GenerateStep):
    """A GenerateStep with its changes of the states."""

    # Nodes that lose their states, the states of nodes after the step, and nodes with states that rows start from.

    evicted_nodes: tuple[Node, ...] = ()
    new_states: Mapping[Node, State] = field(default_factory=dict)
    read_nodes: tuple[Node, ...] = ()


@dataclass(eq=False, slots=True)
class RepeatedStateStep(RepeatedStep):
    """A RepeatedStep of a StateStep: each state is stored in the slot from which it was read."""

    @classmethod
    def of(cls, step: GenerateStep) -> Self | None:
        runs = step.message.runs  # type: ignore[attr-defined]
        stays = np.array_equal(runs.source, runs.slots) and np.array_equal(runs.ends, np.arange(len(runs.source)))
        return super(RepeatedStateStep, cls).of(step) if stays else None

    def again(self) -> GenerateStep | None:
        step, last = super(RepeatedStateStep, self).again(), self.step
        if step is None:
            return None
        assert isinstance(last, StateStep) and isinstance(last.message, StateSlotStep)
        message = StateSlotStep(**_fields(step.message, SlotStep), runs=last.message.runs)
        states = {node: State(state.slot, state.rows + 1) for node, state in last.new_states.items()}
        own = _fields(step, GenerateStep) | {"message": message}
        return StateStep(**own, new_states=states, read_nodes=last.read_nodes)


@dataclass
class StatesPlan(StepPlan):
    """A StepPlan that adds rows to be computed again, from the nearest state down to a sequence's rows.

    Attributes:
        states: the stored states by node
    """

    states: Mapping[Node, State] = field(default_factory=dict)

    def reach(self, node: Node) -> int | None:
        """Return the number of the node's rows up to the end of its rows in the step; None if it has no rows there."""
        if rows := self.computed_rows.get(node):
            return node.num_computed + rows
        repeated = self.repeats.get(node)
        return None if repeated is None else repeated.stop

    def first(self, node: Node) -> int:
        """Return the first of a node's rows in the step."""
        return self.repeats[node].start if node in self.repeats else node.num_computed

    def _add_tail(self, sequence: SequenceState) -> None:
        state = self.states.get(sequence.tail)
        if state is not None and state.rows == sequence.tail.num_computed:
            super()._add_tail(sequence)
        elif self._add([*sequence.leaf.path(), sequence.tail]):
            self.reads.append((sequence, sequence.tail))
            self.decode_rows += 1

    def _add_prompt(self, sequence: SequenceState) -> None:
        if sequence.tail.tokens:  # the sequence was preempted
            self._add_tail(sequence)
            return
        path, leaf = sequence.leaf.path(), sequence.leaf
        if not self._add(path):
            return
        if self.reach(leaf) != len(leaf):  # the prompt is computed, but the result of its last row is not stored
            above = len(leaf) - 1
            if not (self._bring(path, len(path) - 1, above) and self._repeat(leaf, above, len(leaf))):
                return
        self.reads.append((sequence, leaf))

    def _add(self, nodes: Sequence[Node]) -> bool:
        """Add the rows of a path that are not computed, and the rows above them that have to be computed again.

        Return whether all of them fit into the step.
        """
        for number, node in enumerate(nodes):
            planned = self.computed_rows.get(node, 0)
            if missing := node.num_pending - planned:
                if not self._bring(nodes, number, node.num_computed + planned):
                    return False
                rows = min(missing, self.room)
                if rows:
                    self.computed_rows[node] = planned + rows
                    self.room -= rows
                if rows < missing:
                    return False
        return True

    def _bring(self, nodes: Sequence[Node], number: int, rows: int) -> bool:
        """Add rows to be computed again, until there is a state after `rows` rows of node `number` of a path.

        Return whether all of them fit into the step.
        """
        above, behind = self._nearest(nodes, number, rows)
        for at in range(above, number + 1):
            stop = rows if at == number else len(nodes[at])
            if not self._repeat(nodes[at], behind if at == above else 0, stop):
                return False
        return True

    def _repeat(self, node: Node, first: int, stop: int) -> bool:
        rows = min(stop - first, self.room)
        if rows:
            before = self.repeats.get(node)
            assert before is None or before.stop == first
            self.repeats[node] = range(first if before is None else before.start, first + rows)
            self.room -= rows
        return rows == stop - first

    def _nearest(self, nodes: Sequence[Node], number: int, rows: int) -> tuple[int, int]:
        """Return (node number, rows of the node) of the deepest state at or above `rows` rows of node `number`."""
        for at in range(number, -1, -1):
            node, most = nodes[at], rows if at == number else len(nodes[at])
            state = self.states.get(node)
            both = 0 if state is None else state.rows, self.reach(node) or 0
            there = [behind for behind in both if 0 < behind <= most]
            if there:
                return at, max(there)
        return 0, 0


class StateScheduler(Scheduler):
    """A Scheduler for a hybrid.

    Attributes:
        states: the stored states by node, least recently used first
        state_slots: the number of slots for states
    """

    def __init__(self, pool: SlotPool, *, state_slots: int, **options: Any):
        super().__init__(pool, **options)
        self.state_slots = state_slots
        self.states: dict[Node, State] = {}
        self.free_states = set(range(ZERO + 1, state_slots + 1))
        self.unread: dict[Node, set[SequenceState]] = {}  # {leaf: sequences that have not read the leaf yet}
        self.tree.on_split.append(self._split_state)
        self.tree.on_drop.append(self._drop_state)

    def _enter(self, key: Hashable, namespace: Namespace, tokens: np.ndarray, *arguments: Any) -> None:
        if len(tokens) > 1:
            self.tree.insert(namespace, token_bytes(tokens[:-1]))
        super()._enter(key, namespace, tokens, *arguments)
        for sequence in self.requests[key]:
            if not sequence.tail.tokens:
                self.unread.setdefault(sequence.leaf, set()).add(sequence)

    def _was_read(self, sequence: SequenceState) -> None:
        unread = self.unread.get(sequence.leaf, set())
        unread.discard(sequence)
        if not unread:
            self.unread.pop(sequence.leaf, None)

    def clear(self) -> None:
        super().clear()
        self.states.clear()
        self.unread.clear()
        self.free_states = set(range(ZERO + 1, self.state_slots + 1))

    # ------------------------------------------------------------------------------------------- states and nodes

    def _split_state(self, upper: Node, lower: Node) -> None:
        state = self.states.get(lower)
        if state is None:
            return
        if state.rows <= len(upper):
            del self.states[lower]
            self.states[upper] = state
        else:
            self.states[lower] = replace(state, rows=state.rows - len(upper))

    def _drop_state(self, node: Node) -> None:
        if (state := self.states.pop(node, None)) is not None:
            self.free_states.add(state.slot)

    def _preempt(self, sequence: SequenceState) -> None:
        self._drop_state(sequence.tail)
        super()._preempt(sequence)

    def _end(self, sequence: SequenceState) -> None:
        self._was_read(sequence)
        tail, state = sequence.tail, self.states.pop(sequence.tail, None)
        del tail.tokens[sequence.num_known :]
        rows = min(tail.num_computed, len(tail.tokens))
        ids = token_bytes(tail.tokens[:rows])
        super()._end(sequence)
        if state is None:
            return
        # The cache has moved the tail's rows into the trie. The state moves too, if it is the state after the last row.
        matches = list(sequence.leaf.match(ids))
        node, same = matches[-1] if matches else (sequence.leaf, 0)
        is_there = same == len(node) == node.num_computed and node.stop == sequence.leaf.stop + rows
        if is_there and rows == state.rows and node not in self.states:
            self.states[node] = replace(state, rows=len(node))
        else:
            self.free_states.add(state.slot)

    # ------------------------------------------------------------------------------------------------- steps

    _repeated_of = staticmethod(RepeatedStateStep.of)

    def _new_plan(self, limits: StepLimits) -> StatesPlan:
        return StatesPlan(self._max_rows(limits), states=self.states)

    def _lay_out(self, plan: StatesPlan) -> StateStep:
        step = lay_out(plan)
        nodes = sorted(plan.last_row, key=plan.last_row.__getitem__)
        evicted_nodes, new_states = self._places(plan)
        runs, read_nodes = self._runs(plan, nodes, new_states)
        message = StateSlotStep(**_fields(step.message, SlotStep), runs=runs)
        own = _fields(step, GenerateStep) | {"message": message}
        return StateStep(**own, evicted_nodes=evicted_nodes, new_states=new_states, read_nodes=read_nodes)

    def begin(self, step: GenerateStep) -> None:
        assert isinstance(step, StateStep)
        for node in step.evicted_nodes:
            self._drop_state(node)
        for node in step.read_nodes:
            if node in self.states:  # move it to the end, as the most recently used
                self.states[node] = self.states.pop(node)
        for node, state in step.new_states.items():
            self.states.pop(node, None)
            self.states[node] = state
            self.free_states.discard(state.slot)
        super().begin(step)
        for sequence in step.consumers:
            self._was_read(sequence)
        for node in step.read_nodes:
            if node not in step.new_states and not self._is_wanted(node):
                self._drop_state(node)

    def _is_wanted(self, node: Node, plan: StatesPlan | None = None) -> bool:
        """Return whether the state at the end of a prompt's node is still needed.

        It is needed by a branch or tail without rows, by a sequence that has not read the row below yet, and, with a
        cache, by any later prompt.

        Args:
            plan: the plan of the step that is about to start
        """
        children = node.children.values()
        begun: Collection[Node] = ()
        reads: set[SequenceState] = set()
        if plan is not None:
            begun, reads = plan.last_row, {sequence for sequence, _ in plan.reads}
        if children and self.cache is not None:
            return True
        for child in children:
            if child.users and not child.num_computed and child not in begun:
                return True
            if not self.unread.get(child, set()) <= reads:
                return True
        ends_here = node.users - sum(child.users for child in children)
        return ends_here > sum(
            sequence.leaf is node
            and (sequence.tail.num_computed > 0 or sequence.tail in begun or len(sequence.tail) + 1 >= sequence.limit)
            for sequence in (self._admitted() if ends_here else ())
        )

    def _places(self, plan: StatesPlan) -> tuple[tuple[Node, ...], dict[Node, State]]:
        """Return (the nodes that lose their states with the step of a plan, the new states by node)."""
        needed = {node: None for sequence in self.running if (node := self._last_node(plan, sequence)) is not None}
        rows_wanted = [
            node
            for node in plan.last_row
            if node not in needed and plan.reach(node) == len(node) and self._is_wanted(node, plan)
        ]
        stored: dict[Node, State] = {}
        free, victims, evicted = iter(self.free_states), self._victims(needed, stored), list[Node]()
        for node in (*needed, *rows_wanted):
            reach, state = plan.reach(node), self.states.get(node)
            assert reach is not None
            slot = next(free, None) if state is None or node in evicted else state.slot
            if slot is None and (victim := next(victims, None)) is not None:
                evicted.append(victim)
                slot = self.states[victim].slot
            if slot is not None:
                stored[node] = State(slot, reach)
            else:
                assert node not in needed, "more sequences run than there are slots for states"
        return tuple(evicted), stored

    def _last_node(self, plan: StatesPlan, sequence: SequenceState) -> Node | None:
        """Return the last node on a sequence's path with rows in the step, if the state after them is needed.

        The state is needed by the sequence or the cache. Else return None.
        """
        tail, leaf = sequence.tail, sequence.leaf
        node = tail if tail in plan.last_row else next((n for n in leaf.path()[::-1] if n in plan.last_row), None)
        if node is None or node not in (tail, leaf) or plan.reach(node) != len(node):
            return node
        ends = len(tail.tokens) + 1 == sequence.limit
        return None if ends and (node is leaf or self.cache is None) else node

    def _victims(self, needed: Collection[Node], stored: Collection[Node]) -> Iterator[Node]:
        """Yield the nodes with states that may be evicted, in the order of eviction.

        Args:
            needed: nodes with rows in the planned step; their new states are always stored
            stored: nodes with new states that are stored; the caller adds nodes between two values
        """
        deepest = set(needed)
        for sequence in self.running:
            path = [*sequence.leaf.path(), sequence.tail][::-1]
            if not sequence.ready:  # it has yet to read the leaf, from the state above the leaf
                path = [node for node in path if node is not sequence.leaf or node in needed]
            deepest.update(itertools.islice((node for node in path if node in self.states or node in needed), 1))
        for node in self.states:
            if node not in deepest and node not in stored:
                yield node

    def _runs(
        self, plan: StatesPlan, nodes: Sequence[Node], stored: Mapping[Node, State]
    ) -> tuple[StateRuns, tuple[Node, ...]]:
        """Return (the runs of a plan, the nodes with states that they start from).

        Args:
            nodes: the nodes with rows in the step, in the order of the rows
        """
        num_begun = Counter(node.parent for node in nodes if not plan.first(node))
        first, source, ends, slots = list[int](), list[int](), list[int](), list[int]()
        run_of: dict[Node, int] = {}
        read: dict[Node, None] = {}
        for node in nodes:
            above, begins, reach = node.parent, plan.first(node), plan.reach(node)
            assert above is not None and reach is not None
            row = plan.last_row[node] + 1 - (reach - begins)
            run_of[node] = len(first)
            if begins or above not in run_of:
                start = node if begins else above
                is_root = start.parent is None
                first.append(row)
                source.append(ZERO if is_root else self.states[start].slot)
                if not is_root:
                    read[start] = None
            elif above in stored or num_begun[above] > 1 or row != plan.last_row[above] + 1:
                first.append(row)
                source.append(-1 - run_of[above])
            else:  # the run continues
                run_of[node] = run_of[above]
            if node in stored:
                ends.append(run_of[node])
                slots.append(stored[node].slot)
        return StateRuns(*(np.array(numbers, np.int64) for numbers in (first, source, ends, slots))), tuple(read)

    def _count_admission(self, sequence: SequenceState, path: list[Node], fresh: Collection[Node]) -> None:
        is_first = sequence.cached_tokens is None
        super()._count_admission(sequence, path, fresh)
        if is_first and sequence.cached_tokens:
            # Rows below the deepest state are computed again, except rows that another sequence is about to compute.
            there = [node.start + self.states[node].rows for node in path if node in self.states]
            there += [node.stop for node in path if node not in fresh and node.num_pending]
            sequence.cached_tokens = min(sequence.cached_tokens, max(there, default=0))


def _fields(values: Any, kind: type) -> dict[str, Any]:
    return {entry.name: getattr(values, entry.name) for entry in fields(kind)}
