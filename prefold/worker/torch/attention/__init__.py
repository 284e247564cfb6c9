"""Interval attention with tensors: over rows of a step (`RowAttention`) and over slots (`KVStore`).

Files `row_*.py` are for rows, `slot_*.py` for slots; `*_triton.py` have the GPU kernels.
"""

from .heads import Heads
from .row_attention import RowAttention
from .store import KVStore

__all__ = ["Heads", "KVStore", "RowAttention"]
