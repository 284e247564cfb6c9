"""Interval attention: key row j is visible to query row i exactly when j <= i < end[j]; where spans of
rows see each other both ways, when first[j] <= i < end[j], `first` being the first row of key j's span.

`RowAttention` plans on the host once a step (`plan_rows`) and attends once a plane. For generation, where keys lie in
the slots of a store, `plan_slots` does the host's part, and `KVStore` keeps the keys and attends.

Files `row_*.py` are about rows as they lie, `slot_*.py` about slots. `*_plan.py` is the host's part, `*_triton.py` the
form for a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .row_plan import RowPlan, plan_rows, visibility
from .slot_plan import KeyRuns, SlotPlan, plan_slots

if TYPE_CHECKING:
    from .heads import Heads
    from .row_attention import RowAttention
    from .store import KVStore

__all__ = [
    "Heads",
    "KVStore",
    "KeyRuns",
    "RowAttention",
    "RowPlan",
    "SlotPlan",
    "plan_rows",
    "plan_slots",
    "visibility",
]

_LATE = {"Heads": "heads", "RowAttention": "row_attention", "KVStore": "store"}  # what imports torch


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATE[name]}", __name__), name)
