"""A radix trie: the prefix trie of token sequences that come and go.

`Trie` lays a known set of sequences flat, once. A radix trie changes: callers insert a sequence, find its node again,
and remove it. A run of tokens without a branch is one node. So the size and the cost of a walk depend on the number of
branches, not of tokens.

    insert "to be"             insert "to go"                     remove the node of "be"

    root                       root                               root
      "to be"                    "to "      <- new, by a split      "to "
                                   "be"     <- the old node           "go"
                                   "go"

The rules:

- A node stands for its last token. A split puts a new node *above* the old one. So a reference to a node stays valid
  while the node is in the trie, and its end never moves.
- Namespaces share nothing: each has its own root, and a root has no tokens.
- The ids of a run are bytes: int32 in native byte order. One `memcmp` compares a run. A node's run is a copy, so it
  keeps no long prompt in memory. The first four bytes are the key of a child.
- Only this file changes `parent`, `children`, `ids` and `start`.

A trie is useful for its *payload*: K/V slots in the cache, the replicas that hold rows in the router, the totals of
waiting requests in the live window. A payload is a subclass of `RadixNode` with its own `__slots__`. A separate object
per node would cost one more attribute lookup for every row of every step, and one more allocation per node. If a
payload belongs to tokens, it defines in `divide` how a split divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import numpy as np

ID = np.dtype(np.int32)  # a token id; NumPy looks a type up on every use unless it gets a dtype object
TOKEN = ID.itemsize


def token_bytes(tokens: np.ndarray | Sequence[int]) -> bytes:
    """Return token ids as int32 bytes."""
    return np.asarray(tokens, ID).tobytes()


def shared_by(ids: bytes, other: bytes, at: int = 0) -> int:
    """Return how many leading tokens of `ids` equal the tokens of `other` from byte `at` on."""
    if other.startswith(ids, at):
        return len(ids) // TOKEN
    size = min(len(ids), len(other) - at) // TOKEN
    differ = np.frombuffer(ids, ID, size) != np.frombuffer(other, ID, size, at)
    return int(differ.argmax()) if differ.any() else size


@dataclass(eq=False, repr=False, slots=True)
class RadixNode:
    """A run of tokens; the base class of payloads."""

    parent: Self | None  # the node above; None for a root
    ids: bytes  # the token ids of the run; empty for a root
    start: int  # the position of the first token
    children: dict[bytes, Self] = field(default_factory=dict, init=False)  # by the bytes of their first tokens
    namespace: Hashable = field(default=None, init=False)  # for a root: the namespace of the trie

    def divide(self, upper: Self) -> None:
        """Move the payload of the first tokens of the run to `upper`, the new node above.

        `upper` has these tokens already, and this node has only the rest.
        """

    def __len__(self) -> int:
        return len(self.ids) // TOKEN

    @property
    def stop(self) -> int:
        """The position just past the last token."""
        return self.start + len(self.ids) // TOKEN

    def path(self, below: Self | None = None) -> list[Self]:
        """Return the nodes down to this node, starting below the root or below the ancestor `below`."""
        nodes = []
        node = self
        while node is not below and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def match(self, ids: bytes) -> Iterator[tuple[Self, int]]:
        """Yield the nodes below this one that match `ids`, each with the number of its leading tokens that match.

        All tokens of a node match, except perhaps in the last node. The caller may split a node that it got and
        continue.
        """
        node, at, size = self, 0, len(ids)
        while at < size:
            child = node.children.get(ids[at : at + TOKEN])
            if child is None:
                return
            run = child.ids  # read once: another thread may split the node meanwhile
            if not ids.startswith(run, at):
                yield child, shared_by(run, ids, at)
                return
            yield child, len(run) // TOKEN
            node, at = child, at + len(run)


P = TypeVar("P", bound=RadixNode)


class RadixTrie(Generic[P]):
    """The tries of all namespaces.

    Args:
        make: Creates a node from its parent, its ids and its start. Often this is just the payload's class.

    Attributes:
        roots: The root of each trie, by namespace. A root exists while its trie has other nodes.
    """

    def __init__(self, make: Callable[[P | None, bytes, int], P]) -> None:
        self._make = make
        self.roots: dict[Hashable, P] = {}

    def plant(self, namespace: Hashable) -> P:
        """Create and return the root of a new namespace."""
        root = self.roots[namespace] = self._make(None, b"", 0)
        root.namespace = namespace
        return root

    def insert(self, namespace: Hashable, ids: bytes) -> P:
        """Return the node that ends with `ids` (at least one token); create it if it is missing."""
        root = self.roots.get(namespace)
        return self.extend(self.plant(namespace) if root is None else root, ids)

    def extend(self, node: P, ids: bytes) -> P:
        """Return the node that ends `ids` below the end of `node`; create it if it is missing.

        If the end lies within a run, that node is split. The time is linear in the number of matching tokens, plus one
        lookup per node.
        """
        at, size = 0, len(ids)
        while at < size:
            child = node.children.get(ids[at : at + TOKEN])
            if child is None:
                child = node.children[ids[at : at + TOKEN]] = self._make(node, ids[at:], node.stop)
                return child
            if not ids.startswith(child.ids, at):
                child = self.split(child, shared_by(child.ids, ids, at))
            node = child
            at += len(child.ids)
        return node

    def match(self, namespace: Hashable, ids: bytes) -> Iterator[tuple[P, int]]:
        """Yield the nodes that match `ids`, each with the number of its leading tokens that match.

        See `RadixNode.match`.
        """
        root = self.roots.get(namespace)
        return iter(()) if root is None else root.match(ids)

    def split(self, node: P, size: int) -> P:
        """Cut off the first `size` tokens of a node as a new node above it, and return the new node."""
        above = node.parent
        assert above is not None and 0 < size < len(node)
        upper = self._make(above, node.ids[: size * TOKEN], node.start)
        above.children[node.ids[:TOKEN]] = upper
        node.parent, node.ids, node.start = upper, node.ids[size * TOKEN :], node.start + size
        upper.children[node.ids[:TOKEN]] = node
        node.divide(upper)
        return upper

    def join(self, node: P) -> P:
        """Prepend the tokens of a node to its only child, and return the child: the inverse of `split`.

        The child's payload is unchanged, and the node's payload is lost.
        """
        above, (child,) = node.parent, node.children.values()
        assert above is not None
        above.children[node.ids[:TOKEN]] = child
        child.parent, child.ids, child.start = above, node.ids + child.ids, node.start
        return child

    def remove(self, node: P) -> None:
        """Remove a node without children from its trie. A root is removed with its last child."""
        above, first = node.parent, node.ids[:TOKEN]
        assert above is not None and not node.children
        if above.children.get(first) is node:
            del above.children[first]
        if above.parent is None and not above.children and self.roots.get(above.namespace) is above:
            del self.roots[above.namespace]

    def nodes(self) -> Iterator[P]:
        """Yield all nodes except the roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
