"""Daft's provider by its rules."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulate.costs import StepCost, machine_named, model_named
from benchmarks.simulate.daft import DaftProvider, DaftRouter
from benchmarks.simulate.published import vllm_blocks
from benchmarks.simulate.requests import prefix_repetition

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
