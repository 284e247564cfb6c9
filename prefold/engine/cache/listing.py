"""Lists what a radix tree holds at one moment: the rows of each namespace, and its paths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .tree import Node, RowTrie


class HeldRows(NamedTuple):
    """A HeldRows counts the computed rows of a namespace: those that are kept for later requests, those that are
    pinned, those that sequences use; and its nodes."""

    kept: int = 0
    pinned: int = 0
    in_use: int = 0
    nodes: int = 0


class Part(NamedTuple):
    """A Part is a run of a path's tokens. start: the place of the first one; above: the Part above it"""

    tokens: Any
    start: int
    above: Part | None


class TreePath(NamedTuple):
    """A TreePath is a path from a root down to a leaf, or down to the last token of a sequence.

    end         the last of its parts
    shared      how many leading tokens it shares with the path before it
    is_running  whether a sequence uses it
    namespace   the namespace of its root
    """

    end: Part
    shared: int
    is_running: bool
    namespace: Hashable


def held_rows(tree: RowTrie) -> dict[Hashable, HeldRows]:
    """Returns the rows of each namespace."""
    rows = {}
    for namespace, root in tree.roots.items():
        counts = {"kept": 0, "pinned": 0, "in_use": 0, "nodes": 0}
        nodes = list(root.children.values())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            counts["nodes"] += 1
            counts["pinned" if node.pins else "kept" if node.kept else "in_use"] += node.num_computed
        rows[namespace] = HeldRows(**counts)
    return rows


def paths_of(
    tree: RowTrie,
    tails: Mapping[Node, Sequence[Sequence[int]]],
    *,
    most: int,
    wants: Callable[[Hashable], bool] | None = None,
) -> list[TreePath]:
    """Returns at most so many paths of a tree, depth-first: one for each leaf, and one for each sequence that runs.

    The tree may change afterwards: the paths refer to nothing of it but tokens, which stay as they are.

    tails  {node: the tokens of each sequence that goes on below it}
    wants  whether the paths of a namespace are wanted; None: all are
    """
    paths: list[TreePath] = []
    # (node, the part above it, how many tokens the next path shares with the path before it, its namespace)
    stack: list[tuple[Node, Part | None, int, Hashable]] = []
    for namespace, root in reversed(list(tree.roots.items())):
        if wants is None or wants(namespace):
            stack += [(child, None, 0, namespace) for child in _last_first(root.children.values())]
    while stack and len(paths) < most:
        node, above, common, namespace = stack.pop()
        part = Part(node.tokens, node.start, above)
        ends = [(Part(tail, node.stop, part), True) for tail in tails.get(node, ()) if len(tail)]
        if not node.children and not ends:
            ends = [(part, node.users > 0)]
        for end, is_running in ends:
            paths.append(TreePath(end, common, is_running, namespace))
            common = node.stop
        children = _last_first(node.children.values())
        # The first of them shares all that the node before it did, the others what is above them.
        stack += [(child, part, node.stop, namespace) for child in children[:-1]]
        stack += [(child, part, common, namespace) for child in children[-1:]]
    return paths


def _last_first(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: int(node.tokens[0]), reverse=True)
