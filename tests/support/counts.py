"""Counts what a call takes. A count is the same on every machine, however slow or busy it is."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable


def lines_run(call: Callable[[], object]) -> int:
    """Returns how many lines of Python a call runs, those of all functions that it calls included."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def most_bytes(call: Callable[[], object]) -> int:
    """Returns how many bytes a call holds at most at a time, those of NumPy's arrays included, those of tensors not."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
