"""The default model on 50 real prompts, against transformers with the same weights, at several cuts."""

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


def real_prompts(llm: LLM) -> list[list[int]]:
    """Reranking prompts of the demo's passages, and the passages by themselves."""
    text = resources.files("prefold.cli").joinpath("demo.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    works = llm.task("rerank").prepare([{"query": r["query"], "documents": r["documents"]} for r in records])
    prompts = [request.tokens.tolist() for work in works for request in work.requests]
    alone = [llm.tokenizer.encode(document).tolist() for r in records for document in r["documents"]]
    return [*prompts, *alone][:50]


def test_hidden_states_and_logits_at_every_cut():
    llm = LLM("smollm2-135m", dtype="float32", device="cpu", threads=2)
    prompts = real_prompts(llm)
    assert len(prompts) == 50
    states, logits, difference = [], [], 0.0
    eager, sdpa = as_transformers(llm, "eager"), as_transformers(llm, "sdpa")
    with torch.inference_mode():
        for tokens in prompts:
            ids = torch.tensor([tokens])
            states.append(eager.model(input_ids=ids).last_hidden_state[0, -1])
            other = sdpa.model(input_ids=ids).last_hidden_state[0, -1]
            difference = max(difference, (states[-1] - other).abs().max().item())
            logits.append(eager.lm_head(states[-1]).numpy())
    tolerance = max(1e-4, 3 * difference)
    ids = (0, 5, 1000, 40_000)
    unique = len({tuple(t[: i + 1]) for t in prompts for i in range(len(t))})
    print(f"tolerance {tolerance:.1e}, {sum(map(len, prompts))} tokens, {unique} unique")
    for rows in (1, 7, 64, 512, 10_000):
        for sharing in ("full", "mlp", "off") if rows > 1 else ("full",):
            llm.engine.reset_stats()
            found = run(llm, [as_request(t) for t in prompts], Readout("last"), sharing=sharing, rows=rows)
            worst = max(np.abs(f.values - s.numpy()).max() for f, s in zip(found, states, strict=True))
            print(f"{sharing} {rows}: {worst:.1e}")
            assert worst <= tolerance
            if sharing == "full":
                assert llm.stats.rows_computed == unique
                assert llm.stats.path_rows_peak <= max(map(len, prompts))
    read = run(llm, [as_request(t) for t in prompts], Readout("logits", ids), sharing="full", rows=512)
    for one, expected in zip(read, logits, strict=True):
        np.testing.assert_allclose(one.values, expected[list(ids)], atol=10 * tolerance)
