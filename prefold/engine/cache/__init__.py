"""Where the K/V of a row lies, and how long it stays: slots, the radix tree, and the radix cache. No torch."""

from __future__ import annotations

from ...spec.model import POLICIES, CacheOptions
from .events import CacheEvents, CacheReporter
from .radix import RadixCache
from .slots import SCRATCH, SlotPool

__all__ = ["POLICIES", "SCRATCH", "CacheEvents", "CacheOptions", "CacheReporter", "RadixCache", "SlotPool"]
