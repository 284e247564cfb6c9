"""Steps of a row stream that stop between two planes for others."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from generating import ask, engine_of, generate
from running import as_request, prompts
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine.meter import StepBudget
from prefold.stream import Spool
from prefold.types import Readout


@pytest.fixture(scope="module", params=["llama", "mistral"])
def engine(request, tmp_path_factory):
    more = {"sliding_window": 4} if request.param == "mistral" else {}
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param, **more)
    return engine_of(LLM(str(folder), dtype="float32", device="cpu"))


def numbers(engine, requests, readout, **how):
    results = [None] * len(requests)
    with Spool() as spool:
        for number, request in enumerate(requests):
            spool.add(request, str(number).encode())
        for tag, result in engine.run(spool.windows(max_tokens=40), readout, cache_prefill=False, **how):
            results[int(tag)] = result
    return results


@pytest.mark.parametrize("kind", ["last", "mean", "logprobs"])
def test_what_runs_between_two_planes_changes_nothing(engine, kind):
    targets = [7] if kind == "logprobs" else None
    requests, others = ([as_request(tokens, targets) for tokens in prompts(seed)] for seed in (1, 2))
    readout, planes = Readout(kind), len(engine.worker.model.config.planes)
    texts = [ask(tokens, max_tokens=5, ignore_eos=True) for tokens in prompts(3)[:3]]
    expected = [numbers(engine, some, readout, max_batch_rows=8) for some in (requests, others)]
    written = [found[0].tokens for found in generate(engine, texts)]
    found = []

    def between():
        found.append(numbers(engine, others, readout, max_batch_rows=8))
        answers = {}
        for number, text in enumerate(texts):  # in the engine's own thread, which must not wait for itself
            engine.generator.add(text, None, lambda answer, number=number: answers.update({number: answer}))
        while engine.generator.step():
            pass
        assert [answers[number][0].tokens for number in range(len(texts))] == written

    own = numbers(engine, requests, readout, budget=StepBudget(8, between=between))
    assert len(found) > planes and len(found) % planes == 0
    for some, wanted in [(own, expected[0]), *((one, expected[1]) for one in found)]:
        for result, same in zip(some, wanted, strict=True):
            np.testing.assert_array_equal(result.values, same.values)


def test_the_time_between_parts_is_not_that_of_the_step(engine):
    steps, budget = [], StepBudget(1000, between=lambda: time.sleep(0.05))
    requests = [as_request(tokens) for tokens in prompts(1)]
    started = time.perf_counter()
    numbers(engine, requests, Readout("last"), budget=budget, on_step=steps.append)
    spent, planes = time.perf_counter() - started, len(engine.worker.model.config.planes)
    assert budget.paused >= 0.05 * planes * len(steps)
    assert sum(step.seconds for step in steps) <= spent - budget.paused


def test_a_worker_that_computes_steps_as_a_whole_is_not_asked_to_stop(engine, monkeypatch):
    monkeypatch.setattr(engine.worker, "facts", replace(engine.worker.facts, parts=1))
    budget = StepBudget(1000, between=lambda: pytest.fail("it was"))
    assert all(numbers(engine, [as_request([1, 2, 3])], Readout("last"), budget=budget))
