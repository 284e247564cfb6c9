"""The shape of a job's stream, and a tree made from it that is small enough to draw.

`StreamShape` records the windows as they run: eight bytes per prompt, and a few thousand sampled prompts for their
text. `icicle` makes the nodes of the trie from the root down, and folds nodes that would be too narrow to see.
`trie_picture` draws the trie on a terminal: a column stands for some prompts, a line for some tokens of depth.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

_SAMPLES = 4096
_SAMPLE_TOKENS = 2048


@dataclass(slots=True)
class Rest:
    """The sums of a node's branches that are not drawn separately."""

    branches: int
    prompts: int
    rows: int
    depth: float  # mean position of the ends of their prompts


@dataclass(slots=True)
class DrawnNode:
    """A run of rows that the same prompts share."""

    start: int  # position of its first row
    length: int  # number of rows
    prompts: int  # number of prompts that pass through it
    first: int  # number of the first of these prompts, in stream order
    rows: int  # rows of its subtree, including its own
    ending: int = 0  # number of prompts that end with its last row
    kids: list[DrawnNode] = field(default_factory=list)
    rest: Rest | None = None


class StreamShape:
    """The lengths and shared prefixes of the prompts of consecutive windows."""

    def __init__(self, *, samples: int = _SAMPLES) -> None:
        self._lengths: list[np.ndarray] = []
        self._shared: list[np.ndarray] = []
        self._max_samples = samples
        self._stride = 1
        self._samples: dict[int, np.ndarray] = {}
        self.num_requests = 0
        self.num_tokens = 0
        self.num_rows = 0

    def add(self, tokens: np.ndarray, offsets: np.ndarray, *, common: int = 0) -> None:
        """Add a window's prompts, in lexicographic order.

        Args:
            common: Leading tokens that the first prompt shares with the last prompt of the previous window.
        """
        from ...trie import common_prefix_lengths

        count = len(offsets) - 1
        if not count:
            return
        lengths = np.diff(offsets)
        shared = common_prefix_lengths(tokens, offsets, np.arange(count))
        shared[0] = common
        self._lengths.append(lengths.astype(np.int32))
        self._shared.append(shared.astype(np.int32))
        start = self.num_requests
        for number in range(-(-start // self._stride) * self._stride, start + count, self._stride):
            at = offsets[number - start]
            stop = min(offsets[number - start + 1], at + _SAMPLE_TOKENS)
            self._samples[number] = tokens[at:stop].copy()
        while len(self._samples) > self._max_samples:
            self._stride *= 2
            self._samples = {n: t for n, t in self._samples.items() if n % self._stride == 0}
        self.num_requests += count
        self.num_tokens += int(lengths.sum())
        self.num_rows += int((lengths - shared).sum())

    def see(self, window: Any) -> None:
        """Add a window's prompts, in the order in which rows are shared. Repeated reads of a prompt count once."""
        from ...trie import lexsort_sequences

        prompts = window.without_twins()
        if not prompts.is_sorted:
            prompts = prompts.take(lexsort_sequences(prompts.tokens, prompts.offsets))
        self.add(prompts.tokens, prompts.offsets, common=prompts.common)

    def watch(self, windows: Any) -> Iterator[Any]:
        """Add each window, then yield it."""
        for window in windows:
            self.see(window)
            yield window

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (lengths, shared), each int32 [prompts], in stream order; shared[0] is 0."""
        if not self._lengths:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._lengths, self._shared = [np.concatenate(self._lengths)], [np.concatenate(self._shared)]
        return self._lengths[0], self._shared[0]

    def tokens_of(self, node: DrawnNode, limit: int = 96) -> np.ndarray | None:
        """Return the first tokens of a node, or None if no sampled prompt passes through it."""
        number = -(-node.first // self._stride) * self._stride
        if number >= node.first + node.prompts:
            return None
        tokens = self._samples[number][node.start : node.start + min(limit, node.length)]
        return tokens if len(tokens) else None


def icicle(shape: StreamShape, *, max_nodes: int = 2000) -> DrawnNode:
    """Return the trie of a stream as a tree of at most max_nodes nodes. The root has no rows.

    Branches with the most prompts are expanded first. Branches beyond max_nodes are folded into the `rest` of their
    parent, and in a large stream also branches with few prompts. Each prompt and each row is in exactly one node or
    rest.
    """
    lengths, shared = shape.arrays()
    tree = _Tree(lengths, shared)
    root = DrawnNode(0, 0, len(lengths), 0, shape.num_rows)
    least = 1 if len(lengths) <= max_nodes else max(2, len(lengths) // (8 * max_nodes))
    count, todo = 1, _branches(tree, root, least)
    heapq.heapify(todo)
    while todo and count < max_nodes:
        _, first, stop, parent = heapq.heappop(todo)
        kid = tree.node(first, stop, parent.start + parent.length)
        parent.kids.append(kid)
        count += 1
        for branch in _branches(tree, kid, least):
            heapq.heappush(todo, branch)
    for _, first, stop, parent in sorted(todo, key=lambda branch: branch[1]):
        parent.rest = tree.fold(parent, first, stop)
    for node, _ in walk(root):
        node.kids.sort(key=lambda kid: kid.first)
    return root


def _branches(tree: _Tree, node: DrawnNode, least: int) -> list[tuple[int, int, int, DrawnNode]]:
    """Return (-prompts, first, stop, node) of each branch below a node.

    Prompts that end with the node are counted in `node.ending`. Branches of fewer than `least` prompts are folded into
    `node.rest`.
    """
    out = []
    for first, stop in tree.below(node):
        if tree.lengths[first] == node.start + node.length:
            node.ending += stop - first
        elif stop - first < least:
            node.rest = tree.fold(node, first, stop)
        else:
            out.append((first - stop, first, stop, node))
    return out


class _Tree:
    def __init__(self, lengths: np.ndarray, shared: np.ndarray):
        self.lengths = lengths
        self.shared = shared
        self.new_rows = np.concatenate(([0], np.cumsum(lengths.astype(np.int64) - shared)))
        self.ends = np.concatenate(([0], np.cumsum(lengths.astype(np.int64))))

    def below(self, node: DrawnNode) -> list[tuple[int, int]]:
        """Return the groups of prompts that diverge at the end of a node, as (first, stop)."""
        at = node.start + node.length
        inner = self.shared[node.first + 1 : node.first + node.prompts]
        cuts = np.flatnonzero(inner <= at) + node.first + 1
        edges = [node.first, *cuts.tolist(), node.first + node.prompts]
        return list(pairwise(edges))

    def node(self, first: int, stop: int, start: int) -> DrawnNode:
        end = int(self.shared[first + 1 : stop].min()) if stop - first > 1 else int(self.lengths[first])
        return DrawnNode(start, end - start, stop - first, first, self._rows(first, stop, start))

    def _rows(self, first: int, stop: int, start: int) -> int:
        return int(self.lengths[first]) - start + int(self.new_rows[stop] - self.new_rows[first + 1])

    def fold(self, node: DrawnNode, first: int, stop: int) -> Rest:
        prompts, depth = stop - first, int(self.ends[stop] - self.ends[first])
        rows = self._rows(first, stop, node.start + node.length)
        rest = node.rest or Rest(0, 0, 0, 0.0)
        total = rest.depth * rest.prompts + depth
        return Rest(rest.branches + 1, rest.prompts + prompts, rest.rows + rows, total / (rest.prompts + prompts))


def walk(root: DrawnNode) -> Iterator[tuple[DrawnNode, int]]:
    """Yield every node, depth-first, with the index of its parent in this order (-1 for the root)."""
    stack, place = [(root, -1)], 0
    while stack:
        node, parent = stack.pop()
        yield node, parent
        stack.extend((kid, place) for kid in reversed(node.kids))
        place += 1


def to_data(shape: StreamShape, root: DrawnNode, decode: Callable[[np.ndarray], str] | None) -> list[list[Any]]:
    """Return the tree as plain data: for each node [parent, start, length, prompts, rows, ending, rest, text].

    rest is [branches, prompts, rows, mean depth of their ends], or 0 if there is no rest. text is 0 if it is unknown.
    """
    out: list[list[Any]] = []
    for node, parent in walk(root):
        rest = node.rest and [node.rest.branches, node.rest.prompts, node.rest.rows, round(node.rest.depth, 1)]
        text = _text(shape, node, decode) if decode is not None and node.length else None
        out.append([parent, node.start, node.length, node.prompts, node.rows, node.ending, rest or 0, text or 0])
    return out


def _text(shape: StreamShape, node: DrawnNode, decode: Callable[[np.ndarray], str]) -> str | None:
    tokens = shape.tokens_of(node)
    if tokens is None:
        return None
    text = decode(tokens)
    return text[:240] + ("…" if len(text) > 240 or len(tokens) < node.length else "")


_SHADES = "░▒▓█"  # rows computed for one prompt, for a few, for many, for most prompts


def trie_picture(shape: StreamShape, *, width: int = 64, height: int = 12) -> list[str]:
    """Return lines of block characters. A token shared by more prompts is darker. Blank: the prompts have ended.

    If there is enough space, a thin line separates neighbouring branches.
    """
    lengths, shared = (a.astype(np.int64) for a in shape.arrays())
    count = len(lengths)
    if not count:
        return []
    width_each = max(1, width // count)  # columns per prompt
    columns = np.arange(min(width, width_each * count)) * count // min(width, width_each * count)
    deepest = int(np.quantile(lengths, 0.97))
    height = min(height, deepest)
    lines = []
    for line in range(height):
        depth = (2 * line + 1) * deepest // (2 * height)
        group = np.cumsum(shared <= depth)
        members = np.bincount(group)[group]
        lines.append(_line(columns, group, members, lengths > depth, count, width_each).rstrip())
    return lines


def _line(columns: np.ndarray, group: np.ndarray, members: np.ndarray, alive: np.ndarray, count: int, each: int) -> str:
    out = []
    for i, prompt in enumerate(columns):
        if not alive[prompt]:
            out.append(" ")
        elif each > 1 and i and columns[i - 1] != prompt and group[columns[i - 1]] != group[prompt]:
            out.append("▏" if members[prompt] == 1 else "▐")
        else:
            sharing = int(members[prompt])
            shade = 0 if sharing == 1 else 3 if 2 * sharing > count else 2 if 8 * sharing > count else 1
            out.append(_SHADES[shade])
    return "".join(out)
