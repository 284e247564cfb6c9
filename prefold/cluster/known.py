"""Work whose order is known: a spool's requests, divided among replicas by `leases.py` and packed as windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..prefix import RowCost, StreamCost
from ..stream import Order, Window, Windows
from .leases import LeaseOptions, Leases
from .replicas import ReplicaFacts, RunCall, expected_limit, lease_windows

__all__ = ["Answered", "KnownWork"]

_SAMPLED = 256  # requests that are asked how many they may have

# A request's tag, the tokens of its prompt (0: of a further read of a prompt), and what it gave.
Answered = tuple[bytes, int, Any]


class KnownWork:
    """The requests of a spool on a fleet. Its `num_rows` are the rows of their stream.

    windows   gives their order, and how many tokens a window has
    call      what is asked of every request
    row_cost  what a row costs, by which work is divided
    numbers   where the leases' numbers come from
    patience  seconds without any progress after which a replica that has work is given up
    """

    def __init__(self, windows: Windows, call: RunCall, row_cost: RowCost, numbers: Iterator[int], patience: float):
        self.order: Order = windows.order()
        self.leases: Leases | None = None
        self._call, self._numbers, self._patience = call, numbers, patience
        self._max_tokens = windows.max_tokens
        lengths, shared = self.order.lengths, self.order.shared
        outputs = _expected_outputs(self.order) if call.readout.kind == "tokens" and len(self.order) else None
        self._cost = StreamCost(lengths, shared, row_cost, outputs=outputs)
        self.num_rows = int(lengths.sum(dtype=np.int64) - shared.sum(dtype=np.int64))
        # Place of the request whose path a replica holds: the last one that it was given, where that is of this order.
        self._last: dict[str, int] = {}
        self._under_way: dict[int, tuple[bytes, int]] = {}

    @property
    def is_done(self) -> bool:
        """Returns whether all requests are answered."""
        return not len(self.order) or (self.leases is not None and not self.leases.num_left)

    def join(self, name: str, facts: ReplicaFacts, expected: list[str], now: float) -> None:
        """A replica can take work; with the first of them the order is cut for all that are expected."""
        if not len(self.order):
            return
        if self.leases is None:
            self.leases = Leases(self._cost, expected, self._options(facts), numbers=self._numbers)
        self.leases.join(name, now)

    def send(self, now: float) -> Iterator[tuple[str, list[Window]]]:
        """Yields (replica, windows) of what is to be given away now."""
        if self.leases is None or self.is_done:
            return
        self.leases.admit(now)
        while (lease := self.leases.plan()) is not None:
            self.leases.begin(lease, now)
            name = str(lease.replica)
            before, self._last[name] = self._last.get(name), lease.places[-1]
            windows, tags = lease_windows(
                self.order, lease.number, lease.places, max_tokens=self._max_tokens, before=before
            )
            counted = [
                0 if twin else int(n) for w in windows for n, twin in zip(np.diff(w.offsets), w.twins, strict=True)
            ]
            self._under_way.update(zip(lease.places, zip(tags, counted, strict=True), strict=True))
            yield name, windows

    def forget_path(self, name: str) -> None:
        """Notes that a replica was given requests that are not of this order: its next window goes on with no path."""
        self._last.pop(name, None)

    def commit(self, name: str, number: int, answers: Mapping[int, Any], now: float) -> Iterator[Answered]:
        """Yields the answers to a lease that are the first ones. answers: by the requests' places."""
        assert self.leases is not None
        for place in self.leases.commit(name, number, answers, now):
            yield *self._under_way.pop(place), answers[place]

    def lose(self, name: str, now: float, *, returns: bool, died: bool) -> Iterator[bytes]:
        """Yields the tags of the requests that are given up as a replica is lost."""
        self.forget_path(name)
        if self.leases is None:
            return
        for place in self.leases.lose(name, now, died=died):
            yield self._under_way.pop(place)[0]
        if returns:
            self.leases.expect(name)

    def _options(self, facts: ReplicaFacts) -> LeaseOptions:
        """Returns how large leases are, by what a replica can do at once."""
        row = self._cost.total / max(1, self.num_rows)
        most, patience = row * self._max_tokens, self._patience
        if self._call.readout.kind == "tokens":
            running = facts.max_running
            found = LeaseOptions(
                least=4 * self._cost.total / max(1, len(self.order)), most=most, waiting=running + running // 2,
                begun=(2 * running, np.inf), patience=patience,
            )  # fmt: skip
        else:
            step = row * (self._call.max_batch_rows or facts.max_rows)
            begun = (1 << 30, 2 * step)
            found = LeaseOptions(least=step / 4, most=most, waiting=facts.at_once, begun=begun, patience=patience)
        return found if facts.dies_of_requests else replace(found, begun=(0, 0.0))


def _expected_outputs(order: Order) -> np.ndarray:
    """Returns how many tokens may be generated for each request, int64: the mean of some from all over the order."""
    found = []
    for place in np.linspace(0, len(order) - 1, min(_SAMPLED, len(order))).astype(int).tolist():
        (request,) = order.read(place, place + 1)
        found.append(expected_limit(request))
    return np.full(len(order), round(float(np.mean(found))), np.int64)
