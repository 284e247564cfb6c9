"""Plans of interval attention, made on the host. The executors run attention from these plans.

Key row j is visible to query row i exactly when j <= i < end[j]. The rows of a span (an image) also see each other both
ways: the condition is then first[j] <= i < end[j], and `first[j]` is the first row of key j's span.

`plan_rows` plans attention over the rows of a stream step, once for each sliding window. `plan_slots` plans attention
over keys in the slots of a KV store, as in generation.
"""

from __future__ import annotations

from .row_plan import RowPlan, plan_rows, visibility
from .slot_plan import KeyRuns, SlotPlan, plan_slots

__all__ = ["KeyRuns", "RowPlan", "SlotPlan", "plan_rows", "plan_slots", "visibility"]
