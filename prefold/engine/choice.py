"""How windows are computed that share little: as with sharing "full" or "off", by what both were measured to take."""

from __future__ import annotations

import threading

from ..types import Sharing

# How much less a step counts than the one after it.
KEPT = 0.9
# The part of the time that may be lost by trying the way that seems to take longer, and windows between two tries.
LOST, BETWEEN = 0.01, 16


class SharingChoice:
    """A SharingChoice says how a window is computed: one whose unique tokens are at most the threshold share of its
    tokens with "full"; another with "full" too, until "off" has been measured to take less time for all of its tokens
    than "full" for the unique ones.

    Now and then the other way is tried, so seldom that by all that is known it costs at most LOST of the time. It may
    be asked from any thread.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._sums: dict[Sharing, tuple[float, float]] = {"full": (0.0, 0.0), "off": (0.0, 0.0)}  # (rows, seconds)
        self._windows, self._tried_at = 0, -BETWEEN
        self._spent = self._lost = 0.0  # seconds that windows should have taken, and that tries should have cost
        self._lock = threading.Lock()

    def choose(self, unique: int, tokens: int) -> Sharing:
        """Returns how a window is computed that has so many unique tokens, of so many."""
        if unique <= self.threshold * tokens:
            return "full"
        with self._lock:
            self._windows += 1
            full, off = self._seconds("full", unique), self._seconds("off", tokens)
            if full is None:
                return "full"
            if off is None:  # a row as long as with the other
                off = max(full, full * tokens / unique)
            self._spent += min(full, off)
            better, other = ("off", "full") if off < full else ("full", "off")
            lost = self._lost + abs(full - off)
            if self._windows - self._tried_at < BETWEEN or lost > LOST * self._spent:
                return better  # type: ignore[return-value]
            self._lost, self._tried_at = lost, self._windows
            return other  # type: ignore[return-value]

    def note(self, sharing: Sharing, rows: int, seconds: float) -> None:
        """Takes note of a step of a window that shares little."""
        with self._lock:
            before = self._sums[sharing]
            self._sums[sharing] = KEPT * before[0] + rows, KEPT * before[1] + seconds

    def _seconds(self, sharing: Sharing, rows: int) -> float | None:
        total, seconds = self._sums[sharing]
        return seconds / total * rows if total else None
