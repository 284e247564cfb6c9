"""Rules by which other systems choose a replica: their formulas, on what the router knows."""

from __future__ import annotations

from collections import deque

import numpy as np

from prefold.cluster.router import POLICIES, Forgetful, Standing

__all__ = ["Daft", "Preble", "SGLang"]


class Daft:
    """As daft 0.7.26: of the replicas that were ever sent at most 256 prompts more than the one that was sent least,
    the one that saw this exact prefix most recently (it remembers 8 of each); else the last of them."""

    slack = 256
    remembered = 8

    def __init__(self) -> None:
        self._seen: dict[int, deque[bytes]] = {}

    def choose(self, standing: Standing) -> int:
        s = standing
        near = s.allowed & (s.total <= s.total[s.allowed].min() + self.slack)
        best, rank = None, self.remembered
        for replica in np.flatnonzero(near).tolist():
            seen = self._seen.get(replica, ())
            if s.prefix and s.prefix in seen and (place := list(seen).index(s.prefix)) < rank:
                best, rank = replica, place
        return int(np.flatnonzero(near)[-1]) if best is None else best

    def sent(self, standing: Standing, replica: int) -> None:
        seen = self._seen.setdefault(replica, deque(maxlen=self.remembered))
        if standing.prefix in seen:
            seen.remove(standing.prefix)
        seen.appendleft(standing.prefix)


class SGLang(Forgetful):
    """As SGLang's gateway: the fewest requests where they are out of balance (by more than 64, and 1.5 times); else
    the longest match if it is more than 0.3 of the prompt; else the replica that holds the fewest rows."""

    absolute, relative, threshold = 64, 1.5, 0.3

    def choose(self, standing: Standing) -> int:
        s = standing
        requests = s.requests[s.allowed]
        most, least = int(requests.max()), int(requests.min())
        if most - least > self.absolute and most > self.relative * least:
            return s.least(s.requests)
        best = s.least(-s.matched_rows)
        return best if s.matched_rows[best] > self.threshold * s.rows else s.least(s.cached_rows)


class Preble(Forgetful):
    """As Preble's E2 (Srivatsa et al. 2024): where more of the prompt is cached somewhere than not, the least loaded of
    those that hold most of it; else the least of load, prefill and what it evicts, computed again."""

    def choose(self, standing: Standing) -> int:
        s = standing
        longest = int(s.matched_rows[s.allowed].max())
        if longest > s.rows - longest:
            return s.least(s.waits, s.allowed & (s.matched_rows == longest))
        fresh = s.rows - s.matched_rows
        evicted = np.clip(s.cached_rows + fresh - s.capacity, 0, fresh)
        return s.least(s.waits + (fresh + evicted) * s.prefill_seconds)


POLICIES.update({"daft": Daft, "sglang": SGLang, "preble": Preble})
