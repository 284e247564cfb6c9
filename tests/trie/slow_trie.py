"""A trie the slow, obvious way: nested dictionaries, walked depth-first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st


@dataclass
class SlowTrie:
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)
    row: dict[tuple[int, ...], int] = field(default_factory=dict)  # of each prefix


def slow_trie(sequences: list[tuple[int, ...]]) -> SlowTrie:
    root: dict = {}
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
    trie = SlowTrie()

    def walk(node: dict, prefix: tuple[int, ...], above: int) -> None:
        for token in sorted(node):
            row = len(trie.tokens)
            trie.tokens.append(token)
            trie.positions.append(len(prefix))
            trie.parent.append(above)
            trie.end.append(0)
            trie.row[(*prefix, token)] = row
            walk(node[token], (*prefix, token), row)
            trie.end[row] = len(trie.tokens)

    walk(root, (), -1)
    return trie


def ragged(sequences: list[tuple[int, ...]], dtype: type = np.int64) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([t for s in sequences for t in s], dtype)
    return tokens, np.cumsum([0, *(len(s) for s in sequences)])


# Few different tokens and short sequences: duplicates, prefixes of one another and deep branching are common.
sequence_lists = st.integers(1, 4).flatmap(
    lambda vocab: st.lists(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=9).map(tuple), max_size=14)
)


def random_sequences(rng: np.random.Generator, num: int, length: int, vocab: int) -> list[tuple[int, ...]]:
    """Sequences that go on from prefixes of earlier ones about half of the time."""
    sequences: list[tuple[int, ...]] = []
    for _ in range(num):
        start: tuple[int, ...] = ()
        if sequences and rng.random() < 0.6:
            other = sequences[rng.integers(len(sequences))]
            start = other[: rng.integers(len(other) + 1)]
        rest = rng.integers(0, vocab, rng.integers(0 if start else 1, length)).tolist()
        sequences.append((*start, *rest))
    return sequences
