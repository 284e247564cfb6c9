"""A fleet has the face of an engine: what it is asked to run it divides among replicas, and yields their answers once.

One thread, that of whoever asks, decides and writes. The decisions are made in `leases.py`; here replicas are told of
them, and answers come back as events.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from ..engine.meter import StepInfo
from ..errors import FleetError, InputError, JobError, PrefoldError
from ..prefix import RowCost, StreamCost
from ..stream import Order, Windows
from ..stream.options import decode_options
from ..text import Tokenizer
from ..types import Readout, Sharing, Stats
from .leases import LeaseOptions, Leases
from .replicas import (
    ReplicaEvent,
    ReplicaFacts,
    ReplicaLost,
    ReplicaReady,
    ReplicaReport,
    Replicas,
    RunCall,
    lease_windows,
)

__all__ = ["Fleet"]

_GUESSED_OUTPUT = 256  # tokens, where no request says how many it may have
_SAMPLED = 256  # requests that are asked how many they may have
_TICK = 0.25
_AT_ONCE = 64  # events that are taken before new leases are sent


class Fleet:
    """Runs requests on replicas.

    replicas   what computes
    sharing    of rows between requests
    row_cost   what a row costs, by which work is divided
    patience   seconds without progress after which a replica that has work is killed
    notify     called with what a person should know: replicas that were lost, or refused

    Raises FleetError when no replica is left, with the reasons.
    """

    takes_ranges = True  # of a spool's order, in place of its windows one after the other

    def __init__(
        self,
        replicas: Replicas,
        *,
        sharing: Sharing = "full",
        row_cost: RowCost = RowCost(),  # noqa: B008
        patience: float = 300.0,
        notify: Callable[[str], None] = lambda line: None,
    ):
        self.sharing: Sharing = sharing
        self.replicas = replicas
        self.row_cost = row_cost
        self.stats = Stats()
        self.steals = self.moved = self.losses = 0
        self._patience, self._notify = patience, notify
        self._ready: dict[str, ReplicaFacts] = {}
        self._gone: dict[str, str] = {}
        self._identity: dict[str, str] | None = None
        self._events: SimpleQueue[tuple[str, ReplicaEvent]] = SimpleQueue()
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()  # one run at a time
        replicas.start(lambda name, event: self._events.put((name, event)))

    @property
    def facts(self) -> ReplicaFacts | None:
        """Returns what the first replica that is ready says of itself; None while none is ready."""
        return next(iter(self._ready.values()), None)

    @property
    def num_ready(self) -> int:
        """Returns how many replicas were ready when the last run looked."""
        return len(self._ready)

    @property
    def in_words(self) -> str:
        """Returns what became of the replicas."""
        words = f"{self.num_ready} of {len(self.replicas.names)} at the end"
        words += f", work was divided anew {self.steals:,} times" if self.steals else ""
        words += f"; {self.losses:,} were lost, {self.moved:,} prompts went to others" if self.losses else ""
        return words

    def reset_stats(self) -> Stats:
        """Begins to count anew; returns what was counted until now."""
        self.stats, before = Stats(), self.stats
        return before

    def close(self) -> None:
        """Ends all replicas."""
        self.replicas.close()

    def run(
        self,
        windows: Windows,
        readout: Readout,
        *,
        sharing: Sharing | None = None,
        max_batch_rows: int | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields (tag, result) of every request of a spool, as `Engine.run` does; of a request that two replicas died
        of, the InputError."""
        call = RunCall(readout, sharing or self.sharing, max_batch_rows)
        return self._run(windows, call, on_step, stopping)

    def generate(
        self,
        windows: Windows,
        tokenizer: Tokenizer | None,
        *,
        sharing: Sharing | None = None,
        on_step: Callable[[StepInfo], None] | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[bytes, Any]]:
        """Yields (tag, a Generated a sample) of every request of a spool, as `Engine.generate` does."""
        call = RunCall(Readout("tokens"), sharing or self.sharing, text=tokenizer is not None)
        return self._run(windows, call, on_step, stopping)

    def _run(
        self,
        windows: Windows,
        call: RunCall,
        on_step: Callable[[StepInfo], None] | None,
        stopping: Callable[[], bool],
    ) -> Iterator[tuple[bytes, Any]]:
        with self._turn:
            run = _FleetRun(self, windows, call, on_step)
            try:
                yield from run.answers(stopping)
            finally:
                run.end()

    # ---------------------------------------------------------------------------------------------- replicas

    def _next_event(self, timeout: float) -> tuple[str, ReplicaEvent] | None:
        try:
            return self._events.get(timeout=timeout)
        except Empty:
            return None

    def _meet(self, name: str, facts: ReplicaFacts) -> bool:
        """Takes in a replica that is ready; returns False for one that would give other results than the others."""
        if self._identity is None:
            self._identity = facts.identity
        different = [what for what, value in facts.identity.items() if self._identity.get(what) != value]
        if different:
            what = ", ".join(f"{w} {facts.identity[w]} (others: {self._identity.get(w)})" for w in different)
            self._leave(name, f"refused, for it has {what}", returns=False)
            self.replicas.kill(name)
            return False
        self._gone.pop(name, None)
        self._ready[name] = facts
        return True

    def _leave(self, name: str, reason: str, *, returns: bool) -> None:
        self.losses += self._ready.pop(name, None) is not None
        if self._gone.get(name) != reason:
            again = "; it is started anew" if returns else ""
            self._notify(f"{name} is lost: {reason}{again}")
        if not returns:
            self._gone[name] = reason

    @property
    def _expected(self) -> list[str]:
        """Returns the replicas that are there or may come."""
        return [name for name in self.replicas.names if name not in self._gone]

    def _check_alive(self) -> None:
        if not self._expected:
            reasons = "\n".join(f"  {name}: {reason}" for name, reason in self._gone.items())
            raise FleetError(f"no replica is left\n{reasons}")


class _FleetRun:
    """One run of a fleet."""

    def __init__(self, fleet: Fleet, windows: Windows, call: RunCall, on_step: Callable[[StepInfo], None] | None):
        self.fleet, self.call, self.on_step = fleet, call, on_step
        self.order: Order = windows.order()
        self.max_tokens = windows.max_tokens
        self._counts_rows = call.readout.kind not in ("tokens", "first")
        lengths, shared = self.order.lengths, self.order.shared
        outputs = _expected_outputs(self.order) if call.readout.kind == "tokens" else None
        self.cost = StreamCost(lengths, shared, fleet.row_cost, outputs=outputs)
        self.num_rows = int(lengths.sum(dtype=np.int64) - shared.sum(dtype=np.int64))
        self.leases: Leases | None = None
        self._early: list[str] = []
        self._begun: set[str] = set()
        self._last: dict[str, int] = {}  # place of the last request that a replica was given
        self._tags: dict[int, bytes] = {}  # of requests that are under way
        if self._counts_rows:
            fleet.stats.unique_tokens += self.num_rows

    def answers(self, stopping: Callable[[], bool]) -> Iterator[tuple[bytes, Any]]:
        fleet = self.fleet
        if not len(self.order):
            return
        for name in list(fleet._ready):
            self._join(name)
        while self.leases is None or self.leases.num_left:
            fleet._check_alive()
            if stopping():
                return
            self._send()
            for number in range(_AT_ONCE):
                event = fleet._next_event(0.0 if number else _TICK)
                if event is None:
                    break
                yield from self._take(*event)
            self._kill_hung()

    def end(self) -> None:
        """Ends the run on all replicas that take part."""
        for name in self._begun & self.fleet._ready.keys():
            self.fleet.replicas.end(name)
        if self.leases is not None:
            self.fleet.steals += self.leases.steals
            self.fleet.moved += self.leases.moved

    def _take(self, name: str, event: ReplicaEvent) -> Iterator[tuple[bytes, Any]]:
        fleet, now = self.fleet, time.monotonic()
        if isinstance(event, ReplicaReady):
            if fleet._meet(name, event.facts):
                self._join(name)
            elif self.leases is not None:
                self.leases.lose(name, now)
        elif isinstance(event, ReplicaLost):
            fleet._leave(name, event.reason, returns=event.returns)
            yield from self._lose(name, event)
        elif event.failure is not None and isinstance(event.failure, (InputError, JobError)):
            raise event.failure  # any replica would say so
        else:
            yield from self._take_report(name, event, now)
            if event.failure is not None:
                fleet._notify(f"{name} has failed: {_in_words(event.failure)}")
                fleet.replicas.kill(name)

    def _take_report(self, name: str, report: ReplicaReport, now: float) -> Iterator[tuple[bytes, Any]]:
        if report.stats is not None:
            unique = self.fleet.stats.unique_tokens
            self.fleet.stats += report.stats
            if self._counts_rows:
                self.fleet.stats.unique_tokens = unique
        started = time.perf_counter()
        for step in report.steps if self.on_step is not None else ():
            self.on_step(replace(step, started=started - step.started))
        if self.leases is None:
            return
        if report.steps:
            self.leases.heard(name, now)
        by_lease: dict[int, dict[int, Any]] = {}
        for number, place, answer in report.answers:
            by_lease.setdefault(number, {}).setdefault(place, answer)
        for number, answers in by_lease.items():
            for place in self.leases.commit(name, number, answers, now):
                yield self._tags.pop(place), answers[place]

    def _lose(self, name: str, event: ReplicaLost) -> Iterator[tuple[bytes, Any]]:
        self._begun.discard(name)
        self._last.pop(name, None)
        if self.leases is None:
            return
        for place in self.leases.lose(name, time.monotonic()):
            message = f"two replicas were lost while they worked on it, the last one with: {event.reason}"
            remedy = "see what is unusual about the record, or run it again by itself"
            yield self._tags.pop(place), InputError(message, remedy=remedy, code="replicas_lost")
        if event.returns:
            self.leases.expect(name)

    def _join(self, name: str) -> None:
        if self.leases is None:
            options = self._options(self.fleet._ready[name])
            expected = self.fleet._expected
            self.leases = Leases(self.cost, expected, options, numbers=self.fleet._numbers)
        self._begun.add(name)
        self.fleet.replicas.begin(name, self.call)
        self.leases.join(name, time.monotonic())

    def _options(self, facts: ReplicaFacts) -> LeaseOptions:
        """Returns how large leases are, by what a replica can do at once."""
        row = self.cost.total / max(1, self.num_rows)
        most, patience = row * self.max_tokens, self.fleet._patience
        if self.call.readout.kind == "tokens":
            running = facts.max_running
            found = LeaseOptions(
                least=4 * self.cost.total / len(self.order), most=most, waiting=running + running // 2,
                begun=(2 * running, np.inf), alone=False, patience=patience,
            )  # fmt: skip
        else:
            step = row * (self.call.max_batch_rows or facts.max_rows)
            begun = (1 << 30, 2 * step)
            found = LeaseOptions(least=step / 4, most=most, waiting=facts.at_once, begun=begun, patience=patience)
        return found if facts.dies_of_requests else replace(found, begun=(0, 0.0))

    def _send(self) -> None:
        if self.leases is None:
            return
        now = time.monotonic()
        self.leases.admit(now)
        while (lease := self.leases.plan()) is not None:
            self.leases.begin(lease, now)
            name = str(lease.replica)
            windows, tags = lease_windows(
                self.order, lease.number, lease.start, lease.stop,
                max_tokens=self.max_tokens, before=self._last.get(name),
            )  # fmt: skip
            self._last[name] = lease.stop - 1
            self._tags.update(zip(range(lease.start, lease.stop), tags, strict=True))
            self.fleet.replicas.give(name, windows)

    def _kill_hung(self) -> None:
        if self.leases is None:
            return
        for name in self.leases.hung(time.monotonic()):
            self.fleet._notify(f"{name} has done nothing for {self.fleet._patience:.0f} s and is killed")
            self.leases.heard(name, time.monotonic())  # said once; `ReplicaLost` follows
            self.fleet.replicas.kill(str(name))


def _expected_outputs(order: Order) -> np.ndarray:
    """Returns how many tokens may be generated for each request, int64: the mean of some from all over the order."""
    found = []
    for place in np.linspace(0, len(order) - 1, min(_SAMPLED, len(order))).astype(int).tolist():
        (request,) = order.read(place, place + 1)
        sampling, _ = decode_options(request.options)
        limit = _GUESSED_OUTPUT if sampling is None or sampling.max_tokens is None else sampling.max_tokens
        found.append(limit * (1 if sampling is None else sampling.n))
    return np.full(len(order), round(float(np.mean(found))), np.int64)


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, PrefoldError) else f"{type(error).__name__}: {error}"
