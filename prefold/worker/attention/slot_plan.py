"""Plan attention over slots on the host: the slots that each query reads, found once per step.

The last part of the file builds the tile lists of the Triton kernels. Imports only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from ... import kernels
from ...engine.schedule.steps import SlotStep
from ...model.config import Latent
from .plan import Plan, window_positions

MAX_SLOTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KeyRuns:
    """The keys of a step, as runs of neighbouring slots: int64 arrays of equal length, ancestors before descendants."""

    start: np.ndarray  # first slot
    count: np.ndarray  # number of slots, at least 1
    position: np.ndarray  # position of the first key; the next keys have the next positions
    first: np.ndarray  # queries [first, last) see all keys of the run
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def of_queries(self, queries: np.ndarray) -> KeyRuns:
        """Return the runs that some of these queries see, which are numbered from 0. queries: ascending."""
        first, last = np.searchsorted(queries, self.first), np.searchsorted(queries, self.last)
        seen = last > first
        return KeyRuns(*(part[seen] for part in (self.start, self.count, self.position, first, last)))

    def slots(self) -> np.ndarray:
        """Return the slot of each key, int64, one run after the other."""
        starts = self.count.cumsum() - self.count
        return np.repeat(self.start - starts, self.count) + np.arange(self.count.sum())

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the arrays in the order of the fields."""
        return self.start, self.count, self.position, self.first, self.last


@dataclass(frozen=True, slots=True)
class SplitQueries:
    """The queries of a plan in two groups, because latent attention expands the keys and values of one group.

    absorbed, expanded  the queries of each group, int64, ascending
    slots               the slots of the keys that the expanded queries see, int64 [keys]
    lists               of the expanded queries, over these keys
    """

    absorbed: np.ndarray
    expanded: np.ndarray
    slots: np.ndarray
    lists: kernels.SlotLists


@dataclass(frozen=True)
class SlotPlan(Plan):
    """The attention plan of a step over slots, for one sliding window or none. `plan_slots` makes it."""

    runs: KeyRuns
    num_queries: int
    query_positions: np.ndarray | None  # int64 [queries] with a sliding window, else None
    window: int | None  # a key must be fewer than this many positions before the query; None: no limit
    slots_needed: int  # one more than the last slot of any run
    lists: kernels.SlotLists | None = None  # the lists that the compiled kernel reads, or None
    split: SplitQueries | None = None  # two groups of queries; `lists` has the absorbed ones. None: one group

    def can_grow(self, slots: np.ndarray) -> bool:
        """Return True if the next step can reuse the plan by making each query's last run one key longer.

        This needs the lists of the compiled kernel, no window, and new keys right behind those runs.

        Args:
            slots: int64 [queries], the slot of each query's new key.
        """
        if self.lists is None or self.split is not None or self.window is not None or not len(self.lists.own):
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
    invariant: bool = False,
    latent: Latent | None = None,
) -> SlotPlan:
    """Return the plan for attention of queries 0 to num_queries - 1 over the keys of `runs`.

    Every query must see a key: its own row is a run of one key, visible from its own query on. No tensor is needed.

    Args:
        query_positions: int64 [queries]. Needed only with a sliding window.
        window: See SlotPlan.
        group: Query heads per KV head. A hint for speed: any number gives a correct plan.
        compiled: Make the lists that the compiled CPU kernel reads.
        invariant: As in ModelConfig, for the compiled kernel.
        latent: Sizes of latent attention, for the compiled kernel: some queries may be expanded. None: all queries are
            absorbed, or attention is not latent. With `invariant` or a window, all queries are absorbed.

    Raises:
        ValueError: An array breaks these rules.
    """
    runs = KeyRuns(*(np.ascontiguousarray(array, dtype=np.int64) for array in runs.arrays))
    if any(array.shape != (len(runs),) for array in runs.arrays):
        raise ValueError("the arrays of the runs differ in length; pass one number per run in each array")
    query_positions = window_positions(window, query_positions, num_queries)
    wrong = (runs.count < 1) | (runs.start < 0) | (runs.first < 0) | (runs.last <= runs.first)
    slots_needed = int((runs.start + runs.count).max(initial=0))
    if wrong.any() or runs.last.max(initial=0) > num_queries or slots_needed > MAX_SLOTS:
        raise ValueError(
            "a run has no keys, invalid slots or invalid queries"
            f"; pass count >= 1, slots in [0, {MAX_SLOTS}), 0 <= first < last <= number of queries"
        )
    if not (seen_by_query(runs, num_queries) > 0).all():
        raise ValueError("a query sees no key; pass each row's own key as a run of one")
    library = kernels.load() if compiled else None
    lists = split = None
    if library is not None:
        own, own_queries = runs, num_queries
        if latent is not None and window is None and not invariant:
            split = _split(library, runs, num_queries, latent)
        if split is not None:
            own, own_queries = runs.of_queries(split.absorbed), len(split.absorbed)
        lists = library.plan_slots(own.arrays, own_queries, query_positions, window, group, placed=invariant)
    return SlotPlan(runs, num_queries, query_positions, window, slots_needed, lists, split)


def _split(library: kernels.Kernels, runs: KeyRuns, num_queries: int, latent: Latent) -> SplitQueries | None:
    """Return the groups of the queries; None: all queries are absorbed."""
    sizes = (latent.rank, latent.tail, latent.dim, latent.value_dim)
    chosen = library.choose_expanded(runs.count, runs.first, runs.last, num_queries, sizes)
    if not chosen.any():
        return None
    absorbed, expanded = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    runs = runs.of_queries(expanded)
    slots = runs.slots()
    numbered = replace(runs, start=runs.count.cumsum() - runs.count)  # the keys, one run after the other
    lists = library.plan_slots(numbered.arrays, len(expanded), None, None, 1)
    return SplitQueries(absorbed, expanded, slots, lists)


def runs_by_window(
    step: SlotStep,
    windows: Iterable[int | None],
    queries: np.ndarray | None = None,
    has_spans: Callable[[int | None], bool] = lambda window: True,
) -> dict[int | None, tuple[KeyRuns, np.ndarray]]:
    """Return, for each sliding window, the keys that queries of a step see, and the queries' positions, int64.

    Args:
        queries: The querying rows, ascending (None: all).
        has_spans: As in ModelConfig.
    """
    seen = {window: has_spans(window) for window in windows}
    runs = {both_ways: runs_of(step, queries, both_ways) for both_ways in {*seen.values()}}
    return {window: runs[both_ways] for window, both_ways in seen.items()}


def runs_of(step: SlotStep, queries: np.ndarray | None = None, has_spans: bool = True) -> tuple[KeyRuns, np.ndarray]:
    """Return the keys that queries of a step see, and the queries' positions, int64.

    Args:
        queries: The querying rows, ascending. None: all.
        has_spans: True if rows of a span see each other both ways. Otherwise each row sees only rows before it.
    """
    first, last, positions = step.run_first, step.run_last, step.positions.astype(np.int64)
    if not has_spans:
        first = np.maximum(first, _own_queries(step))
    runs = KeyRuns(step.run_start, step.run_count, step.run_position, first, last)
    return (runs, positions) if queries is None else (runs.of_queries(queries), positions[queries])


def _own_queries(step: SlotStep) -> np.ndarray:
    """Return, for each run, the query at which its first key is computed; 0 for runs of earlier steps."""
    order = np.argsort(step.slots)
    row = order[np.minimum(np.searchsorted(step.slots, step.run_start, sorter=order), len(order) - 1)]
    return np.where(step.slots[row] == step.run_start, row, 0)


def seen_by_query(runs: KeyRuns, num_queries: int) -> np.ndarray:
    """Return the number of keys that each query sees, ignoring sliding windows, int64 [queries]."""
    change = np.zeros(num_queries + 1, np.int64)
    np.add.at(change, runs.first, runs.count)
    np.subtract.at(change, runs.last, runs.count)
    return change[:num_queries].cumsum()


# The columns that describe a stretch of keys in a tile's list, and a work item.
STRETCH_FIELDS = ("place", "slot", "count", "position", "first", "step", "last")
ITEM_FIELDS = ("tile", "start", "whole", "stop", "alone")
# Allowed rows of a tile (queries times heads of a group), and the maximum by bytes per number. The float32 maximum
# is low, because these kernels use no tensor cores then, and more rows spill from the registers.
ROWS = (16, 32, 64, 128)
MOST_ROWS = {2: 128, 4: 32}
# Up to about this many rows, more rows cost no time: reading the keys takes longer than multiplying them.
FREE_ROWS = 96
# Work items per KV head, to use every processor of a GPU; and the minimum number of keys of an item.
ITEMS = 128
LEAST_KEYS = 256


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """The keys that each tile of queries reads, cut into work items.

    Attributes:
        block_q: Queries per tile.
        num_keys: Number of entries in all lists.
        stretches: int64 [STRETCH_FIELDS, s]. A stretch is `count` entries of the lists, from `place` on: the slots from
            `slot` on, at the positions from `position` on. Key o of it is visible to queries [first + o * step, last).
        items: int64 [ITEM_FIELDS, i]. An item is the entries [start, stop) of the lists, for one tile. All queries of
            the tile see the entries before `whole`. `alone` is 1 if the tile has no other item.
        tile_items: int64 [tiles + 1]: the first item of each tile.
    """

    block_q: int
    num_keys: int
    stretches: np.ndarray
    items: np.ndarray
    tile_items: np.ndarray


def stretches(runs: KeyRuns) -> np.ndarray:
    """Join runs with consecutive slots and positions, int64 [6, s]: slot, count, position, first, step, last.

    Neighbouring runs that the same queries see become one stretch (step 0). So do runs of one key each, if each is
    visible from one query later than the run before, like the new rows of a prompt (step 1).
    """
    before, after = (
        {name: getattr(runs, name)[part] for name in ("start", "count", "position", "first", "last")}
        for part in (slice(None, -1), slice(1, None))
    )
    joined = (after["start"] == before["start"] + before["count"]) & (after["last"] == before["last"])
    joined &= after["position"] == before["position"] + before["count"]
    later = (after["first"] == before["first"] + 1) & (before["count"] == 1) & (after["count"] == 1)
    kind = np.where(joined & (after["first"] == before["first"]), 1, np.where(joined & later, 2, 0))
    # A run starts a stretch of its own if the run before was joined in the other way.
    turned = (kind[1:] != kind[:-1]) & (kind[:-1] != 0)
    begins = np.ones(len(runs), bool)
    begins[1:] = kind == 0
    begins[2:] |= turned
    at = np.flatnonzero(begins)
    steps = np.append(kind, 0)[at] == 2
    # The second run of the pair may have started a stretch of its own.
    steps &= np.append(~begins[1:], False)[at]
    count = np.add.reduceat(runs.count, at) if len(at) else runs.count
    return np.stack((runs.start[at], count, runs.position[at], runs.first[at], steps, runs.last[at]))


def pick_rows(joined: np.ndarray, group: int, itemsize: int) -> int:
    """Return the number of rows per tile, from ROWS, that minimises the time to read and multiply the keys.

    Args:
        itemsize: Bytes per number.
    """
    best = 1 << (group - 1).bit_length()  # if no number of ROWS fits one query
    least = np.inf
    for rows in ROWS:
        if group <= rows <= MOST_ROWS[itemsize]:
            cost = listed_keys(joined, rows // group) * max(1.0, rows / FREE_ROWS)
            if cost < least:
                best, least = rows, cost
    return best


def listed_keys(joined: np.ndarray, block_q: int) -> int:
    """Return the maximum number of entries in the lists of tiles with `block_q` queries."""
    _, count, _, first, _, last = joined
    return int((count * ((last - 1) // block_q - first // block_q + 1)).sum())


def slot_tiles(plan: SlotPlan, joined: np.ndarray, block_q: int, block_k: int) -> SlotTiles:
    """Return the tiles of a plan, with `block_q` queries each. Items start at a multiple of `block_k` keys of a list.

    Args:
        joined: The plan's runs, from `stretches`.
    """
    num_queries, window = plan.num_queries, plan.window
    num_tiles = -(-num_queries // block_q)
    slot, count, position, first, step, last = joined
    # One entry per pair of a stretch and a tile with a query that sees it.
    touched = (last - 1) // block_q - first // block_q + 1
    at = np.repeat(np.arange(len(count)), touched)
    tile = first[at] // block_q + np.arange(len(at)) - np.repeat(touched.cumsum() - touched, touched)
    slot, count, position, first, step, last = (a[at] for a in (slot, count, position, first, step, last))
    begin = tile * block_q
    final = np.minimum(begin + block_q, num_queries) - 1
    count = np.where(step == 1, np.minimum(count, final - first + 1), count)
    whole = (first + step * (count - 1) <= begin) & (last > final)
    if window is not None and num_queries:
        starts = np.arange(0, num_queries, block_q)
        nearest = np.minimum.reduceat(plan.query_positions, starts)[tile]
        farthest = np.maximum.reduceat(plan.query_positions, starts)[tile]
        passed = np.clip(nearest - window + 1 - position, 0, count)
        slot, count, position, first = slot + passed, count - passed, position + passed, first + step * passed
        whole &= farthest - position < window
    order = np.lexsort((~whole, tile))
    order = order[count[order] > 0]
    tile, whole = tile[order], whole[order]
    slot, count, position, first, step, last = (a[order] for a in (slot, count, position, first, step, last))
    place = count.cumsum() - count
    sizes = np.bincount(tile, count, num_tiles).astype(np.int64)
    whole_sizes = np.bincount(tile, count * whole, num_tiles).astype(np.int64)
    starts = sizes.cumsum() - sizes
    total = int(sizes.sum())

    share = max(LEAST_KEYS, -(-total // ITEMS))
    share = -(-share // block_k) * block_k
    parts = -(-sizes // share)
    of_tile = np.repeat(np.arange(num_tiles), parts)
    number = np.arange(len(of_tile)) - np.repeat(parts.cumsum() - parts, parts)
    start = starts[of_tile] + number * share
    stop = np.minimum(start + share, (starts + sizes)[of_tile])
    # Only whole blocks need no mask. The rest of the fully visible keys joins the keys that need one.
    whole_stop = np.clip((starts + whole_sizes)[of_tile], start, stop)
    whole_stop = start + (whole_stop - start) // block_k * block_k
    return SlotTiles(
        block_q=block_q,
        num_keys=total,
        stretches=np.stack((place, slot, count, position, first, step, last)),
        items=np.stack((of_tile, start, whole_stop, stop, parts[of_tile] == 1)),
        tile_items=np.concatenate(([0], parts.cumsum())),
    )
