"""Daft's provider by its rules, and the cases of `python -m benchmarks.simulate` at a small size."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from simulated import unique_rows

from benchmarks.simulate import ablation
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.daft import DaftProvider, DaftRouter
from benchmarks.simulate.internet import _run, draw_prompts
from benchmarks.simulate.published import vllm_blocks
from benchmarks.simulate.cases import Setup
from benchmarks.simulate.costs import StepCost, machine_named, model_named
from benchmarks.simulate.requests import prefix_repetition, shared_rows

MACHINE, MODEL = machine_named("L4"), model_named("Qwen3-8B")


def test_a_batch_goes_where_daft_sends_it():
    router = DaftRouter(3)
    assert router.route(None, 20) == 0 and router.route(None, 5) == 1 and router.route(None, 4) == 2
    assert router.route("a", 250) == 2, "nobody has seen it: the last one that is near the least"
    assert router.route("a", 30) == 2, "254 are fewer than 256 more than the least, 5"
    assert router.route("a", 30) == 1, "now it was sent too many"
    assert router.route("a", 30) == 1 and router.loads == [20, 65, 284]
    for other in "bcdefghi":
        router.route(other, 0)  # each is remembered, and 8 of them are all that is
    assert all("a" not in recent or len(recent) <= 8 for recent in router._recent)


@pytest.mark.parametrize("batch", [None, 512])
def test_every_request_is_given_away_once(batch):
    requests = prefix_repetition(6000, prefixes=100, prefix=256, suffix=64, output=4)
    feeder = DaftProvider(requests, 4, partitions=3, batch=batch)
    for replica in range(3):
        feeder.joined(replica, None, 0.0)
    assert feeder.give(1.0) == [], "it waits for all of its actors"
    feeder.joined(3, None, 2.0)
    given = feeder.give(2.0)
    assert sorted(r.key for _, some in given for r in some) == list(range(6000)) and feeder.give(3.0) == []
    sizes = [len(some) for _, some in given]
    if batch:
        assert sorted(set(sizes)) == [2000 % 512, 512]
    else:  # a partition has 20 prompts of each prefix, of which each bucket is made
        assert np.mean(sizes) == pytest.approx(20, abs=1.5)
        assert np.mean([len({r.path[0] for r in some}) == 1 for _, some in given]) > 0.85, "few are put together"


def test_small_buckets_are_put_together():
    requests = prefix_repetition(400, prefixes=100, prefix=256, suffix=64, output=4)
    feeder = DaftProvider(requests, 1, partitions=1)
    feeder.joined(0, None, 0.0)
    sizes = [len(some) for _, some in feeder.give(0.0)]
    assert set(sizes[:-1]) == {16} and sum(sizes) == 400


def test_what_vllm_tries_out_before_takes_room():
    cost = StepCost(MACHINE, MODEL)
    small = vllm_blocks(cost, max_batch_rows=2048, max_running=128)
    large = vllm_blocks(cost, max_batch_rows=8192, max_running=256)
    assert 16 * small == pytest.approx(28_600, rel=0.02) and 16 * large == pytest.approx(22_500, rel=0.02)


def test_prompts_as_arrays_share_what_their_paths_share():
    prompts = draw_prompts(3000, seed=3)
    lengths, shared = prompts.lengths_and_shared()
    made = prompts.requests(0, 3000)
    assert lengths.tolist() == [one.rows for one in made]
    assert shared.tolist() == [0, *(shared_rows(a.path, b.path) for a, b in pairwise(made))]
    assert int((lengths - shared).sum()) == unique_rows(made)
    assert [one.path[0][0] for one in made] == sorted(one.path[0][0] for one in made)


def test_a_large_fleet_computes_once_but_for_cuts_and_grains_agree():
    prompts = draw_prompts(1200)
    seconds = {}
    for engine in ("prefold", "prefold-steps"):
        run, facts = _run(Setup(MACHINE, MODEL, replicas=8, engine=engine, feeder="segments"), prompts)
        assert run.requests == 1200 and run.busy + sum(run.idle.values()) == pytest.approx(8 * run.seconds)
        assert 1 <= facts["rows computed, of the unique ones"] < 1.03
        assert 1 <= facts["costliest segment, of the mean"] < 1.01
        seconds[engine] = run.seconds
    assert seconds["prefold"] == pytest.approx(seconds["prefold-steps"], rel=0.03)


def invoke(tmp_path, *arguments: str):
    main([*arguments, "--json", str(tmp_path / "out.json")])
    return json.loads((tmp_path / "out.json").read_text())["outcomes"]


def test_internet_from_the_shell(tmp_path):
    large, coarse, steps = invoke(tmp_path, "internet", "--prompts", "600", "--replicas", "4")
    assert large["requests"] == coarse["requests"] == steps["requests"] == 600
    assert large["gigabytes of memory at most"] > 0 and large["microseconds of CPU of planning a prompt"] > 0
    assert steps["times the seconds in coarse grain"] == pytest.approx(1, abs=0.05)


def test_ablation_from_the_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "_BACK", (6, 64, 60))
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp_ms": 0, "input_length": 5, "output_length": 7}\n')
    found = invoke(tmp_path, "ablation", "--prompts", "60", "--replicas", "2", "--outputs", str(trace))
    ours = [one for one in found if one["system"].endswith(": ours")]
    assert len(ours) == 8 and len(found) == 8 * 12 + 2
    assert all(any(name.startswith("times the seconds of") for name in one) for one in ours)
    (azure,) = [one for one in ours if one["system"].startswith("Azure")]
    assert azure["output_tokens"] == 60 * 7
    assert found[-1]["replicas"] == 128 and found[-1]["times as fast as 32"] > 0
