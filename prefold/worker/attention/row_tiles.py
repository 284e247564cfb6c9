"""The host's part of the Triton kernels for rows: which key blocks each tile of queries visits. NumPy only.

A tile is `block_q` neighbouring queries, a key block `block_k` neighbouring rows of the carried path, or of the
new rows. Of the blocks that a tile visits, some it sees whole (every query every key): those need no mask. What no
query of the tile sees is not visited, so that the work is that of the visible pairs, but for the edges of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .row_plan import RowPlan

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
