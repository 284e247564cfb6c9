"""Hybrids in the engine: the states that rows of a stream start from, and the states that a stream stores. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from ...engine.meter import Meter
from ...engine.protocol import EngineOptions
from ...engine.schedule.generate_step import HoldsRows
from ...engine.schedule.parts import EnginePart, MakePlanner, over_store
from ...engine.schedule.steps import StreamStep
from ...engine.schedule.windows import PlannedStep, WindowPlanner, reusable_rows
from ...engine.worker import Worker
from ...errors import InputError
from .scheduler import StateScheduler
from .steps import ZERO, MakeStates, StateFacts, StateRuns, StateStreamStep


class StateStream(WindowPlanner):
    """A WindowPlanner whose steps also plan the states of their rows.

    Between two steps it stores every state that a later row of the window starts from: the states at branch points of
    the path, and the state above the cut. At the end of a window it stores the states at the branch points and at the
    end of the last path. The next window continues from the deepest of these states that it can use.

    Args:
        arguments: the arguments of WindowPlanner
        before: the planner of the previous window of the stream
        note: called after each step with the number of stored states
        options: as for WindowPlanner
    """

    def __init__(
        self, *arguments: Any, before: StateStream | None, note: Callable[[int], object], follows: bool, **options: Any
    ):
        super().__init__(*arguments, follows=follows, **options)
        self._note = note
        trie = self.trie
        inner = trie.parent[trie.parent >= 0]
        self._children = np.bincount(inner, minlength=trie.num_rows)
        # The last row that starts directly below each row. Its state is not needed afterwards.
        self._last_child = np.full(trie.num_rows, -1, np.int64)
        np.maximum.at(self._last_child, inner, np.flatnonzero(trie.parent >= 0))
        carried = np.zeros(0, np.int64) if before is None or not follows else before.depths_left
        self._first = self._position = self._goes_on_from(carried)
        # Rows of the last path with states that the next window may start from. The first rows of the path are the
        # trie's.
        has_path = self.sharing == "full" and len(trie.order) > 0
        rows = trie.rows_of(int(trie.order[-1])) if has_path else np.zeros(0, np.int64)
        branches = (self._children[rows] > 1) | (np.arange(len(rows)) == len(rows) - 1)
        self._has_state = np.ones(trie.num_rows, bool)
        self._has_state[: self._first] = np.isin(np.arange(self._first) + 1, carried)
        self._last_path = rows[np.where(rows < self._first, True, branches) & self._has_state[rows]]

    def _goes_on_from(self, carried: np.ndarray) -> int:
        """Return how many rows of the previous window's last path are not computed again.

        Args:
            carried: the depths of the states on that path, int64 ascending
        """
        most = reusable_rows(self.window, self.readout) if len(carried) else 0
        branches = np.flatnonzero(self._children[:most] > 1) + 1
        missing = branches[~np.isin(branches, carried)]
        if len(missing):  # a later row starts from a state that is not stored: compute the branch point's row again
            most = min(most, int(missing[0]) - 1)
        return int(carried[carried <= most].max(initial=0))

    @property
    def depths_left(self) -> np.ndarray:
        """Return the depths (rows above) of the states that are stored after the window, int64 ascending."""
        return self.trie.positions[self._last_path].astype(np.int64) + 1

    def step(self, start: int, stop: int) -> PlannedStep:
        planned = super().step(start, stop)
        trie = self.trie
        rows = np.arange(start, stop)
        parent = trie.parent[start:stop]
        above = rows - 1
        begins = (rows == start) | (parent != above)
        begins[1:] |= self._children[above[1:]] > 1
        first = np.flatnonzero(begins)
        parents = parent[first]
        depth = np.where(parents < 0, ZERO, trie.positions[np.maximum(parents, 0)] + 1)
        run = np.searchsorted(first, parents - start, side="right") - 1
        source = np.where(parents >= start, -1 - run, depth)

        ends = np.append(first[1:], len(rows)) - 1 + start
        kept = self._is_kept(ends, stop)
        before = trie.path(start)
        depths = trie.positions[before[self._is_kept(before, stop)]].astype(np.int64) + 1
        runs = StateRuns(first, source, np.flatnonzero(kept), trie.positions[ends[kept]].astype(np.int64) + 1)
        self._note(len(depths) + len(runs.slots))
        message = planned.message
        own = {entry.name: getattr(message, entry.name) for entry in fields(StreamStep)}
        return replace(planned, message=StateStreamStep(**own, runs=runs, kept_states=depths))

    def _is_kept(self, rows: np.ndarray, stop: int) -> np.ndarray:
        """Return whether the state after each of these rows is stored after the step that ends before `stop`, bool."""
        return ((self._last_child[rows] >= stop) | np.isin(rows, self._last_path)) & self._has_state[rows]


class StateStreams:
    """Makes the StateStream of each window of one row stream, in order."""

    def __init__(self, note: Callable[[int], object]) -> None:
        self._before: StateStream | None = None
        self._note = note

    def __call__(self, *arguments: Any, **options: Any) -> StateStream:
        self._before = StateStream(*arguments, before=self._before, note=self._note, **options)
        return self._before


# Defaults for `state_memory`: this share of the memory for K/V, but at most this number of states per running sequence.
SHARE, MOST_PER_SEQUENCE = 0.25, 4


class States(EnginePart):
    """The engine part for hybrids."""

    def __init__(self, worker: Worker, options: EngineOptions, facts: StateFacts, meter: Meter):
        self._worker, self._options, self._facts, self._meter = worker, options.generation, facts, meter

    def stream_scheduler(self, inner: MakePlanner) -> StateStreams:
        return StateStreams(self._note)

    def scheduler(self, max_batch_rows: int, holds_rows: HoldsRows | None) -> StateScheduler:
        worker, options = self._worker, self._options
        size, running = self._facts.state_bytes, options.max_running
        if options.state_memory is None:
            slots = int(worker.kv_slots(options.kv_memory, size) * SHARE)
            slots = min(max(slots, 2), MOST_PER_SEQUENCE * running)
        else:
            slots = worker.kv_slots(options.state_memory, size)
        if slots < 2:
            raise InputError(
                f"state_memory is {options.state_memory} bytes, but one state takes {size}",
                field="state_memory",
                remedy=f"give {3 * size} or more",
            )
        worker.start(MakeStates(slots + 1)).result()
        kind: Any = partial(StateScheduler, state_slots=slots)
        scheduler: StateScheduler = over_store(kind, worker, options, max_batch_rows, holds_rows)
        scheduler.max_running = min(scheduler.max_running, slots)
        return scheduler

    def before_plan(self, scheduler: StateScheduler, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        self._note(len(scheduler.states))
        return {}

    def _note(self, states: int) -> None:
        """Record the number of states that are stored now."""
        self._meter.add(state_bytes_peak=states * self._facts.state_bytes)


def engine_part(worker: Worker, options: EngineOptions, meter: Meter) -> States | None:
    """Return the engine part for a worker's model, or None if the model is not a hybrid."""
    facts = worker.facts.of(StateFacts)
    return None if facts is None else States(worker, options, facts, meter)
