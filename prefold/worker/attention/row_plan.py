"""The host's part of interval attention: which keys each block of queries reads, found once a step.

The last part prepares the Triton kernels for rows. NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ... import kernels
from .plan import Plan, window_positions

# Queries that share one gathered key list in the PyTorch form. At 256, prompts with completions cost 5 to 20 % more.
BLOCK_QUERIES = 128


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """A block is queries [start, stop) of a plan, and the keys that any of them sees.

    runs: int64 [runs, 2] of (first key, past the last).
    """

    start: int
    stop: int
    runs: np.ndarray

    def keys(self) -> slice | np.ndarray:
        """Returns the keys as an index: a slice where they are one run, else int64 [keys]."""
        if len(self.runs) == 1:
            return slice(int(self.runs[0, 0]), int(self.runs[0, 1]))
        return np.concatenate([np.arange(first, stop) for first, stop in self.runs])


@dataclass(frozen=True)
class RowPlan(Plan):
    """A plan holds what attention needs to know about a step, for one sliding window or none. `plan_rows` makes it.

    end         int64 [keys]: key j is visible to the query at key row i exactly when j <= i < end[j] (see `first`)
    query_rows  int64 [queries], ascending: the key row of each query
    positions   int64 [keys] with a sliding window, else None
    window      the sliding window: a key must also be fewer than this many positions before the query; None: no limit
    lists       what the compiled kernel reads; None where there is none
    first       int64 [keys] where there are spans, whose rows see each other both ways: then key j is visible exactly
                when first[j] <= i < end[j]; else None
    """

    end: np.ndarray
    query_rows: np.ndarray
    positions: np.ndarray | None
    window: int | None
    lists: kernels.RowLists | None = None
    first: np.ndarray | None = None

    @property
    def num_keys(self) -> int:
        """Returns how many keys there are: those of the carried path, and the new rows."""
        return len(self.end)

    @property
    def num_queries(self) -> int:
        """Returns how many rows query."""
        return len(self.query_rows)

    @cached_property
    def blocks(self) -> list[KeyBlock]:
        """Returns key lists for the form in PyTorch, made when first asked for."""
        return key_blocks(self)


def plan_rows(
    end: np.ndarray,
    query_rows: np.ndarray,
    positions: np.ndarray | None = None,
    window: int | None = None,
    *,
    first: np.ndarray | None = None,
    compiled: bool = True,
    invariant: bool = False,
) -> RowPlan:
    """Returns the plan of attention of `query_rows` over `len(end)` keys: rows of the carried path, then the new rows.

    end         int64 [keys], end[j] > j, intervals [j, end[j]) nested as in any trie
    query_rows  int64 [queries], ascending, within [0, keys)
    positions   int64 [keys], ascending along every path; needed with a sliding window only
    first       int64 [keys]: of a row in a span the first row of the span, of any other row the row itself; the rows of
                a span follow one another and end together. None: there are no spans
    compiled    whether to make what the compiled CPU kernel reads
    invariant   as of ModelConfig; for the compiled kernel

    No tensor is needed for it: it may run in another thread while the step before computes. Raises ValueError where an
    array breaks these rules.
    """
    end = np.ascontiguousarray(end, dtype=np.int64)
    query_rows = np.ascontiguousarray(query_rows, dtype=np.int64)
    positions = window_positions(window, positions, len(end))
    if np.any(end <= np.arange(len(end))):
        raise ValueError("a row ends before it begins; end[j] must be greater than j")
    if len(query_rows) and (query_rows[0] < 0 or query_rows[-1] >= len(end) or np.any(np.diff(query_rows) < 0)):
        raise ValueError("query rows out of order or out of range; pass ascending rows in [0, keys)")
    first = None if first is None else _checked_first(first, end)
    library = kernels.load() if compiled else None
    try:
        lists = library.plan_rows(end, query_rows, positions, window, first, placed=invariant) if library else None
    except ValueError as error:
        raise ValueError(
            "two rows' intervals overlap and neither holds the other, or positions fall along a path"
            "; pass the ends and positions of a depth-first trie"
        ) from error
    return RowPlan(end, query_rows, positions, window, lists, first)


def _checked_first(first: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    """Returns `first` as contiguous int64; None where no row is in a span."""
    first, rows = np.ascontiguousarray(first, dtype=np.int64), np.arange(len(end))
    if first.shape != end.shape or np.any(first > rows) or np.any(first < 0):
        raise ValueError(
            "a row's span begins behind it; pass for each key the first row of its span, or the row itself"
        )
    inside = np.flatnonzero(first < rows)
    if np.any(first[inside] != first[inside - 1]) or np.any(end[inside] != end[inside - 1]):
        raise ValueError("the rows of a span do not follow one another, or do not end together; a span has one end")
    return first if len(inside) else None


def key_blocks(plan: RowPlan) -> list[KeyBlock]:
    """Returns blocks of queries with the keys any query of the block sees, each list filtered from the one before."""
    blocks = []
    open_keys = np.empty(0, np.int64)
    num_seen = 0
    for start in range(0, plan.num_queries, BLOCK_QUERIES):
        rows = plan.query_rows[start : start + BLOCK_QUERIES]
        # What ended before this block's first query is invisible from here on; what began since is a candidate.
        stop = int(rows[-1]) + 1 if plan.first is None else int(np.searchsorted(plan.first, rows[-1], side="right"))
        fresh = np.arange(num_seen, stop)
        open_keys = open_keys[plan.end[open_keys] > rows[0]]
        open_keys = np.concatenate((open_keys, fresh[plan.end[fresh] > rows[0]]))
        num_seen = stop
        # Visible to any query of the block: the first query at or after the key comes before its end.
        following = rows[np.searchsorted(rows, open_keys if plan.first is None else plan.first[open_keys])]
        used = following < plan.end[open_keys]
        if plan.window is not None:
            used &= plan.positions[open_keys] > plan.positions[rows].min() - plan.window
        blocks.append(KeyBlock(start, start + len(rows), runs_of(open_keys[used])))
    return blocks


def runs_of(keys: np.ndarray) -> np.ndarray:
    """Returns the runs of consecutive keys among ascending ones, int64 [runs, 2] of (first, past last)."""
    breaks = np.flatnonzero(np.diff(keys) != 1)
    first = keys[np.concatenate(([0], breaks + 1))]
    last = keys[np.concatenate((breaks, [len(keys) - 1]))]
    return np.stack((first, last + 1), 1)


def visibility(
    end: np.ndarray,
    query_rows: np.ndarray,
    positions: np.ndarray | None = None,
    window: int | None = None,
    first: np.ndarray | None = None,
) -> np.ndarray:
    """Returns which keys each query sees, bool [queries, keys]: first[j] <= i < end[j], and no more than `window` - 1
    positions before it (the sliding window; None: at any distance).

    end int64 [keys]; query_rows int64 [queries], the key row of each query; positions int64 [keys]; first int64 [keys],
    of a row in a span the span's first row, of others the row itself; None: there are no spans.
    """
    end, rows = np.asarray(end), np.asarray(query_rows)[:, None]
    visible = ((np.arange(len(end)) if first is None else np.asarray(first)) <= rows) & (rows < end)
    if window is not None:
        positions = np.asarray(positions)
        visible &= positions[rows] - positions < window
    return visible


# Parts of a tile's list, in this order: the carried path, then the new rows; each seen whole, then in part.
PARTS = 4


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Lists name the key blocks that each tile of queries visits.

    bounds int32 [PARTS, tiles + 1]: part p of tile t is blocks[bounds[p, t] : bounds[p, t + 1]]
    blocks  int32: the first row of a key block, within the path or the new rows
    order   int32 [tiles]: tiles with the most work first
    """

    bounds: np.ndarray
    blocks: np.ndarray
    order: np.ndarray

    @property
    def num_tiles(self) -> int:
        """Returns how many tiles there are."""
        return len(self.order)


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """Lists name the tiles of queries that see each key block: gradients of keys and values are summed over them.

    bounds int32 [2, blocks + 1]: the tiles that see key block b whole, tiles[bounds[0, b] : bounds[0, b + 1]], and
           those that see it in part
    tiles  int32
    order  int32 [blocks]: blocks with the most work first
    """

    bounds: np.ndarray
    tiles: np.ndarray
    order: np.ndarray


def row_tiles(plan: RowPlan, path_rows: int, block_q: int, block_k: int) -> RowTiles:
    """Returns the key blocks that each tile of a plan visits. path_rows: how many of its keys are the carried
    path's."""
    tile_keys = _TileKeys(plan, block_q)
    num_tiles = len(tile_keys.first)
    parts = []
    for start, stop in ((0, path_rows), (path_rows, plan.num_keys)):
        tile, block, whole = tile_keys.blocks(start, stop, block_k)
        order = np.argsort(tile * (plan.num_keys + 1) + block)
        tile, block, whole = tile[order], block[order], whole[order]
        parts += [(tile[whole], block[whole] * block_k), (tile[~whole], block[~whole] * block_k)]
    bounds, blocks = _lists(parts, num_tiles)
    return RowTiles(bounds, blocks, _most_first(bounds))


def key_tiles(plan: RowPlan, block_q: int, block_k: int) -> KeyTiles:
    """Returns the tiles that see each key block, of a plan whose keys all lie together."""
    tile, block, whole = _TileKeys(plan, block_q).blocks(0, plan.num_keys, block_k)
    bounds, tiles = _lists([(block[whole], tile[whole]), (block[~whole], tile[~whole])], -(-plan.num_keys // block_k))
    return KeyTiles(bounds, tiles, _most_first(bounds))


def _lists(parts: list[tuple[np.ndarray, np.ndarray]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns bounds int64 [parts, size + 1], and all lists one after the other.

    parts: of each the owners, ascending and below `size`, and what each has.
    """
    bounds = np.zeros((len(parts), size + 1), np.int64)
    start = 0
    for bound, (owner, _) in zip(bounds, parts, strict=True):
        bound[0] = start
        bound[1:] = start + np.bincount(owner, minlength=size).cumsum()
        start += len(owner)
    return bounds, np.concatenate([items for _, items in parts])


def _most_first(bounds: np.ndarray) -> np.ndarray:
    return np.argsort(-np.diff(bounds).sum(0), kind="stable")


class _TileKeys:
    """What each tile of queries sees of a plan's keys."""

    def __init__(self, plan: RowPlan, block_q: int):
        self.plan = plan
        rows = plan.query_rows
        starts = np.arange(0, len(rows), block_q)
        self.first, self.last = rows[starts], rows[np.minimum(starts + block_q, len(rows)) - 1]
        # Keys that no query sees: the first query at or after them comes too late.
        self.begin = np.arange(plan.num_keys) if plan.first is None else plan.first
        following = np.append(rows, np.iinfo(np.int64).max)[np.searchsorted(rows, self.begin)]
        self.end = np.where(following < plan.end, plan.end, 0)
        if plan.window is not None and len(starts):
            positions = plan.positions[rows]
            self.nearest = np.minimum.reduceat(positions, starts)  # the smallest position of a tile
            self.farthest = np.maximum.reduceat(positions, starts)

    def blocks(self, start: int, stop: int, block_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns pairs (tile, block) of the keys [start, stop), by block, of which some is seen; and which are seen
        whole.

        Tiles ascend, so those that see some of a block, or all of it, lie side by side: windows aside.
        """
        plan = self.plan
        firsts = np.arange(start, stop, block_k)
        if not len(firsts) or not len(self.first):
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool)
        at = firsts - start
        longest = np.maximum.reduceat(self.end[start:stop], at)
        shortest = np.minimum.reduceat(plan.end[start:stop], at)
        # The block's first key is not after the tile's last query.
        begin = np.searchsorted(self.last, self.begin[firsts])
        count = np.maximum(np.searchsorted(self.first, longest) - begin, 0)
        block = np.repeat(np.arange(len(firsts)), count)
        tile = np.arange(len(block)) + np.repeat(begin - (count.cumsum() - count), count)
        whole = self.begin[np.minimum(firsts + block_k, plan.num_keys) - 1][block] <= self.first[tile]
        whole &= (shortest[block] > self.last[tile]) & (firsts + block_k <= stop)[block]
        if plan.window is None:
            return tile, block, whole
        positions = plan.positions[start:stop]
        latest = np.maximum.reduceat(np.where(self.end[start:stop] > 0, positions, -1), at)
        whole &= np.minimum.reduceat(positions, at)[block] > self.farthest[tile] - plan.window
        used = latest[block] > self.nearest[tile] - plan.window
        return tile[used], block[used], whole[used]
