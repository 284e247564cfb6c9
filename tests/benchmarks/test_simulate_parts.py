"""Fleets of other systems, fleets with a driver, and ours with parts left out; and what is published comes out at a
small size.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
from simulated import unique_rows

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.ablation import _nested, _outputs
from benchmarks.simulate.driven import Driver, run_driven
from benchmarks.simulate.internet import draw_prompts
from benchmarks.simulate.others import PARTS, SharedQueue
from benchmarks.simulate.published import _ray_data, _sorted, published
from benchmarks.simulate.scheduled import ScheduledEngine
from prefold.cluster.router import POLICIES, Speed
from benchmarks.simulate.cases import ENGINES, FEEDERS, Setup, run_setup
from benchmarks.simulate.costs import StepCost, machine_named, model_named
from benchmarks.simulate.engines import RowEngine
from benchmarks.simulate.fleet import ListFeeder, Replica, StreamFeeder, run_fleet
from benchmarks.simulate.requests import prefix_repetition, shared_rows

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


def test_what_is_given_may_come_late():
    some = prefix_repetition(300, prefixes=1, prefix=64, suffix=32, output=8)
    requests = [replace(request, output=1 + request.key % 8) for request in some]  # they do not end together
    found = []
    for delay in (0.0, 0.001, 2.0):
        feeder = ListFeeder([requests], in_flight=20)
        driver = Driver(delay) if delay else None
        found.append(run_driven([Replica(lambda: RowEngine(StepCost(MACHINE, MODEL)))], feeder, driver=driver))
    at_once, soon, late = found
    assert [run.requests for run in found] == [300] * 3
    assert soon.seconds > 1.05 * at_once.seconds, "a step begins without those that take the place of who has ended"
    assert late.seconds > 14 * 2.0 and late.idle["border"] > 0 == at_once.idle["border"], (
        "fourteen times twenty are given"
    )


def test_what_is_idle_begins_with_the_first_lease_that_comes():
    """Four leases of one request each: together they are one step, one after the other the first is a step alone."""

    class OneByOne(ListFeeder):
        def give(self, now):
            return [(replica, [one]) for replica, some in super().give(now) for one in some]

    requests = prefix_repetition(4, prefixes=4, prefix=64, suffix=32, output=1)
    steps = []
    for each in (0.0, 0.001):
        feeder = OneByOne([requests])
        run = run_driven([Replica(lambda: RowEngine(StepCost(MACHINE, MODEL)))], feeder, driver=Driver(0.0, each))
        assert run.requests == 4 and run.idle["tail"] == run.idle["border"] == 0.0
        steps.append(run.steps)
    assert steps == [1, 2]


def test_a_replica_that_works_alone_is_faster():
    requests = prefix_repetition(40, prefixes=4, prefix=64, suffix=32, output=8)
    parts, ended = (requests[:10], requests[10:]), []
    for alone in (1.0, 0.5):
        replicas = [Replica(lambda: RowEngine(StepCost(MACHINE, MODEL)))] * 2
        run = run_driven(replicas, ListFeeder(parts), alone=alone)
        ended.append(run.ended_at)
        assert run.busy == pytest.approx(sum(run.ended_at))
    together, rest = ended[0][0], ended[0][1] - ended[0][0]
    assert ended[1][0] == together and ended[1][1] == pytest.approx(together + rest / 2, rel=0.15)
    only = [run_driven(replicas[:1], ListFeeder([requests]), alone=alone).seconds for alone in (1.0, 0.5)]
    assert only[1] == pytest.approx(only[0] / 2)


def test_a_driver_looks_what_it_may_give_after_every_step():
    looks = []

    class Looked(ListFeeder):
        def give(self, now):
            looks.append(now)
            return super().give(now)

    requests = prefix_repetition(1, prefixes=1, prefix=64, suffix=32, output=6)
    engine = ScheduledEngine(StepCost(MACHINE, MODEL))
    run = run_driven([Replica(lambda: engine)], Looked([requests]), driver=Driver(0.5))
    assert run.steps == 6 and len(looks) == 1 + 6 and looks[-1] == pytest.approx(run.seconds + 0.5)


def test_a_fleet_learns_how_fast_its_replicas_are_and_how_much_they_hold():
    cost, requests = StepCost(MACHINE, MODEL), prefix_repetition(60, prefixes=6, prefix=64, suffix=32, output=4)
    engine = ScheduledEngine(cost, slots=700, reports=True)
    told = []
    for learns in (True, False, True):
        feeder = StreamFeeder(cost, count=60, slots=700, requests=requests, learns=learns)
        feeder.joined(0, engine, 0.0)
        told.append(feeder.router.load(0).speed)
        assert feeder.router._members[0].capacity == 700
    assert told[0] == told[2] == Speed() and told[1].prefill == cost.prefill_seconds


def test_an_engine_that_begins_anew_tells_what_it_holds_and_counts_from_nothing():
    cost, requests = StepCost(MACHINE, MODEL), prefix_repetition(20, prefixes=4, prefix=64, suffix=32, output=4)
    engine, found = ScheduledEngine(cost, slots=3000, reports=True), []
    for _ in range(2):
        feeder = StreamFeeder(cost, count=20, slots=3000, requests=requests)
        found.append(run_fleet([Replica(engine.begin)], feeder))
        held = sum(place.stop - place.start for place, _ in feeder.router._members[0].runs.values())
        assert held == unique_rows(requests) + 20 * 3, "rows of outputs are held too, but for the last"
    first, again = found
    assert first.hits.rows_computed == unique_rows(requests) and first.hits.tokens == again.hits.tokens == 20 * 96
    assert again.hits.rows_computed == 20, "the last token of each prompt, for its logits"


def test_what_each_part_of_the_dispatcher_is_worth():
    """Long limits leave room for few prefixes; a frequent one is more than a replica's share."""
    long = [replace(r, limit=1000) for r in prefix_repetition(2000, prefixes=48, prefix=512, suffix=64, output=60)]
    frequent = prefix_repetition(1500, prefixes=8, prefix=512, suffix=256, output=48, skew=2.0)
    found = {}
    for name, requests, parts in (("long", long, ("runs",)), ("frequent", frequent, ("shares", "copies"))):
        for without in ("", *parts):
            feeder = f"stream without {without}" if without else "stream"
            run = run_setup(Setup(MACHINE, MODEL, replicas=4, feeder=feeder, slow=2.0), requests)
            assert run.requests == len(requests)
            found[without, name] = run
    assert {without for without, _ in found} == {"", *PARTS}
    assert found["runs", "long"].hits.rows_computed > 1.2 * found["", "long"].hits.rows_computed
    assert found["shares", "frequent"].idle_share("tail") > 1.5 * found["", "frequent"].idle_share("tail")
    assert found["copies", "frequent"].seconds > 1.2 * found["", "frequent"].seconds


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


def test_batches_of_one_replica_are_waited_for():
    """Each batch of 512 waits for the last one of its replica, which nobody else needs: the rest is the tail."""
    requests = prefix_repetition(1024, prefixes=4, prefix=64, suffix=64, output=4)
    batches = run_setup(Setup(MACHINE, MODEL, replicas=3, feeder="batches"), requests)
    assert batches.seconds <= batches.idle["tail"] < 1.2 * batches.seconds, (
        "two replicas have a batch, the third has none"
    )


def test_the_table_has_what_was_published(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    main(["published", "--scale", "512", "--plot", str(tmp_path / "a.svg")])
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].split()[5] == "published"
    naive = next(row for row in shown if row.startswith("naive")).split()
    assert naive[5] == "977" and "29.2%" in naive and "naive" in (tmp_path / "a.svg").read_text()


def test_a_machine_is_fitted_to_measured_steps(tmp_path):
    steps, machine = tmp_path / "steps.jsonl", tmp_path / "mine.json"
    rows = {"decode": 4, "keys": 400, "pairs": 0, "reads": 4}
    lines = [rows | {"prefill": p, "seconds": 0.05 + p * 1e-3} for p in range(0, 2000, 100)]
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(["machine", str(steps), "-o", str(machine), "--like", "L4", "--model", "Qwen3-8B"])
    assert json.loads(machine.read_text())["flops"] == pytest.approx(2 * MODEL.linear / 1e-3, rel=0.05)
