"""Prefix tries: `Trie` lays a known set of token sequences flat, `RadixTrie` changes as sequences come and go. NumPy
only."""

from __future__ import annotations

from .fold import PrefixMap
from .radix import RadixNode, RadixTrie, shared_by, token_bytes
from .ragged import check_ragged, common_prefix_lengths, lexsort_sequences
from .segments import RowCost, Segment, StreamCost
from .trie import MEDIA_BASE, SPAN_BASE, Trie, clear_of_span, longest_span, span_starts

__all__ = [
    "MEDIA_BASE",
    "SPAN_BASE",
    "PrefixMap",
    "RadixNode",
    "RadixTrie",
    "RowCost",
    "Segment",
    "StreamCost",
    "Trie",
    "check_ragged",
    "clear_of_span",
    "common_prefix_lengths",
    "lexsort_sequences",
    "longest_span",
    "shared_by",
    "span_starts",
    "token_bytes",
]
