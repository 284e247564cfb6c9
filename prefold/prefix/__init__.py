"""Lays the prefix trie of a set of token sequences flat, and gives views of it. NumPy only."""

from __future__ import annotations

from .fold import PrefixMap
from .ragged import check_ragged, common_prefix_lengths, lexsort_sequences
from .segments import RowCost, Segment, StreamCost
from .trie import MEDIA_BASE, SPAN_BASE, Trie, clear_of_span, longest_span, span_starts

__all__ = [
    "MEDIA_BASE",
    "SPAN_BASE",
    "PrefixMap",
    "RowCost",
    "Segment",
    "StreamCost",
    "Trie",
    "check_ragged",
    "clear_of_span",
    "common_prefix_lengths",
    "lexsort_sequences",
    "longest_span",
    "span_starts",
]
