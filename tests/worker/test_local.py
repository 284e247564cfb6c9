"""The worker of this process: what it holds, and for how long."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from running import as_request, prompts
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine.schedule.steps import MakeStore, SlotStep
from prefold.engine.schedule.windows import WindowPlanner
from prefold.errors import OutOfMemoryError
from prefold.model import MediaRows, machine
from prefold.spec.requests import Readout
from prefold.trie import MEDIA_BASE, Spool
from prefold.worker.native.worker import NativeWorker
from prefold.worker.parts import WorkerPart
from prefold.worker.torch import worker as local


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture
def llm(folder) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", executor="torch")


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_memory_goes_back_with_the_last_reference(folder, monkeypatch, executor):
    """Without the garbage collector's help, and when the model's own memory is free already."""
    left = []
    llm = LLM(folder, dtype="float32", device="cpu", executor=executor)
    llm.embed(["some text"])
    llm.generate("some text", max_tokens=2)
    model = weakref.ref(llm.model)
    held = llm.model.embedding if executor == "torch" else next(iter(llm.model.memory.matrices.values()))
    weight = weakref.ref(held)
    del held
    gc.collect()  # of other tests, too
    monkeypatch.setattr(machine, "give_back", lambda: left.append((model(), weight())))
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
        steps.append(WindowPlanner(window, Readout("last"), sharing="full", max_batch_rows=9, stream=stream))
        results.append([])
    while (planned := [scheduler.plan() for scheduler in steps])[0] is not None:
        for scheduler, step, found in zip(steps, planned, results, strict=True):
            found.append(worker.start(step.message).result().values)
            scheduler.commit(step)
    np.testing.assert_array_equal(np.concatenate(results[0]), np.concatenate(results[1]))
    assert set(worker.paths) == {7, 8}
    worker.forget(7)
    assert set(worker.paths) == {8}
    with worker._lock:  # as the garbage collector may, in the middle of a step
        worker.forget(8)
    assert not worker.paths


def slot_step(tokens: list[int], first: int) -> SlotStep:
    """Rows of one sequence from position `first` on, whose K/V lie in slots in the order of positions; the last is
    read."""
    n = len(tokens)
    at = np.arange(n)
    start, count, seen_from = [*(1 + first + at)], [1] * n, [*at]
    if first:
        start, count, seen_from = [1, *start], [first, *count], [0, *seen_from]
    start = np.array(start)
    return SlotStep(
        tokens=np.array(tokens, np.int32), positions=(first + at).astype(np.int32), slots=1 + first + at,
        run_start=start, run_count=np.array(count), run_position=start - 1, run_first=np.array(seen_from),
        run_last=np.full(len(start), n), read_rows=np.array([n - 1]), reads=np.array([0]),
    )  # fmt: skip


def test_a_step_for_which_memory_is_too_small_changes_nothing(llm):
    """Not even what the next step knows of the tokens of the one before."""
    found = []
    for fails in (False, True):
        worker = local.TorchWorker(llm.model, depth=2)
        worker.start(MakeStore(9))
        first = worker.start(slot_step([5, 6, 7], 0))
        if fails:
            hook = llm.model.register_forward_pre_hook(no_memory)
            with hook, pytest.raises(OutOfMemoryError, match="no more"):
                worker.start(slot_step([-1], 3))
        second = worker.start(slot_step([-1], 3))
        found.append([ticket.result().ids.tolist() for ticket in (first, second)])
    assert found[0] == found[1]


def test_rows_of_images_are_for_no_graph(llm):
    """A row that is read may be one of an image, of which a graph would have the embedding of another token."""
    worker = local.TorchWorker(llm.model)
    worker.start(MakeStore(9))
    worker._graphs = SimpleNamespace(takes=lambda step: True, run=lambda *given: pytest.fail("a graph is run"))
    values = torch.randn(1, llm.model.embedding.shape[1])
    worker._media = lambda tokens: MediaRows(torch.tensor([0]), values)
    assert len(worker.start(slot_step([MEDIA_BASE], 0)).result().ids) == 1


@pytest.mark.parametrize("kind", ["gpt2", "gemma3"])
def test_rows_of_media_in_both_executors(tmp_path, kind):
    """Of a model with learned positions, which all rows have, and of one whose embeddings are scaled."""
    folder, rng = str(tiny_checkpoint(tmp_path, kind)), np.random.default_rng(0)
    ids = np.array([5, MEDIA_BASE, MEDIA_BASE + 1, 6], np.int32)
    found = []
    for executor in ("native", "torch"):
        llm = LLM(folder, dtype="float32", device="cpu", executor=executor)
        model, is_native = llm.model, executor == "native"
        if not found:
            values = rng.normal(size=(2, model.config.hidden)).astype(np.float32)
        at, rows = (np.array([1, 2]), values) if is_native else (torch.tensor([1, 2]), torch.from_numpy(values))
        part = WorkerPart({}, media=lambda tokens, at=at, rows=rows: MediaRows(at, rows) if len(tokens) > 2 else None)
        worker = (NativeWorker if is_native else local.TorchWorker)(model, parts=[part])
        worker.start(MakeStore(9))
        first = worker.start(slot_step(ids.tolist(), 0)).result().ids
        second = worker.start(slot_step([7, 8], len(ids))).result().ids
        with Spool() as spool:
            spool.add(as_request(ids))
            window = next(iter(spool.windows(max_tokens=1 << 20)))
        step = WindowPlanner(window, Readout("last"), sharing="full", max_batch_rows=9).plan()
        found.append((first.tolist(), second.tolist(), worker.start(step.message).result().values))
    assert found[0][:2] == found[1][:2]
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=0, atol=1e-4)


def no_memory(*given) -> None:
    raise torch.OutOfMemoryError("no more")


def test_a_step_that_goes_on_with_rows_that_are_not_there(llm):
    with Spool() as spool:
        spool.add(as_request([1, 2, 3, 4]))
        window = next(iter(spool.windows(max_tokens=1 << 20)))
    scheduler = WindowPlanner(window, Readout("last"), sharing="full", max_batch_rows=9)
    with pytest.raises(ValueError, match="needs a path of 2 rows, but its stream has 0"):
        llm.engine.worker.start(scheduler.step(2, 4).message)
