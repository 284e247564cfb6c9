"""The shape of a radix tree that is in use, for the same icicle as that of a job's stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ...engine.cache.listing import Part, TreePath
from .icicle import DrawnNode, icicle, to_data, walk

TEXT_TOKENS = 32


class TreeShape:
    """A TreeShape holds the paths of a radix tree, depth-first: one for each leaf, and one for each sequence that runs.

    owners    for each path, the owner of the namespace of its root
    is_whole  whether it holds all paths that it was made of
    num_rows  rows of all paths, each row once
    """

    def __init__(self, paths: Sequence[TreePath], owner_of: Callable[[Hashable], str], *, most: int):
        """Takes at most `most` of the paths. owner_of: returns the owner of a namespace"""
        self.is_whole, paths = len(paths) <= most, paths[:most]
        self._ends = [path.end for path in paths]
        self._running = [path.is_running for path in paths]
        self.owners = [owner_of(path.namespace) for path in paths]
        self._lengths = np.array([end.start + len(end.tokens) for end in self._ends], np.int32)
        self._shared = np.array([path.shared for path in paths], np.int32)
        self.num_rows = int((self._lengths - self._shared).sum())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (lengths, shared) of the paths, each int32 [paths]; see `StreamShape.arrays`."""
        return self._lengths, self._shared

    def tokens_of(self, node: DrawnNode, limit: int = TEXT_TOKENS) -> np.ndarray:
        """Returns the first tokens of a node."""
        return self._between(node.first, node.start, node.start + min(limit, node.length))

    def _between(self, path: int, start: int, stop: int) -> np.ndarray:
        pieces: list[np.ndarray] = []
        part: Part | None = self._ends[path]
        while part is not None and part.start + len(part.tokens) > start:
            if part.start < stop:
                pieces.append(np.asarray(part.tokens[max(0, start - part.start) : stop - part.start], np.int32))
            part = part.above
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)

    def data(self, decode: Callable[[np.ndarray], str] | None, *, max_nodes: int = 2000) -> dict[str, Any]:
        """Returns the data of a drawing: {"nodes": as `to_data`, each with the sequences below it and its owner;
        "parting": [owner, end of the text that is shared, its tokens, branches, paths] of where most paths part}."""
        if not self.owners:
            return {"nodes": [], "parting": []}
        root = icicle(self, max_nodes=max_nodes)  # type: ignore[arg-type]
        running = np.concatenate(([0], np.cumsum(self._running)))
        nodes = to_data(self, root, decode)  # type: ignore[arg-type]
        parting: list[tuple[str, str, int, int, int]] = []
        for row, (node, _) in zip(nodes, walk(root), strict=True):
            first, stop = node.first, node.first + node.prompts
            row += [int(running[stop] - running[first]), self.owners[first] if node.length else ""]
            branches = len(node.kids) + (node.rest.branches if node.rest else 0) + bool(node.ending)
            if node.length and branches > 1:
                end = node.start + node.length
                text = "" if decode is None else decode(self._between(first, max(0, end - TEXT_TOKENS), end))
                parting.append((self.owners[first], text, end, branches, node.prompts))
        return {"nodes": nodes, "parting": sorted(parting, key=lambda part: -part[4])[:10]}
