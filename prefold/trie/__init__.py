"""The prefix trie laid flat, and its views.

`Trie` lays a fixed set of token sequences flat, and a `Segment` is a contiguous part of it. `RadixTrie` changes as
sequences come and go. `Spool` sorts the requests of a job and cuts them into windows of one row stream. `LiveWindows`
does the same for requests that are still arriving. This package imports no torch.
"""

from __future__ import annotations

from .fold import PrefixMap
from .live_windows import Feed, LiveInput, LiveWindows
from .order import Order
from .radix import RadixNode, RadixTrie, shared_by, token_bytes
from .ragged import check_ragged, common_prefix_lengths, lexsort_sequences
from .repeats import read_tags
from .segments import RowCost, Segment, StreamCost
from .spool import Spool
from .trie import MEDIA_BASE, SPAN_BASE, Trie, clear_of_span, longest_span, span_starts
from .window import Window, Windows

__all__ = [
    "MEDIA_BASE",
    "SPAN_BASE",
    "Feed",
    "LiveInput",
    "LiveWindows",
    "Order",
    "PrefixMap",
    "RadixNode",
    "RadixTrie",
    "RowCost",
    "Segment",
    "Spool",
    "StreamCost",
    "Trie",
    "Window",
    "Windows",
    "check_ragged",
    "clear_of_span",
    "common_prefix_lengths",
    "lexsort_sequences",
    "longest_span",
    "read_tags",
    "shared_by",
    "span_starts",
    "token_bytes",
]
