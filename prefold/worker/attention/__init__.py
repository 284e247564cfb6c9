"""Plans of interval attention, made on the host.

Key row j is visible to query row i exactly when j <= i < end[j]. The rows of a span see each other both ways: then it
is first[j] <= i < end[j], `first` being the first row of key j's span.

`plan_rows` is for rows as they lie, once a step and window; `plan_slots` for keys in the slots of a store, as in
generation. The executors attend by these plans.
"""

from __future__ import annotations

from .row_plan import RowPlan, plan_rows, visibility
from .slot_plan import KeyRuns, SlotPlan, plan_slots

__all__ = ["KeyRuns", "RowPlan", "SlotPlan", "plan_rows", "plan_slots", "visibility"]
