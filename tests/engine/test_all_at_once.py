"""Calls of every kind at once, from threads and an event loop, give what they give alone."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from books import check_books
from generating import until_idle
from tiny import tiny_checkpoint

from prefold import LLM

TEXTS = ["a common start, and one", "a common start, and two", "another", "a common"]


def score(llm: LLM) -> list:
    return [np.round(one.logprobs, 3).tolist() for one in llm.score(TEXTS)]


def embed(llm: LLM) -> list:
    return np.round(llm.embed(TEXTS), 3).tolist()


def generate(llm: LLM) -> list:
    return [one.tokens for one in llm.generate(TEXTS, max_tokens=9, temperature=1.0, seed=3, ignore_eos=True)]


def stream(llm: LLM) -> str:
    return "".join(piece.text for piece in llm.stream(TEXTS[0], max_tokens=9, ignore_eos=True))


async def several(llm: LLM) -> list:
    wanted = (llm.agenerate(text, max_tokens=20, ignore_eos=True) for text in TEXTS)
    return [one.tokens for one in await asyncio.gather(*wanted)]


CALLS = (score, embed, generate, stream)


@pytest.mark.parametrize("rounds", [2, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache_prefill", [True, False])
def test_results_are_those_of_a_call_alone(tmp_path, rounds, cache_prefill):
    folder = str(tiny_checkpoint(tmp_path, "llama"))
    llm = LLM(folder, dtype="float32", device="cpu", max_batch_rows=16, kv_memory=1 << 20, cache_prefill=cache_prefill)
    alone = {call: call(llm) for call in CALLS}
    together = asyncio.run(several(llm))
    wrong: list = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + len(CALLS)):
                call = CALLS[number % len(CALLS)]
                found = call(llm)
                if found != alone[call]:
                    wrong.append((call, found))
        except BaseException as error:
            wrong.append(error)

    for _ in range(rounds):
        threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        assert asyncio.run(several(llm)) == together
        for thread in threads:
            thread.join(120)
        assert not wrong, wrong[0]
        assert not any(thread.is_alive() for thread in threads)
    until_idle(llm.engine)
    check_books(llm.engine.generator.scheduler)
    llm.close()
