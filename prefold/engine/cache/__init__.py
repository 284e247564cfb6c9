"""The KV cache: where K/V is stored and how long it stays (slots, radix tree, radix cache). No torch."""

from __future__ import annotations

from ...spec.model import POLICIES, CacheOptions
from .events import CacheEvents, CacheReporter
from .radix import RadixCache
from .slots import SCRATCH, SlotPool

__all__ = ["POLICIES", "SCRATCH", "CacheEvents", "CacheOptions", "CacheReporter", "RadixCache", "SlotPool"]
