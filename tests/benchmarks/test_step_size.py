"""Steps whose rows nobody gives: as fast as the best number, or as fast as large ones, on what a roofline says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulate.costs import StepCost, machine_named, model_named
from benchmarks.simulate.engines import RowEngine
from benchmarks.simulate.requests import SimRequest, prefix_repetition
from prefold.engine.step_size import StepSize

# An L4 as the published job had it, a GPU with plenty of memory, one with little of it left, and a CPU.
COSTS = {
    "L4": StepCost(replace(machine_named("L4"), flops=42e12, bandwidth=240e9, overhead=0.018), model_named("Qwen3-8B")),
    "H100": StepCost(machine_named("H100"), model_named("Qwen3-8B")),
    "H100, 32B": StepCost(machine_named("H100"), model_named("Qwen3-32B")),
    "CPU": StepCost(machine_named("cpu2"), model_named("SmolLM2-135M")),
}
# prompts, prefixes, tokens of a prefix, of its own, of an output
SETS = {
    "published": (1562, 4, 256, 256, 128),
    "short outputs": (1562, 4, 256, 256, 8),
    "long outputs": (400, 4, 256, 256, 512),
    "long prompts": (200, 4, 256, 3744, 128),
    "few": (100, 4, 256, 256, 128),
    "nothing shared": (1562, 1562, 1, 511, 32),
    "all but a little shared": (1562, 16, 512, 64, 32),
}


def requests_of(name: str) -> list[SimRequest]:
    count, prefixes, prefix, suffix, output = SETS[name]
    found = prefix_repetition(count, prefixes=prefixes, prefix=prefix, suffix=suffix, output=output)
    return sorted(found, key=lambda request: request.path)


def seconds(cost, requests, rows, kind=RowEngine):
    engine = kind(cost, max_batch_rows=rows)
    for request in requests:
        engine.submit(request)
    total = 0.0
    while (stretch := engine.step()) is not None:
        total += stretch.seconds
    return total


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("machine", COSTS)
def test_it_is_never_slower_than_large_steps(machine, name):
    requests = requests_of(name)
    assert seconds(COSTS[machine], requests, None) <= 1.01 * seconds(COSTS[machine], requests, 8192)


@pytest.mark.parametrize(
    "machine, name, share",
    [
        ("L4", "published", 0.76), ("L4", "long prompts", 0.75), ("L4", "long outputs", 0.97),
        ("L4", "nothing shared", 0.91), ("H100, 32B", "published", 0.82), ("H100, 32B", "long prompts", 0.74),
    ],
)  # fmt: skip
def test_it_is_as_fast_as_the_best_number_where_a_device_waits_for_its_weights(machine, name, share):
    requests, cost = requests_of(name), COSTS[machine]
    found, large = seconds(cost, requests, None), seconds(cost, requests, 8192)
    best = min(seconds(cost, requests, rows) for rows in (192, 256, 384, 768, 1024))
    assert found < share * large and found < 1.06 * best


def test_outputs_of_all_lengths():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.geometric(1 / 128, 1562), 1, 384).tolist()
    requests = [replace(r, output=n, limit=384) for r, n in zip(requests_of("published"), lengths, strict=True)]
    assert seconds(COSTS["L4"], requests, None) < 0.92 * seconds(COSTS["L4"], requests, 8192)


@pytest.mark.parametrize("machine", ["L4", "H100, 32B"])
@pytest.mark.parametrize("order", [("long outputs", "long prompts"), ("published", "short outputs", "long outputs")])
def test_a_job_whose_requests_change(machine, order):
    requests = []
    for part, name in enumerate(order):
        for request in requests_of(name)[:300]:
            path = tuple((part * 10**9 + number, rows) for number, rows in request.path)
            requests.append(replace(request, key=len(requests), path=path))
    assert seconds(COSTS[machine], requests, None) <= 1.01 * seconds(COSTS[machine], requests, 8192)


def told(size: StepSize, *, compiles: bool = False) -> None:
    """Tells of three waves of 60 sequences, 300 rows of a prompt and 100 tokens of an output each, on a device that
    computes 10,000 rows a second and reads its weights in 30 ms; until steps are to be small."""
    for wave in range(3):
        for step in range(9):
            if size.small is not None:
                return
            seconds = 20.0 if compiles and not (wave or step) else 0.2
            size.note(2000, 0, seconds, max_rows=8192, waiting=999, began=60 if step == 8 else 0, ended=0, tokens=0)
        for step in range(99):
            ended = 60 if step == 98 else 0
            size.note(0, 60, 0.03, max_rows=8192, waiting=999, began=0, ended=ended, tokens=100 * ended)


def test_the_rows_that_come_and_go():
    size = StepSize()
    assert size.rows(8192, 999, 60) == 8192
    told(size)
    assert size.small == pytest.approx(0.95 * 60 * (300 + 100) / 100, rel=0.02)
    assert size.rows(8192, 999, 60) == size.small and size.rows(100, 999, 60) == 100
    assert size.rows(8192, 999, 500) == 516, "outputs, and a few rows more"
    assert size.rows(8192, 999, 500, least=256) == 756, "and the rows of an image"
    assert size.rows(8192, 0, 60) == 8192, "nobody waits any more"
    size.reset()
    assert size.rows(8192, 999, 60) == 8192


def test_a_step_in_which_kernels_were_compiled_says_nothing():
    size, other = StepSize(), StepSize()
    told(size, compiles=True), told(other)
    assert size.small == other.small


def test_what_does_not_help_is_given_up_and_tried_again_later():
    size = StepSize()
    told(size)
    small = size.small
    for _ in range(8):  # it takes as long as prompts and outputs one after the other
        size.note(small - 60, 60, 0.05, max_rows=8192, waiting=999, began=0, ended=0, tokens=0)
    assert size.small is None
    told(size)
    assert size.small is None, "too soon"
    for _ in range(4):
        told(size)
    assert size.small is not None


def test_the_end_of_a_job_says_nothing_of_the_next_steps():
    """Sequences that nobody waits behind end one after the other, and leave steps of few rows."""
    size = StepSize()
    told(size)
    small = size.small
    for _ in range(200):
        size.note(0, 2, 0.002, max_rows=8192, waiting=0, began=0, ended=0, tokens=0)
    size.note(small - 60, 60, 0.03, max_rows=8192, waiting=999, began=0, ended=0, tokens=0)
    assert size.small == small
