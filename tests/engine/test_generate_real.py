"""Greedy text of the real models on 64 real prompts, token for token that of transformers with the same weights."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from generating import ask, engine_of, generate, reference_tokens, tokens_of
from running import as_transformers

from prefold import LLM
from prefold.engine.cache import CacheOptions

pytestmark = pytest.mark.slow
MAX_TOKENS = 24


def real_prompts(llm: LLM) -> list[list[int]]:
    """Questions about passages and passages to go on with, as plain text and, where there is a template, in a chat."""
    text = resources.files("prefold.cli").joinpath("demo.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    pairs = [(record["query"], document) for record in records for document in record["documents"]]
    texts = [f"Answer the question with the passage.\n\nPassage: {d}\nQuestion: {q}\nAnswer:" for q, d in pairs]
    texts += [document for _, document in pairs]
    prompts = [tokens.tolist() for tokens in llm.tokenizer.encode_batch(texts)]
    if llm.tokenizer.chat_templates:
        chats = [[{"role": "user", "content": f"{q}\n\n{d}"}] for q, d in pairs]
        rendered = [llm.tokenizer.render_chat(chat, add_generation_prompt=True) for chat in chats]
        prompts += [llm.tokenizer.encode(one, special=False).tolist() for one in rendered]
    return prompts[:: max(1, len(prompts) // 64)][:64]


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_token_for_token(name):
    llm = LLM(name, dtype="float32", device="cpu", threads=2)
    prompts = real_prompts(llm)
    assert len(prompts) == 64
    eos = llm.engine.options.eos_ids
    expected = reference_tokens(as_transformers(llm, "eager"), prompts, MAX_TOKENS, eos)
    requests = [ask(p, max_tokens=MAX_TOKENS) for p in prompts]
    unique = len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})
    print(f"{sum(map(len, prompts))} tokens, {unique} unique, {sum(map(len, expected))} generated")
    for rows in (7, 64, 512, 4096):
        engine = engine_of(llm, rows=rows, kv_memory=1 << 30)
        assert tokens_of(generate(engine, requests)) == expected, rows
        if rows >= 512:
            assert engine.stats.generation.prefill_rows == unique
    few = slice(0, 64, 8)
    engine = engine_of(llm, rows=1, kv_memory=1 << 30)
    assert tokens_of(generate(engine, requests[few])) == expected[few], "one row a step"
    for request, tokens in zip(requests[few], expected[few], strict=True):
        assert tokens_of(generate(engine, [request])) == [tokens], "alone"
    engine = engine_of(llm, sharing="off", kv_memory=1 << 30)
    assert tokens_of(generate(engine, requests)) == expected, "sharing off"
    longest = max(map(len, prompts)) + MAX_TOKENS
    engine = engine_of(llm, slots=2 * longest, reserve_output=False)
    assert tokens_of(generate(engine, requests)) == expected, "little memory"
    assert engine.stats.generation.preemptions > 0
    engine = engine_of(llm, kv_memory=1 << 30, cache=CacheOptions(min_overlap=0))
    for _ in range(2):
        assert tokens_of(generate(engine, requests)) == expected, "cache"
    assert engine.stats.generation.cross_window_hits > 0
