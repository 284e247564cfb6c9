"""Runs `prefold simulate`, which says what a fleet would do without having one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import click
from click.core import ParameterSource

from ..files import read_text
from .options import number


@click.command(short_help="What a fleet would take: seconds, cost, idle time.")
@click.argument("what", metavar="repetition|TRACE")
@click.option("-m", "--model", default="Qwen3-8B", show_default=True, metavar="NAME", help="One of costs.json.")
@click.option("--machine", default="L4", show_default=True, metavar="NAME", help="One of costs.json, or a file.")
@click.option("--replicas", multiple=True, type=click.IntRange(1), metavar="N", help="Repeated: scaling.  [default: 8]")
@click.option("--feeder", multiple=True, metavar="NAME", help="Who gives work; see below.")
@click.option("--policy", multiple=True, metavar="NAME", help="Of stream and routed; see below.  [default: prefix]")
@click.option("--load", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Until a model is there.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), metavar="N", help="Records a second that come in.")
@number("--prompts", "Repetition.", 10_000)
@number("--prefixes", "Repetition.", 64)
@number("--prefix", "Repetition.", 256, metavar="TOKENS")
@number("--suffix", "Repetition.", 256, metavar="TOKENS")
@number("--output", "Repetition.", 128, metavar="TOKENS")
@click.option("--skew", type=click.FloatRange(0), default=0.0, metavar="X", help="Prefix i comes as 1 / i ** X.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the order of the prompts.")
@number("--limit", "The first N requests of a trace.")
@number("--max-batch-rows", "Rows of a step.  [default: what is found to be fast, at most 8,192]")
@click.option("--write-job", metavar="FILE", help="Write the requests as a job that `prefold run` takes.")
@click.option("--json", "as_json", is_flag=True, help="The outcomes as JSON lines.")
def simulate(**o: Any) -> None:
    """Say how long a fleet would take, what it would cost, and where its time would go; compute nothing.

    Discrete events around the window, the router and the cache that a real fleet runs, with the rules of its
    scheduler; a step takes what a roofline of its rows says. `repetition` is a set of prompts that repeat prefixes, and
    a TRACE a file of Mooncake's or Azure's requests.

    \b
    --feeder  segments     all is known, sorted and cut into a segment for each replica, with stealing
              stream       the live window: requests leave in buckets as replicas have room (the default)
              routed       each request is routed as it comes (the default of a trace)
    --policy  prefix, round-robin, least-loaded
    --replicas, --feeder and --policy may be repeated.

    \b
    prefold simulate repetition --prefixes 512 --replicas 8 --replicas 32 --feeder segments --feeder stream
    prefold simulate conversation_trace.jsonl --machine H100 --replicas 16 --policy prefix --policy round-robin
    """
    from ..simulate import cases

    _check_given(o["what"])
    is_first = True
    for outcome in _outcomes(o):
        if o["as_json"]:
            click.echo(json.dumps(cases.as_json(outcome)))
            continue
        if is_first:
            click.echo(f"{cases.machine_line(outcome)} (--model and --machine name others)\n\n{cases.header()}")
            is_first = False
        click.echo(cases.line(outcome))
    if not o["as_json"]:
        click.echo("\n" + cases.LEGEND)


_SET = frozenset(("prompts", "prefixes", "prefix", "suffix", "output", "skew", "seed"))


def _check_given(mode: str) -> None:
    """Raises UsageError for an option that was given and that does not go with the requests: the numbers would not be
    those that were asked for."""
    context = click.get_current_context()
    owner, others = ("`simulate repetition`", {"limit"}) if mode == "repetition" else ("a trace", _SET)
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in others and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[-1]} is no option of {owner}; leave it out")


def _outcomes(o: dict[str, Any]) -> Iterator[Any]:
    """Yields the outcome of each combination of the options that may be repeated."""
    from ..simulate.cases import Outcome, Setup, run_setup
    from ..simulate.costs import model_named

    machine, model, requests = _machine(o["machine"]), model_named(o["model"]), _requests(o)
    if o["write_job"]:
        _write_job(requests, o["write_job"], model.vocab)
    feeders = o["feeder"] or (("routed",) if any(request.arrival for request in requests) else ("stream",))
    for feeder, policy, replicas in product(feeders, o["policy"] or ("prefix",), o["replicas"] or (8,)):
        setup = Setup(
            machine, model, replicas=replicas, feeder=feeder, policy=policy, load=o["load"], rate=o["rate"],
            max_batch_rows=o["max_batch_rows"],
        )  # fmt: skip
        yield Outcome(setup.name, setup, run_setup(setup, requests))


def _machine(name: str) -> Any:
    from ..errors import InputError
    from ..simulate.costs import Machine, machine_named

    if not name.endswith(".json"):
        return machine_named(name)
    try:
        return Machine(**json.loads(read_text(name)))
    except (ValueError, TypeError) as error:
        remedy = "give name, flops, bandwidth, memory, overhead and dollars_per_hour"
        raise InputError(f"{name} is no machine: {error}", field="machine", remedy=remedy) from None


def _requests(o: dict[str, Any]) -> Any:
    from ..simulate.requests import prefix_repetition, read_trace

    if o["what"] != "repetition":
        return read_trace(o["what"], limit=o["limit"])
    sizes = {name: o[name] for name in ("prefixes", "prefix", "suffix", "output", "seed", "skew")}
    return prefix_repetition(o["prompts"], **sizes)


def _write_job(requests: Any, path: str, vocab: int) -> None:
    """Writes OpenAI batch lines whose prompts are token ids that share what the requests share."""
    with open(path, "w") as file:
        for request in requests:
            body = {"prompt": request.drawn_tokens(vocab).tolist(), "max_tokens": request.output, "ignore_eos": True}
            record = {"custom_id": str(request.key), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(record) + "\n")
