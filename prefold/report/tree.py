"""Takes the shape of a radix tree that is in use, for the same icicle as that of a job's stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..cache.tree import Node, RadixTree
from .icicle import DrawnNode, icicle, to_data, walk

TEXT_TOKENS = 32


class _Part(NamedTuple):
    """A run of a path's tokens, and what is above it."""

    tokens: Any
    start: int
    above: _Part | None


class TreeShape:
    """The paths of a radix tree, depth-first: one for each leaf, and one for each sequence that runs.

    The tree may change once this is made: nothing of it is read later but tokens, which stay as they are.

    owners      for each path, what the namespace of its root stands for
    is_whole    False where the tree has more paths than were taken
    num_rows    rows of all paths, each row once
    """

    def __init__(
        self,
        tree: RadixTree,
        tails: Mapping[Node, Sequence[Sequence[int]]],
        owner_of: Callable[[Hashable], str],
        *,
        of: str | None = None,
        most: int = 5000,
    ):
        """Takes the shape of a tree.

        tails     {node: tokens of each sequence that goes on below it}
        owner_of  whom a namespace belongs to
        of        take only what belongs to this owner
        most      how many paths are taken
        """
        self._ends: list[_Part] = []
        self._running: list[bool] = []
        self.owners: list[str] = []
        lengths: list[int] = []
        shared: list[int] = []
        self.is_whole = True
        # (node, what is above it, how much the next path shares with the one before it, whose it is)
        stack: list[tuple[Node, _Part | None, int, str]] = []
        for namespace, root in reversed(list(tree.roots.items())):
            owner = owner_of(namespace)
            if of in (None, owner):
                stack += [(kid, None, 0, owner) for kid in _last_first(root.children.values())]
        while stack:
            node, above, common, owner = stack.pop()
            if len(lengths) >= most:
                self.is_whole = False
                break
            part = _Part(node.tokens, node.start, above)
            paths = [(_Part(tail, node.stop, part), True) for tail in tails.get(node, ()) if len(tail)]
            if not node.children and not paths:
                paths = [(part, node.users > 0)]
            for end, running in paths:
                lengths.append(end.start + len(end.tokens))
                shared.append(common)
                common = node.stop
                self._ends.append(end)
                self._running.append(running)
                self.owners.append(owner)
            kids = _last_first(node.children.values())
            # The first of them shares all that the node before it did, the others what is above them.
            stack += [(kid, part, node.stop, owner) for kid in kids[:-1]]
            stack += [(kid, part, common, owner) for kid in kids[-1:]]
        self._lengths, self._shared = np.array(lengths, np.int32), np.array(shared, np.int32)
        self.num_rows = int((self._lengths - self._shared).sum())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (lengths, shared) of the paths, each int32 [paths]; see `StreamShape.arrays`."""
        return self._lengths, self._shared

    def tokens_of(self, node: DrawnNode, limit: int = TEXT_TOKENS) -> np.ndarray:
        """Returns the first tokens of a node."""
        return self._between(node.first, node.start, node.start + min(limit, node.length))

    def _between(self, path: int, start: int, stop: int) -> np.ndarray:
        pieces: list[np.ndarray] = []
        part: _Part | None = self._ends[path]
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


def _last_first(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: int(node.tokens[0]), reverse=True)
