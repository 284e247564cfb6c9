"""Fleets described by the names of their parts, and the table of their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prefold.cluster.router import policy_named
from prefold.errors import InputError

from .costs import Machine, ModelShape, StepCost
from .engines import RowEngine
from .fleet import IDLE_CAUSES, FleetOutcome, ListFeeder, Replica, RoutedFeeder, StreamFeeder, contiguous, run_fleet
from .requests import SimRequest

_Requests = Sequence[SimRequest]

ENGINES: dict[str, Any] = {"prefold": RowEngine}


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet, and the way in which it gets its work."""

    machine: Machine
    model: ModelShape
    replicas: int = 1
    engine: str = "prefold"  # a name in ENGINES
    # A name in FEEDERS. "segments" knows all requests; "stream" is the live window; "routed" sends each request to a
    # replica when it arrives.
    feeder: str = "stream"
    policy: str = "prefix"  # "stream" and "routed": a name in cluster.router.POLICIES
    reports: bool = True  # "stream" and "routed": whether replicas report their cached rows; else these are estimated
    steal: bool = True  # "segments": whether idle replicas steal work from others
    load: float = 0.0  # seconds to load a model
    rate: float | None = None  # arrivals per second; None: arrival times of the requests, if they have any
    slow: float = 1.0  # factor on the times of the steps of every second replica
    max_batch_rows: int | None = None  # rows of a step; None: 8,192
    max_running: int = 256

    @property
    def takes_arrivals(self) -> bool:
        """Whether requests may arrive over time."""
        return self.feeder in ("stream", "routed")

    @property
    def name(self) -> str:
        name = f"{self.engine}, {self.feeder}" + (f", {self.policy}" if self.takes_arrivals else "")
        return name + ("" if self.reports else ", no events") + ("" if self.steal else ", no stealing")

    @property
    def step_options(self) -> dict[str, int | None]:
        """The limits of an engine's steps."""
        return {"max_batch_rows": self.max_batch_rows, "max_running": self.max_running}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a Setup."""

    name: str
    setup: Setup
    run: FleetOutcome
    facts: dict[str, float] = field(default_factory=dict)  # {name: number}, printed below the line of the table


def run_setup(setup: Setup, requests: Sequence[SimRequest]) -> FleetOutcome:
    """Return the outcome of a fleet with these requests. Requests with arrival times arrive at these times.

    Raise InputError for an unknown name, for no replicas, and for a request that does not fit on the machine.
    """
    for name, value, table in (("engine", setup.engine, ENGINES), ("feeder", setup.feeder, FEEDERS)):
        if value not in table:
            raise InputError(f"there is no {name} {value!r}", field=name, remedy=f"use {', '.join(table)}")
    if setup.replicas < 1:
        raise InputError(f"replicas is {setup.replicas}", field="replicas", remedy="give 1 or more")
    cost = StepCost(setup.machine, setup.model)
    options = setup.step_options | {"reports": setup.takes_arrivals and setup.reports}
    replicas = [
        Replica(lambda: ENGINES[setup.engine](cost, **options), setup.load, setup.slow if number % 2 else 1.0)
        for number in range(setup.replicas)
    ]
    if setup.rate is not None:
        requests = [replace(request, arrival=i / setup.rate) for i, request in enumerate(requests)]
    come = any(request.arrival for request in requests)
    if come and not setup.takes_arrivals:
        message = f"{setup.feeder} needs all requests at the start, but these have arrival times"
        raise InputError(message, field="feeder", remedy="use stream or routed")
    feeder = FEEDERS[setup.feeder](setup, cost, requests, () if come else requests)
    return run_fleet(replicas, feeder, requests if come else ())


def _streamed(setup: Setup, cost: StepCost, requests: _Requests, initial: _Requests) -> StreamFeeder:
    return StreamFeeder(
        cost, count=len(requests), policy=policy_named(setup.policy), reports=setup.reports, requests=initial,
        reserves=ENGINES[setup.engine].reserves,
    )  # fmt: skip


def _routed(setup: Setup, cost: StepCost, requests: _Requests, initial: _Requests) -> RoutedFeeder:
    return RoutedFeeder(policy_named(setup.policy), cost, reports=setup.reports, requests=initial)


def _segments(setup: Setup, cost: StepCost, requests: _Requests, initial: _Requests) -> ListFeeder:
    in_order = sorted(requests, key=lambda request: request.path)
    return ListFeeder(contiguous(in_order, setup.replicas), in_flight=_in_flight(cost, requests), steal=setup.steal)


def _in_flight(cost: StepCost, requests: Sequence[SimRequest]) -> int:
    """Return the number of requests that keep a replica busy: as many as fit if they share half of their rows."""
    if not requests:
        return 2
    sample = requests[:: max(1, len(requests) // 1000)]
    rows = sum(request.rows / 2 + request.limit for request in sample) / len(sample)
    return max(2, int(1.25 * cost.kv_rows / rows))


# {name: function(setup, costs of a step, all requests, the requests from the start) -> Feeder}
FEEDERS: dict[str, Callable[..., Any]] = {"segments": _segments, "stream": _streamed, "routed": _routed}


_NAME = 48  # width of a system's name
# (name, width, function(outcome) -> text)
Column = tuple[str, int, Callable[[Any], str]]
COLUMNS: tuple[Column, ...] = (
    ("requests", 11, lambda o: f"{o.run.requests:,}"),
    ("tokens", 15, lambda o: f"{o.run.prompt_tokens + o.run.output_tokens:,}"),
    ("replicas", 9, lambda o: f"{o.run.replicas:,}"),
    ("seconds", 10, lambda o: f"{o.run.seconds:,.1f}"),
    ("$/Mtok", 9, lambda o: f"{o.run.dollars_per_million(o.setup.machine.dollars_per_hour):.4f}"),
    ("first", 7, lambda o: f"{o.run.hits.rates()['first_admission']:.1%}"),
    ("in-step", 8, lambda o: f"{o.run.hits.rates()['in_step']:.1%}"),
    ("use", 7, lambda o: f"{1 - o.run.idle_share():.1%}"),
    *((cause, 8, lambda o, cause=cause: f"{o.run.idle_share(cause):.1%}") for cause in IDLE_CAUSES),
)
LEGEND = """\
tokens: tokens of prompts and outputs. $/Mtok: dollars per million of these tokens.
first, in-step: share of prompt tokens that are cached when a request is admitted, and share that another request of the
  same step computes.
use: share of time in which the replicas work. Idle time: load, the model is being loaded; input, no request has
  arrived; border, the replica waits for other replicas; tail, after the last request was sent."""


def machine_line(outcome: Outcome) -> str:
    """Return a description of the model and the machine of an outcome."""
    machine, model = outcome.setup.machine, outcome.setup.model
    rates = f"{machine.flops / 1e12:,.3g} TFLOP/s, {machine.bandwidth / 1e9:,.4g} GB/s"
    overhead = f"{machine.overhead * 1e3:,.3g} ms overhead per step"
    return f"{model.name} on {machine.name}: {rates}, {overhead}, ${machine.dollars_per_hour:g} an hour"


def header(columns: Sequence[Column] = COLUMNS) -> str:
    """Return the head of the table."""
    return f"{'system':<{_NAME}}" + "".join(f"{name:>{width}}" for name, width, _ in columns)


def line(outcome: Outcome, columns: Sequence[Column] = COLUMNS) -> str:
    """Return a line of the table, followed by a line for each fact."""
    row = f"{outcome.name:<{_NAME}}" + "".join(f"{of(outcome):>{width}}" for _, width, of in columns)
    return "\n".join([row, *(f"    {fact:<40}{number:>14,.6g}" for fact, number in outcome.facts.items())])


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON values."""
    run, setup = outcome.run, outcome.setup
    waits = sorted(run.waits)
    return {
        "system": outcome.name,
        "machine": setup.machine.name,
        "model": setup.model.name,
        "replicas": run.replicas,
        "seconds": run.seconds,
        "dollars_per_million_tokens": run.dollars_per_million(setup.machine.dollars_per_hour),
        "requests": run.requests,
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        "prompt_rows_computed": run.hits.rows_computed,
        "steps": run.steps,
        "hits": run.hits.rates(),
        "use": 1 - run.idle_share(),
        "idle": {cause: run.idle_share(cause) for cause in IDLE_CAUSES},
        "seconds_to_answer": {f"p{p}": waits[int(p / 100 * (len(waits) - 1))] for p in (50, 95, 99)} if waits else {},
        **outcome.facts,
    }
