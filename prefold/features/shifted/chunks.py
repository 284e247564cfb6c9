"""Find chunks of a new prompt that have rows in the cache at other positions.

Such rows have the same tokens, but other tokens before them, so results from them are approximations (EPIC, Hu et al.
2024; CacheBlend, Yao et al. 2024). Nothing here runs unless `CacheOptions.shifted` is set.

Rows are found by hashes of blocks. The rows of each path are cut into blocks at multiples of the block size. A prompt
is looked up at each of its positions. A block is half as long as the shortest chunk, so each sufficiently long common
text contains a block. Hashes only propose a chunk; the tokens are then compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from ...engine.cache.tree import Node, RowTrie
from ...engine.schedule.steps import Message
from ...trie import MEDIA_BASE, token_bytes
from .options import ShiftedReuse

# Number of places of a block that are tried; the longest chunk wins.
TRIES = 4
# The search for a prompt's chunks ends after this many failed places. Repetitive text would have one at each position.
MAX_FAILED_STEPS = 256
# _BASE is odd, so that it has an inverse modulo 2**64. _MIX spreads the bits of token ids (splitmix64).
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

Key = tuple[bytes, int]  # (digest of the images before a block, hash of the block)


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """A part of a prompt that has rows elsewhere."""

    start: int  # first position of the chunk in the prompt
    stop: int  # the position after the chunk's last
    slots: np.ndarray  # int64 [stop - start]: slots with the K/V of the same tokens
    position: int  # position at which the first of these rows was computed
    node: Node  # the node of the last of these rows

    def __len__(self) -> int:
        return self.stop - self.start

    def behind(self, at: int) -> Chunk:
        """Return the part of the chunk from position `at` on."""
        first = at - self.start
        return Chunk(at, self.stop, self.slots[first:], self.position + first, self.node)


@dataclass(frozen=True, slots=True)
class ShiftedFacts:
    """A worker's facts about moving rows."""

    fixed: str | None = None  # why rows cannot be moved to other positions; None: they can


@dataclass(frozen=True, eq=False, slots=True)
class MoveRows(Message):
    """A request to copy the K/V of n rows to other positions: keys are rotated by the angles between the positions.

    Everything is read before anything is written.
    """

    sources: np.ndarray  # int64 [n]: slots to read
    positions: np.ndarray  # int64 [n]: positions at which these rows were computed
    slots: np.ndarray  # int64 [n]: slots to write, all different
    new_positions: np.ndarray  # int64 [n]: positions of the copies


class ChunkIndex:
    """Finds chunks of text among the computed rows of a radix tree, in use or cached.

    Rows outside the tree, such as tails, are not found.
    """

    def __init__(self, tree: RowTrie, options: ShiftedReuse):
        self.options = options
        self._shortest = max(options.min_tokens, options.recompute + 1)
        self.size = (self._shortest + 1) // 2
        self.tree = tree
        self.blocks: dict[Hashable, dict[Key, dict[Node, int]]] = {}  # {namespace: {block: {node: end}}}
        self._noted: dict[Node, tuple[Hashable, int, list[tuple[int, Key]]]] = {}  # (namespace, end, blocks (end, key))
        tree.on_store.append(self._store)
        tree.on_split.append(self._split)
        tree.on_drop.append(self._drop)
        tree.on_clear.append(self._clear)

    def find(self, namespace: Hashable, tokens: np.ndarray, first: int) -> list[Chunk]:
        """Return chunks of a prompt's tokens, int32 [n], from position `first` on, in order and without overlap.

        The last token is in no chunk, because its row has to be computed. A chunk has no rows of images, and its rows
        had the same images before them, in the same order.
        """
        table = self.blocks.get(namespace)
        stop = min(len(tokens) - 1, first + self.options.window)
        if not table or stop - first < self._shortest:
            return []
        chunks: list[Chunk] = []
        in_vain = 0
        for start, end in _texts(tokens, first, stop):
            behind = _images_before(tokens, start)
            hashes = window_hashes(tokens[start:end], self.size).tolist()
            at, i = start, 0
            while i < len(hashes) and len(chunks) < self.options.max_matches and in_vain < MAX_FAILED_STEPS:
                places = table.get((behind, hashes[i]))
                chunk = places and self._longest(places, tokens, start + i, at, end)
                if chunk:
                    chunks.append(chunk)
                    at, i = chunk.stop, chunk.stop - start
                else:
                    i, in_vain = i + 1, in_vain + (places is not None)
        covered = sum(map(len, chunks))
        return chunks if covered >= self.options.min_share * (len(tokens) - first) else []

    def _longest(self, places: dict[Node, int], tokens: np.ndarray, at: int, first: int, stop: int) -> Chunk | None:
        """Return the longest chunk within [first, stop) around the block at `at`, or None if all are too short."""
        best = None
        for node, _ in zip(reversed(places), range(TRIES), strict=False):
            chunk = self._around(node, places[node], tokens, at, first, stop)
            if chunk is not None and len(chunk) >= self._shortest and (best is None or len(chunk) > len(best)):
                best = chunk
        return best

    def _around(self, node: Node, end: int, tokens: np.ndarray, at: int, first: int, stop: int) -> Chunk | None:
        """Return the chunk around the prompt's block at `at`. The equal block of a path ends at `end` in `node`."""
        rows, slots = _rows(node.path())
        source = end - self.size
        back = min(at - first, source)
        same = (rows[source - back : source] == tokens[at - back : at]) & (slots[source - back : source] > 0)
        before = _num_leading(same[::-1])
        begin = source - before
        start = at - before
        while True:
            size = min(len(rows) - begin, stop - start)
            same = (rows[begin : begin + size] == tokens[start : start + size]) & (slots[begin : begin + size] > 0)
            size = _num_leading(same)
            behind = token_bytes(tokens[start + size : start + size + 1])
            follows = node.children.get(behind) if begin + size == len(rows) else None
            if follows is None or start + size >= stop:
                break
            node = follows
            more_rows, more_slots = _rows([node])
            rows, slots = np.concatenate((rows, more_rows)), np.concatenate((slots, more_slots))
        if size < before + self.size:
            return None
        return Chunk(start, start + size, slots[begin : begin + size], begin, node)

    # ------------------------------------------------------------------------------------------- the tree's callbacks

    def _store(self, node: Node) -> None:
        if isinstance(node.tokens, list):  # a tail: it is not in the tree
            return
        path = node.path()
        assert path[0].parent is not None
        namespace, end_noted, keys = self._noted.get(node) or (path[0].parent.namespace, node.start, [])
        stop = node.start + node.num_computed
        ends = [end for end in range(end_noted // self.size * self.size + self.size, stop + 1, self.size)]
        if ends:
            tokens = np.concatenate([node_above.tokens for node_above in path])[:stop]
            first = ends[0] - self.size
            hashes = window_hashes(tokens[first:], self.size)[:: self.size].tolist()
            has_images = bool(tokens.max() >= MEDIA_BASE)
            for end, value in zip(ends, hashes, strict=True):
                start = end - self.size
                if has_images and tokens[start:end].max() >= MEDIA_BASE:
                    continue
                key = (_images_before(tokens, start) if has_images else b"", value)
                keys.append((end, key))
                self.blocks.setdefault(namespace, {}).setdefault(key, {})[node] = end
        self._noted[node] = (namespace, max(end_noted, stop), keys)

    def _split(self, upper: Node, lower: Node) -> None:
        if lower not in self._noted:
            return
        namespace, end_noted, keys = self._forget(lower)
        for node, low, high in ((upper, 0, upper.stop), (lower, upper.stop, lower.stop)):
            ends = [(end, key) for end, key in keys if low < end <= high]
            for end, key in ends:
                self.blocks.setdefault(namespace, {}).setdefault(key, {})[node] = end
            self._noted[node] = (namespace, min(max(end_noted, node.start), node.stop), ends)

    def _drop(self, node: Node) -> None:
        if node in self._noted:
            self._forget(node)

    def _forget(self, node: Node) -> tuple[Hashable, int, list[tuple[int, Key]]]:
        namespace, end_noted, keys = self._noted.pop(node)
        table = self.blocks.get(namespace, {})
        for _, key in keys:
            places = table.get(key)
            if places is not None:
                places.pop(node, None)
                if not places:
                    del table[key]
        if not table:
            self.blocks.pop(namespace, None)
        return namespace, end_noted, keys

    def _clear(self) -> None:
        self.blocks.clear()
        self._noted.clear()


def window_hashes(tokens: np.ndarray, size: int) -> np.ndarray:
    """Return a hash of each `size` consecutive tokens, uint64 [n - size + 1], for tokens int32 [n].

    It is a polynomial in an odd number modulo 2**64 (Karp and Rabin 1987), from sums of the terms up to each token.
    """
    count = len(tokens) - size + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    mixed = tokens.astype(np.uint64) + np.uint64(_BASE)
    for factor, shift in zip(_MIX, (30, 27), strict=True):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    sums = np.zeros(len(tokens) + 1, np.uint64)
    np.cumsum(mixed * _powers(_BASE, len(tokens)), out=sums[1:])
    return (sums[size:] - sums[:count]) * _powers(_INVERSE, count)


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


def _rows(nodes: list[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Return (the tokens of nodes on a path, int32 [n]; the slots of their rows, int64 [n], 0 for a missing row)."""
    slots = [np.pad(node.slots[: node.num_computed], (0, len(node) - node.num_computed)) for node in nodes]
    return np.concatenate([node.tokens for node in nodes]), np.concatenate(slots)


def _num_leading(same: np.ndarray) -> int:
    return len(same) if same.all() else int(same.argmin())


def _texts(tokens: np.ndarray, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each range without rows of images, among the tokens from `first` to `stop`."""
    images = np.flatnonzero(tokens[first:stop] >= MEDIA_BASE) + first
    start = first
    for at in (*images.tolist(), stop):
        if at > start:
            yield start, at
        start = at + 1


def _images_before(tokens: np.ndarray, at: int) -> bytes:
    """Return a digest of the rows of images before a position, or b"" if there are none."""
    ids = tokens[:at][tokens[:at] >= MEDIA_BASE]
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest() if len(ids) else b""
