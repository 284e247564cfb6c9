"""Numeric tasks that use the cache of generation: the same results, and rows of earlier calls are not computed anew."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from books import check_books
from running import as_request, prompts, run
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.errors import InputError
from prefold.spec.requests import Readout

PLACE = {"dtype": "float32", "device": "cpu"}
CACHE = CacheOptions(min_overlap=0)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request, tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param))


@pytest.mark.parametrize("kv_memory", [None, 40_000])
@pytest.mark.parametrize("rows", [3, 1000])
def test_results_are_those_of_the_stream(folder, rows, kv_memory):
    plain = LLM(folder, **PLACE)
    cached = LLM(folder, **PLACE, cache=CACHE, cache_prefill=True, kv_memory=kv_memory)
    token_lists = prompts(3, count=8)
    rng = np.random.default_rng(0)
    for _ in range(2):  # cold, then warm
        for kind in ("last", "logits", "logprobs", "mean"):
            readout = Readout(kind, (3, 200, 17) if kind == "logits" else ())
            most = int(rng.integers(1, 3)) if kind == "logprobs" else 0
            requests = [
                as_request(t, rng.integers(0, 300, min(most, len(t))).tolist() if most else None) for t in token_lists
            ]
            found, expected = (
                run(llm, requests, readout, sharing="full", rows=rows, window=40) for llm in (cached, plain)
            )
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one.values, other.values, rtol=1e-4, atol=1e-4)
                assert (one.greedy is None) == (other.greedy is None)
                assert one.greedy is None or np.array_equal(one.greedy, other.greedy)
    check_books(cached.engine.generator.scheduler)


def test_a_call_that_comes_back_computes_what_is_new(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path, "llama")), **PLACE, cache=CACHE, cache_prefill=True)
    query, documents = "what do cats eat", ["mice, mostly", "nothing at all", "what they are given"]
    first = llm.rerank(query, documents)
    before = llm.stats.rows_computed
    again = llm.rerank(query, documents)
    assert llm.stats.rows_computed - before == len(documents)  # each prompt's last row, for its result
    np.testing.assert_allclose(again.scores, first.scores, atol=1e-6)
    before = llm.stats.rows_computed
    other = llm.rerank(query, ["mice, sometimes"])
    assert 0 < llm.stats.rows_computed - before < 60
    np.testing.assert_allclose(
        other.scores, LLM(llm.checkpoint, **PLACE).rerank(query, ["mice, sometimes"]).scores, atol=1e-5
    )
    assert llm.stats.generation.cross_window_hits > 0
    off = LLM(llm.checkpoint, **PLACE)
    off.rerank(query, documents)
    assert off.stats.generation is None  # nobody asked for it


def test_a_checkpoint_without_logits(tmp_path):
    folder = str(tiny_checkpoint(tmp_path, "qwen3", head="classifier", num_labels=3))
    texts = ["one text", "one text more", "another"]
    cached = LLM(folder, **PLACE, cache=CACHE, cache_prefill=True)
    found, expected = cached.classify(texts), LLM(folder, **PLACE).classify(texts)
    for one, other in zip(found, expected, strict=True):
        assert one.label == other.label
        np.testing.assert_allclose([*one.probabilities.values()], [*other.probabilities.values()], atol=1e-5)
    assert cached.stats.generation.prefill_rows > 0


def test_beside_text_that_is_generated(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path, "llama")), **PLACE, cache=CACHE, cache_prefill=True)
    texts = ["a common start, and one", "a common start, and two"]
    alone = [llm.generate(text, max_tokens=30, ignore_eos=True).tokens for text in texts], llm.embed(texts)
    llm.cache.clear()

    async def together():
        generated = [asyncio.ensure_future(llm.agenerate(t, max_tokens=30, ignore_eos=True)) for t in texts]
        await asyncio.sleep(0)
        vectors = await asyncio.to_thread(llm.embed, texts)
        return [one.tokens for one in await asyncio.gather(*generated)], vectors

    tokens, vectors = asyncio.run(together())
    assert tokens == alone[0]
    np.testing.assert_allclose(vectors, alone[1], atol=1e-5)


def test_labels_of_one_token_are_one_prompt_as_in_the_stream(tmp_path):
    folder = str(tiny_checkpoint(tmp_path, "llama"))
    plain = LLM(folder, **PLACE)
    cached = LLM(folder, **PLACE, cache=CACHE, cache_prefill=True)
    readout = Readout("logprobs")
    long = list(range(5, 45))
    requests = [as_request(tokens, [label]) for tokens in (long, [5, 6, 7]) for label in (1, 2, 3)]
    requests += [as_request([5, 9], [1])]
    for llm in (plain, cached):
        run(llm, requests, readout, sharing="full", rows=100, window=400)
    assert (plain.stats.requests, plain.stats.tokens) == (3, 45)
    assert (cached.stats.requests, cached.stats.tokens) == (3, 45)
    assert cached.stats.generation is not None


def test_a_prompt_without_room_in_the_cache_is_an_error_and_the_others_are_answered(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path, "llama")), **PLACE, cache=CACHE, cache_prefill=True, kv_memory=1 << 12)
    slots = llm.engine.generator.scheduler.pool.num_slots
    long, short = as_request([5] * (slots + 8)), as_request([1, 2])
    found = run(llm, [long, short], Readout("last"), sharing="full", rows=100)
    assert isinstance(found[0], InputError) and found[0].code == "kv_memory" and "kv_memory" in str(found[0])
    assert found[1].values.shape == (llm.config.hidden,)
