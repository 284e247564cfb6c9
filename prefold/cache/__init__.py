"""Where K/V lies and how long: slots, and the radix cache. No torch."""

from __future__ import annotations

from .radix import POLICIES, CacheOptions, RadixCache
from .slots import SCRATCH, SlotPool

__all__ = ["POLICIES", "SCRATCH", "CacheOptions", "RadixCache", "SlotPool"]
