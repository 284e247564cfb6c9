"""Cut a stream between prompts into segments of about equal time, each computable on its own.

The input is the length of each prompt and how many leading tokens it shares with the previous prompt, in lexicographic
order: eight bytes a prompt. No trie is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import InputError

_HALVINGS = 50


class Segment(NamedTuple):
    """The prompts from `start` up to, not including, `stop` of a stream, in its order."""

    start: int
    stop: int


def keys_seen(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Return how many keys the first `lengths` rows of a prompt see in total. `window` is the sliding window."""
    lengths = lengths.astype(np.int64, copy=False)
    inside = lengths if window is None else np.minimum(lengths, window)
    return inside * (inside + 1) // 2 + (lengths - inside) * (window or 0)


@dataclass(frozen=True)
class RowCost:
    """The cost of a row: `linear`, plus `per_key` for each key that the row sees in each plane.

    A row at position p sees p + 1 keys, limited by the sliding window. By default the cost is the number of rows.
    """

    linear: float = 1.0
    per_key: float = 0.0
    planes: tuple[int | None, ...] = ()  # the sliding window of each plane; None: full attention

    def first_rows(self, lengths: np.ndarray) -> np.ndarray:
        """Return the total cost of the first `lengths` rows of a prompt, float64."""
        cost = self.linear * lengths.astype(np.float64)
        for window in set(self.planes) if self.per_key else ():
            cost += self.per_key * self.planes.count(window) * keys_seen(lengths, window)
        return cost


class StreamCost:
    """The cost of the prompts of a stream; cuts ranges of prompts into segments.

    Args:
        lengths: Tokens of each prompt, in lexicographic order [prompts].
        shared: How many leading tokens each prompt shares with the previous one [prompts].
        cost: The cost of a row.
        outputs: Expected number of generated tokens for each prompt [prompts]; None for jobs without generation.
        decode: The cost of one decode row, in prompt rows.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        shared: np.ndarray,
        cost: RowCost = RowCost(),
        *,
        outputs: np.ndarray | None = None,
        decode: float = 1.0,
    ):
        self.num_prompts = len(lengths)
        whole, path = cost.first_rows(lengths), cost.first_rows(shared)
        own_rows = whole - path
        if outputs is not None:
            own_rows += decode * (cost.first_rows(lengths + outputs) - whole)
        # `_before`: the cost of all earlier prompts. `_gain`: `_before` minus the cost of the path above the prompt,
        # because a segment that starts there computes this path again. A segment from prompt c with cost `limit` ends
        # at the prompt whose `_before` is limit + _gain[c]. So the best reachable cut has the largest gain.
        self._before = np.concatenate(([0.0], np.cumsum(own_rows)))
        self._gain = self._before.copy()
        self._gain[:-1] -= path
        self._longest_path = float(path.max(initial=0.0))

    @property
    def total(self) -> float:
        """The cost of the whole stream on one replica."""
        return float(self._before[-1])

    def of(self, start: int, stop: int) -> float:
        """Return the cost of the prompts from `start` up to, not including, `stop`, with the path above the first."""
        return float(self._before[stop] - self._gain[start]) if start < stop else 0.0

    def own(self, prompt: int) -> float:
        """Return the cost of a prompt without the rows that it shares with the previous prompt."""
        return float(self._before[prompt + 1] - self._before[prompt])

    def reach(self, start: int, stop: int, limit: float) -> int:
        """Return the end of a segment from `start` that costs about `limit`: a place in (start, stop].

        The end lies in the last quarter of the limit, at the place with the cheapest path.
        """
        first = self._before[start]
        last = self._last_within(start, stop, first + limit)
        if last >= stop:
            return stop
        low = max(start + 1, int(np.searchsorted(self._before[: last + 1], first + 0.75 * limit)))
        low = min(low, last)
        path = self._before[low : last + 1] - self._gain[low : last + 1]
        return last - int(np.argmin(path[::-1])) if last > start else start + 1

    def cut(
        self, start: int, stop: int, speeds: Sequence[float], *, busy: Sequence[float] | None = None
    ) -> list[Segment]:
        """Return one segment per replica; together they cover the prompts from `start` to `stop`, in order.

        The cuts minimize the time at which the last replica finishes. A replica that cannot help gets an empty segment.

        Args:
            speeds: Cost units that each replica computes per second; 0 for a replica that gets no work.
            busy: Cost of the work that each replica must finish first; None if all are idle.

        Raises:
            InputError: No speed is above 0, or a speed is negative or infinite.
        """
        if not speeds or not max(speeds) > 0 or not all(0 <= speed < np.inf for speed in speeds):
            remedy = "give one number >= 0 for each replica, at least one of them above 0"
            raise InputError(f"speeds is {list(speeds)}", field="speeds", remedy=remedy)
        waits = [0.0] * len(speeds) if busy is None else list(busy)
        if start >= stop:
            return [Segment(start, start)] * len(speeds)
        work = self.of(start, stop)
        low = 0.0
        high = min((work + wait) / speed for speed, wait in zip(speeds, waits, strict=True) if speed)
        pieces = None
        for _ in range(_HALVINGS):
            limit = (low + high) / 2
            cuts = self._cuts(start, stop, [max(0.0, limit * v - w) for v, w in zip(speeds, waits, strict=True)])
            if cuts is None:
                low = limit
            else:
                high, pieces = limit, cuts
            if high - low <= 1e-6 * high:
                break
        if pieces is None:  # no split beats one replica that computes everything
            limits = [max(0.0, high * (1 + 1e-9) * v - w) for v, w in zip(speeds, waits, strict=True)]
            pieces = self._cuts(start, stop, limits)
        assert pieces is not None
        return [Segment(a, b) for a, b in pairwise(pieces)]

    def _cuts(self, start: int, stop: int, limits: Sequence[float]) -> list[int] | None:
        """Return the bounds of segments of at most these costs, or None if they do not reach `stop`."""
        cuts, end = [start], float(self._before[stop])
        for limit in limits:
            at = cuts[-1]
            reach = limit + self._gain[at]
            if at == stop or reach >= end:
                cuts.append(stop)
                continue
            last = self._last_within(at, stop, reach)
            # A cut further back than the longest path cannot have a larger gain than the last cut.
            low = max(at + 1, int(np.searchsorted(self._before[: last + 1], self._before[last] - self._longest_path)))
            best = low + int(np.argmax(self._gain[low : last + 1])) if low <= last else at
            cuts.append(best if self._gain[best] > self._gain[at] else at)
        return cuts if cuts[-1] == stop else None

    def _last_within(self, start: int, stop: int, reach: float) -> int:
        """Return the last place in [start, stop] at which all earlier prompts cost at most `reach`."""
        return start + int(np.searchsorted(self._before[start : stop + 1], reach, side="right")) - 1
