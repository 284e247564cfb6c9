"""Messages hold arrays and plain numbers: what is kept, waits or runs beside a step is no part of it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from running import as_request, prompts

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.engine.schedule.steps import SlotResult, SlotStep
from prefold.engine.schedule.windows import WindowPlanner
from prefold.engine.worker import Worker
from prefold.spec.requests import Readout, Request, Sampling
from prefold.trie import Spool


class Recorder(Worker):
    """Gives token 1 to everybody, and remembers how large the last step's message was."""

    size = 0

    def start(self, message, prepared=None):
        if isinstance(message, SlotStep):
            self.size = len(pickle.dumps(message))
            return Done(SlotResult(np.ones(len(message.reads), np.int64)))
        return Done(None)


class Done:
    def __init__(self, found):
        self.found = found

    def result(self):
        return self.found


def message_size(kept: list[list[int]]) -> int:
    """Bytes of the message of a step, where so many prompts are kept."""
    worker = Recorder()
    generation = GenerateOptions(cache=CacheOptions(min_overlap=0))
    engine = ModelEngine(worker, EngineOptions(max_batch_rows=4096, generation=generation))
    for tokens in [*kept, [7, 8, 9]]:
        with Spool() as spool:
            spool.add(Request(np.array(tokens, np.int32), sampling=Sampling(max_tokens=1)))
            assert len(list(engine.run(spool.windows(max_tokens=1 << 20), Readout("tokens")))) == 1
    assert not kept or len(list(engine.generator.scheduler.tree.nodes())) >= len(kept)
    return worker.size


def test_a_step_over_slots_does_not_grow_with_what_is_kept():
    none = message_size([])
    assert message_size([[5, number, 6] for number in range(1000)]) == none


@pytest.mark.parametrize("depth", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_nested_prompts_do_not_nest_the_message(depth):
    nested = [*range(7, 10), *range(depth)]
    assert message_size([nested[: i + 1] for i in range(len(nested))]) < 5000


def test_a_step_of_the_stream_is_its_arrays():
    with Spool() as spool:
        for prompt in prompts(1, count=200):
            spool.add(as_request(prompt))
        window = next(iter(spool.windows(max_tokens=1 << 20)))
    step = WindowPlanner(window, Readout("last"), sharing="full", max_batch_rows=10).plan()
    assert len(pickle.dumps(step.message)) < 3000
