"""Fleets on every engine and feeder, and the published comparison at a small size."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from click.testing import CliRunner
from simulated import unique_rows

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.cases import ENGINES, FEEDERS, Setup, run_setup
from benchmarks.simulate.costs import machine_named, model_named
from benchmarks.simulate.published import SharedQueue, _ray_data, _sorted, published
from benchmarks.simulate.requests import prefix_repetition
from prefold.cluster.router import POLICIES

MACHINE, MODEL = machine_named("L4"), model_named("Qwen3-8B")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feeder", FEEDERS)
def test_every_request_ends_once_and_time_adds_up(engine, feeder):
    requests = prefix_repetition(240, prefixes=12, prefix=128, suffix=64, output=16)
    run = run_setup(Setup(MACHINE, MODEL, replicas=3, engine=engine, feeder=feeder, load=2.0), requests)
    assert run.requests == 240 and run.hits.tokens == 240 * 192 and run.hits.rows_computed >= unique_rows(requests)
    assert run.busy + sum(run.idle.values()) == pytest.approx(3 * run.seconds, rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("feeder", ["stream", "routed"])
def test_requests_that_come_in_time(policy, feeder):
    requests = prefix_repetition(150, prefixes=5, prefix=128, suffix=64, output=16)
    run = run_setup(Setup(MACHINE, MODEL, replicas=2, feeder=feeder, policy=policy, rate=20.0), requests)
    assert run.requests == 150 and run.seconds >= 149 / 20 and max(run.waits) < 30


def test_the_published_systems_at_a_small_size():
    found = {(o.name, o.expected): o for o in published(scale=512, ours=False)}
    assert len(found) == 10
    (small_steps,) = [o for o in found.values() if o.name == "bucketing, steps of 190"]
    assert small_steps.setup.max_batch_rows == 190 and small_steps.expected is None
    of = {o.name: o for o in islice(published(scale=32, ours=False), 4)}
    assert {o.run.replicas for o in of.values()} == {4}
    assert of["sorted"].run.hits.rates()["vllm"] == pytest.approx(0.545, abs=0.05)
    assert of["naive"].run.seconds > of["continuous"].run.seconds > of["bucketing"].run.seconds


def test_nodes_have_queues_of_their_own():
    requests = prefix_repetition(100, prefixes=4, prefix=64, suffix=64, output=4)
    feeder = SharedQueue(requests, batch=10, in_flight=10, nodes=2)
    for replica in range(4):
        feeder.joined(replica, None, 0.0)
    given = {replica: some for replica, some in feeder.give(0.0)}
    halves = {0: requests[:50], 1: requests[50:]}
    assert all(set(some) <= set(halves[replica % 2]) and len(some) == 10 for replica, some in given.items())
    assert len(given) == 4


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


def test_the_published_comparison_is_a_table(tmp_path):
    done = CliRunner().invoke(main, ["published", "--scale", "512", "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["benchmark"] == "simulate" and len(found["outcomes"]) == 14
    naive = next(line for line in found["tables"]["theirs"].splitlines() if line.startswith("| naive"))
    assert "| 977 " in naive and "29.2%" in naive and "segments" in found["tables"]["ours"]
