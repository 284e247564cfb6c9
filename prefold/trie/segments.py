"""Cuts a stream between prompts into segments of about equal time, each of which can be computed on its own.

All that is known of the stream here is each prompt's length and how many leading tokens it shares with the prompt
before it: eight bytes a prompt, in lexicographic order. The trie is not needed.
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
    """A segment is the prompts start <= prompt < stop of a stream, in its order."""

    start: int
    stop: int


def keys_seen(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Returns how many keys the first `lengths` rows of a prompt see together. window: the sliding window."""
    lengths = lengths.astype(np.int64, copy=False)
    inside = lengths if window is None else np.minimum(lengths, window)
    return inside * (inside + 1) // 2 + (lengths - inside) * (window or 0)


@dataclass(frozen=True)
class RowCost:
    """A RowCost is what a row costs: `linear`, and `per_key` for each key that it sees in each of the planes.

    planes: the sliding window of each plane, None where a plane has none. A row at position p sees p + 1 keys, or as
    many as the window has. The defaults count rows.
    """

    linear: float = 1.0
    per_key: float = 0.0
    planes: tuple[int | None, ...] = ()

    def first_rows(self, lengths: np.ndarray) -> np.ndarray:
        """Returns what the first `lengths` rows of a prompt cost together, float64."""
        cost = self.linear * lengths.astype(np.float64)
        for window in set(self.planes) if self.per_key else ():
            cost += self.per_key * self.planes.count(window) * keys_seen(lengths, window)
        return cost


class StreamCost:
    """A StreamCost holds what the prompts of a stream cost, and cuts ranges of them into segments.

    lengths  [prompts]: tokens of each prompt, in lexicographic order
    shared   [prompts]: how many leading tokens it has in common with the prompt before it
    cost     what a row costs
    outputs  [prompts]: tokens that are expected to be generated after each prompt; None: none
    decode   how many rows of a prompt one row of a running sequence costs
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
        # What the prompts before each one cost, and what the path above it costs, which a segment that starts there
        # computes again. A segment that starts at prompt c and may cost `limit` ends where the prompts before it
        # cost limit + gain[c], so of the cuts within reach the one of largest gain is the best.
        self._before = np.concatenate(([0.0], np.cumsum(own_rows)))
        self._gain = self._before.copy()
        self._gain[:-1] -= path
        self._longest_path = float(path.max(initial=0.0))

    @property
    def total(self) -> float:
        """Returns what the whole stream costs one replica."""
        return float(self._before[-1])

    def of(self, start: int, stop: int) -> float:
        """Returns what the prompts start <= prompt < stop cost, the path above the first of them included."""
        return float(self._before[stop] - self._gain[start]) if start < stop else 0.0

    def own(self, prompt: int) -> float:
        """Returns what a prompt costs where the rows that it shares with the prompt before it are there."""
        return float(self._before[prompt + 1] - self._before[prompt])

    def reach(self, start: int, stop: int, limit: float) -> int:
        """Returns the prompt at which a segment from `start` that costs about `limit` ends: start < it <= `stop`.

        Of the last quarter of the limit the place is taken across which the path is cheapest.
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
        """Returns one segment for each replica, which together cover start <= prompt < stop in order.

        They are such that the replica that ends last ends as early as can be. Where a replica can be of no use its
        segment is empty.

        speeds  cost that each replica does in a second, in any unit; 0 for one that takes nothing
        busy    cost of what each replica has to do before; None: nothing

        Raises InputError where there is no replica of a speed above 0.
        """
        if not speeds or not max(speeds) > 0 or not all(0 <= speed < np.inf for speed in speeds):
            remedy = "give one number of 0 or more for each replica, one of them above 0"
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
        if pieces is None:  # nothing is better than one replica that takes all
            limits = [max(0.0, high * (1 + 1e-9) * v - w) for v, w in zip(speeds, waits, strict=True)]
            pieces = self._cuts(start, stop, limits)
        assert pieces is not None
        return [Segment(a, b) for a, b in pairwise(pieces)]

    def _cuts(self, start: int, stop: int, limits: Sequence[float]) -> list[int] | None:
        """Returns the bounds of segments that cost at most these limits; None where they do not reach `stop`."""
        cuts, end = [start], float(self._before[stop])
        for limit in limits:
            at = cuts[-1]
            reach = limit + self._gain[at]
            if at == stop or reach >= end:
                cuts.append(stop)
                continue
            last = self._last_within(at, stop, reach)
            # A cut further back than the longest path cannot gain more than the last one.
            low = max(at + 1, int(np.searchsorted(self._before[: last + 1], self._before[last] - self._longest_path)))
            best = low + int(np.argmax(self._gain[low : last + 1])) if low <= last else at
            cuts.append(best if self._gain[best] > self._gain[at] else at)
        return cuts if cuts[-1] == stop else None

    def _last_within(self, start: int, stop: int, reach: float) -> int:
        """Returns the last place from start to stop before which all prompts together cost at most `reach`."""
        return start + int(np.searchsorted(self._before[start : stop + 1], reach, side="right")) - 1
