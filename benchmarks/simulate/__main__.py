"""Holds our fleet against other systems, in the simulator.

python -m benchmarks.simulate published                     the job of Daft's article, with the systems that it compares
python -m benchmarks.simulate ablation --outputs TRACE      our rule beside the others on several sets
python -m benchmarks.simulate internet                      ten million prompts on a thousand replicas
python -m benchmarks.simulate others --engine vllm --feeder batches      prompts that repeat prefixes, on any parts
python -m benchmarks.simulate steps -o steps.jsonl          the steps of this machine
python -m benchmarks.simulate machine steps.jsonl -o mine.json      a machine that explains them
python -m benchmarks.simulate router                        how fast the router is
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from prefold.simulate import cases

from prefold.cluster.router import POLICIES

from ..common import write_json
from . import measure, others  # noqa: F401  # the tables have other systems' parts too
from .ablation import ablation
from .cases import ENGINES, FEEDERS, Outcome, Setup, run_setup
from .costs import machine_named, model_named
from .internet import internet
from .plot import plot
from .published import PublishedOutcome, published
from .requests import prefix_repetition, read_trace


def _expected(outcome: Outcome, place: int, form: str) -> str:
    value = (outcome.expected or (None, None))[place] if isinstance(outcome, PublishedOutcome) else None
    return "" if value is None else format(value, form)


def _rate(outcome: Outcome, name: str) -> str:
    rates = outcome.run.hits.rates()
    return f"{rates[name]:.1%}" if name in rates else ""


_BEHIND = {
    "seconds": [("published", 10, lambda o: _expected(o, 0, ",.0f"))],
    "in-step": [
        ("again", 7, lambda o: _rate(o, "recompute")),
        ("vLLM", 7, lambda o: _rate(o, "vllm")),
        ("published", 10, lambda o: _expected(o, 1, ".1%")),
    ],
}
COLUMNS = [other for column in cases.COLUMNS for other in (column, *_BEHIND.get(column[0], ()))]


def _outcomes(o: argparse.Namespace) -> Iterator[Outcome]:
    """Yields the outcomes of a case."""
    if o.case == "published":
        yield from published(scale=o.scale)
        return
    count = o.replicas or (1024 if o.case == "internet" else 8)
    setup = Setup(machine_named(o.machine), model_named(o.model), replicas=count, load=o.load)
    if o.case == "internet":
        yield from internet(setup, prompts=o.prompts or 10_000_000)
    elif o.case == "ablation":
        lengths = [request.output for request in read_trace(o.outputs)] if o.outputs else ()
        yield from ablation(setup, outputs=lengths, prompts=o.prompts or 8192)
    else:
        requests = prefix_repetition(o.prompts or 10_000, prefixes=o.prefixes, prefix=256, suffix=256, output=128)
        for engine, feeder, policy in product(o.engine, o.feeder, o.policy):
            one = Setup(
                setup.machine, setup.model, replicas=count, load=o.load, engine=engine, feeder=feeder, policy=policy
            )
            yield Outcome(one.name, one, run_setup(one, requests))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = parser.add_subparsers(dest="case", required=True)
    for name in ("published", "ablation", "internet", "others"):
        case = cases.add_parser(name)
        case.add_argument("--json", help="write the outcomes to this file")
        case.add_argument("--plot", help="a picture of them, .svg, .png or .pdf; needs matplotlib")
        if name == "published":
            case.add_argument("--scale", type=int, default=1, help="so many times smaller")
            continue
        case.add_argument("--machine", default="L4")
        case.add_argument("--model", default="Qwen3-8B")
        case.add_argument("--replicas", type=int)
        case.add_argument("--prompts", type=int)
        case.add_argument("--load", type=float, default=0.0, help="seconds until a model is there")
        if name == "ablation":
            case.add_argument("--outputs", help="a trace, whose lengths of outputs are drawn from")
        if name == "others":
            case.add_argument("--prefixes", type=int, default=64)
            for option, names in (("engine", ENGINES), ("feeder", FEEDERS), ("policy", POLICIES)):
                case.add_argument(f"--{option}", nargs="+", choices=[*names], default=[next(iter(names))])
    case = cases.add_parser("steps")
    case.add_argument("-o", "--out", type=Path, default=Path("steps.jsonl"))
    case.add_argument("--model", default="smollm2-135m")
    case.add_argument("--prompts", type=int, default=64)
    case = cases.add_parser("machine")
    case.add_argument("steps", type=Path)
    case.add_argument("-o", "--out", type=Path, default=Path("machine.json"))
    case.add_argument("--like", default="cpu2", help="the machine of costs.json that it is like")
    case.add_argument("--model", default="SmolLM2-135M", help="the model that was measured")
    case = cases.add_parser("router")
    case.add_argument("--prefixes", type=int, default=1_000_000)
    case.add_argument("--replicas", type=int, default=128)
    case.add_argument("--json", help="write the rates to this file")
    o = parser.parse_args(arguments)
    if o.case == "steps":
        measure.steps(o.out, o.model, o.prompts)
    elif o.case == "machine":
        measure.machine(o.steps, o.out, like=o.like, model=o.model)
    elif o.case == "router":
        write_json(o.json, benchmark="simulate", case="router", rates=measure.router(o.prefixes, o.replicas))
    else:
        _show(o)


def _show(o: argparse.Namespace) -> None:
    """Prints the outcomes of a case, each as it is done."""
    outcomes, found = [], []
    for outcome in _outcomes(o):
        if not outcomes:
            print(f"{cases.machine_line(outcome)}\n\n{cases.header(COLUMNS)}")
        outcomes.append(outcome)
        expected = getattr(outcome, "expected", None)
        beside = {} if expected is None else {"published_seconds": expected[0]}
        found.append(cases.as_json(outcome) | beside)
        print(cases.line(outcome, COLUMNS), flush=True)
    print(f"\n{cases.LEGEND}\nagain: there after a preemption. vLLM: the hit rate that vLLM would print.")
    write_json(o.json, benchmark="simulate", case=o.case, outcomes=found)
    if o.plot:
        plot(outcomes, o.plot)


if __name__ == "__main__":
    main()
