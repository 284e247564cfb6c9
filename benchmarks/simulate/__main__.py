"""Simulate a fleet: its time, its cost, and the causes of idle time. No model runs.

    python -m benchmarks.simulate published --json FILE
    python -m benchmarks.simulate repetition --prefixes 512 --replicas 8 --replicas 32 --feeder segments --feeder stream
    python -m benchmarks.simulate conversation_trace.jsonl --machine H100 --replicas 16 --policy prefix

The simulator runs discrete events. It uses the window, the router and the cache of a real fleet, and the rules of its
scheduler. A roofline model computes the time of a step from its rows.

published    the job of Daft's article on dynamic prefix bucketing, with the article's systems and with prefold
repetition   prompts with repeated prefixes
TRACE        a file of requests in Mooncake's or Azure's format

--feeder  segments     all requests are known; they are sorted and cut into one segment per replica, with stealing
          stream       the live window: requests are sent in buckets when replicas have free slots (default)
          routed       each request is routed when it arrives (default for a trace)
--policy  prefix, round-robin, least-loaded
--engine  prefold        the scheduler's rules on parts of prompts
          prefold-steps  the real scheduler and cache, step by step
          vllm           a block scheduler like vLLM's V1

--replicas, --feeder, --policy and --engine may be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource

from prefold.errors import InputError

from ..harness import benchmark
from . import cases
from .cases import Outcome, Setup, run_setup
from .costs import Machine, machine_named, model_named
from .published import published, tables
from .requests import SimRequest, prefix_repetition, read_trace

_SIZES = ("prefixes", "prefix", "suffix", "output", "seed", "skew")
# options that only one case accepts
_OF_REPETITION, _OF_TRACE, _OF_PUBLISHED = {"prompts", *_SIZES}, {"limit"}, {"scale"}
_COUNT = click.IntRange(1)


@benchmark(limits=False, called="simulate")
@click.argument("what", metavar="published|repetition|TRACE")
@click.option("-m", "--model", default="Qwen3-8B", show_default=True, help="Model in costs.json.")
@click.option("--machine", default="L4", show_default=True, help="Machine in costs.json, or a JSON file.")
@click.option("--replicas", multiple=True, type=_COUNT, default=(8,), show_default=True, help="Number of replicas.")
@click.option("--feeder", multiple=True, help="Way of giving work to replicas; see above.")
@click.option(
    "--policy", multiple=True, default=("prefix",), show_default=True, help="Routing policy of stream and routed."
)
@click.option("--engine", multiple=True, default=("prefold",), show_default=True, help="Engine of a replica.")
@click.option("--load", type=click.FloatRange(0), default=0.0, help="Seconds until a model is loaded.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Arrivals per second.")
@click.option("--prompts", type=_COUNT, default=10_000, show_default=True, help="repetition: number of prompts.")
@click.option("--prefixes", type=_COUNT, default=64, show_default=True, help="repetition: number of prefixes.")
@click.option("--prefix", type=_COUNT, default=256, show_default=True, help="repetition: tokens of a prefix.")
@click.option(
    "--suffix", type=_COUNT, default=256, show_default=True, help="repetition: tokens of a prompt after its prefix."
)
@click.option("--output", type=_COUNT, default=128, show_default=True, help="repetition: tokens of an output.")
@click.option(
    "--skew",
    type=click.FloatRange(0),
    default=0.0,
    help="repetition: frequency of prefix i is proportional to 1 / i ** SKEW.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="repetition: seed for shuffling prompts.")
@click.option("--limit", type=_COUNT, help="TRACE: read only the first N requests.")
@click.option("--scale", type=_COUNT, default=1, show_default=True, help="published: divide the job by N.")
@click.option("--max-batch-rows", type=_COUNT, help="Rows of a step (default: found by the engine, at most 8,192).")
@click.option("--write-job", metavar="FILE", help="Write the requests as a job for `prefold run`.")
def main(o: SimpleNamespace) -> dict[str, Any]:
    _check_given(o.what)
    outcomes: list[Outcome] = []
    for outcome in published(scale=o.scale) if o.what == "published" else _outcomes(o):
        if not outcomes:
            print(f"{cases.machine_line(outcome)} (--model and --machine name others)\n\n{cases.header()}")
        outcomes.append(outcome)
        print(cases.line(outcome), flush=True)
    print("\n" + cases.LEGEND)
    found = {"case": o.what, "outcomes": [cases.as_json(outcome) for outcome in outcomes]}
    if o.what != "published":
        return found
    shown = tables(outcomes)
    print("\n" + "\n\n".join(shown.values()))
    return found | {"tables": shown}


def _check_given(what: str) -> None:
    """Raise UsageError for an option that the case does not accept."""
    context = click.get_current_context()
    given = {
        parameter.name: parameter.opts[-1]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    }
    if what == "published":
        wrong, owner = set(given) - {"what", "scale", "json"}, "`published`"
    elif what == "repetition":
        wrong, owner = set(given) & (_OF_TRACE | _OF_PUBLISHED), "`repetition`"
    else:
        wrong, owner = set(given) & (_OF_REPETITION | _OF_PUBLISHED), "a trace"
    if wrong:
        raise click.UsageError(f"{given[min(wrong)]} is not an option of {owner}; leave it out")


def _outcomes(o: SimpleNamespace) -> Iterator[Outcome]:
    """Yield the outcome of each combination of the repeatable options."""
    machine, model, requests = _machine(o.machine), model_named(o.model), _requests(o)
    if o.write_job:
        _write_job(requests, o.write_job, model.vocab)
    feeders = o.feeder or (("routed",) if any(request.arrival for request in requests) else ("stream",))
    for engine, feeder, policy, replicas in product(o.engine, feeders, o.policy, o.replicas):
        setup = Setup(
            machine, model, replicas=replicas, engine=engine, feeder=feeder, policy=policy, load=o.load, rate=o.rate,
            max_batch_rows=o.max_batch_rows,
        )  # fmt: skip
        yield Outcome(setup.name, setup, run_setup(setup, requests))


def _machine(name: str) -> Machine:
    if not name.endswith(".json"):
        return machine_named(name)
    try:
        return Machine(**json.loads(Path(name).read_text()))
    except (ValueError, TypeError) as error:
        remedy = "give name, flops, bandwidth, memory, overhead and dollars_per_hour"
        raise InputError(f"{name} does not describe a machine: {error}", field="machine", remedy=remedy) from None


def _requests(o: SimpleNamespace) -> list[SimRequest]:
    if o.what != "repetition":
        return read_trace(o.what, limit=o.limit)
    return prefix_repetition(o.prompts, **{name: getattr(o, name) for name in _SIZES})


def _write_job(requests: Sequence[SimRequest], path: str, vocab: int) -> None:
    """Write the requests as OpenAI batch lines. Prompts are token ids that share the same prefixes."""
    with open(path, "w") as file:
        for request in requests:
            body = {"prompt": request.drawn_tokens(vocab).tolist(), "max_tokens": request.output, "ignore_eos": True}
            record = {"custom_id": str(request.key), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
