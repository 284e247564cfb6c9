"""Plan interval attention over rows on the host: the keys that each block of queries reads, found once per step.

The last part of the file builds the tile lists of the Triton kernels. Imports only NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ... import kernels
from .plan import Plan, window_positions

# Queries that share one gathered key list in the PyTorch code. At 256, prompts with completions cost 5 to 20 % more.
BLOCK_QUERIES = 128


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """The queries [start, stop) of a plan, and the keys that at least one of them sees."""

    start: int
    stop: int
    runs: np.ndarray  # int64 [runs, 2]: the first key of each run, and one past its last key

    def keys(self) -> slice | np.ndarray:
        """Return the keys as an index: a slice if they are consecutive, else int64 [keys]."""
        if len(self.runs) == 1:
            return slice(int(self.runs[0, 0]), int(self.runs[0, 1]))
        return np.concatenate([np.arange(first, stop) for first, stop in self.runs])


@dataclass(frozen=True)
class RowPlan(Plan):
    """The attention plan of a step, for one sliding window or none. `plan_rows` makes it.

    Attributes:
        end: int64 [keys]. Key j is visible to the query at key row i exactly when j <= i < end[j] (see `first`).
        query_rows: int64 [queries], ascending: the key row of each query.
        positions: int64 [keys] with a sliding window, else None.
        window: The sliding window: a key must also be fewer than this many positions before the query. None: no limit.
        lists: The lists that the compiled kernel reads, or None.
        first: int64 [keys] if there are spans, else None. Rows of a span see each other both ways: key j is then
            visible exactly when first[j] <= i < end[j].
    """

    end: np.ndarray
    query_rows: np.ndarray
    positions: np.ndarray | None
    window: int | None
    lists: kernels.RowLists | None = None
    first: np.ndarray | None = None

    @property
    def num_keys(self) -> int:
        """Return the number of keys: the rows of the carried path and the new rows."""
        return len(self.end)

    @property
    def num_queries(self) -> int:
        """Return the number of query rows."""
        return len(self.query_rows)

    @cached_property
    def blocks(self) -> list[KeyBlock]:
        """Return the key lists of the PyTorch code, made on first use."""
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
    """Return the plan for attention of `query_rows` over `len(end)` keys: rows of the carried path, then the new rows.

    It needs no tensor, so another thread may plan while the previous step computes.

    Args:
        end: int64 [keys], end[j] > j. The intervals [j, end[j]) nest, as in any trie.
        query_rows: int64 [queries], ascending, in [0, keys).
        positions: int64 [keys], ascending along every path. Needed only with a sliding window.
        window: See RowPlan.
        first: int64 [keys]: the first row of a row's span, or the row itself outside spans. The rows of a span are
            consecutive and have one end. None: there are no spans.
        compiled: Make the lists that the compiled CPU kernel reads.
        invariant: As in ModelConfig, for the compiled kernel.

    Raises:
        ValueError: An array breaks these rules.
    """
    end = np.ascontiguousarray(end, dtype=np.int64)
    query_rows = np.ascontiguousarray(query_rows, dtype=np.int64)
    positions = window_positions(window, positions, len(end))
    if np.any(end <= np.arange(len(end))):
        raise ValueError("the interval of a row is empty; end[j] must be greater than j")
    if len(query_rows) and (query_rows[0] < 0 or query_rows[-1] >= len(end) or np.any(np.diff(query_rows) < 0)):
        raise ValueError("query rows are not ascending or out of range; pass ascending rows in [0, keys)")
    first = None if first is None else _checked_first(first, end)
    library = kernels.load() if compiled else None
    try:
        lists = library.plan_rows(end, query_rows, positions, window, first, placed=invariant) if library else None
    except ValueError as error:
        raise ValueError(
            "the intervals of two rows overlap without nesting, or positions fall along a path"
            "; pass the ends and positions of a depth-first trie"
        ) from error
    return RowPlan(end, query_rows, positions, window, lists, first)


def _checked_first(first: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    """Return `first` as contiguous int64, or None if no row is in a span."""
    first, rows = np.ascontiguousarray(first, dtype=np.int64), np.arange(len(end))
    if first.shape != end.shape or np.any(first > rows) or np.any(first < 0):
        raise ValueError(
            "the span of a row begins behind it; pass for each key the first row of its span, or the row itself"
        )
    inside = np.flatnonzero(first < rows)
    if np.any(first[inside] != first[inside - 1]) or np.any(end[inside] != end[inside - 1]):
        raise ValueError("the rows of a span are not consecutive or have different ends; a span has one end")
    return first if len(inside) else None


def key_blocks(plan: RowPlan) -> list[KeyBlock]:
    """Return blocks of queries with the keys that any query of the block sees, each filtered from the previous list."""
    blocks = []
    open_keys = np.empty(0, np.int64)
    num_seen = 0
    for start in range(0, plan.num_queries, BLOCK_QUERIES):
        rows = plan.query_rows[start : start + BLOCK_QUERIES]
        # Keys that ended before this block's first query stay invisible. Keys that began since are candidates.
        stop = int(rows[-1]) + 1 if plan.first is None else int(np.searchsorted(plan.first, rows[-1], side="right"))
        fresh = np.arange(num_seen, stop)
        open_keys = open_keys[plan.end[open_keys] > rows[0]]
        open_keys = np.concatenate((open_keys, fresh[plan.end[fresh] > rows[0]]))
        num_seen = stop
        # A key is visible to some query of the block if the first query at or after the key comes before its end.
        following = rows[np.searchsorted(rows, open_keys if plan.first is None else plan.first[open_keys])]
        used = following < plan.end[open_keys]
        if plan.window is not None:
            used &= plan.positions[open_keys] > plan.positions[rows].min() - plan.window
        blocks.append(KeyBlock(start, start + len(rows), runs_of(open_keys[used])))
    return blocks


def runs_of(keys: np.ndarray) -> np.ndarray:
    """Split ascending keys into runs of consecutive keys, int64 [runs, 2] of (first, one past the last)."""
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
    """Return a mask of the keys each query sees, bool [queries, keys]: first[j] <= i < end[j], within `window`.

    Args:
        end: int64 [keys].
        query_rows: int64 [queries], the key row of each query.
        positions: int64 [keys], for a sliding window.
        window: A key must be fewer than this many positions before the query. None: no limit.
        first: int64 [keys], the first row of a row's span, or the row itself outside spans. None: there are no spans.
    """
    end, rows = np.asarray(end), np.asarray(query_rows)[:, None]
    visible = ((np.arange(len(end)) if first is None else np.asarray(first)) <= rows) & (rows < end)
    if window is not None:
        positions = np.asarray(positions)
        visible &= positions[rows] - positions < window
    return visible


# The parts of a tile's list, in this order: fully visible and partly visible blocks of the path, then of the new rows.
PARTS = 4


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The key blocks that each tile of queries visits."""

    bounds: np.ndarray  # int32 [PARTS, tiles + 1]: part p of tile t is blocks[bounds[p, t] : bounds[p, t + 1]]
    blocks: np.ndarray  # int32: the first row of each key block, counted within the path or within the new rows
    order: np.ndarray  # int32 [tiles]: tiles with the most work first

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles."""
        return len(self.order)


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """The tiles of queries that see each key block. Gradients of keys and values are summed over these tiles."""

    # int32 [2, blocks + 1]: bounds[0] is for tiles that see a block whole, bounds[1] for tiles that see a part of it:
    # tiles[bounds[p, b] : bounds[p, b + 1]].
    bounds: np.ndarray
    tiles: np.ndarray  # int32
    order: np.ndarray  # int32 [blocks]: blocks with the most work first


def row_tiles(plan: RowPlan, path_rows: int, block_q: int, block_k: int) -> RowTiles:
    """Return the key blocks that each tile of a plan visits.

    Args:
        path_rows: number of keys in the carried path
    """
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
    """Return the tiles that see each key block, for a plan without a carried path."""
    tile, block, whole = _TileKeys(plan, block_q).blocks(0, plan.num_keys, block_k)
    bounds, tiles = _lists([(block[whole], tile[whole]), (block[~whole], tile[~whole])], -(-plan.num_keys // block_k))
    return KeyTiles(bounds, tiles, _most_first(bounds))


def _lists(parts: list[tuple[np.ndarray, np.ndarray]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds int64 [parts, size + 1], and all items, one list after the other.

    Args:
        parts: for each part, the owner of each item (ascending, below `size`) and the items
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
    """The keys that each tile of queries sees."""

    def __init__(self, plan: RowPlan, block_q: int):
        self.plan = plan
        rows = plan.query_rows
        starts = np.arange(0, len(rows), block_q)
        self.first, self.last = rows[starts], rows[np.minimum(starts + block_q, len(rows)) - 1]
        # No query sees a key if the first query at or after the key comes too late.
        self.begin = np.arange(plan.num_keys) if plan.first is None else plan.first
        following = np.append(rows, np.iinfo(np.int64).max)[np.searchsorted(rows, self.begin)]
        self.end = np.where(following < plan.end, plan.end, 0)
        if plan.window is not None and len(starts):
            positions = plan.positions[rows]
            self.nearest = np.minimum.reduceat(positions, starts)  # the smallest position of a tile
            self.farthest = np.maximum.reduceat(positions, starts)

    def blocks(self, start: int, stop: int, block_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (tile, block, whether the tile sees all keys of the block) for each block that a tile sees.

        The pairs are sorted by block. Without a window, the tiles that see a block are neighbours, because tiles
        ascend.

        Args:
            start, stop: the range of keys
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
