"""Interval attention with tensors: over rows as they lie (`RowAttention`) and over slots (`KVStore`).

Files `row_*.py` are about rows as they lie, `slot_*.py` about slots; `*_triton.py` is the form for a GPU.
"""

from .heads import Heads
from .row_attention import RowAttention
from .store import KVStore

__all__ = ["Heads", "KVStore", "RowAttention"]
