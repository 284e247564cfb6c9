"""What `prefold simulate` runs: a fleet of one's own, by names of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..cluster.dispatch import Dispatcher
from ..cluster.policies import policy_named
from ..errors import InputError
from .blocks import BlockEngine
from .costs import Machine, ModelShape, StepCost
from .daft import DaftProvider
from .engines import MOST_ROWS, SimEngine
from .feeders import Lists, Routed, SharedQueue, Streamed, contiguous
from .fleet import Feeder, FleetOutcome, Replica, run_fleet
from .parts import PARTS
from .requests import SimRequest
from .rows import RowEngine
from .scheduled import ScheduledEngine

__all__ = ["ENGINES", "FEEDERS", "Outcome", "Setup", "run_setup"]

ENGINES: dict[str, Callable[..., SimEngine]] = {
    "prefold": RowEngine,
    "prefold-steps": ScheduledEngine,
    "vllm": BlockEngine,
}
FEEDERS = ("segments", "stream", "routed", "static", "batches", "bucketing")


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet and how it gets its work.

    engine    one of ENGINES
    feeder    one of FEEDERS: "segments" and "static" know all requests, in sorted order and as they come; "stream" is
              the live window; "routed" gives each request away as it comes; "batches" are of 512; "bucketing" is Daft's
    policy    of "stream" and "routed": one of cluster.policies.POLICIES
    reports   of "stream" and "routed": whether replicas tell what their caches hold; else it is estimated
    steal     of "segments": whether work is divided anew
    load      seconds until a model is there
    without   of "stream": one of parts.PARTS that is left out; "": nothing is
    slow      every second replica takes so many times as long for a step
    max_batch_rows  rows of a step; None: ours finds how many are fast, and vLLM has its own number
    rate      records a second that come in; None: all are there from the start, or at their own times
    """

    machine: Machine
    model: ModelShape
    replicas: int = 1
    engine: str = "prefold"
    feeder: str = "stream"
    policy: str = "prefix"
    reports: bool = True
    steal: bool = True
    load: float = 0.0
    rate: float | None = None
    without: str = ""
    slow: float = 1.0
    max_batch_rows: int | None = None
    max_running: int = 256

    @property
    def name(self) -> str:
        name = f"{self.engine}, {self.feeder}" + (f", {self.policy}" if self.feeder in ("stream", "routed") else "")
        return (
            name
            + ("" if self.reports else ", no events")
            + ("" if self.steal else ", no stealing")
            + (f", without {self.without}" if self.without else "")
        )

    @property
    def step_options(self) -> dict[str, int | None]:
        """Returns the options of an engine that its steps have."""
        rows = MOST_ROWS if self.engine == "vllm" and self.max_batch_rows is None else self.max_batch_rows
        return {"max_batch_rows": rows, "max_running": self.max_running}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a setup gave.

    expected  seconds and hit rate that were published for it
    facts     what else there is to say of it: {what: number}
    """

    name: str
    setup: Setup
    run: FleetOutcome
    expected: tuple[float, float | None] | None = None
    facts: dict[str, float] = field(default_factory=dict)


def run_setup(setup: Setup, requests: Sequence[SimRequest]) -> FleetOutcome:
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
    in_time = setup.feeder in ("stream", "routed")
    reports = in_time and setup.reports
    options = setup.step_options | {"reports": reports}
    replicas = [
        Replica(lambda: ENGINES[setup.engine](cost, **options), setup.load, setup.slow if number % 2 else 1.0)
        for number in range(setup.replicas)
    ]
    if setup.rate is not None:
        requests = [replace(request, arrival=i / setup.rate) for i, request in enumerate(requests)]
    come = any(request.arrival for request in requests)
    if come and not in_time:
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
        kind = PARTS[setup.without] if setup.without else Dispatcher
        return Streamed(
            cost, count=len(requests), kind=kind, policy=policy_named(setup.policy), reports=setup.reports,
            requests=there, reserves=setup.engine != "vllm",
        )  # fmt: skip
    if setup.feeder == "routed":
        return Routed(policy_named(setup.policy), cost, reports=setup.reports, requests=there)
    if setup.feeder == "batches":
        return SharedQueue(requests, batch=512, in_flight=512)
    if setup.feeder == "bucketing":
        return DaftProvider(requests, count)
    if setup.feeder == "static":
        size = len(requests)
        return Lists([requests[i * size // count : (i + 1) * size // count] for i in range(count)])
    in_order = sorted(requests, key=lambda request: request.path)
    return Lists(contiguous(in_order, count), in_flight=_ahead(cost, requests), steal=setup.steal)


def _ahead(cost: StepCost, requests: Sequence[SimRequest]) -> int:
    """Returns how many requests keep a replica busy: as many as would fit if they shared half of their rows."""
    if not requests:
        return 2
    some = requests[:: max(1, len(requests) // 1000)]
    each = sum(request.rows / 2 + request.limit for request in some) / len(some)
    return max(2, int(1.25 * cost.kv_rows / each))
