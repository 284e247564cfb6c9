"""Comparison of a model's answers, bit for bit, in different company."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from running import as_request, run

from prefold import LLM
from prefold.spec.requests import Readout


def bits(value: Any) -> Any:
    """The parts of a result, without its numbers of tokens from a cache."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: bits(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {name: part for name, part in fields.items() if "token" not in name or name == "tokens"}
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return [bits(part) for part in value] if isinstance(value, (list, tuple)) else value


def results(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """The answers of each task to each prompt."""
    generated = llm.generate(prompts, max_tokens=5, temperature=0.0, logprobs=2, ignore_eos=True)
    means = llm.embed(prompts, pooling="mean")
    requests = [as_request(prompt) for prompt in prompts]
    labels = [one.values for one in run(llm, requests, Readout("logits", (3, 17, 200)), sharing=None, rows=None)]
    return [bits(one) for one in zip(generated, llm.embed(prompts), means, llm.score(prompts), labels, strict=True)]


def prompts_of(vocab: int, count: int = 40) -> list[list[int]]:
    """Prompts, some of which begin alike."""
    rng = np.random.default_rng(0)
    stems = [rng.integers(3, vocab, size).tolist() for size in (70, 130, 5)]
    return [stems[rng.integers(3)] + rng.integers(3, vocab, rng.integers(1, 60)).tolist() for _ in range(count)]


def check_invariant(folder: Path, **options: Any) -> None:
    """Compare the answers to some prompts with the answers to each alone, in other steps, and from a cache."""
    with LLM(str(folder), invariant=True, **options) as llm:
        prompts = prompts_of(llm.config.vocab_size)
        found = results(llm, prompts)
        for number in (0, 7, 33):
            assert results(llm, [prompts[number]]) == [found[number]], "alone, some of it from the cache"
    with LLM(str(folder), invariant=True, max_batch_rows=29, cache_prefill=True, **options) as llm:
        assert results(llm, prompts[::-1]) == found[::-1], "in the steps of the scheduler, of few rows"
