"""Cut a stream into one segment per replica, so that all replicas finish at about the same time.

Cuts lie between prompts. The input is two numbers per prompt, in lexicographic order: its length, and how many leading
tokens it shares with the previous prompt. The trie itself is not needed.
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
    """The prompts `start:stop` of a stream, in lexicographic order."""

    start: int
    stop: int


def keys_seen(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Return the total number of keys that the first n rows of a prompt see, for each n in `lengths`.

    Args:
        window: The sliding window; None: full attention.
    """
    lengths = lengths.astype(np.int64, copy=False)
    inside = lengths if window is None else np.minimum(lengths, window)
    return inside * (inside + 1) // 2 + (lengths - inside) * (window or 0)


@dataclass(frozen=True)
class RowCost:
    """The cost of a row: `linear`, plus `per_key` for each key that the row sees in each plane.

    A row at position p sees p + 1 keys, or the size of the sliding window if that is smaller. With the default values
    every row costs 1.
    """

    linear: float = 1.0
    per_key: float = 0.0
    planes: tuple[int | None, ...] = ()  # the sliding window of each plane; None: full attention

    def first_rows(self, lengths: np.ndarray) -> np.ndarray:
        """Return the total cost of the first n rows of a prompt, for each n in `lengths`, float64."""
        cost = self.linear * lengths.astype(np.float64)
        for window in set(self.planes) if self.per_key else ():
            cost += self.per_key * self.planes.count(window) * keys_seen(lengths, window)
        return cost


class StreamCost:
    """The cost of each prompt of a stream, and the methods that cut ranges of prompts by cost.

    Args:
        lengths: [prompts], the number of tokens of each prompt, in lexicographic order.
        shared: [prompts], the number of leading tokens that each prompt shares with the previous prompt.
        cost: The cost of a row.
        outputs: [prompts], the expected number of generated tokens of each prompt; None for jobs without generation.
        decode: The cost of a decode row, relative to a prompt row that sees as many keys.
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
        # _before[c]: the cost of all prompts before prompt c.
        # _gain[c]: _before[c] minus the cost of the path above prompt c. A segment that starts at c computes this path
        # again. With a cost of `limit` it ends at the last prompt e with _before[e] <= limit + _gain[c]. So of all
        # possible ends of a segment, the end with the largest gain lets the next segment end last.
        self._before = np.concatenate(([0.0], np.cumsum(own_rows)))
        self._gain = self._before.copy()
        self._gain[:-1] -= path
        self._longest_path = float(path.max(initial=0.0))

    @property
    def total(self) -> float:
        """The cost of the whole stream on one replica."""
        return float(self._before[-1])

    def of(self, start: int, stop: int) -> float:
        """Return the cost of the segment `start:stop`, including the path above its first prompt."""
        return float(self._before[stop] - self._gain[start]) if start < stop else 0.0

    def own(self, prompt: int) -> float:
        """Return the cost of a prompt without the rows that it shares with the previous prompt."""
        return float(self._before[prompt + 1] - self._before[prompt])

    def reach(self, start: int, stop: int, limit: float) -> int:
        """Return the end of a segment that starts at `start` and costs 75 % to 100 % of `limit`.

        In this range, the end is the place with the cheapest path. The cost leaves out the path above `start`. A
        segment has at least one prompt, even if the prompt costs more than `limit`, and ends at `stop` at the latest.
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
        """Cut the prompts `start:stop` into one segment per replica, in order.

        The cuts minimize the time at which the last replica finishes. A replica gets an empty segment if its speed is
        0, or if it is too busy to finish anything in that time.

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
            # A place whose `_before` is smaller by more than the longest path cannot have a larger gain than `last`.
            low = max(at + 1, int(np.searchsorted(self._before[: last + 1], self._before[last] - self._longest_path)))
            best = low + int(np.argmax(self._gain[low : last + 1])) if low <= last else at
            cuts.append(best if self._gain[best] > self._gain[at] else at)
        return cuts if cuts[-1] == stop else None

    def _last_within(self, start: int, stop: int, reach: float) -> int:
        """Return the last place in [start, stop] before which all prompts of the stream cost at most `reach`."""
        return start + int(np.searchsorted(self._before[start : stop + 1], reach, side="right")) - 1
