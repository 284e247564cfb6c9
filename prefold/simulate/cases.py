"""What `prefold simulate` runs: the published job of Daft's article, and fleets of one's own under several policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..cluster.policies import policy_named
from ..errors import InputError
from .blocks import BlockEngine
from .costs import Machine, ModelShape, StepCost, machine_named, model_named
from .engines import SimEngine
from .feeders import DaftBuckets, Lists, Routed, SharedQueue, Streamed, contiguous
from .fleet import Feeder, FleetRun, Replica, run_fleet
from .requests import SimRequest, prefix_repetition
from .rows import RowEngine
from .scheduled import ScheduledEngine

__all__ = ["ENGINES", "FEEDERS", "PUBLISHED", "Outcome", "Setup", "published", "run_setup"]

ENGINES: dict[str, Callable[..., SimEngine]] = {
    "prefold": RowEngine,
    "prefold-steps": ScheduledEngine,
    "vllm": BlockEngine,
}
FEEDERS = ("segments", "stream", "routed", "static", "batches", "bucketing")

# Seconds and vLLM's hit rate of https://www.daft.ai (dynamic prefix bucketing): 200,000 prompts of 512 tokens, 512
# prefixes of 256, 128 output tokens, Qwen3-8B in bfloat16, by (system, number of L4).
PUBLISHED: dict[tuple[str, int], tuple[float, float | None]] = {
    ("naive", 128): (977, 0.292),
    ("continuous", 128): (869, 0.265),
    ("sorted", 128): (563, 0.545),
    ("bucketing", 128): (482, 0.54),
    ("Ray Data", 128): (842, None),
    ("bucketing", 64): (865, None),
    ("Ray Data", 64): (1548, None),
    ("bucketing", 32): (1682, None),
    ("Ray Data", 32): (2915, None),
}
# One set of constants for all of them, fitted by hand: an L4 at its 72 W, with vLLM's and Daft's work between steps.
PUBLISHED_L4 = {"flops": 38e12, "bandwidth": 300e9, "overhead": 0.02}
PUBLISHED_LOAD = 90.0  # seconds until a model is there
PUBLISHED_SORT = 40.0  # seconds of the distributed sort, in which nobody computes
_MAX_BATCH_ROWS = 8192  # vLLM's own choice for offline use


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet and how it gets its work.

    engine    one of ENGINES
    feeder    one of FEEDERS: "segments" and "static" know all requests, in sorted order and as they come; "stream" is
              the live window; "routed" gives each request away as it comes; "batches" are of 512; "bucketing" is Daft's
    policy    of "stream" and "routed": one of cluster.policies.POLICIES
    load      seconds until a model is there
    rate      records a second that come in; None: all are there from the start, or at their own times
    """

    machine: Machine
    model: ModelShape
    replicas: int = 1
    engine: str = "prefold"
    feeder: str = "stream"
    policy: str = "prefix"
    load: float = 0.0
    rate: float | None = None
    max_batch_rows: int = _MAX_BATCH_ROWS
    max_running: int = 256

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.feeder}" + (f", {self.policy}" if self.feeder in ("stream", "routed") else "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a setup gave; `expected`: seconds and hit rate that were published for it."""

    name: str
    setup: Setup
    run: FleetRun
    expected: tuple[float, float | None] | None = None


def run_setup(setup: Setup, requests: Sequence[SimRequest]) -> FleetRun:
    """Returns what a fleet does with these requests. Where they have times of arrival they come at those.

    Raises InputError for unknown names, for no replicas, and where a request fits on no machine.
    """
    if setup.engine not in ENGINES:
        raise InputError(f"there is no engine {setup.engine!r}", field="engine", remedy=f"use {', '.join(ENGINES)}")
    if setup.feeder not in FEEDERS:
        raise InputError(f"there is no feeder {setup.feeder!r}", field="feeder", remedy=f"use {', '.join(FEEDERS)}")
    if setup.replicas < 1:
        raise InputError(f"replicas is {setup.replicas}", field="replicas", remedy="give 1 or more")
    cost = StepCost(setup.machine, setup.model)
    reports = setup.feeder in ("stream", "routed")
    options = {"max_batch_rows": setup.max_batch_rows, "max_running": setup.max_running, "reports": reports}
    replicas = [Replica(lambda: ENGINES[setup.engine](cost, **options), setup.load)] * setup.replicas
    if setup.rate is not None:
        requests = [replace(request, arrival=i / setup.rate) for i, request in enumerate(requests)]
    come = any(request.arrival for request in requests)
    if come and not reports:
        raise InputError(
            f"{setup.feeder} knows all requests from the start, these come in time",
            field="feeder",
            remedy="use stream or routed",
        )
    there = () if come else requests
    return run_fleet(replicas, _feeder(setup, cost, requests, there), requests if come else ())


def _feeder(setup: Setup, cost: StepCost, requests: Sequence[SimRequest], there: Sequence[SimRequest]) -> Feeder:
    count = setup.replicas
    if setup.feeder == "stream":
        return Streamed(cost, count=len(requests), policy=policy_named(setup.policy), requests=there)
    if setup.feeder == "routed":
        return Routed(policy_named(setup.policy), cost, requests=there)
    if setup.feeder == "batches":
        return SharedQueue(requests, batch=512, in_flight=512)
    if setup.feeder == "bucketing":
        return DaftBuckets(requests, count)
    if setup.feeder == "static":
        size = len(requests)
        return Lists([requests[i * size // count : (i + 1) * size // count] for i in range(count)])
    in_order = sorted(requests, key=lambda request: request.path)
    return Lists(contiguous(in_order, count), in_flight=_ahead(cost, requests), steal=True)


def _ahead(cost: StepCost, requests: Sequence[SimRequest]) -> int:
    """Returns how many requests keep a replica busy: as many as would fit if they shared half of their rows."""
    some = requests[:: max(1, len(requests) // 1000)]
    each = sum(request.rows / 2 + request.limit for request in some) / len(some)
    return max(2, int(1.25 * cost.kv_rows / each))


def published(*, prompts: int = 200_000, prefixes: int = 512, scale: int = 1, ours: bool = True) -> Iterator[Outcome]:
    """Yields the published systems, and ours without and with loading, each as it is done.

    scale  so many times fewer prompts, prefixes and replicas
    """
    machine = replace(machine_named("L4"), **PUBLISHED_L4)
    base = Setup(machine, model_named("Qwen3-8B"), load=PUBLISHED_LOAD)
    requests = prefix_repetition(
        prompts // scale, prefixes=max(1, prefixes // scale), prefix=256, suffix=256, output=128
    )
    in_order = sorted(requests, key=lambda request: request.path)
    cost = StepCost(base.machine, base.model)
    for (name, replicas), expected in PUBLISHED.items():
        count = max(1, replicas // scale)
        size = len(requests)
        feeder: Feeder
        if name == "naive":
            feeder = SharedQueue(requests, batch=512, in_flight=512)
        elif name == "continuous":
            feeder = Lists([requests[i * size // count : (i + 1) * size // count] for i in range(count)])
        elif name == "sorted":
            parts = [in_order[i * size // count : (i + 1) * size // count] for i in range(count)]
            feeder = Lists(parts, start=base.load + PUBLISHED_SORT)
        elif name == "bucketing":
            feeder = DaftBuckets(requests, count)
        else:
            feeder = SharedQueue(requests, batch=16, in_flight=128)
        engine = Replica(lambda: BlockEngine(cost, max_batch_rows=_MAX_BATCH_ROWS), base.load)
        setup = replace(base, replicas=count, engine="vllm", feeder=name)
        yield Outcome(name, setup, run_fleet([engine] * count, feeder), expected)
    if not ours:
        return
    for replicas in (32, 64, 128):
        setup = replace(base, replicas=max(1, replicas // scale), feeder="segments", load=0.0)
        yield Outcome("ours, segments", setup, run_setup(setup, requests))
    largest = replace(base, replicas=max(1, 128 // scale), load=0.0)
    for engine, feeder, policy in (
        ("prefold", "stream", "prefix"),
        ("vllm", "segments", "prefix"),
        ("vllm", "stream", "prefix"),
        ("prefold", "static", "prefix"),
        ("prefold", "stream", "least-loaded"),
    ):
        setup = replace(largest, engine=engine, feeder=feeder, policy=policy)
        yield Outcome(setup.name, setup, run_setup(setup, requests))
