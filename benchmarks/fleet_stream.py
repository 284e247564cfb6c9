"""Streams on two replicas of one thread on Ray: the cases `two` and `idle` of fleet.py."""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import median
from simulate import policies  # noqa: F401  # other systems' policies are put into their table
from simulate.driven import Driver, run_driven
from simulate.fit import fit
from simulate.scheduled import ScheduledEngine

from prefold.cluster.fleet import Fleet
from prefold.cluster.online import limits_of
from prefold.cluster.ray_replicas import RayReplicas
from prefold.cluster.replicas import ReplicaFacts, ReplicaReady, ReplicaReport, RunCall
from prefold.cluster.router import POLICIES, BestStart, LeastLoaded, Policy, Standing, policy_named
from prefold.engine.meter import StepInfo
from prefold.simulate.costs import StepCost, StepRows, machine_named, model_named
from prefold.simulate.fleet import FleetOutcome, Replica, StreamFeeder
from prefold.simulate.requests import SimRequest, prefix_repetition
from prefold.stream import Feed, LiveInput
from prefold.types import Readout, Request, Sampling

MODEL = "smollm2-135m"
PREFIXES, PREFIX, SUFFIX, OUTPUT = 24, 192, 16, 8
STORE = 3072  # rows of a replica's KV store
RUNNING = 16
# Measured on this fleet at work: from a step to its report 3 ms, its way 1.5, the decision 1, the order's way 5; and
# what the driver takes to send one more lease.
DRIVER = Driver(delay=0.01, each=0.0002)
CALIBRATION = itertools.count(1000)  # seeds of its runs
# Whoever does not look at prefixes takes requests as they come, one by one.
IN_ORDER = {"threshold": 2.0, "max_age": 0.0}


class Watched(RayReplicas):
    """Replicas whose steps are noted as (name, start, stop, StepInfo) of this process' clock, and answers as they come.

    late  {name: seconds}: that replica is asked for its model so much later than the first of the others is ready
    """

    def __init__(self, *arguments: Any, late: dict[str, float] | None = None, **options: Any):
        super().__init__(*arguments, **options)
        self.steps: list[tuple[str, float, float, StepInfo]] = []
        self.answered: list[float] = []
        self.ready: dict[str, float] = {}
        self._late, self._first = late or {}, threading.Event()

    def start(self, tell: Any) -> None:
        def heard(name: str, event: Any) -> None:
            now = time.perf_counter()
            if isinstance(event, ReplicaReady):
                self.ready[name] = now
                self._first.set()
            if isinstance(event, ReplicaReport):
                self.steps += [(name, now - s.started_at, now - s.started_at + s.seconds, s) for s in event.steps]
                self.answered += [now] * len(event.answers)
            tell(name, event)

        super().start(heard)

    def _host(self, name: str) -> Any:
        if name in self._late:
            self._first.wait()
            time.sleep(self._late.pop(name))
        return super()._host(name)


def fleet_of(late: dict[str, float] | None = None, **options: Any) -> tuple[Fleet, Watched]:
    place = {"dtype": "float32", "device": "cpu", "threads": 1, "cache": "lru"}
    replicas = Watched(MODEL, place | options, count=2, late=late)
    return Fleet(replicas), replicas


def wait_for(fleet: Fleet, count: int) -> None:
    while fleet.num_ready < count:
        run(fleet, prefix_repetition(8, prefixes=2, prefix=8, suffix=8, output=1, seed=99))


def run(fleet: Fleet, requests: list[SimRequest]) -> float:
    """The seconds in which a stream of requests is answered, all of which are there from the start."""
    feed = Feed(1 << 30)
    for request in requests:
        sampling = Sampling(max_tokens=request.limit, ignore_eos=True)
        feed.put([(Request(request.drawn_tokens(40_000), sampling=sampling), str(request.key).encode())])
    feed.end()
    began = time.perf_counter()
    count = sum(1 for _ in fleet.run(LiveInput(feed, 1 << 20), Readout("tokens")))
    assert count == len(requests)
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------------------------ two


def two(rows: int, repeats: int) -> list[dict[str, Any]]:
    """rows: requests of a run."""
    slot_bytes = 30 * 2 * 3 * 64 * 4  # SmolLM2 135M in float32
    fleet, replicas = fleet_of(kv_memory=(STORE + 1) * slot_bytes, max_running=RUNNING)
    table = []
    seeds = iter(range(1, 1000))
    try:
        wait_for(fleet, 2)
        twin = Simulated(next(iter(fleet.ready.values())))
        calibrate(twin, fleet, replicas)
        for shape in ("repeated", "nothing shared"):
            runs: dict[str, list[tuple[float, Any, FleetOutcome]]] = {name: [] for name in POLICIES}
            for _ in range(repeats):
                for name in POLICIES:
                    requests = of_shape(shape, rows, next(seeds))
                    # The speed of a virtual machine changes by 5 to 10 % within minutes.
                    twin.set_pace(steps_of(twin, fleet, replicas, LeastLoaded(), "nothing shared"))
                    fleet.policy = policy_named(name)
                    fleet.window = {} if name == "prefix" else IN_ORDER
                    fleet.reset_stats()
                    seconds = run(fleet, requests)
                    runs[name].append((seconds, fleet.stats.generation, twin.run(policy_named(name), requests)))
            ours = median([seconds for seconds, _, _ in runs["prefix"]])
            for name, some in runs.items():
                seconds, g = median([one for one, _, _ in some]), some[-1][1]
                predicted = median([one.seconds for _, _, one in some])
                asked = sum(request.rows for request in requests)
                table.append(
                    {
                        "requests": shape, "policy": name, "seconds": seconds, "of ours": seconds / ours,
                        "simulated": predicted, "off by": predicted / seconds - 1,
                        "on admission": (g.first_admission_hits + g.cross_window_hits) / asked,
                        "in step": g.in_step_hits / asked, "computed": g.prefill_rows / asked,
                        "again": g.recomputed_rows / asked,
                        "computed, simulated": some[-1][2].hits.rows_computed / asked,
                    }
                )  # fmt: skip
    finally:
        fleet.close()
    return table


def of_shape(shape: str, rows: int, seed: int) -> list[SimRequest]:
    if shape == "repeated":
        return renumbered(
            prefix_repetition(rows, prefixes=PREFIXES, prefix=PREFIX, suffix=SUFFIX, output=OUTPUT, seed=seed), seed
        )
    found = prefix_repetition(rows // 4, prefixes=rows // 4, prefix=PREFIX, suffix=SUFFIX, output=OUTPUT, seed=seed)
    return renumbered(found, seed)


def renumbered(requests: list[SimRequest], seed: int) -> list[SimRequest]:
    """Requests that share nothing with those of another seed: caches stay as they are between runs."""
    base = seed * 1_000_000  # at most 2,146 of them: tokens of the simulator are 32 bits
    return [replace(r, path=tuple((base + number, rows) for number, rows in r.path)) for r in requests]


class First(LeastLoaded):
    """One replica gets all."""

    def choose(self, standing: Standing) -> int:
        return int(standing.allowed.argmax())


def calibrate(twin: Simulated, fleet: Fleet, replicas: Watched) -> None:
    """Gives the simulated fleet the constants that explain best what the fleet's own steps take: while both replicas
    are at work on prompts of which nothing is shared, and on such as repeat prefixes; and then how much faster one is
    alone."""
    both = [steps_of(twin, fleet, replicas, LeastLoaded(), shape) for shape in ("nothing shared", "repeated")]
    twin.calibrate(both[0] + both[1])
    twin.set_alone(steps_of(twin, fleet, replicas, First(), "nothing shared"))


def steps_of(
    twin: Simulated, fleet: Fleet, replicas: Watched, policy: Policy, shape: str
) -> list[tuple[StepRows, float]]:
    """Runs 24 prompts that share nothing, or 96 that do, on both fleets; returns the steps of the real one."""
    replicas.steps.clear()
    requests = of_shape(shape, 96, next(CALIBRATION))
    fleet.policy, fleet.window = policy, IN_ORDER
    run(fleet, requests)
    twin.run(policy, requests)
    return measured_steps(replicas)


def measured_steps(replicas: Watched) -> list[tuple[StepRows, float]]:
    """Returns the steps that replicas have made, with the seconds until the next began."""
    steps: list[tuple[StepRows, float]] = []
    for name in replicas.names:
        mine = sorted((start, stop, info) for who, start, stop, info in replicas.steps if who == name)
        for (start, stop, info), (after, _, _) in pairwise(mine):
            prefill = info.rows - info.running
            pairs, reads = prefill * (PREFIX + SUFFIX) // 2, info.running + prefill // (PREFIX + SUFFIX)
            seconds = after - start if after - stop < 0.05 else stop - start
            steps.append((StepRows(prefill, info.running, info.path_rows, pairs, reads), seconds))
    return steps


class Simulated:
    """The same fleet in the simulator; caches of its replicas stay as they are from run to run, as the real ones do."""

    def __init__(self, facts: ReplicaFacts):
        self._fitted, self._alone = machine_named("cpu2"), 1.0
        self._cost = StepCost(self._fitted, model_named("SmolLM2-135M"))
        self._limits = limits_of(facts, RunCall(Readout("tokens"), online=True))
        some = {"max_batch_rows": facts.max_rows, "max_running": facts.max_running, "slots": facts.cache_rows}
        self._engines = [ScheduledEngine(self._cost, reports=True, **some) for _ in range(2)]
        self._slots = facts.cache_rows

    def calibrate(self, steps: list[tuple[StepRows, float]]) -> None:
        """Takes over what steps take while both replicas are at work."""
        self._fitted = fit(machine_named("cpu2"), self._cost.model, steps)
        self.set_pace(steps)

    def set_pace(self, steps: list[tuple[StepRows, float]]) -> None:
        """Takes over how fast the machine is now: all of its constants change alike."""
        times = self._of_expected(steps, StepCost(self._fitted, self._cost.model))
        machine = replace(
            self._fitted, flops=self._fitted.flops / times, bandwidth=self._fitted.bandwidth / times,
            overhead=self._fitted.overhead * times,
        )  # fmt: skip
        self._cost = StepCost(machine, self._cost.model)
        for engine in self._engines:
            engine.cost = self._cost

    def set_alone(self, steps: list[tuple[StepRows, float]]) -> None:
        """Takes over what steps take while one replica is at work."""
        self._alone = self._of_expected(steps, self._cost)

    @staticmethod
    def _of_expected(steps: list[tuple[StepRows, float]], cost: StepCost) -> float:
        return sum(seconds for _, seconds in steps) / sum(cost.seconds(step) for step, _ in steps)

    def run(self, policy: Policy, requests: list[SimRequest]) -> FleetOutcome:
        window = {"max_tokens": 1 << 23} | ({} if isinstance(policy, BestStart) else IN_ORDER)
        known = {"slots": self._slots, "policy": policy, "requests": requests, "learns": True}
        feeder = StreamFeeder(self._cost, count=len(requests), window=window, **known)
        feeder.limits = self._limits
        replicas = [Replica(engine.begin) for engine in self._engines]
        return run_driven(replicas, feeder, driver=DRIVER, alone=self._alone)


# ----------------------------------------------------------------------------------------------------- idle


def idle(rows: int, repeats: int) -> list[dict[str, Any]]:
    """rows: records of a run. Jobs are those of the command line: a reader, a journal, an output."""
    table = []
    cases: list[tuple[str, bool, dict[str, float], float]] = [
        ("a stream", True, {}, 10.0), ("a known job", False, {}, 10.0),
        ("a stream, one 20 s late", True, {"replica 2": 20.0}, 40.0),
        ("a known job, one 20 s late", False, {"replica 2": 20.0}, 40.0),
    ]  # fmt: skip
    for name, streaming, late, seconds in cases:
        for _ in range(repeats):
            table.append({"job": name} | idle_run(rows, streaming, dict(late), seconds))
    return table


def idle_run(rows: int, streaming: bool, late: dict[str, float], seconds: float) -> dict[str, Any]:
    """seconds: over which the records come"""
    from prefold.checkpoint import resolve
    from prefold.job import Job, OutputOptions, open_output, run_job
    from prefold.job.models import FleetModel
    from prefold.records.fields import Template
    from prefold.records.source import open_source
    from prefold.records.tables import Columns, TableAdapter
    from prefold.report.progress import Progress
    from prefold.tasks import make_task
    from prefold.text import tokenizer_or_none

    checkpoint = resolve(MODEL)
    tokenizer = tokenizer_or_none(checkpoint)
    fleet, replicas = fleet_of(late, max_running=32)
    while not replicas.ready:
        time.sleep(0.05)
    if not late:
        wait_for(fleet, 2)
    replicas.steps.clear()
    replicas.answered.clear()
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of(rows)))
        task = make_task("generate", checkpoint, tokenizer, max_tokens=OUTPUT, ignore_eos=True)
        job = Job(
            Slow(open_source(str(source)), seconds / rows),
            TableAdapter("generate", Columns(prompt=Template("text", "--prompt"))),
            {"generate": task}, lambda: FleetModel(fleet), open_output(OutputOptions(out), {}), streaming=streaming,
            early=True,
        )  # fmt: skip
        began = time.perf_counter()
        summary = run_job(job, Progress())  # it closes the fleet
        seconds = time.perf_counter() - began
        assert summary.records == rows and not summary.errors
    shares = []
    for name in replicas.names:
        mine = [(start, stop) for who, start, stop, _ in replicas.steps if who == name]
        if mine:
            span = max(stop for _, stop in mine) - min(start for start, _ in mine)
            shares.append(1 - sum(stop - start for start, stop in mine) / span)
    first = min(start for _, start, _, _ in replicas.steps)
    # Where all were there from the start: none.
    before = sum(at < max(replicas.ready.values()) for at in replicas.answered)
    return {
        "records": rows, "seconds": seconds, "first step after": first - job.source.first, "steps": len(replicas.steps),
        "idle, replica 1": shares[0], "idle, replica 2": shares[-1], "answers before the second was there": before,
        "the second after": max(replicas.ready.values()) - min(replicas.ready.values()),
    }  # fmt: skip


def texts_of(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "rho", "sigma", "tau", "pi"]
    prefixes = [" ".join(rng.choice(words, 60)) for _ in range(PREFIXES)]
    return [f"{prefixes[rng.integers(PREFIXES)]} {rng.integers(10**9)}" for _ in range(count)]


class Slow:
    """A source of a record every `pause` seconds; `first` is when the first came."""

    def __init__(self, source: Any, pause: float):
        self._source, self._pause = source, pause
        self.first = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def records(self, *arguments: Any) -> Any:
        for record in self._source.records(*arguments):
            self.first = self.first or time.perf_counter()
            yield record
            time.sleep(self._pause)
