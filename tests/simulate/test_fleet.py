"""Fleets: every request ends once, time is accounted for, and what is published comes out at a small size."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from prefold.cli import main
from prefold.cluster.policies import POLICIES
from prefold.cluster.replica import Speed
from prefold.errors import InputError
from prefold.simulate.cases import ENGINES, FEEDERS, Setup, run_setup
from prefold.simulate.costs import StepCost, machine_named, model_named
from prefold.simulate.feeders import Lists, Streamed
from prefold.simulate.fleet import Driver, Replica, run_fleet
from prefold.simulate.parts import PARTS
from prefold.simulate.published import published
from prefold.simulate.requests import prefix_repetition, read_trace, unique_rows
from prefold.simulate.rows import RowEngine
from prefold.simulate.scheduled import ScheduledEngine

MACHINE, MODEL = machine_named("L4"), model_named("Qwen3-8B")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feeder", FEEDERS)
def test_every_request_ends_once_and_time_adds_up(engine, feeder):
    requests = prefix_repetition(240, prefixes=12, prefix=128, suffix=64, output=16)
    run = run_setup(Setup(MACHINE, MODEL, replicas=3, engine=engine, feeder=feeder, load=2.0), requests)
    assert run.requests == 240 and len(run.waits) == 240
    assert run.prompt_tokens == 240 * 192 and run.output_tokens == 240 * 16
    assert run.hits.asked == 240 * 192 and run.hits.computed >= unique_rows(requests)
    assert run.busy + sum(run.idle.values()) == pytest.approx(3 * run.seconds, rel=1e-6)
    assert np.mean(run.use) == pytest.approx(run.busy / (3 * run.seconds), rel=1e-6) and max(run.use) <= 1 + 1e-9
    assert run.idle["load"] == 6.0 and max(run.ended_at) == run.seconds


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("feeder", ["stream", "routed"])
def test_requests_that_come_in_time(policy, feeder):
    requests = prefix_repetition(150, prefixes=5, prefix=128, suffix=64, output=16)
    setup = Setup(MACHINE, MODEL, replicas=2, engine="prefold", feeder=feeder, policy=policy, rate=20.0)
    run = run_setup(setup, requests)
    assert run.requests == 150 and run.seconds >= 149 / 20
    assert min(run.waits) > 0 and max(run.waits) < 30
    assert run.idle["tail"] + run.idle["input"] + run.idle["border"] + run.busy == pytest.approx(2 * run.seconds)


def test_segments_compute_once_but_for_a_path_a_cut():
    requests = prefix_repetition(2000, prefixes=40, prefix=256, suffix=64, output=8)
    for replicas in (1, 2, 7):
        run = run_setup(Setup(MACHINE, MODEL, replicas=replicas, feeder="segments"), requests)
        assert 0 <= run.hits.computed - unique_rows(requests) <= 256 * (replicas - 1 + 10)  # and what was stolen


def test_prefixes_are_kept_together():
    requests = prefix_repetition(3000, prefixes=96, prefix=512, suffix=64, output=32)
    found = {
        policy: run_setup(Setup(MACHINE, MODEL, replicas=8, feeder="routed", policy=policy), requests)
        for policy in ("prefix", "round-robin", "least-loaded")
    }
    assert found["prefix"].seconds < 0.95 * min(found["round-robin"].seconds, found["least-loaded"].seconds)
    assert found["prefix"].hits.computed < 0.8 * found["round-robin"].hits.computed


def test_feeders_are_told_what_steps_take_on_a_slow_replica():
    class Told(Lists):
        seconds = 0.0

        def worked(self, replica, stretch, events, now):
            super().worked(replica, stretch, events, now)
            self.seconds += stretch.seconds

    requests = prefix_repetition(60, prefixes=4, prefix=64, suffix=32, output=8)
    feeder = Told([requests[:30], requests[30:]])
    replicas = [Replica(lambda: RowEngine(StepCost(MACHINE, MODEL)), slow=slow) for slow in (1.0, 3.0)]
    run = run_fleet(replicas, feeder)
    assert feeder.seconds == pytest.approx(run.busy) and run.ended_at[1] > 2.5 * run.ended_at[0]


def test_what_is_given_may_come_late():
    some = prefix_repetition(300, prefixes=1, prefix=64, suffix=32, output=8)
    requests = [replace(request, output=1 + request.key % 8) for request in some]  # they do not end together
    found = []
    for delay in (0.0, 0.001, 2.0):
        feeder = Lists([requests], in_flight=20)
        driver = Driver(delay) if delay else None
        found.append(run_fleet([Replica(lambda: RowEngine(StepCost(MACHINE, MODEL)))], feeder, driver=driver))
    at_once, soon, late = found
    assert [run.requests for run in found] == [300] * 3
    assert soon.seconds > 1.05 * at_once.seconds, "a step begins without those that take the place of who has ended"
    assert late.seconds > 14 * 2.0 and late.idle["border"] > 0 == at_once.idle["border"], (
        "fourteen times twenty are given"
    )


def test_what_is_idle_begins_with_the_first_lease_that_comes():
    """Four leases of one request each: together they are one step, one after the other the first is a step alone."""

    class OneByOne(Lists):
        def give(self, now):
            return [(replica, [one]) for replica, some in super().give(now) for one in some]

    requests = prefix_repetition(4, prefixes=4, prefix=64, suffix=32, output=1)
    steps = []
    for each in (0.0, 0.001):
        feeder = OneByOne([requests])
        run = run_fleet([Replica(lambda: RowEngine(StepCost(MACHINE, MODEL)))], feeder, driver=Driver(0.0, each))
        assert run.requests == 4 and run.idle["tail"] == run.idle["border"] == 0.0
        steps.append(run.steps)
    assert steps == [1, 2]


def test_a_replica_that_works_alone_is_faster():
    requests = prefix_repetition(40, prefixes=4, prefix=64, suffix=32, output=8)
    parts, ended = (requests[:10], requests[10:]), []
    for alone in (1.0, 0.5):
        replicas = [Replica(lambda: RowEngine(StepCost(MACHINE, MODEL)))] * 2
        run = run_fleet(replicas, Lists(parts), alone=alone)
        ended.append(run.ended_at)
        assert run.busy == pytest.approx(sum(run.ended_at))
    together, rest = ended[0][0], ended[0][1] - ended[0][0]
    assert ended[1][0] == together and ended[1][1] == pytest.approx(together + rest / 2, rel=0.15)
    only = [run_fleet(replicas[:1], Lists([requests]), alone=alone).seconds for alone in (1.0, 0.5)]
    assert only[1] == pytest.approx(only[0] / 2)


def test_a_driver_looks_what_it_may_give_after_every_step():
    looks = []

    class Looked(Lists):
        def give(self, now):
            looks.append(now)
            return super().give(now)

    requests = prefix_repetition(1, prefixes=1, prefix=64, suffix=32, output=6)
    engine = ScheduledEngine(StepCost(MACHINE, MODEL))
    run = run_fleet([Replica(lambda: engine)], Looked([requests]), driver=Driver(0.5))
    assert run.steps == 6 and len(looks) == 1 + 6 and looks[-1] == pytest.approx(run.seconds + 0.5)


def test_a_fleet_learns_how_fast_its_replicas_are_and_how_much_they_hold():
    cost, requests = StepCost(MACHINE, MODEL), prefix_repetition(60, prefixes=6, prefix=64, suffix=32, output=4)
    engine = ScheduledEngine(cost, slots=700, reports=True)
    told = []
    for learns in (True, False, True):
        feeder = Streamed(cost, count=60, slots=700, requests=requests, learns=learns)
        feeder.joined(0, engine, 0.0)
        told.append(feeder.router.load(0).speed)
        assert feeder.router._capacity[0] == 700
    assert told[0] == told[2] == Speed() and told[1].prefill == cost.prefill_seconds


def test_an_engine_that_begins_anew_tells_what_it_holds_and_counts_from_nothing():
    cost, requests = StepCost(MACHINE, MODEL), prefix_repetition(20, prefixes=4, prefix=64, suffix=32, output=4)
    engine, found = ScheduledEngine(cost, slots=3000, reports=True), []
    for _ in range(2):
        feeder = Streamed(cost, count=20, slots=3000, requests=requests)
        found.append(run_fleet([Replica(engine.begin)], feeder))
        held = sum(place.stop - place.start for place, _ in feeder.router._members[0].runs.values())
        assert held == unique_rows(requests) + 20 * 3, "rows of outputs are held too, but for the last"
    first, again = found
    assert first.hits.computed == unique_rows(requests) and first.hits.asked == again.hits.asked == 20 * 96
    assert again.hits.computed == 20, "the last token of each prompt, for its logits"


def test_what_each_part_of_the_dispatcher_is_worth():
    """Long limits leave room for few prefixes; a frequent one is more than a replica's share."""
    long = [replace(r, limit=1000) for r in prefix_repetition(2000, prefixes=48, prefix=512, suffix=64, output=60)]
    frequent = prefix_repetition(1500, prefixes=8, prefix=512, suffix=256, output=48, skew=2.0)
    found = {}
    for without in ("", *PARTS):
        for name, requests in (("long", long), ("frequent", frequent)):
            run = run_setup(Setup(MACHINE, MODEL, replicas=4, without=without, slow=2.0), requests)
            assert run.requests == len(requests)
            found[without, name] = run
    assert found["runs", "long"].hits.computed > 1.2 * found["", "long"].hits.computed
    assert found["shares", "frequent"].idle_share("tail") > 1.5 * found["", "frequent"].idle_share("tail")
    assert found["copies", "frequent"].seconds > 1.2 * found["", "frequent"].seconds


def test_the_published_systems_at_a_small_size():
    found = {(o.name, o.expected): o for o in published(scale=32, ours=False)}
    assert len(found) == 10
    (small_steps,) = [o for o in found.values() if o.name == "bucketing, steps of 190"]
    assert small_steps.setup.max_batch_rows == 190 and small_steps.expected is None
    of = {o.name: o for o in found.values() if o.run.replicas == 4}
    assert of["sorted"].run.hits.rates()["vllm"] == pytest.approx(0.545, abs=0.05)
    assert of["naive"].run.seconds > of["continuous"].run.seconds > of["bucketing"].run.seconds


def test_unknown_names_are_errors():
    requests = prefix_repetition(4, prefixes=2, prefix=8, suffix=8, output=2)
    for field, wrong in (("engine", "x"), ("feeder", "x"), ("replicas", 0)):
        with pytest.raises(InputError):
            run_setup(Setup(MACHINE, MODEL, **{field: wrong}), requests)
    with pytest.raises(InputError, match="come in time"):
        run_setup(Setup(MACHINE, MODEL, feeder="segments", rate=1.0), requests)


def write_trace(path, lines) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_traces(tmp_path):
    mooncake, azure = tmp_path / "m.jsonl.gz", tmp_path / "a.jsonl.gz"
    lines = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 7]},
    ]
    write_trace(mooncake, lines)
    write_trace(azure, [{"timestamp_ms": 1500.0, "input_length": 40, "output_length": 2}])
    first, second = read_trace(mooncake)
    assert (first.arrival, first.path) == (0.0, ((0, 512), (7, 188))) and second.path == ((0, 512), (1, 512), (2, 76))
    assert unique_rows([first, second]) == 700 + 512 + 76
    (only,) = read_trace(azure)
    assert (only.arrival, only.rows, only.output) == (1.5, 40, 2)
    write_trace(azure, [{"length": 3}])
    with pytest.raises(InputError, match="line 1"):
        read_trace(azure)


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["simulate", *arguments], catch_exceptions=False)


def test_command_prints_tables_json_and_plots(tmp_path):
    small = ("repetition", "--prompts", "60", "--prefixes", "6", "--output", "4", "--replicas", "1", "--replicas", "2")
    shown = invoke(*small, "--feeder", "segments", "--feeder", "stream", "--engine", "prefold", "--engine", "vllm")
    rows = [line for line in shown.output.splitlines() if line.startswith(("prefold, ", "vllm, "))]
    assert shown.exit_code == 0 and len(rows) == 8
    pytest.importorskip("matplotlib")
    plot = tmp_path / "a.svg"
    result = invoke(*small, "--json", "--plot", str(plot))
    found = [json.loads(text) for text in result.output.splitlines()]
    assert [one["replicas"] for one in found] == [1, 2] and found[0]["requests"] == 60
    drawn = plot.read_text()
    assert "<svg" in drawn and drawn.count("prefold, stream, prefix") >= 3, "two bars, and their line by replicas"


def test_command_calibrates(tmp_path):
    steps, machine = tmp_path / "steps.jsonl", tmp_path / "mine.json"
    steps.write_text(
        "".join(
            json.dumps({"prefill": p, "decode": 4, "keys": 400, "pairs": 0, "reads": 4, "seconds": 0.05 + p * 1e-3})
            + "\n"
            for p in range(0, 2000, 100)
        )
    )
    invoke("repetition", "--prompts", "4", "--calibrate", str(steps), "--write-machine", str(machine))
    assert json.loads(machine.read_text())["flops"] == pytest.approx(2 * MODEL.linear / 1e-3, rel=0.05)
    again = invoke("repetition", "--prompts", "4", "--machine", str(machine), "--json")
    assert json.loads(again.output)["requests"] == 4
    steps.write_text('{"prefill": 3}\n')
    result = CliRunner().invoke(main, ["simulate", "repetition", "--calibrate", str(steps)])
    assert result.exit_code == 1


def test_a_set_is_written_as_a_job(tmp_path):
    job = tmp_path / "job.jsonl"
    invoke("repetition", "--prompts", "6", "--prefixes", "2", "--model", "SmolLM2-135M", "--write-job", str(job))
    bodies = [json.loads(text)["body"] for text in job.read_text().splitlines()]
    prompts = np.array([body["prompt"] for body in bodies])
    assert prompts.shape == (6, 512) and prompts.max() < 49152
    assert len({tuple(prompt[:256]) for prompt in prompts.tolist()}) == 2
    assert len({tuple(prompt) for prompt in prompts.tolist()}) == 6
