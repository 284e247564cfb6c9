"""Runs `prefold simulate`, which says what a fleet would do without having one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

__all__ = ["simulate"]


@click.command(short_help="What a fleet would take: seconds, cost, idle time.")
@click.argument("what", metavar="repetition|published|ablation|internet|TRACE")
@click.option("-m", "--model", default="Qwen3-8B", show_default=True, metavar="NAME", help="One of costs.json.")
@click.option("--machine", default="L4", show_default=True, metavar="NAME", help="One of costs.json, or a file.")
@click.option("--replicas", multiple=True, type=click.IntRange(1), metavar="N", help="Repeated: scaling.  [default: 8]")
@click.option("--engine", multiple=True, metavar="NAME", help="prefold, prefold-steps, vllm.  [default: prefold]")
@click.option("--feeder", multiple=True, metavar="NAME", help="Who gives work; see below.")
@click.option("--policy", multiple=True, metavar="NAME", help="Of stream and routed; see below.  [default: prefix]")
@click.option("--load", type=click.FloatRange(0), default=0.0, metavar="SECONDS", help="Until a model is there.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), metavar="N", help="Records a second that come in.")
@click.option(
    "--prompts",
    type=click.IntRange(1),
    metavar="N",
    help="Of a set.  [default: 10,000; ablation 8,192; internet 10,000,000]",
)
@click.option("--prefixes", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Repetition.")
@click.option("--prefix", type=click.IntRange(1), default=256, show_default=True, metavar="TOKENS", help="Repetition.")
@click.option("--suffix", type=click.IntRange(1), default=256, show_default=True, metavar="TOKENS", help="Repetition.")
@click.option("--output", type=click.IntRange(1), default=128, show_default=True, metavar="TOKENS", help="Repetition.")
@click.option("--skew", type=click.FloatRange(0), default=0.0, metavar="X", help="Prefix i comes as 1 / i ** X.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the order of the prompts.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="The first N requests of a trace.")
@click.option("--scale", type=click.IntRange(1), default=1, metavar="N", help="Published: so many times smaller.")
@click.option("--outputs", metavar="TRACE", help="Ablation: a trace, whose lengths of outputs are drawn from.")
@click.option(
    "--max-batch-rows",
    type=click.IntRange(1),
    metavar="N",
    help="Rows of a step.  [default: what is found to be fast, at most 8,192]",
)
@click.option("--calibrate", metavar="FILE", help="Fit the machine to measured steps, which are JSON lines.")
@click.option("--write-machine", metavar="FILE", help="Write the machine, to be given as --machine.")
@click.option("--write-job", metavar="FILE", help="Write the requests as a job that `prefold run` takes.")
@click.option("--json", "as_json", is_flag=True, help="The outcomes as JSON lines.")
@click.option("--plot", metavar="FILE", help="Use over time and scaling, as .svg, .png or .pdf; needs prefold[plot].")
def simulate(**o: Any) -> None:
    """Say how long a fleet would take, what it would cost, and where its time would go; compute nothing.

    Discrete events around the window, the router, the scheduler and the cache that a real fleet runs; a step takes
    what a roofline of its rows says. `repetition` is a set of prompts that repeat prefixes, `published` the job of
    Daft's article with the systems that it compares, `ablation` our rule beside the others on several sets, `internet`
    ten million prompts on a thousand replicas, and a TRACE a file of Mooncake's or Azure's requests.

    \b
    --feeder  segments     all is known, sorted and cut into a segment for each replica, with stealing
              stream       the live window: requests leave in buckets as replicas have room (the default)
              routed       each request is routed as it comes (the default of a trace)
              static       equal parts, as they come
              batches      of 512, one after the other
              bucketing    as Daft's provider
    --policy  prefix, round-robin, least-loaded, daft, sglang, preble
    --calibrate takes lines with prefill, decode, keys, pairs, reads and seconds; --engine prefold-steps runs
    every step of the real scheduler. --replicas, --engine, --feeder and --policy may be repeated.

    \b
    prefold simulate repetition --prefixes 512 --replicas 8 --replicas 32 --feeder segments --feeder stream
    prefold simulate conversation_trace.jsonl --machine H100 --replicas 16 --policy prefix --policy round-robin
    prefold simulate published --scale 8
    """
    from ..simulate import show

    _check_given(o["what"], o["replicas"])
    outcomes = _CASES.get(o["what"], _own)(o)
    found, is_published = [], o["what"] == "published"
    for outcome in outcomes:
        if not found and not o["as_json"]:
            others = "" if is_published else " (--model and --machine name others)"
            click.echo(f"{show.machine_line(outcome)}{others}\n\n{show.header(published=is_published)}")
        found.append(outcome)
        line = json.dumps(show.as_json(outcome)) if o["as_json"] else show.line(outcome, published=is_published)
        click.echo(line)
    if not o["as_json"]:
        click.echo("\n" + show.LEGEND)
    if o["plot"]:
        show.plot(found, o["plot"])


_SHOWN = frozenset(("what", "as_json", "plot"))
_FLEET = frozenset(("model", "machine", "replicas", "load", "max_batch_rows", "calibrate", "write_machine"))
_OWN = _FLEET | {"engine", "feeder", "policy", "rate", "write_job"}
_SET = ("prompts", "prefixes", "prefix", "suffix", "output", "skew", "seed")
# The options that each case takes. A name that is none of these is a trace.
_TAKES = {
    "published": _SHOWN | {"scale"},
    "ablation": _SHOWN | _FLEET | {"prompts", "outputs"},
    "internet": _SHOWN | _FLEET | {"prompts", "seed"},
    "repetition": _SHOWN | _OWN | {*_SET},
}
_TRACE = _SHOWN | _OWN | {"limit"}


def _check_given(what: str, replicas: tuple[int, ...]) -> None:
    """Raises UsageError for an option that was given and that a case does not take: its numbers would not be those
    that were asked for."""
    context, takes = click.get_current_context(), _TAKES.get(what, _TRACE)
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in takes and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            whose = f"`simulate {what}`" if what in _TAKES else "a trace"
            raise click.UsageError(f"{parameter.opts[-1]} is no option of {whose}; leave it out")
    if len(replicas) > 1 and what in ("ablation", "internet"):
        raise click.UsageError(f"`simulate {what}` takes --replicas once; run it again for another number")


def _published(o: dict[str, Any]) -> Any:
    from ..simulate.published import published

    return published(scale=o["scale"])


def _setup(o: dict[str, Any], replicas: int) -> Any:
    """Returns a setup of the machine and the model that were asked for."""
    from ..simulate.cases import Setup
    from ..simulate.costs import model_named

    model = model_named(o["model"])
    count = o["replicas"][0] if o["replicas"] else replicas
    return Setup(_machine(o, model), model, replicas=count, load=o["load"], max_batch_rows=o["max_batch_rows"])


def _ablation(o: dict[str, Any]) -> Any:
    from ..simulate.ablation import ablation
    from ..simulate.requests import read_trace

    outputs = [request.output for request in read_trace(o["outputs"])] if o["outputs"] else ()
    given = {} if o["prompts"] is None else {"prompts": o["prompts"]}
    return ablation(_setup(o, 8), outputs=outputs, **given)


def _internet(o: dict[str, Any]) -> Any:
    from ..simulate.internet import internet

    given = {} if o["prompts"] is None else {"prompts": o["prompts"]}
    return internet(_setup(o, 1024), seed=o["seed"], **given)


_CASES = {"published": _published, "ablation": _ablation, "internet": _internet}


def _own(o: dict[str, Any]) -> Any:
    """Yields the outcome of each combination of what was asked for."""
    from ..simulate.cases import Outcome, Setup, run_setup
    from ..simulate.costs import model_named

    model = model_named(o["model"])
    machine = _machine(o, model)
    requests = _requests(o)
    if o["write_job"]:
        _write_job(requests, o["write_job"], model.vocab)
    feeders = o["feeder"] or (("routed",) if any(request.arrival for request in requests) else ("stream",))
    for engine, feeder, policy, replicas in product(
        o["engine"] or ("prefold",), feeders, o["policy"] or ("prefix",), o["replicas"] or (8,)
    ):
        setup = Setup(
            machine, model, replicas=replicas, engine=engine, feeder=feeder, policy=policy, load=o["load"],
            rate=o["rate"], max_batch_rows=o["max_batch_rows"],
        )  # fmt: skip
        yield Outcome(setup.name, setup, run_setup(setup, requests))


def _machine(o: dict[str, Any], model: Any) -> Any:
    from ..errors import InputError
    from ..simulate.costs import Machine, StepRows, fit, machine_named

    name = o["machine"]
    if name.endswith(".json"):
        try:
            machine = Machine(**json.loads(Path(name).read_text()))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{name} is no machine: {error}", field="machine", remedy="write one with --write-machine"
            ) from None
    else:
        machine = machine_named(name)
    if o["calibrate"]:
        steps = []
        for number, text in enumerate(Path(o["calibrate"]).read_text().splitlines(), 1):
            try:
                step = json.loads(text)
                seconds = float(step.pop("seconds"))
                steps.append((StepRows(**step), seconds))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                message = f"line {number} of {o['calibrate']} is no measured step: {error!r}"
                remedy = "give prefill, decode, keys, pairs, reads and seconds"
                raise InputError(message, field="calibrate", remedy=remedy) from None
        machine = replace(fit(machine, model, steps), name=f"{machine.name}, calibrated")
        click.echo(
            f"{machine.flops / 1e12:,.3g} TFLOP/s, {machine.bandwidth / 1e9:,.4g} GB/s, "
            f"{machine.overhead * 1e3:,.3g} ms a step, by {len(steps)} steps",
            err=True,
        )
    if o["write_machine"]:
        Path(o["write_machine"]).write_text(json.dumps(asdict(machine)) + "\n")
    return machine


def _requests(o: dict[str, Any]) -> Any:
    from ..simulate.requests import prefix_repetition, read_trace

    if o["what"] != "repetition":
        return read_trace(o["what"], limit=o["limit"])
    sizes = {name: o[name] for name in ("prefixes", "prefix", "suffix", "output", "seed", "skew")}
    return prefix_repetition(o["prompts"] or 10_000, **sizes)


def _write_job(requests: Any, path: str, vocab: int) -> None:
    """Writes OpenAI batch lines whose prompts are token ids that share what the requests share."""
    with open(path, "w") as file:
        for request in requests:
            body = {"prompt": request.drawn_tokens(vocab).tolist(), "max_tokens": request.output, "ignore_eos": True}
            record = {"custom_id": str(request.key), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(record) + "\n")
