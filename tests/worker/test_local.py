"""The worker of this process: what it holds, and for how long."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from running import as_request, prompts
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.schedule import PrefillScheduler
from prefold.stream import Spool
from prefold.types import Readout
from prefold.worker import local


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture
def llm(folder) -> LLM:
    return LLM(folder, dtype="float32", device="cpu")


def test_memory_goes_back_with_the_last_reference(folder, monkeypatch):
    """Without the garbage collector's help, and when the model's own memory is free already."""
    left = []
    llm = LLM(folder, dtype="float32", device="cpu")
    llm.embed(["some text"])
    llm.generate("some text", max_tokens=2)
    model = weakref.ref(llm.model)
    weight = weakref.ref(llm.model.embedding)
    monkeypatch.setattr(local, "give_back", lambda: left.append((model(), weight())))
    gc.collect()
    gc.disable()
    try:
        del llm
        assert left == [(None, None)]
    finally:
        gc.enable()


def test_a_path_is_held_until_its_stream_is_forgotten(llm):
    worker = llm.engine.worker
    with Spool() as spool:
        for prompt in prompts(2):
            spool.add(as_request(prompt))
        window = next(iter(spool.windows(max_tokens=1 << 20)))
    steps, results = [], []
    for stream in (7, 8):  # two streams take turns
        steps.append(PrefillScheduler(window, Readout("last"), sharing="full", max_batch_rows=9, stream=stream))
        results.append([])
    while (planned := [scheduler.plan() for scheduler in steps])[0] is not None:
        for scheduler, step, found in zip(steps, planned, results, strict=True):
            found.append(worker.start(step.message).result().values)
            scheduler.commit(step)
    np.testing.assert_array_equal(np.concatenate(results[0]), np.concatenate(results[1]))
    assert set(worker._paths) == {7, 8}
    worker.forget(7)
    assert set(worker._paths) == {8}
    with worker._lock:  # as the garbage collector may, in the middle of a step
        worker.forget(8)
    assert not worker._paths


def test_a_step_that_goes_on_with_rows_that_are_not_there(llm):
    with Spool() as spool:
        spool.add(as_request([1, 2, 3, 4]))
        window = next(iter(spool.windows(max_tokens=1 << 20)))
    scheduler = PrefillScheduler(window, Readout("last"), sharing="full", max_batch_rows=9)
    with pytest.raises(ValueError, match="goes on with 2 rows, its stream left 0"):
        llm.engine.worker.start(scheduler.step(2, 4).message)
