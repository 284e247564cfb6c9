"""Holds our rule against the others: on sets of prompts that differ in what they share and in how long outputs are, on
replicas of different speeds, and with prefixes that come back, on as many caches as hold them and on fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from prefold.cluster.router import POLICIES
from prefold.simulate.cases import Outcome, Setup, run_setup
from prefold.simulate.requests import SimRequest, prefix_repetition

from . import others  # noqa: F401  # their parts are put into the tables

__all__ = ["ablation"]

_COUNT = 8192  # prompts of a set
_BACK = (1500, 2048, 20_000)  # prefixes that come back, tokens of each, prompts
_MEDIAN, _MEAN = 129, 211  # tokens of an output, in the conversations of Azure (Patel et al. 2024, Splitwise)


def ablation(setup: Setup, *, outputs: Sequence[int] = (), prompts: int = _COUNT) -> Iterator[Outcome]:
    """Yields, for each set, what our rule takes, and what each of the others takes, each as it is done.

    setup    machine, model, replicas and so on; its feeder and policy are ours
    outputs  lengths of outputs to draw from; none: a distribution with Azure's mean and median
    """
    for name, requests, slow in _sets(prompts, outputs):
        base = replace(setup, slow=slow)
        best: tuple[float, str] = (math.inf, "")
        for policy in POLICIES:
            for feeder in ("stream", "routed"):
                if (policy, feeder) == ("prefix", "stream"):
                    continue
                one = replace(base, feeder=feeder, policy=policy)
                run = run_setup(one, requests)
                if policy != "prefix":
                    best = min(best, (run.seconds, f"{policy}, {feeder}"))
                yield Outcome(f"{name}: {policy}, {feeder}", one, run)
        ours = replace(base, feeder="stream", policy="prefix")
        run = run_setup(ours, requests)
        facts = {f"times the seconds of {best[1]}": run.seconds / best[0]}
        yield Outcome(f"{name}: ours", ours, run, facts=facts)
    count, rows, times = _BACK
    back = prefix_repetition(times, prefixes=count, prefix=rows, suffix=64, output=16)
    seconds = {}
    for replicas in (32, 128):
        one = replace(setup, feeder="routed", policy="prefix", replicas=replicas)
        run = run_setup(one, back)
        seconds[replicas] = run.seconds
        facts = {"times as fast as 32": seconds[32] / run.seconds} if replicas == 128 else {}
        yield Outcome("prefixes that come back", one, run, facts=facts)


def _sets(count: int, outputs: Sequence[int]) -> Iterator[tuple[str, list[SimRequest], float]]:
    sizes = {"prefix": 512, "suffix": 64, "output": 32}
    for prefixes in (8, 64, 512, 4096):
        yield f"{prefixes} prefixes", prefix_repetition(count, prefixes=prefixes, **sizes), 1.0
    yield "skewed", prefix_repetition(count, prefixes=512, skew=1.2, **sizes), 1.0
    yield "nested", _nested(count), 1.0
    rng = np.random.default_rng(1)
    drawn = _outputs(rng, count) if not len(outputs) else rng.choice(np.array(outputs), count)
    limit = int(drawn.max())
    some = prefix_repetition(count, prefixes=64, **sizes)
    yield "Azure's outputs", [replace(r, output=int(n), limit=limit) for r, n in zip(some, drawn, strict=True)], 1.0
    yield "half at half speed", prefix_repetition(count, prefixes=64, **sizes), 2.0


def _outputs(rng: np.random.Generator, count: int) -> np.ndarray:
    sigma = math.sqrt(2 * math.log(_MEAN / _MEDIAN))
    return np.clip(rng.lognormal(math.log(_MEDIAN), sigma, count), 1, 1000).astype(int)


def _nested(count: int) -> list[SimRequest]:
    """Returns prompts of a system prompt of 8, examples of 16 for each, a document of 8 for each, and a question."""
    rng = np.random.default_rng(2)
    found = []
    for key in range(count):
        system, shot, document = (int(n) for n in rng.integers(0, (8, 16, 8)))
        shots = 8 + system * 16 + shot
        path = ((system, 128), (shots, 256), (1000 + shots * 8 + document, 256), (100_000 + key, 48))
        found.append(SimRequest(key, path, 32, 32))
    return found
