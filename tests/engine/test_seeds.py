"""A seed holds: on the logits of a real model, rounding changes what is drawn only where two tokens are close."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest
import torch
from choosing import choose_for
from running import as_request, run

from prefold import LLM
from prefold.engine.sampling import SamplerState
from prefold.spec.requests import Readout, Sampling

pytestmark = pytest.mark.slow

OPTIONS = [Sampling(temperature=1.0), Sampling(temperature=0.7), Sampling(temperature=1.0, top_p=0.9, top_k=200)]
POSITIONS = 512


def prefixes(llm: LLM) -> list[list[int]]:
    """Prompts that end at each of many places of real texts."""
    lines = resources.files("prefold.cli").joinpath("demo.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines for text in json.loads(line)["documents"]]
    prompts = [tokens[: n + 1].tolist() for tokens in llm.tokenizer.encode_batch(texts) for n in range(len(tokens))]
    return prompts[-POSITIONS:]


def draws(llm: LLM, prompts: list[list[int]], samples: int = 1, rows: int = 4096, sharing: str = "full") -> np.ndarray:
    """The token after each prompt that each sample of each of OPTIONS draws, [options, samples, prompts]."""
    found = run(llm, [as_request(prompt) for prompt in prompts], Readout("last"), sharing=sharing, rows=rows)
    logits = torch.from_numpy(llm.model.logits(np.stack([one.values for one in found]).astype(llm.model.dtype)))
    tokens = np.empty((len(OPTIONS), samples, len(prompts)), np.int64)
    for place, options in np.ndindex(len(prompts), len(OPTIONS)):
        states = [SamplerState(OPTIONS[options], seed=7, sample=sample) for sample in range(samples)]
        for state in states:
            state.position = place
        tokens[options, :, place] = choose_for(logits[place : place + 1], states, [0] * samples).ids
    return tokens


def test_neither_steps_nor_company_nor_sharing_change_a_draw_in_float32():
    llm = LLM("smollm2-135m", dtype="float32", device="cpu")
    prompts = prefixes(llm)
    assert len(prompts) == POSITIONS
    wanted = draws(llm, prompts, samples=20)
    for options in ({"rows": 7}, {"rows": 100}, {"sharing": "mlp"}):
        found = draws(llm, prompts, samples=20, **options)
        assert (found != wanted).sum(axis=(1, 2)).tolist() == [0, 0, 0], options


def test_bfloat16_draws_nearly_what_float32_draws():
    found = {}
    for dtype in ("float32", "bfloat16"):
        llm = LLM("smollm2-135m", dtype=dtype, device="cpu")
        found[dtype] = draws(llm, prefixes(llm), samples=4)
    differ = (found["float32"] != found["bfloat16"]).mean(axis=(1, 2))
    print(
        "share of draws that differ:", dict(zip(("temperature 1", "0.7", "top_p, top_k"), differ.tolist(), strict=True))
    )
    assert differ.max() < 0.03
