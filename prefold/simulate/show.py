"""Tables of simulated runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .cases import Outcome
from .fleet import IDLE_CAUSES

_NAME = 48  # width of a system's name
# (name, width, what stands there of an outcome)
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
tokens: of prompts and outputs. $/Mtok: dollars for a million of them.
first, in-step: part of the prompts' tokens that is there at a request's admission, and that another request of the same
  step computes.
use: part of the replicas' time at work. Idle: load, until the model is there; input, none has come; border, waiting for
  other replicas; tail, when all is given out. docs/simulate.md says more."""


def machine_line(outcome: Outcome) -> str:
    """Returns what is simulated on what, in words."""
    machine, model = outcome.setup.machine, outcome.setup.model
    rates = f"{machine.flops / 1e12:,.3g} TFLOP/s, {machine.bandwidth / 1e9:,.4g} GB/s"
    overhead = f"{machine.overhead * 1e3:,.3g} ms beside each step"
    return f"{model.name} on {machine.name}: {rates}, {overhead}, ${machine.dollars_per_hour:g} an hour"


def header(columns: Sequence[Column] = COLUMNS) -> str:
    """Returns the head of the table."""
    return f"{'system':<{_NAME}}" + "".join(f"{name:>{width}}" for name, width, _ in columns)


def line(outcome: Outcome, columns: Sequence[Column] = COLUMNS) -> str:
    """Returns one line of the table, and below it one for each further fact."""
    row = f"{outcome.name:<{_NAME}}" + "".join(f"{of(outcome):>{width}}" for _, width, of in columns)
    return "\n".join([row, *(f"    {what:<40}{number:>14,.6g}" for what, number in outcome.facts.items())])


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome as plain values."""
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
        "prompt_rows_computed": run.hits.computed,
        "steps": run.steps,
        "hits": run.hits.rates(),
        "use": 1 - run.idle_share(),
        "idle": {cause: run.idle_share(cause) for cause in IDLE_CAUSES},
        "seconds_to_answer": {f"p{p}": waits[int(p / 100 * (len(waits) - 1))] for p in (50, 95, 99)} if waits else {},
        "use_over_time": run.use,
        **outcome.facts,
    }
