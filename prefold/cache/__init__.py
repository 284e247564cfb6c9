"""Where the K/V of a row lies, and how long it stays: slots, the radix tree, and the radix cache. No torch."""

from __future__ import annotations

from .events import CacheEvents, CacheReporter
from .radix import POLICIES, CacheOptions, RadixCache
from .shifted import Chunk, ChunkIndex, ShiftedReuse
from .slots import SCRATCH, SlotPool
from .tails import Tails
from .visits import VisitCache, VisitNode

__all__ = [
    "POLICIES", "SCRATCH", "CacheEvents", "CacheOptions", "CacheReporter", "Chunk", "ChunkIndex", "RadixCache",
    "ShiftedReuse", "SlotPool", "Tails", "VisitCache", "VisitNode",
]  # fmt: skip
