"""Requests that come while others with the same beginning are being computed: no row is computed twice."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from serving import serving

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.trie import Trie

SHARED = [5 + i * 7 % 250 for i in range(300)]


def unique_rows(prompts):
    return Trie.build(np.concatenate(prompts), np.cumsum([0, *map(len, prompts)])).num_rows


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["texts", "numbers"])
def test_rows_are_computed_once(llm, kind, spread):
    """Embeddings too are read in the KV store, and share rows with those of earlier requests."""
    own = LLM(str(llm.folder), dtype="float32", kv_memory=1 << 23, cache=CacheOptions(min_overlap=0))
    prompts = [[*SHARED, 7 + number, 9] for number in range(32)]

    async def ask(client, number):
        await asyncio.sleep(spread * number / len(prompts))
        if kind == "texts":
            body = {"prompt": prompts[number], "max_tokens": 1, "temperature": 0, "ignore_eos": True, "logprobs": 0}
            found = (await client.post("/v1/completions", json=body)).json()
            return found["choices"][0]["logprobs"]["token_logprobs"]
        return (await client.post("/v1/embeddings", json={"input": prompts[number]})).json()["data"][0]["embedding"]

    async def ask_all(url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(len(prompts))))

    with serving(own) as server:
        found = asyncio.run(ask_all(server.url))
    assert own.stats.rows_computed == own.stats.unique_tokens == unique_rows(prompts)
    assert own.stats.requests == len(prompts)
    if kind == "texts":
        expected = [one.logprobs[0].logprob for one in llm.generate(prompts, max_tokens=1, ignore_eos=True, logprobs=0)]
        assert [one for (one,) in found] == pytest.approx(expected, rel=2e-6, abs=1e-5)
    else:
        np.testing.assert_allclose(found, llm.embed(prompts), atol=1e-6)
    own.close()


def test_cache_prompt_keeps_numbers_apart(llm):
    own = LLM(str(llm.folder), dtype="float32", kv_memory=1 << 23, cache=CacheOptions(min_overlap=0))
    rows = [0]
    with serving(own) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for asked in ({}, {}, {"cache_prompt": False}, {"cache_prompt": False}):
            assert client.post("/v1/embeddings", json={"input": SHARED} | asked).status_code == 200
            rows.append(own.stats.rows_computed)
    first, again, *apart = np.diff(rows)
    assert again < first == len(SHARED) and apart == [first, first]
    own.close()


def test_numbers_that_the_store_cannot_hold(llm):
    """They are an error, and what it can hold is not."""
    small = LLM(str(llm.folder), dtype="float32", kv_memory=100_000)
    assert small.engine.generator.scheduler.pool.num_slots < 200
    with serving(small) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.post("/v1/embeddings", json={"input": ["yes", "the no " * 100]})
        assert found.status_code == 400 and "give a larger kv_memory" in found.json()["error"]["message"]
        vector = client.post("/v1/embeddings", json={"input": ["yes"]}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(vector, llm.embed("yes"), atol=1e-6)
    small.close()
