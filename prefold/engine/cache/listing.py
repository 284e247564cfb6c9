"""A snapshot of a radix tree: the rows of each namespace, and its paths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .tree import Node, RowTrie


class HeldRows(NamedTuple):
    """The computed rows of a namespace, and its nodes."""

    kept: int = 0  # kept for later requests
    pinned: int = 0
    in_use: int = 0  # used by sequences
    nodes: int = 0


class Part(NamedTuple):
    """A run of a path's tokens."""

    tokens: Any
    start: int  # position of the first token
    above: Part | None


class TreePath(NamedTuple):
    """A path from a root to a leaf, or to the last token of a sequence."""

    end: Part  # the last part of the path
    shared: int  # leading tokens that it shares with the path before it
    is_running: bool  # a sequence uses it
    namespace: Hashable


def held_rows(tree: RowTrie) -> dict[Hashable, HeldRows]:
    """Return the rows of each namespace."""
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
    """Return at most `most` paths of a tree, depth-first: one per leaf, and one per running sequence.

    The tree may change afterwards: the paths refer only to tokens, which never change.

    Args:
        tails: {node: the tokens of each sequence that continues below it}.
        wants: wants(namespace) -> True to include its paths; None: include all.
    """
    paths: list[TreePath] = []
    # (node, the part above it, tokens that the next path shares with the path before it, its namespace)
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
        # The first child shares as much as the node did, the others share the node too.
        stack += [(child, part, node.stop, namespace) for child in children[:-1]]
        stack += [(child, part, common, namespace) for child in children[-1:]]
    return paths


def _last_first(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: int(node.tokens[0]), reverse=True)
