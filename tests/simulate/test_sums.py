"""The simulator's sums by hand: costs of steps, prices, idle causes, tables, and what sets of requests are like."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from prefold.simulate.ablation import _nested, _outputs
from prefold.simulate.cases import Outcome, Setup, run_setup
from prefold.simulate.costs import StepCost, StepRows, machine_named, model_named
from prefold.simulate.engines import Hits
from prefold.simulate.feeders import SharedQueue, contiguous
from prefold.simulate.fleet import FleetOutcome
from prefold.simulate.internet import draw_prompts
from prefold.simulate.published import _ray_data, _sorted
from prefold.simulate.requests import prefix_repetition, shared_rows
from prefold.simulate.show import as_json, header, line

MACHINE, MODEL = machine_named("L4"), model_named("Qwen3-8B")
COST = StepCost(MACHINE, MODEL)


def test_a_step_costs_what_its_parts_cost():
    few, many = COST.seconds(StepRows(100, 5, 0, 0, 5)), COST.seconds(StepRows(4000, 5, 0, 0, 5))
    weights = 2 * (MODEL.linear + MODEL.vocab * MODEL.hidden)
    assert few == pytest.approx(MACHINE.overhead + weights / MACHINE.bandwidth)
    products = 2 * (MODEL.linear * 4005 + MODEL.vocab * MODEL.hidden * 5)
    assert many == pytest.approx(MACHINE.overhead + products / MACHINE.flops)
    keys = COST.seconds(StepRows(100, 5, 70_000, 0, 5)) - few
    assert keys == pytest.approx(70_000 * 2 * 36 * 8 * 128 * 2 / MACHINE.bandwidth)
    pairs = COST.seconds(StepRows(100, 5, 0, 10**7, 5)) - few
    assert pairs == pytest.approx(10**7 * 4 * 36 * 32 * 128 / MACHINE.flops)
    assert COST.decode_seconds(64) == pytest.approx(COST.seconds(StepRows(0, 64, 0, 0, 64)) / 64)


def run_of() -> FleetOutcome:
    hits = Hits(
        asked=1000, first_admission=400, in_step=100, recompute=50, tier=20, computed=480, queries=1500, found=600
    )
    run = FleetOutcome(4, seconds=50.0, requests=4, prompt_tokens=1000, output_tokens=3000, busy=120.0, hits=hits)
    run.idle |= {"load": 40.0, "input": 20.0, "border": 14.0, "tail": 6.0}
    run.waits.extend([30.0, 10.0, 40.0, 20.0])
    return run


def test_the_table_shows_each_number_in_its_column():
    outcome = Outcome(
        "one", Setup(replace(MACHINE, dollars_per_hour=1.8), MODEL), run_of(), (48.0, 0.5), {"a fact": 7.0}
    )
    shown, fact = line(outcome, published=True).splitlines()
    names, cells = header(published=True).split()[1:], shown.split()[1:]
    every = list(zip(names, cells, strict=True))
    assert every == [
        ("requests", "4"), ("tokens", "4,000"),
        ("replicas", "4"), ("seconds", "50.0"), ("published", "48"), ("$/Mtok", "25.0000"), ("first", "40.0%"),
        ("in-step", "10.0%"), ("again", "5.0%"), ("vLLM", "40.0%"), ("published", "50.0%"),
        ("use", "60.0%"), ("load", "20.0%"), ("input", "10.0%"), ("border", "7.0%"), ("tail", "3.0%"),
    ]  # fmt: skip
    assert fact.split() == ["a", "fact", "7"]
    plain = zip(header().split()[1:], line(outcome).splitlines()[0].split()[1:], strict=True)
    assert list(plain) == [column for column in every if column[0] != "published"]
    found = as_json(outcome)
    assert found["dollars_per_million_tokens"] == pytest.approx(25.0) and found["use"] == pytest.approx(0.6)
    assert found["seconds_to_answer"] == {"p50": 20.0, "p95": 30.0, "p99": 30.0} and found["a fact"] == 7.0


def test_idle_time_has_its_cause():
    requests = prefix_repetition(60, prefixes=4, prefix=64, suffix=64, output=4)
    slow = run_setup(Setup(MACHINE, MODEL, replicas=2, feeder="stream", rate=2.0), requests)
    assert slow.idle["input"] > 0.7 * 2 * slow.seconds and slow.idle["border"] < 0.01 * slow.seconds
    # Each batch of 512 waits for the last one of its replica, which nobody else needs: the rest is the tail.
    batches = run_setup(Setup(MACHINE, MODEL, replicas=3, feeder="batches"), prefix_repetition(
        1024, prefixes=4, prefix=64, suffix=64, output=4
    ))  # fmt: skip
    assert batches.seconds <= batches.idle["tail"] < 1.2 * batches.seconds, (
        "two replicas have a batch, the third has none"
    )


def test_nodes_have_queues_of_their_own():
    requests = prefix_repetition(100, prefixes=4, prefix=64, suffix=64, output=4)
    feeder = SharedQueue(requests, batch=10, in_flight=10, nodes=2)
    for replica in range(4):
        feeder.joined(replica, None, 0.0)
    given = {replica: some for replica, some in feeder.give(0.0)}
    halves = {0: requests[:50], 1: requests[50:]}
    assert all(set(some) <= set(halves[replica % 2]) and len(some) == 10 for replica, some in given.items())
    assert len(given) == 4


def test_segments_are_of_equal_cost_with_outputs():
    requests = prefix_repetition(400, prefixes=4, prefix=64, suffix=16, output=1)
    requests = [replace(r, output=100 if r.path[0][0] < 2 else 1) for r in sorted(requests, key=lambda r: r.path)]
    costs = [sum(16 + 4 * r.output for r in part) for part in contiguous(requests, 8)]
    assert max(costs) < 1.1 * sum(costs) / 8


def test_published_systems_get_what_they_got():
    requests = prefix_repetition(1100, prefixes=4, prefix=64, suffix=64, output=4)
    ray = _ray_data(requests, 2)
    ray.joined(0, None, 0.0)
    given = [r for _, some in ray.give(0.0) for r in some]
    assert len(given) == 128 and all(r.rows == 128 + 9 for r in given)
    in_order = _sorted(requests, 1)
    in_order.joined(0, None, 0.0)
    first = next(some for _, some in in_order.give(0.0))
    assert len({r.path[0] for r in first}) == 1, "a partition has a eighth of the order, less than one prefix"


def test_sets_are_like_what_they_stand_for():
    rng = np.random.default_rng(0)
    drawn = _outputs(rng, 20_000)
    assert np.median(drawn) == pytest.approx(129, rel=0.03) and drawn.mean() == pytest.approx(205, rel=0.05)
    counts = np.bincount([r.path[0][0] for r in prefix_repetition(
        40_000, prefixes=16, prefix=8, suffix=8, output=1, skew=1.5)])  # fmt: skip
    assert counts[0] / counts[3] == pytest.approx(4**1.5, rel=0.1)
    nested = sorted(_nested(3000), key=lambda request: request.path)
    assert len({r.path[0] for r in nested}) == 8 and len({r.path[:2] for r in nested}) == 128
    assert len({r.path[:3] for r in nested}) > 900 and nested[0].rows == 128 + 256 + 256 + 48
    prompts = draw_prompts(50_000, seed=1)
    assert prompts.output.mean() == pytest.approx(45, rel=0.05) and prompts.output.max() <= 128
    lengths, shared = prompts.lengths_and_shared()
    made = prompts.requests(20_000, 20_100)
    for place, (one, other) in enumerate(pairwise(made), 20_001):
        assert shared[place] == shared_rows(one.path, other.path) and lengths[place] == other.rows
