"""The radix trie against a dict of all its rows, with a payload that has data per token."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from books import check_books
from hypothesis import given, settings
from hypothesis import strategies as st

import prefold
from prefold.trie import RadixNode, RadixTrie, shared_by, token_bytes

PACKAGE = Path(prefold.__file__).parent
tokens = st.lists(st.sampled_from([0, 1, 300, -1, 2**31 - 1]), max_size=9)


@dataclass(eq=False, repr=False, slots=True)
class Marked(RadixNode):
    marks: list[int] = field(default_factory=list)  # one for each token
    name: int = 0  # of the whole node

    def divide(self, upper: Self) -> None:
        upper.name = self.name
        upper.marks, self.marks = self.marks[: len(upper)], self.marks[len(upper) :]


def tokens_of(node: RadixNode) -> tuple[int, ...]:
    """The tokens of a path."""
    return tuple(np.frombuffer(b"".join(above.ids for above in node.path()), np.int32).tolist())


class Model:
    """A trie, and beside it a dict of its rows: {(namespace, the tokens down to the row): its mark}."""

    def __init__(self) -> None:
        self.trie = RadixTrie(Marked)
        self.rows: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        self.references: dict[Marked, tuple[Hashable, tuple[int, ...]]] = {}
        self.numbers = itertools.count(1)

    def arrive(self, node: Marked, namespace: Hashable, path: tuple[int, ...]) -> None:
        """Refers to the node that ends with a path, and marks its new rows."""
        for above in node.path():
            if not above.marks:
                above.marks = [next(self.numbers) for _ in range(len(above))]
                above.name = above.marks[-1]
                for at, mark in enumerate(above.marks, above.start + 1):
                    assert self.rows.setdefault((namespace, path[:at]), mark) == mark, "a row that was there"
        self.references[node] = namespace, path

    def insert(self, namespace: Hashable, path: tuple[int, ...]) -> None:
        self.arrive(self.trie.insert(namespace, token_bytes(path)), namespace, path)

    def extend(self, node: Marked, more: tuple[int, ...]) -> None:
        namespace, path = self.references[node]
        self.arrive(self.trie.extend(node, token_bytes(more)), namespace, path + more)

    def split(self, node: Marked, size: int) -> None:
        if 0 < size < len(node):
            namespace, path = self.references[node]
            upper = self.trie.split(node, size)
            assert (len(upper), upper.name, node.parent) == (size, node.name, upper)
            self.references[upper] = namespace, path[: upper.stop]

    def join(self, node: Marked) -> None:
        if len(node.children) == 1:
            (child,) = node.children.values()
            child.marks = node.marks + child.marks
            assert self.trie.join(node) is child
            self.references.pop(node)

    def remove(self, node: Marked) -> None:
        if not node.children:
            namespace, path = self.references.pop(node)
            self.trie.remove(node)
            for stop in range(node.start + 1, node.stop + 1):
                del self.rows[namespace, path[:stop]]

    def check(self) -> None:
        check_books(self.trie)
        found = {}
        for node in self.trie.nodes():
            path, namespace = tokens_of(node), node.path()[0].parent.namespace
            assert len(path) == node.stop and len(node.marks) == len(node)
            found |= {(namespace, path[:at]): mark for at, mark in enumerate(node.marks, node.start + 1)}
        assert found == self.rows
        for node, (namespace, path) in self.references.items():
            assert tokens_of(node) == path and node.path()[0].parent is self.trie.roots[namespace], "an end has moved"

    def check_match(self, namespace: Hashable, path: tuple[int, ...]) -> None:
        matches = list(self.trie.match(namespace, token_bytes(path)))
        longest = max((at for at in range(len(path) + 1) if (namespace, path[:at]) in self.rows), default=0)
        assert sum(same for _, same in matches) == longest
        marks = [mark for node, same in matches for mark in node.marks[:same]]
        assert marks == [self.rows[namespace, path[:at]] for at in range(1, longest + 1)]
        assert all(same == len(node) for node, same in matches[:-1]) and all(same for _, same in matches)


@settings(max_examples=60)
@given(st.data())
def test_a_trie_has_the_rows_of_a_dict(data):
    model = Model()
    for _ in range(data.draw(st.integers(1, 25), "number of changes")):
        what = data.draw(st.sampled_from(["insert", "insert", "extend", "split", "join", "remove"]))
        namespace, path = data.draw(st.sampled_from([(), "a"])), tuple(data.draw(tokens))
        nodes = sorted(model.references, key=lambda node: (str(model.references[node]), node.start))
        if what == "insert" and path:
            model.insert(namespace, path)
        elif what != "insert" and nodes:
            node = data.draw(st.sampled_from(nodes))
            if what == "extend":
                model.extend(node, path)
            elif what == "split":
                model.split(node, data.draw(st.integers(0, len(node))))
            else:
                getattr(model, what)(node)
        # A part of a path that was split off is a node too, although nothing referred to it.
        for node in model.trie.nodes():
            model.references.setdefault(node, (node.path()[0].parent.namespace, tokens_of(node)))
        model.check()
        model.check_match(namespace, tuple(data.draw(tokens)))
    while model.references:  # a root goes with its last child
        model.remove(next(node for node in model.references if not node.children))
    assert not model.trie.roots and not model.rows


@given(tokens, tokens, tokens)
def test_shared_tokens_are_counted_from_a_byte_on(ids, before, after):
    same = 0
    for one, other in zip(ids, after, strict=False):
        if one != other:
            break
        same += 1
    assert shared_by(token_bytes(ids), token_bytes(before + after), 4 * len(before)) == same


def test_a_walk_may_split_the_node_that_it_got():
    trie = RadixTrie(RadixNode)
    trie.insert((), token_bytes([1, 2, 3]))
    trie.insert((), token_bytes([1, 2, 3, 4, 5]))
    seen = []
    for node, same in trie.match((), token_bytes([1, 2, 3, 4, 6])):
        seen.append(same)
        trie.split(node, 1)
    assert seen == [3, 1]
    check_books(trie)


def test_a_namespace_is_there_while_it_has_nodes():
    trie = RadixTrie(RadixNode)
    nodes = [trie.insert(name, token_bytes([1, 2])) for name in ("a", "b")]
    assert nodes[0] is not nodes[1] and [root.namespace for root in trie.roots.values()] == ["a", "b"]
    trie.remove(nodes[0])
    assert list(trie.roots) == ["b"] and not list(trie.match("a", token_bytes([1])))


def test_a_node_with_children_or_a_root_is_not_removed():
    trie = RadixTrie(RadixNode)
    lower = trie.insert((), token_bytes([1, 2]))
    upper = trie.split(lower, 1)
    for node in (upper, trie.roots[()]):
        with pytest.raises(AssertionError):
            trie.remove(node)


def test_nodes_hold_their_own_tokens_alone():
    """A node of a long prompt may stay after the prompt: it holds none of the prompt's other tokens."""
    trie = RadixTrie(RadixNode)
    lower = trie.insert((), token_bytes(np.arange(10_000)))
    upper = trie.split(lower, 1)
    assert (len(upper.ids), len(lower.ids)) == (4, 39_996)


def test_only_one_file_changes_tries():
    """Owners of tries change payloads; nodes are linked in prefix/radix.py. The simulator has a trie of lengths."""
    change = re.compile(r"\.children(\[.*?\])? = |del \w+\.children|\.children\.(pop|clear|setdefault|update)")
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if change.search(path.read_text())}
    assert found - {"simulate/engines.py"} == {"trie/radix.py"}
