"""Messages hold arrays and plain numbers: what is kept, waits or runs beside a step is no part of it."""

from __future__ import annotations

import pickle

import numpy as np
from running import as_request, prompts

from prefold.cache import CacheOptions, SlotPool
from prefold.schedule import PrefillScheduler
from prefold.schedule.generate import GenerateScheduler
from prefold.stream import Spool
from prefold.types import Readout
from prefold.worker.slots import slot_step


def run_one(scheduler: GenerateScheduler, key: object, tokens: list[int], samples: int = 1):
    """Generate a token after a prompt; returns the last step."""
    scheduler.submit(key, np.array(tokens, np.int32), limit=1, samples=samples, namespace=(None, ""))
    last = None
    while scheduler.has_work:
        scheduler.admit()
        last = scheduler.plan()
        scheduler.begin(last)
        scheduler.commit(last, [1] * len(last.reads), [False] * len(last.reads))
    return last


def message_size(kept: list[list[int]]) -> int:
    """Bytes of the message of a step, where so many prompts are kept."""
    scheduler = GenerateScheduler(
        SlotPool(1 << 16), max_batch_rows=4096, max_running=8, cache=CacheOptions(min_overlap=0)
    )
    for number, tokens in enumerate(kept):
        run_one(scheduler, number, tokens)
    step = run_one(scheduler, "last", [7, 8, 9])
    return len(pickle.dumps(slot_step(step, {}, True)))


def test_a_step_over_slots_does_not_grow_with_what_is_kept():
    none = message_size([])
    assert message_size([[5, number, 6] for number in range(1000)]) == none


def test_nested_prompts_do_not_nest_the_message():
    nested = [*range(7, 10), *range(600)]
    assert message_size([nested[: i + 1] for i in range(len(nested))]) < 5000


def test_a_step_of_the_stream_is_its_arrays():
    with Spool() as spool:
        for prompt in prompts(1, count=200):
            spool.add(as_request(prompt))
        window = next(iter(spool.windows(max_tokens=1 << 20)))
    step = PrefillScheduler(window, Readout("last"), sharing="full", max_batch_rows=10).plan()
    assert len(pickle.dumps(step.message)) < 3000
