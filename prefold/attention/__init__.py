"""Interval attention: key row j is visible to query row i exactly when j <= i < end[j].

`plan_attention` does the host's part once a step, `interval_attention` runs it once a layer, and
`dense_attention` is the slow definition that both are tested against. `plan_slots` and `KVStore` are the
same for generation, where keys lie in the slots of a store.
"""

from __future__ import annotations

from .dense import dense_attention, visibility
from .gpu import Heads, place_rows, place_slots
from .interval import interval_attention
from .plan import AttentionPlan, plan_attention
from .slots import KeyRuns, KVStore, SlotPlan, plan_slots

__all__ = [
    "AttentionPlan",
    "Heads",
    "KVStore",
    "KeyRuns",
    "SlotPlan",
    "dense_attention",
    "interval_attention",
    "place_rows",
    "place_slots",
    "plan_attention",
    "plan_slots",
    "visibility",
]
