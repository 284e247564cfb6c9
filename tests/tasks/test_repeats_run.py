"""Repeats on a real engine: computed once, answered each, with the numbers of a run without repeats."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.spec.requests import Result
from prefold.tasks.run import as_known

TEXTS = ["the yes and the no", "the yes", "no no no", "the yes"]
REPEATED = [TEXTS[i % 4] for i in range(24)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=256)
    with LLM(str(folder), dtype="float32", device="cpu", threads=1, cache="off") as some:
        yield some


def counted(llm: LLM, call):
    llm.engine.reset_stats()
    return call(), llm.stats


def test_greedy_texts_of_equal_prompts_are_generated_once(llm):
    options = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    alone, before = counted(llm, lambda: llm.generate(TEXTS[:3], **options))
    found, stats = counted(llm, lambda: llm.generate(REPEATED, **options))
    assert [one.tokens for one in found] == [alone[TEXTS.index(text)].tokens for text in REPEATED]
    assert [one.logprobs for one in found] == [alone[TEXTS.index(text)].logprobs for text in REPEATED]
    assert stats.generation.generated_tokens == before.generation.generated_tokens == 18
    assert stats.rows_computed == before.rows_computed and stats.steps == before.steps
    assert (stats.requests, stats.repeats) == (24, 21)
    assert stats.tokens == sum(len(llm.tokenizer.encode(text)) + 5 for text in REPEATED)
    # Nothing of a repeat's prompt was computed for it.
    assert [one.cached_tokens for one in found[3:]] == [len(llm.tokenizer.encode(text)) for text in REPEATED[3:]]


def test_draws_of_equal_prompts_stay_different_and_those_with_one_seed_are_one(llm):
    drawn, stats = counted(llm, lambda: llm.generate(["the"] * 6, max_tokens=12, temperature=1.5, seed=1))
    assert stats.repeats == 0 and len({one.tokens for one in drawn}) == 6
    items = [{"prompt": "the", "sampling": {"seed": 3}}] * 6
    same, stats = counted(llm, lambda: llm.generate(items, max_tokens=12, temperature=1.5))
    assert stats.repeats == 5 and len({one.tokens for one in same}) == 1
    unseeded, stats = counted(llm, lambda: llm.generate(["the"] * 6, max_tokens=12, temperature=1.5))
    assert stats.repeats == 0 and len({one.tokens for one in unseeded}) == 6


@pytest.mark.parametrize(
    "call",
    [
        lambda llm, texts: [one.logprobs for one in llm.classify(texts, ["yes", "no", "yes no"])],
        lambda llm, texts: [dict(zip("abc", one, strict=False)) for one in llm.embed(texts).tolist()],
        lambda llm, texts: [{"p": one.logprob} for one in llm.score(texts, [" yes"] * len(texts))],
    ],
)
def test_numbers_are_those_of_each_prompt_alone(llm, call):
    (found, stats), (alone, before) = (counted(llm, lambda t=texts: call(llm, t)) for texts in (REPEATED, TEXTS[:3]))
    for text, one in zip(REPEATED, found, strict=True):
        np.testing.assert_allclose([*one.values()], [*alone[TEXTS.index(text)].values()], atol=1e-5)
    assert stats.rows_computed == before.rows_computed
    assert (stats.requests, stats.repeats) == (8 * before.requests, 7 * before.requests)


def test_arrays_of_repeats_are_apart():
    first = Result(np.ones(3, np.float32))
    second = as_known(first, 5)
    first.values[:] = 0
    assert second.values.all()


def test_sharing_off_computes_each_prompt(llm):
    with LLM(llm.checkpoint, dtype="float32", device="cpu", threads=1, sharing="off") as off:
        off.embed(REPEATED)
        assert off.stats.repeats == 0 and off.stats.rows_computed == off.stats.tokens
