"""The host's part of attention over slots: which slots each query reads, found once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import kernels
from .plan import Plan, window_positions

MAX_SLOTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KeyRuns:
    """The keys of a step are runs of neighbouring slots: int64 arrays of equal length, ancestors before descendants.

    start        first slot
    count        slots, at least one
    position     position of the first key; those after it follow one by one
    first, last  queries [first, last) see all keys of the run
    """

    start: np.ndarray
    count: np.ndarray
    position: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class SlotPlan(Plan):
    """A plan holds what attention over slots needs to know about a step, for one sliding window or none. `plan_slots`
    makes it.

    runs             who sees which slots
    num_queries      rows of the step
    query_positions  int64 [queries] with a sliding window, else None
    window           the sliding window: a key is fewer than this many positions before the query; None: no limit
    slots_needed     one more than the last slot of a run
    lists            what the compiled kernel reads; None where there is none
    """

    runs: KeyRuns
    num_queries: int
    query_positions: np.ndarray | None
    window: int | None
    slots_needed: int
    lists: kernels.SlotLists | None = None

    def can_grow(self, slots: np.ndarray) -> bool:
        """Returns whether the key in `slots`, int64 [queries], can be added to the keys that each query sees by making
        its last run longer: the plan is the compiled kernel's, without a window, and the slots follow on these runs."""
        if self.lists is None or self.window is not None or not len(self.lists.own):
            return False
        return bool((self.lists.own[self.lists.own_offsets[1:] - 1].sum(1) == slots).all())


def plan_slots(
    runs: KeyRuns,
    num_queries: int,
    query_positions: np.ndarray | None = None,
    window: int | None = None,
    *,
    group: int = 1,
    compiled: bool = True,
) -> SlotPlan:
    """Returns the plan of attention of queries 0 to num_queries - 1 over the keys of `runs`.

    query_positions  int64 [queries]; needed with a sliding window only
    group            query heads that share a KV head: a hint, the plan is right for any number
    compiled         whether to make what the compiled CPU kernel reads

    Every query must see a key: its own row is a run of one, seen from its own query on. No tensor is needed for it.
    Raises ValueError where an array breaks these rules.
    """
    arrays = tuple(
        np.ascontiguousarray(a, dtype=np.int64) for a in (runs.start, runs.count, runs.position, runs.first, runs.last)
    )
    runs = KeyRuns(*arrays)
    if any(a.shape != (len(runs),) for a in arrays):
        raise ValueError("the arrays of the runs differ in length; pass a number a run in each")
    query_positions = window_positions(window, query_positions, num_queries)
    wrong = (runs.count < 1) | (runs.start < 0) | (runs.first < 0) | (runs.last <= runs.first)
    slots_needed = int((runs.start + runs.count).max(initial=0))
    if wrong.any() or runs.last.max(initial=0) > num_queries or slots_needed > MAX_SLOTS:
        raise ValueError(
            "a run without keys, of slots that cannot be, or seen by queries that are not there"
            f"; count >= 1, slots in [0, {MAX_SLOTS}), 0 <= first < last <= number of queries"
        )
    if not (seen_by_query(runs, num_queries) > 0).all():
        raise ValueError("a query sees no key; pass each row's own key as a run of one")
    library = kernels.load() if compiled else None
    lists = library.plan_slots(arrays, num_queries, query_positions, window, group) if library else None
    return SlotPlan(runs, num_queries, query_positions, window, slots_needed, lists)


def seen_by_query(runs: KeyRuns, num_queries: int) -> np.ndarray:
    """Returns how many keys each query sees, sliding windows aside, int64 [queries]."""
    change = np.zeros(num_queries + 1, np.int64)
    np.add.at(change, runs.first, runs.count)
    np.subtract.at(change, runs.last, runs.count)
    return change[:num_queries].cumsum()
