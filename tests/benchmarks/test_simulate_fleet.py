"""Fleets: every request ends once, and time is accounted for."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from click.testing import CliRunner
from simulated import unique_rows

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.cases import Setup, run_setup
from benchmarks.simulate.costs import StepCost, machine_named, model_named
from benchmarks.simulate.engines import RowEngine
from benchmarks.simulate.fleet import ListFeeder, Replica, run_fleet
from benchmarks.simulate.requests import SimRequest, prefix_repetition, read_trace, shared_rows
from prefold.errors import InputError

MACHINE, MODEL = machine_named("L4"), model_named("Qwen3-8B")


@pytest.mark.parametrize("feeder", ["segments", "stream", "routed"])
def test_every_request_ends_once_and_time_adds_up(feeder):
    requests = prefix_repetition(240, prefixes=12, prefix=128, suffix=64, output=16)
    run = run_setup(Setup(MACHINE, MODEL, replicas=3, feeder=feeder, load=2.0), requests)
    assert run.requests == 240 and len(run.waits) == 240
    assert run.prompt_tokens == 240 * 192 and run.output_tokens == 240 * 16
    assert run.hits.tokens == 240 * 192 and run.hits.rows_computed >= unique_rows(requests)
    assert run.busy + sum(run.idle.values()) == pytest.approx(3 * run.seconds, rel=1e-6)
    assert np.mean(run.use) == pytest.approx(run.busy / (3 * run.seconds), rel=1e-6) and max(run.use) <= 1 + 1e-9
    assert run.idle["load"] == 6.0 and max(run.ended_at) == run.seconds


@pytest.mark.parametrize("policy", ["prefix", "round-robin", "least-loaded"])
@pytest.mark.parametrize("feeder", ["stream", "routed"])
def test_requests_that_come_in_time(policy, feeder):
    requests = prefix_repetition(150, prefixes=5, prefix=128, suffix=64, output=16)
    setup = Setup(MACHINE, MODEL, replicas=2, feeder=feeder, policy=policy, rate=20.0)
    run = run_setup(setup, requests)
    assert run.requests == 150 and run.seconds >= 149 / 20
    assert min(run.waits) > 0 and max(run.waits) < 30
    assert run.idle["tail"] + run.idle["input"] + run.idle["border"] + run.busy == pytest.approx(2 * run.seconds)


def test_segments_compute_once_but_for_a_path_a_cut():
    requests = prefix_repetition(2000, prefixes=40, prefix=256, suffix=64, output=8)
    for replicas in (1, 2, 7):
        run = run_setup(Setup(MACHINE, MODEL, replicas=replicas, feeder="segments"), requests)
        assert 0 <= run.hits.rows_computed - unique_rows(requests) <= 256 * (replicas - 1 + 10)  # and what was stolen


def test_prefixes_are_kept_together():
    requests = prefix_repetition(3000, prefixes=96, prefix=512, suffix=64, output=32)
    found = {
        policy: run_setup(Setup(MACHINE, MODEL, replicas=8, feeder="routed", policy=policy), requests)
        for policy in ("prefix", "round-robin", "least-loaded")
    }
    assert found["prefix"].seconds < 0.95 * min(found["round-robin"].seconds, found["least-loaded"].seconds)
    assert found["prefix"].hits.rows_computed < 0.8 * found["round-robin"].hits.rows_computed


def test_feeders_are_told_what_steps_take_on_a_slow_replica():
    class Told(ListFeeder):
        seconds = 0.0

        def worked(self, replica, stretch, events, now):
            super().worked(replica, stretch, events, now)
            self.seconds += stretch.seconds

    requests = prefix_repetition(60, prefixes=4, prefix=64, suffix=32, output=8)
    feeder = Told([requests[:30], requests[30:]])
    replicas = [Replica(lambda: RowEngine(StepCost(MACHINE, MODEL)), slow=slow) for slow in (1.0, 3.0)]
    run = run_fleet(replicas, feeder)
    assert feeder.seconds == pytest.approx(run.busy) and run.ended_at[1] > 2.5 * run.ended_at[0]


def test_unknown_names_are_errors():
    requests = prefix_repetition(4, prefixes=2, prefix=8, suffix=8, output=2)
    for field, wrong in (("engine", "x"), ("feeder", "x"), ("replicas", 0)):
        with pytest.raises(InputError):
            run_setup(Setup(MACHINE, MODEL, **{field: wrong}), requests)
    with pytest.raises(InputError, match="have arrival times"):
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
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_command_prints_tables_and_writes_json(tmp_path):
    small = ("repetition", "--prompts", "60", "--prefixes", "6", "--output", "4", "--replicas", "1", "--replicas", "2")
    shown = invoke(*small, "--feeder", "segments", "--feeder", "stream")
    rows = [line for line in shown.output.splitlines() if line.startswith("prefold, ")]
    assert shown.exit_code == 0 and len(rows) == 4
    invoke(*small, "--json", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert [one["replicas"] for one in found] == [1, 2] and found[0]["requests"] == 60


def test_a_machine_may_be_a_file(tmp_path):
    machine = tmp_path / "mine.json"
    machine.write_text(json.dumps(asdict(replace(MACHINE, name="mine"))))
    invoke("repetition", "--prompts", "4", "--machine", str(machine), "--json", str(tmp_path / "out.json"))
    (found,) = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert (found["requests"], found["machine"]) == (4, "mine")
    machine.write_text('{"flops": 3}')
    result = CliRunner().invoke(main, ["repetition", "--machine", str(machine)])
    assert result.exit_code == 1 and "give name, flops" in result.stderr


def test_a_set_is_written_as_a_job(tmp_path):
    job = tmp_path / "job.jsonl"
    invoke("repetition", "--prompts", "6", "--prefixes", "2", "--model", "SmolLM2-135M", "--write-job", str(job))
    bodies = [json.loads(text)["body"] for text in job.read_text().splitlines()]
    prompts = np.array([body["prompt"] for body in bodies])
    assert prompts.shape == (6, 512) and prompts.max() < 49152
    assert len({tuple(prompt[:256]) for prompt in prompts.tolist()}) == 2
    assert len({tuple(prompt) for prompt in prompts.tolist()}) == 6


def test_half_of_the_replicas_may_be_slow():
    requests = prefix_repetition(4000, prefixes=8, prefix=256, suffix=64, output=16)
    fast, slow = (
        run_setup(Setup(MACHINE, MODEL, replicas=4, feeder="segments", slow=factor), requests) for factor in (1.0, 2.0)
    )
    assert 1.2 < slow.seconds / fast.seconds < 1.7, "work was moved: 4 / 3, not 2"
    fixed = run_setup(Setup(MACHINE, MODEL, replicas=4, feeder="segments", slow=2.0, steal=False), requests)
    assert fixed.seconds > 1.1 * slow.seconds


def test_requests_are_made_of_parts():
    one = SimRequest(0, ((1, 4), (2, 3)), 1, 1)
    assert shared_rows(one.path, ((1, 4), (3, 3))) == 4 and shared_rows(one.path, ((2, 4),)) == 0
