"""Calls of several threads on one LLM give what they give alone, and are all counted."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM

TEXTS = ["a common start, and one", "a common start, and two", "another", "a common"]


def calls(llm: LLM) -> list:
    """Calls that take several steps each; what they give is compared."""
    return [
        lambda: llm.embed(TEXTS),
        lambda: llm.embed(TEXTS, pooling="mean"),
        lambda: llm.rerank("a common", TEXTS).scores,
        lambda: np.concatenate([one.logprobs for one in llm.score(TEXTS)]),
        lambda: np.array([one.tokens for one in llm.generate(TEXTS, max_tokens=5, ignore_eos=True)]),
    ]


@pytest.mark.parametrize("rounds", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_results_are_those_of_a_call_alone(tmp_path, rounds):
    llm = LLM(str(tiny_checkpoint(tmp_path, "llama")), dtype="float32", device="cpu", max_batch_rows=7, cache="off")
    alone = [call() for call in calls(llm)]
    tokens = llm.engine.reset_stats().tokens
    wrong: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + len(alone)):
                found = calls(llm)[number % len(alone)]()
                np.testing.assert_allclose(found, alone[number % len(alone)], atol=1e-5)
        except BaseException as error:
            wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(rounds):
            threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong, wrong[0]
    finally:
        sys.setswitchinterval(before)
    assert llm.stats.tokens == rounds * 8 * tokens
    llm.engine.call(lambda: None)  # what was asked for before is done
    assert not llm.engine.worker.paths
