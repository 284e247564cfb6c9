"""Rules by which a request gets its replica, all behind one method.

`BestStart` is ours; the others need to know nothing of prefixes. A policy reads; what it must remember of its own
decisions it is told by `sent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import InputError


@dataclass(frozen=True, eq=False, slots=True)
class Standing:
    """What there is to decide upon for one prompt; arrays have an entry for each of R replicas.

    rows            of the prompt
    prefix          the bytes of the leading tokens that it shares with others of its bucket
    allowed         bool [R]; at least one is True
    matched         int64 [R]: leading rows that the replica holds, or will hold when it has done what it was sent
    waits           float64 [R]: seconds until the replica has done what it was sent
    starts          float64 [R]: seconds until it begins with what it is sent next
    prefill_seconds float64 [R]: seconds for one row of a prompt
    requests        float64 [R]: requests that it was sent and that have not ended
    total           float64 [R]: requests that it was ever sent
    held            float64 [R]: rows in its cache
    capacity        float64 [R]: rows that fit; infinite where unknown
    """

    rows: int
    prefix: bytes
    allowed: np.ndarray
    matched: np.ndarray
    waits: np.ndarray
    starts: np.ndarray
    prefill_seconds: np.ndarray
    requests: np.ndarray
    total: np.ndarray
    held: np.ndarray
    capacity: np.ndarray

    def least(self, values: np.ndarray, among: np.ndarray | None = None) -> int:
        """Returns the first of the allowed replicas, or of those `among`, with the least value."""
        return int(np.argmin(np.where(self.allowed if among is None else among, values, np.inf)))


class Policy(Protocol):
    def choose(self, standing: Standing) -> int:
        """Returns the number of the replica that should get the prompt; changes nothing."""
        ...

    def sent(self, standing: Standing, replica: int) -> None:
        """The prompt was given to that replica."""
        ...


class Forgetful:
    def sent(self, standing: Standing, replica: int) -> None:
        """Nothing needs to be remembered."""


class BestStart(Forgetful):
    """The prompt goes where its prefill would be done first: after the prompts that the replica was sent before, when
    it has room, and after the rows that it does not hold. So a prefix is computed a second time where waiting for who
    holds it takes longer than that.

    dear    what a row that is computed again counts: it also keeps those waiting that come after it
    beside  share of its time that what generates counts with: it makes steps longer, and keeps no request waiting
    """

    dear, beside = 3.0, 0.05

    def choose(self, standing: Standing) -> int:
        s = standing
        again = (s.rows - s.matched) * s.prefill_seconds
        return s.least(s.starts + self.beside * s.waits + self.dear * again)


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, standing: Standing) -> int:
        count = len(standing.allowed)
        return next(r % count for r in range(self._next, self._next + count) if standing.allowed[r % count])

    def sent(self, standing: Standing, replica: int) -> None:
        self._next = replica + 1


class LeastLoaded(Forgetful):
    """The replica with the fewest requests that have not ended."""

    def choose(self, standing: Standing) -> int:
        return standing.least(standing.requests)


POLICIES: dict[str, type[Policy]] = {
    "prefix": BestStart,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


def policy_named(name: str) -> Policy:
    """Returns a new policy. Raises InputError for an unknown name."""
    if name not in POLICIES:
        raise InputError(f"there is no policy {name!r}", field="policy", remedy=f"use {', '.join(POLICIES)}")
    return POLICIES[name]()
