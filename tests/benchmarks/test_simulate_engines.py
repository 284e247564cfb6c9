"""The simulator's engines against the scheduler, against each other, and their own books."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleet_books import check_router
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import check_books, unique_rows

from benchmarks.simulate.blocks import BlockEngine
from benchmarks.simulate.costs import StepCost, StepRows, machine_named, model_named
from benchmarks.simulate.engines import RowEngine
from benchmarks.simulate.published import balanced_rows
from benchmarks.simulate.requests import SimRequest, prefix_repetition
from benchmarks.simulate.scheduled import ScheduledEngine
from prefold.cluster.router import Prompt, Router
from prefold.errors import InputError

COST = StepCost(machine_named("L4"), model_named("Qwen3-8B"))


def run(engine, requests, check=False):
    for request in requests:
        engine.submit(request)
    seconds, steps, ended, prefill, decode = 0.0, 0, [], 0, 0
    while (stretch := engine.step()) is not None:
        seconds, steps = seconds + stretch.seconds, steps + stretch.steps
        prefill, decode = prefill + stretch.prefill, decode + stretch.decode
        ended += [one.request.key for one in stretch.ended_requests]
        if check:
            check_books(engine) if isinstance(engine, RowEngine) else engine.check()
    assert sorted(ended) == sorted(request.key for request in requests)
    return seconds, steps, prefill, decode


def random_requests(rng: np.random.Generator, count: int) -> list[SimRequest]:
    """Paths of up to three parts, the first of few, the last of each its own."""
    found = []
    for key in range(count):
        first, second = int(rng.integers(3)), int(rng.integers(2))
        path = [(first, 20 + first), (10 + 2 * first + second, 15), (100 + key, int(rng.integers(1, 40)))]
        output = int(rng.integers(1, 30))
        found.append(SimRequest(key, tuple(path), output, output))
    return found


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_books_balance_and_every_request_ends(seed):
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 40)
    rows = int(rng.integers(12, 40)) * 16
    options = {"max_batch_rows": int(rng.integers(20, 200)), "max_running": int(rng.integers(2, 20))}
    for engine in (BlockEngine(COST, blocks=rows // 16, **options), RowEngine(COST, slots=rows, **options)):
        _, _, prefill, decode = run(engine, requests, check=True)
        hits = engine.hits
        preemptions = getattr(hits, "preemptions", 0)
        assert hits.tokens == sum(request.rows for request in requests)
        assert prefill == hits.rows_computed >= unique_rows(requests)
        if not preemptions:
            assert hits.first_admission + hits.in_step + hits.rows_computed == hits.tokens
            assert decode == sum(request.output - 1 for request in requests)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_both_grains_agree(order):
    requests = prefix_repetition(150, prefixes=10, prefix=256, suffix=64, output=24)
    if order == "sorted":
        requests.sort(key=lambda request: request.path)
    every, few = ScheduledEngine(COST, slots=6000), RowEngine(COST, slots=6000)
    exact, coarse = run(every, requests), run(few, requests, check=True)
    assert coarse[1:3] == pytest.approx(exact[1:3], rel=0.02) and coarse[0] == pytest.approx(exact[0], rel=0.03)
    assert few.hits.rows_computed == pytest.approx(every.hits.rows_computed, rel=0.02)
    assert few.hits.first_admission + few.hits.in_step == every.hits.first_admission + every.hits.in_step


def test_blocks_count_what_is_structurally_possible():
    """Of 512 rows 256 are shared; sorted, all but the first of each prefix find them."""
    requests = prefix_repetition(800, prefixes=160, prefix=256, suffix=256, output=128)
    shuffled, in_order = BlockEngine(COST, max_batch_rows=8192), BlockEngine(COST, max_batch_rows=8192)
    run(shuffled, requests)
    run(in_order, sorted(requests, key=lambda request: request.path))
    rates = in_order.hits.rates()
    assert rates["first_admission"] + rates["in_step"] == pytest.approx(0.5 * (1 - 160 / 800), abs=0.002)
    assert shuffled.hits.first_admission + shuffled.hits.in_step < 0.15 * shuffled.hits.tokens
    assert rates["vllm"] > 0.4  # it counts look-ups of those that were preempted, and of those that did not fit
    off = BlockEngine(COST, caching=False)
    run(off, requests[:100])
    assert off.hits.first_admission == off.hits.found == 0


@pytest.mark.parametrize("engine", [BlockEngine, RowEngine, ScheduledEngine])
def test_events_tell_the_router_what_is_held(engine):
    requests = prefix_repetition(60, prefixes=6, prefix=64, suffix=32, output=8)
    one = engine(COST, reports=True, **({"blocks": 60} if engine is BlockEngine else {"slots": 960}))
    router = Router()
    router.join(0)
    for request in requests:
        one.submit(request)
    matched = []
    while one.step() is not None:
        if (events := one.events()) is not None:
            assert router.take(0, events)
            check_router(router)
        matched.append(router.matched_rows(Prompt(requests[0].tokens())).get(0, 0))
    assert max(matched) == 96 and router.load(0).requests == 0


def test_what_cannot_fit_is_an_error():
    request = SimRequest(0, ((1, 900),), 200, 200)
    for engine in (BlockEngine(COST, blocks=60), RowEngine(COST, slots=960)):
        with pytest.raises(InputError, match="request 0"):
            engine.submit(request)
    with pytest.raises(InputError, match="does not fit"):
        StepCost(machine_named("L4"), model_named("Qwen3-32B")).kv_rows  # noqa: B018
    with pytest.raises(InputError, match="no 'L5'"):
        machine_named("L5")


def test_kv_rows_are_those_of_the_roofline():
    assert 25_000 <= COST.kv_rows <= 27_000  # REFERENCES: a pool of about 25 to 27 thousand tokens
    assert COST.model.kv_bytes == 144 << 10


def test_rows_of_prompts_cost_nothing_while_the_weights_are_read():
    def took(rows: int) -> float:
        return COST.seconds(StepRows(rows, 0, 0, 0, 1))

    balanced = balanced_rows(COST)
    assert took(int(0.95 * balanced)) == took(1) < took(int(1.1 * balanced))


def test_both_grains_find_the_same_rows_of_a_step():
    """Nobody gives the rows of a step, so that each grain finds them by what steps take."""
    slow = StepCost(replace(machine_named("L4"), flops=42e12, bandwidth=240e9, overhead=0.018), COST.model)
    requests = prefix_repetition(1562, prefixes=4, prefix=256, suffix=256, output=128)
    some = sorted(requests, key=lambda request: request.path)[:400]
    coarse, exact = (run(kind(slow, max_batch_rows=None), some)[0] for kind in (RowEngine, ScheduledEngine))
    assert coarse == pytest.approx(exact, rel=0.03)
