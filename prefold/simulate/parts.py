"""The dispatcher of a stream with one of its parts left out, to see what the part is worth."""

from __future__ import annotations

from collections.abc import Hashable

from ..cluster.dispatch import Assignment, Dispatcher
from ..stream.live import Bucket

__all__ = ["PARTS"]


class _NoRuns(Dispatcher):
    """A replica looks for the best bucket each time, and does not go on with the one that it has begun."""

    def _best_for(self, replica: Hashable, now: float) -> Bucket | None:
        self._runs.pop(replica, None)
        return super()._best_for(replica, now)


class _NoShares(Dispatcher):
    """At the end of the input a replica takes all that it has room for."""

    def _give(self, bucket: Bucket, replica: Hashable, share: int | None) -> Assignment:
        return super()._give(bucket, replica, None)


class _NoCopies(Dispatcher):
    """What a replica holds is left to it, however much it has to do."""

    def _holders(self, replica: Hashable) -> list[tuple[float, Hashable]]:
        return []


PARTS: dict[str, type[Dispatcher]] = {"runs": _NoRuns, "shares": _NoShares, "copies": _NoCopies}
