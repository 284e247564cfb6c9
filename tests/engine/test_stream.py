"""The engine's numeric runs over a worker that needs no torch, in a process that has none."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from fake_worker import FakeWorker, Ticket, expected

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.engine.schedule.steps import StepResult
from prefold.spec.requests import GenerationStats, Readout, Request, Sampling, Stats
from prefold.trie import Spool

TRACES = Path(__file__).with_name("stream_traces.py")


@pytest.mark.parametrize("count", [50, pytest.param(300, marks=pytest.mark.slow)])
def test_random_runs_without_torch(count):
    """Windows, read-outs, sizes of steps, too little memory, one or two steps in flight, runs that are left or fail."""
    found = subprocess.run([sys.executable, str(TRACES), str(count)], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_numeric_run_stops_between_steps(depth):
    """Of twelve prompts of one row each, in steps of one row, those come whose steps were begun."""
    engine = ModelEngine(Streaming(depth), EngineOptions(max_batch_rows=1))
    with Spool() as spool:
        for token in range(12):
            spool.add(Request(np.array([token])), b"%d" % token)
        windows = spool.windows(max_tokens=3)
        stopping = lambda: engine.stats.steps >= 5  # noqa: E731
        found = [int(tag) for tag, _ in engine.run(windows, Readout("last"), stopping=stopping)]
    assert found == list(range(4 + depth))


class Streaming(FakeWorker):
    """Gives the token of each row that is read, of streams whose requests have one row each."""

    def __init__(self, depth: int):
        super().__init__(random.Random(0), depth, 0.0)

    def start(self, message, prepared=None):
        return Ticket(StepResult(message.tokens[message.read_rows, None].astype(np.float32)), None)


def test_probes_stop_between_steps():
    """The engine makes steps while the caller looks whether it should stop, and none once it has left."""
    generation = GenerateOptions(cache=CacheOptions(min_overlap=0))
    options = EngineOptions(max_batch_rows=2, generation=generation, cache_prefill=True)
    engine = ModelEngine(FakeWorker(random.Random(0), 1, 0.0), options)
    with Spool() as spool:
        for token in range(5000):
            spool.add(Request(np.array([token])), b"%d" % token)
        windows = spool.windows(max_tokens=10_000)
        found = list(engine.run(windows, Readout("last"), stopping=lambda: engine.stats.steps >= 2))
    assert 2 <= len(found) < 5000
    while engine.generator.has_work:  # the engine's thread ends what is left
        time.sleep(0.001)
    assert engine.call(lambda: engine.stats.steps) < 2500


def test_a_window_that_is_not_there_yet():
    """What is open goes on meanwhile."""
    engine = ModelEngine(FakeWorker(random.Random(0), 1, 0.0))
    came, waits = [], []
    prompts = ([0, 1], [2, 2, 1], [1])

    def windows():
        for number, prompt in enumerate(prompts):
            while len(came) < number:
                waits.append(engine.stats.steps)
                yield None
            with Spool() as spool:
                spool.add(Request(np.array(prompt), sampling=Sampling(max_tokens=4)), b"%d" % number)
                yield from spool.windows(max_tokens=10)

    for tag, answer in engine.run(windows(), Readout("tokens")):
        came.append((int(tag), answer[0].tokens))
    assert came == [(i, expected(prompt, Sampling(max_tokens=4))) for i, prompt in enumerate(prompts)]
    assert len(set(waits)) > 1


def test_stats_add_up():
    one = Stats(tokens=5, path_rows_peak=7, seconds={"plan": 1.0})
    two = Stats(tokens=6, path_rows_peak=3, seconds={"plan": 0.5, "model": 2.0})
    both = one + two
    assert both == Stats(tokens=11, path_rows_peak=7, seconds={"plan": 1.5, "model": 2.0})
    assert (one.tokens, one.seconds) == (5, {"plan": 1.0})
    one.generation = GenerationStats(generated_tokens=2, kv_bytes_peak=10, running_peak=4)
    assert (one + two).generation == one.generation
    two.generation = GenerationStats(generated_tokens=3, kv_bytes_peak=9, running_peak=5)
    assert (one + two).generation == GenerationStats(generated_tokens=5, kv_bytes_peak=10, running_peak=5)
    assert sum([one, two], Stats()) == one + two
