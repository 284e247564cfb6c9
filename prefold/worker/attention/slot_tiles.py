"""The host's part of the Triton kernels for slots: which keys each tile of queries reads, in how many pieces of work.

A tile is `block_q` neighbouring queries. The keys that any of them sees are one list a tile, of stretches of
neighbouring slots: so what a tile's queries share is read once for all of them. A list is cut into items, that a long
one may be read in several places at once; an online softmax joins them. NumPy only, and a fixed number of calls to
it: a step of decoding is planned anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .slot_plan import KeyRuns, SlotPlan

# What is known of a stretch of keys in a tile's list, and of an item.
STRETCH_FIELDS = ("place", "slot", "count", "position", "first", "step", "last")
ITEM_FIELDS = ("tile", "start", "whole", "stop", "alone")
# Rows of a tile (queries times the heads of a group) to choose from, and the most by bytes of a number: float32 has no
# tensor cores here, and more of it spills from the registers.
ROWS = (16, 32, 64, 128)
MOST_ROWS = {2: 128, 4: 32}
# More rows cost no time while reading keys takes longer than multiplying them: up to about so many.
FREE_ROWS = 96
# Items a KV head, to keep every processor of a GPU busy; and the fewest keys that are worth one.
ITEMS = 128
LEAST_KEYS = 256


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """Lists name the keys that each tile of queries reads, and the items, pieces of work, that they are cut into.

    num_keys    entries of all lists
    stretches   int64 [STRETCH_FIELDS, s]: `count` keys from `place` of the lists on, in the slots from `slot` on, of
                positions from `position` on. Key o is visible to queries [first + o * step, last)
    items       int64 [ITEM_FIELDS, i]: the keys [start, stop) of the lists for a tile, before `whole` all visible
                to all of its queries; alone: the tile has no other item
    tile_items  int64 [tiles + 1]: a tile's items
    """

    block_q: int
    num_keys: int
    stretches: np.ndarray
    items: np.ndarray
    tile_items: np.ndarray


def stretches(runs: KeyRuns) -> np.ndarray:
    """Returns runs joined as far as they go on in slots and positions, int64 [6, s]: slot, count, position, first,
    step, last.

    Neighbours that the same queries see are one stretch; so are rows of one key each that are seen from a query later
    each (new rows of a prompt): step 1.
    """
    before, after = (
        {name: getattr(runs, name)[part] for name in ("start", "count", "position", "first", "last")}
        for part in (slice(None, -1), slice(1, None))
    )
    joined = (after["start"] == before["start"] + before["count"]) & (after["last"] == before["last"])
    joined &= after["position"] == before["position"] + before["count"]
    later = (after["first"] == before["first"] + 1) & (before["count"] == 1) & (after["count"] == 1)
    kind = np.where(joined & (after["first"] == before["first"]), 1, np.where(joined & later, 2, 0))
    # A run that the one before was joined to in another way begins a stretch.
    turned = (kind[1:] != kind[:-1]) & (kind[:-1] != 0)
    begins = np.ones(len(runs), bool)
    begins[1:] = kind == 0
    begins[2:] |= turned
    at = np.flatnonzero(begins)
    steps = np.append(kind, 0)[at] == 2
    # Its second run may have begun a stretch of its own.
    steps &= np.append(~begins[1:], False)[at]
    count = np.add.reduceat(runs.count, at) if len(at) else runs.count
    return np.stack((runs.start[at], count, runs.position[at], runs.first[at], steps, runs.last[at]))


def pick_rows(joined: np.ndarray, group: int, itemsize: int) -> int:
    """Returns the rows of a tile, of ROWS, with which keys are read and multiplied in the least time.

    itemsize: bytes of a number.
    """
    best = 1 << (group - 1).bit_length()  # where none of ROWS has room for a query
    least = np.inf
    for rows in ROWS:
        if group <= rows <= MOST_ROWS[itemsize]:
            cost = listed_keys(joined, rows // group) * max(1.0, rows / FREE_ROWS)
            if cost < least:
                best, least = rows, cost
    return best


def listed_keys(joined: np.ndarray, block_q: int) -> int:
    """Returns how many keys the lists of tiles of so many queries have, at most."""
    _, count, _, first, _, last = joined
    return int((count * ((last - 1) // block_q - first // block_q + 1)).sum())


def slot_tiles(plan: SlotPlan, joined: np.ndarray, block_q: int, block_k: int) -> SlotTiles:
    """Returns the tiles of a plan, of block_q queries each; an item begins at a multiple of block_k keys of its list.

    joined: the plan's runs as `stretches` gives them.
    """
    num_queries, window = plan.num_queries, plan.window
    num_tiles = -(-num_queries // block_q)
    slot, count, position, first, step, last = joined
    # A stretch and a tile of which some query sees it.
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
    # Whole blocks only: what is left of the keys that all see goes with those that need a mask.
    whole_stop = np.clip((starts + whole_sizes)[of_tile], start, stop)
    whole_stop = start + (whole_stop - start) // block_k * block_k
    return SlotTiles(
        block_q=block_q,
        num_keys=total,
        stretches=np.stack((place, slot, count, position, first, step, last)),
        items=np.stack((of_tile, start, whole_stop, stop, parts[of_tile] == 1)),
        tile_items=np.concatenate(([0], parts.cumsum())),
    )
