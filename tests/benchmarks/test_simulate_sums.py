"""The simulator's sums by hand: costs of steps, prices, idle causes, tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulate.cases import Outcome, Setup, as_json, header, line, run_setup
from benchmarks.simulate.costs import StepCost, StepRows, machine_named, model_named
from benchmarks.simulate.engines import Hits
from benchmarks.simulate.fleet import FleetOutcome, contiguous
from benchmarks.simulate.requests import prefix_repetition

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
    hits = Hits(tokens=1000, first_admission=400, in_step=100, rows_computed=500)
    run = FleetOutcome(4, seconds=50.0, requests=4, prompt_tokens=1000, output_tokens=3000, busy=120.0, hits=hits)
    run.idle |= {"load": 40.0, "input": 20.0, "border": 14.0, "tail": 6.0}
    run.waits.extend([30.0, 10.0, 40.0, 20.0])
    return run


def test_the_table_shows_each_number_in_its_column():
    outcome = Outcome("one", Setup(replace(MACHINE, dollars_per_hour=1.8), MODEL), run_of(), {"a fact": 7.0})
    shown, fact = line(outcome).splitlines()
    names, cells = header().split()[1:], shown.split()[1:]
    every = list(zip(names, cells, strict=True))
    assert every == [
        ("requests", "4"), ("tokens", "4,000"),
        ("replicas", "4"), ("seconds", "50.0"), ("$/Mtok", "25.0000"), ("first", "40.0%"),
        ("in-step", "10.0%"), 
        ("use", "60.0%"), ("load", "20.0%"), ("input", "10.0%"), ("border", "7.0%"), ("tail", "3.0%"),
    ]  # fmt: skip
    assert fact.split() == ["a", "fact", "7"]
    found = as_json(outcome)
    assert found["dollars_per_million_tokens"] == pytest.approx(25.0) and found["use"] == pytest.approx(0.6)
    assert found["seconds_to_answer"] == {"p50": 20.0, "p95": 30.0, "p99": 30.0} and found["a fact"] == 7.0


def test_idle_time_has_its_cause():
    requests = prefix_repetition(60, prefixes=4, prefix=64, suffix=64, output=4)
    slow = run_setup(Setup(MACHINE, MODEL, replicas=2, feeder="stream", rate=2.0), requests)
    assert slow.idle["input"] > 0.7 * 2 * slow.seconds and slow.idle["border"] < 0.01 * slow.seconds


def test_segments_are_of_equal_cost_with_outputs():
    requests = prefix_repetition(400, prefixes=4, prefix=64, suffix=16, output=1)
    requests = [replace(r, output=100 if r.path[0][0] < 2 else 1) for r in sorted(requests, key=lambda r: r.path)]
    costs = [sum(16 + 4 * r.output for r in part) for part in contiguous(requests, 8)]
    assert max(costs) < 1.1 * sum(costs) / 8
