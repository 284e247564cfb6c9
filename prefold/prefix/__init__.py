"""Lays the prefix trie of a set of token sequences flat, and gives views of it. NumPy only."""

from __future__ import annotations

from .fold import PrefixMap
from .ragged import check_ragged, common_prefix_lengths, lexsort_sequences
from .segments import RowCost, Segment, StreamCost
from .trie import Trie

__all__ = [
    "PrefixMap",
    "RowCost",
    "Segment",
    "StreamCost",
    "Trie",
    "check_ragged",
    "common_prefix_lengths",
    "lexsort_sequences",
]
