"""The engine finds how many rows a step of generation may have, by the clock; answers do not depend on it."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from books import check_books
from fake_worker import FakeWorker, expected

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine, generate
from prefold.schedule.steps import SlotStep
from prefold.stream import Spool
from prefold.types import Readout, Request, Sampling

ROWS, OUTPUT, AT_ONCE, MOST = 30, 15, 10, 256


class TimedWorker(FakeWorker):
    """A step takes `weights` seconds, or a millisecond a row where that is longer."""

    def __init__(self, clock, weights, **facts):
        super().__init__(random.Random(0), depth=1, trouble=0.0)
        self.facts = replace(self.facts, max_positions=1000, max_rows=MOST, **facts)
        self.clock, self.weights, self.sizes = clock, weights, []

    def start(self, message, prepared=None):
        if isinstance(message, SlotStep):
            self.sizes.append(message.num_rows)
            self.clock.now += max(self.weights, 1e-3 * message.num_rows)
        return super().start(message, prepared)


def run(monkeypatch, weights, rows=None, learns=True, jobs=1):
    """Returns (seconds, sizes of steps) of jobs of 100 prompts, ten of which find room at once."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(generate, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    worker = TimedWorker(clock, weights, learns_rows=learns)
    options = GenerateOptions(kv_memory=AT_ONCE * (ROWS + OUTPUT - 1) + 1)
    engine = ModelEngine(worker, EngineOptions(max_batch_rows=rows, generation=options))
    rng = np.random.default_rng(0)
    sampling = Sampling(max_tokens=OUTPUT)
    for _ in range(jobs):
        worker.sizes.append(0)
        prompts = rng.integers(0, 8, (100, ROWS)).astype(np.int32)
        with Spool() as spool:
            for number, tokens in enumerate(prompts):
                spool.add(Request(tokens, sampling=sampling), str(number).encode())
            found = dict(engine.run(spool.windows(max_tokens=1 << 20), Readout("tokens")))
        assert len(found) == 100
        for number, tokens in enumerate(prompts.tolist()):
            assert found[str(number).encode()][0].tokens == expected(tokens, sampling)
    check_books(engine.generator.scheduler)
    return clock.now, worker.sizes


def test_steps_become_small_where_the_device_waits_for_its_weights(monkeypatch):
    seconds, sizes = run(monkeypatch, 0.03)
    large, all_large = run(monkeypatch, 0.03, rows=MOST)
    assert max(all_large[-50:]) > 200
    # Ten sequences of 45 rows in 15 steps: 30 rows a step come and go.
    assert sizes[1] > 240 and max(sizes[len(sizes) // 2 : -60]) <= 32
    assert seconds < 0.85 * large


@pytest.mark.parametrize("options", [{"rows": MOST}, {"learns": False}, {}])
def test_steps_stay_large(monkeypatch, options):
    """Where a number was given, where the worker computes all the time, and where that is found out."""
    _, sizes = run(monkeypatch, 0.03 if options else 0.001, **options)
    assert sum(size > 200 for size in sizes) >= 10


def test_another_job_begins_with_large_steps(monkeypatch):
    _, sizes = run(monkeypatch, 0.03, jobs=2)
    second = sizes[len(sizes) - sizes[::-1].index(0) :]
    assert second[0] > 240 and second[1] > 33, "all that there is room for begin together"
    assert max(second[len(second) // 2 : -60]) <= 32
