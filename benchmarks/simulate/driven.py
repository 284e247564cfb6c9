"""A simulated fleet whose work a process gives out that stands beside the replicas, as a real fleet's driver does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prefold.cache import CacheEvents
from prefold.simulate.engines import Stretch
from prefold.simulate.fleet import Feeder, FleetOutcome, Replica, Simulation
from prefold.simulate.requests import SimRequest

__all__ = ["Driver", "run_driven"]


@dataclass(frozen=True, slots=True)
class Driver:
    """The process that gives a real fleet its work, beside the replicas: it looks what may be given after every step.

    delay  seconds from the end of a step until its replica has what it is given because of it; replicas go on meanwhile
           with what they have
    each   seconds from one lease of several that leave together to the next: what is idle begins with the first
    """

    delay: float
    each: float = 0.0


def run_driven(
    replicas: Sequence[Replica],
    feeder: Feeder,
    arrivals: Iterable[SimRequest] = (),
    *,
    driver: Driver | None = None,
    alone: float = 1.0,
) -> FleetOutcome:
    """Runs until nothing happens any more.

    driver  None: work is given at once, whenever a request has ended
    alone   times the seconds that a step takes while no other replica has work: those on one machine share its caches
            and its memory
    """
    return _Driven(replicas, feeder, arrivals, driver, alone).run()


class _Driven(Simulation):
    def __init__(
        self,
        replicas: Sequence[Replica],
        feeder: Feeder,
        arrivals: Iterable[SimRequest],
        driver: Driver | None,
        alone: float,
    ):
        super().__init__(replicas, feeder, arrivals)
        self._driver, self._alone = driver, alone
        self._open = [0] * len(replicas)  # requests that each was given, and that have not ended

    def handle(self, kind: str, what: Any, now: float, touched: set[int]) -> bool:
        if kind == "heard":
            self.feeder.worked(*what, now)
            return True
        if kind == "given":
            self._last_work = now
            self.submit(*what)
            touched.add(what[0])
            return False
        return super().handle(kind, what, now, touched)

    def worked(self, number: int, stretch: Stretch, events: CacheEvents | None, now: float) -> bool:
        self._open[number] -= len(stretch.ended_requests)
        if self._driver is None:
            return super().worked(number, stretch, events, now)
        self.push(now + self._driver.delay, "heard", (number, stretch, events))
        return False

    def assignments(self, now: float) -> Iterable[tuple[int, Sequence[SimRequest]]]:
        """Yields the first of what replicas get; the rest comes later, one lease after the other."""
        late = 0.0
        for number, requests in super().assignments(now):
            self._open[number] += len(requests)
            if late:
                self.push(now + late, "given", (number, requests))
            else:
                yield number, requests
            late += 0.0 if self._driver is None else self._driver.each

    def slowness(self, number: int) -> float:
        is_alone = self._alone != 1 and sum(map(bool, self._open)) == 1
        return super().slowness(number) * (self._alone if is_alone else 1.0)
