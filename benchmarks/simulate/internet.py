"""Ten million prompts on a thousand replicas: planned from (prefix, length) as arrays, and run in coarse grain.

A prompt is a template, a group of prompts that go on alike, and tokens of its own; few templates and groups are
frequent (Zipf). Requests are made when they are given away, so that memory holds those under way.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prefold.cache import CacheEvents
from prefold.prefix import RowCost, Segment, StreamCost
from prefold.simulate.cases import ENGINES, Outcome, Setup
from prefold.simulate.costs import StepCost
from prefold.simulate.engines import Stretch
from prefold.simulate.fleet import Feeder, FleetOutcome, Idle, Replica, run_fleet
from prefold.simulate.requests import SimRequest

from . import others  # noqa: F401  # their parts are put into the tables

__all__ = ["Prompts", "Ranges", "draw_prompts", "internet"]

_TEMPLATES, _GROUPS = 1000, 200_000
_LIMIT = 128  # tokens of an output
_GROUP, _OWN = 1 << 20, 1 << 30  # numbers of parts begin here
_CHECKED, _EACH = 128, 100  # replicas with which the two grains are compared, and prompts of each


@dataclass(frozen=True, eq=False, slots=True)
class Prompts:
    """Prompts in sorted order, as arrays.

    group          int32 [n]; groups are numbered in the order of their templates
    own, output    int16 [n]: tokens of each prompt's own, and of its output
    template       int32 [groups]
    template_rows, group_rows   int32, by template and by group: their tokens
    """

    group: np.ndarray
    own: np.ndarray
    output: np.ndarray
    template: np.ndarray
    template_rows: np.ndarray
    group_rows: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    def lengths_and_shared(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens of each prompt, how many it shares with the one before it), int32 [n] each."""
        first = self.template_rows[self.template].astype(np.int32)
        above = (first + self.group_rows)[self.group]
        shared = np.where(self.group[1:] == self.group[:-1], above[1:], 0)
        template = self.template[self.group]
        alike = (shared == 0) & (template[1:] == template[:-1])
        shared[alike] = self.template_rows[template[1:][alike]]
        return above + self.own, np.concatenate(([0], shared)).astype(np.int32)

    def requests(self, start: int, stop: int) -> list[SimRequest]:
        """Returns the prompts at start <= place < stop of the order."""
        group = self.group[start:stop]
        template = self.template[group]
        columns = (template, self.template_rows[template], group, self.group_rows[group], self.own[start:stop])
        rows = zip(*(column.tolist() for column in (*columns, self.output[start:stop])), strict=True)
        return [
            SimRequest(place, ((t, first), (_GROUP + g, second), (_OWN + place, own)), output, _LIMIT)
            for place, (t, first, g, second, own, output) in enumerate(rows, start)
        ]


def draw_prompts(count: int, seed: int = 0) -> Prompts:
    """Returns `count` prompts of 500 tokens on average, sorted."""
    rng = np.random.default_rng(seed)
    template = np.sort(_zipf(rng, _TEMPLATES, _GROUPS)).astype(np.int32)
    group = np.sort(rng.permutation(_GROUPS)[_zipf(rng, _GROUPS, count)]).astype(np.int32)
    own = np.clip(rng.lognormal(np.log(160), 0.7, count), 8, 2000).astype(np.int16)
    output = np.minimum(rng.geometric(1 / 48, count), _LIMIT).astype(np.int16)
    rows = rng.integers(32, 257, _TEMPLATES), rng.integers(32, 257, _GROUPS)
    return Prompts(group, own, output, template, *(some.astype(np.int32) for some in rows))


def _zipf(rng: np.random.Generator, kinds: int, count: int) -> np.ndarray:
    """Returns `count` numbers below `kinds`, number i in proportion to 1 / (i + 1)."""
    sums = np.cumsum(1 / np.arange(1, kinds + 1))
    return np.searchsorted(sums, rng.random(count, dtype=np.float64) * sums[-1]).astype(np.int32)


class Ranges(Feeder):
    """A segment of the order for each replica, given in order; one that has none left takes a part of the segment with
    most left, such that both end at the same time.

    in_flight  requests that a replica may have at a time
    """

    def __init__(self, prompts: Prompts, cost: StreamCost, segments: list[Segment], *, in_flight: int):
        super().__init__()
        self._prompts, self._cost, self._most = prompts, cost, in_flight
        self._segments = list(segments)
        self._hungry: dict[int, None] = {}
        self.steals = 0

    def joined(self, replica: int, engine: Any, now: float) -> None:
        super().joined(replica, engine, now)
        self._hungry[replica] = None

    def worked(self, replica: int, stretch: Stretch, events: CacheEvents | None, now: float) -> None:
        super().worked(replica, stretch, events, now)
        if stretch.ended_requests:
            self._hungry[replica] = None

    def give(self, now: float) -> list[tuple[int, list[SimRequest]]]:
        given = []
        for replica in list(self._hungry):
            del self._hungry[replica]
            start, stop = self._segments[replica]
            if start == stop and not self.in_flight[replica]:
                start, stop = self._steal(replica)
            until = min(stop, start + self._most - self.in_flight[replica])
            if until > start:
                given.append((replica, self._prompts.requests(start, until)))
                self.in_flight[replica] += until - start
                self._segments[replica] = Segment(until, stop)
        return given

    def _steal(self, replica: int) -> Segment:
        richest = max(range(len(self._segments)), key=lambda other: self._cost.of(*self._segments[other]))
        kept, stolen = self._cost.cut(*self._segments[richest], [1.0, 1.0])
        if stolen.start < stolen.stop:
            self.steals += 1
            self._segments[richest], self._segments[replica] = kept, stolen
        return self._segments[replica]

    def idle_cause(self, replica: int) -> Idle:
        return "border"


def internet(setup: Setup, *, prompts: int = 10_000_000, seed: int = 0) -> Iterator[Outcome]:
    """Yields what a large fleet does, with what planning it took, and then both grains on fewer replicas.

    setup: machine, model, replicas and load are taken from it.
    """
    drawn = draw_prompts(prompts, seed)
    run, facts = _run(replace(setup, engine="prefold"), drawn)
    facts["gigabytes of memory at most"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    yield Outcome("segments", setup, run, facts=facts)
    few = draw_prompts(min(prompts, _CHECKED * _EACH), seed)
    seconds: dict[str, float] = {}
    for engine in ("prefold", "prefold-steps"):
        small = replace(setup, engine=engine, replicas=min(setup.replicas, _CHECKED))
        run, facts = _run(small, few)
        seconds[engine] = run.seconds
        facts |= {"times the seconds in coarse grain": run.seconds / seconds["prefold"]}
        yield Outcome(f"segments, {engine}", small, run, facts=facts)


def _run(setup: Setup, prompts: Prompts) -> tuple[FleetOutcome, dict[str, float]]:
    """Returns what came of it, and how it was planned."""
    cost = StepCost(setup.machine, setup.model)
    started = time.process_time()
    lengths, shared = prompts.lengths_and_shared()
    # What a row of an output costs beside one of a prompt: steps are mostly as long as the weights take to be read.
    decode = cost.decode_seconds(64) / cost.prefill_seconds
    planned = StreamCost(lengths, shared, RowCost(), outputs=prompts.output, decode=decode)
    segments = planned.cut(0, len(prompts), [1.0] * setup.replicas)
    seconds = time.process_time() - started
    costs = [planned.of(*segment) for segment in segments]
    unique = int(lengths.sum(dtype=np.int64) - shared.sum(dtype=np.int64))
    each = float(lengths.mean()) / 2 + _LIMIT
    feeder = Ranges(prompts, planned, segments, in_flight=max(2, int(1.25 * cost.kv_rows / each)))
    started = time.process_time()
    replica = Replica(lambda: ENGINES[setup.engine](cost, **setup.step_options), setup.load)
    run = run_fleet([replica] * setup.replicas, feeder)
    return run, {
        "microseconds of CPU of planning a prompt": 1e6 * seconds / len(prompts),
        "costliest segment, of the mean": max(costs) * setup.replicas / sum(costs),
        "rows computed, of the unique ones": run.hits.rows_computed / unique,
        "unique rows, of those asked for": unique / float(lengths.sum(dtype=np.int64)),
        "times work was moved": feeder.steals,
        "seconds of CPU of simulating": time.process_time() - started,
    }
