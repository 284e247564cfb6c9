"""Gemma 3 270M on real texts longer than its windows, against transformers with the same weights, at several cuts."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest
import torch
from running import as_request, as_transformers, run

from prefold import LLM
from prefold.spec.requests import Readout

pytestmark = pytest.mark.slow


def real_texts() -> list[str]:
    """Ten passages; and all there are in a row, by themselves and with another ending each time."""
    text = resources.files("prefold.cli").joinpath("demo.jsonl").read_text(encoding="utf-8")
    passages = [document for line in text.splitlines() for document in json.loads(line)["documents"]]
    stem = "\n\n".join(passages)
    return [*passages[:10], stem, *(f"{stem}\n\n{passage}" for passage in passages[:3])]


def test_hidden_states_and_logits_at_every_cut():
    llm = LLM("gemma3-270m", dtype="float32", device="cpu", threads=2)
    prompts = [tokens.tolist() for tokens in llm.tokenizer.encode_batch(real_texts())]
    window = llm.config.planes[0].window
    assert window == 512
    assert max(map(len, prompts)) > window + 200
    states, logits, difference = [], [], 0.0
    eager, sdpa = as_transformers(llm, "eager"), as_transformers(llm, "sdpa")
    with torch.inference_mode():
        for tokens in prompts:
            ids = torch.tensor([tokens])
            hidden = eager.model(input_ids=ids).last_hidden_state[0]
            states.append(hidden[-1])
            # Of all rows: a few magnify rounding ten times as much as others.
            other = sdpa.model(input_ids=ids).last_hidden_state[0]
            difference = max(difference, (hidden - other).abs().max().item())
            logits.append(eager.lm_head(states[-1]).numpy())
    tolerance = max(1e-4, 3 * difference)
    print(f"tolerance {tolerance:.1e}, {sum(map(len, prompts))} tokens, longest {max(map(len, prompts))}")
    for rows, sharing in ((64, "full"), (500, "full"), (10_000, "full"), (500, "mlp"), (500, "off")):
        found = run(llm, [as_request(t) for t in prompts], Readout("last"), sharing=sharing, rows=rows)
        worst = max(np.abs(f.values - s.numpy()).max() for f, s in zip(found, states, strict=True))
        print(f"{sharing} {rows}: {worst:.1e}")
        assert worst <= tolerance
    ids = (0, 5, 1000, 200_000)
    read = run(llm, [as_request(t) for t in prompts], Readout("logits", ids), sharing="full", rows=512)
    for one, expected in zip(read, logits, strict=True):
        np.testing.assert_allclose(one.values, expected[list(ids)], atol=10 * tolerance)
        assert expected.std() > 1


def test_what_it_says():
    """The tokenizer and the embedding's scale fit the weights: the most likely words are the words that follow."""
    llm = LLM("gemma3-270m", dtype="bfloat16", device="cpu", threads=2)
    for text, following in (("The opposite of hot is", " cold"), ("one two three four five six", " seven")):
        tokens = llm.tokenizer.encode(text).tolist()
        (result,) = run(llm, [as_request(tokens)], Readout("last"), sharing="full", rows=100)
        best = int(llm.model.logits(result.values[None].astype(llm.model.dtype)).argmax())
        assert llm.tokenizer.decode([best]) == following
